// Filter gradient of float32 on the CUDA cores for small groups and few channels or features, of which the tiles of a
// matrix product would compute mostly what nobody asks for.
//
// A thread has four channels of x by four features of y at three by three taps: 144 sums in registers. It goes along a
// line of y; with every column of x it reads the pixels of the three lines that the window meets there, and it still
// has the last pixels of y: four reads of 16 bytes for 144 products. A warp's lanes are neighbouring fours of channels
// and features, of as many groups as that takes, and, where there are few, of several lines. Each warp has lines of its
// own and copies what they need to a ring in its part of shared memory, each four once; other warps of the block have
// the neighbouring lines, and find most of it in the first cache. At the end the block's threads add up what they have.
//
// A product whose pixel of y does not exist is left out. Longer windows are computed in parts, and those of one line,
// or of long ones, in parts of one line of eight or four.
//
// What bounds it is how many instructions a multiprocessor issues: of 3x3 three in four are products. So that none
// waits for its operands, which lie in two banks of registers, of even and odd numbers, sums are in another order than
// the features: y and the sum are never in the same bank, and x stays the same for four products.
#include <algorithm>
#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/conv/filter.cuh"
#include "cuda/conv/four.cuh"
#include "cuda/conv/runs_plan.h"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

constexpr int kWarpLanes = 32, kThreads = kFilterRunsWarps * kWarpLanes, kStages = 3;

template <int kLines_, int kColumns_, int kStride_>
struct RunsTile {
  static constexpr int kLines = kLines_, kColumns = kColumns_, kStride = kStride_;
  static constexpr int kBack = (kColumns - 1) / kStride;  // pixels of y before a step's that its columns of x meet
  static constexpr int kSteps = kBack + 1;                // of a stage, each of a pixel of y
  static constexpr int kFours = kLines * kStride + 1;     // of a lane and step: x's, and y's
  static constexpr int kTaps = kLines * kColumns, kBlocks = kTaps > 4 ? 2 : 3;  // of a multiprocessor (runs_plan.cc)
  static_assert(kBack > 0, "even pieces without a pixel take a stage");
  using Sums = Four[kTaps][4];  // by channel; of features in the order of Place
  static constexpr int kFourBytes = kThreads * sizeof(Four), kStageBytes = kSteps * kFours * kFourBytes;
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kTaps * 4 * kFourBytes);
  static_assert(kSharedBytes <= 99 << 10, "what a block may have on every device since sm_80");
};

struct FilterRunsParams {
  Axis axis[kRank];
  Box lines_box;  // of an image: without columns
  Box parts;      // of the window
  int window[kRank], lines, columns;
  FastDiv sequences, phases, dilation;  // of a line: by column modulo the dilation, and pieces of `length` columns
  int length, bands;
  FastDiv channel_fours, feature_fours;
  int channels, features, units, sets, splits, log_lanes;
  int64_t images, x_image, x_line, x_pixel, y_pixel;  // strides in elements; from a line to that of the next tap
  int64_t x_step, y_step;                             // from a step's pixel to the next
  int64_t result_size, filter_size;                   // of all problems, and of one
  bool whole, whole_x, whole_y, whole_out;            // whether fours are chunks of 16 bytes: of x and y, and so on
};

// What a block works on: fours of a pixel, a part of the window, and a slice of the lines.
struct RunsWork {
  int set, split, batch, part[kRank], first_band, end_band;

  __device__ explicit RunsWork(const FilterRunsParams& q) {
    const int parts = q.window[0] * q.parts.plane.divisor;
    int at = blockIdx.x;
    set = at % q.sets, at /= q.sets;
    q.parts.Split(at % parts, part), at /= parts;
    split = at % q.splits, batch = at / q.splits;
    first_band = int(int64_t{split} * q.bands / q.splits);
    end_band = int(int64_t{split + 1} * q.bands / q.splits);
  }
};

// Four channels and four features.
struct RunsUnit {
  int group, channel, feature;  // the last two in fours

  __device__ RunsUnit(const FilterRunsParams& q, int unit) {
    group = q.channel_fours.Div(q.feature_fours.Div(unit, &feature), &channel);
  }
};

// A thread's place in its warp, and which threads bring its fours: the first of those that have the same.
struct RunsLane {
  int strand, unit, x_thread, y_thread;

  __device__ RunsLane(const FilterRunsParams& q, const RunsWork& work) {
    const int lane = threadIdx.x % kWarpLanes, in_strand = lane & ((1 << q.log_lanes) - 1);
    strand = lane >> q.log_lanes;
    unit = (work.set << q.log_lanes) + in_strand;
    const RunsUnit of(q, unit);
    const int features = q.feature_fours.divisor;
    x_thread = threadIdx.x - min(of.feature, in_strand);
    y_thread = threadIdx.x - min(of.channel, in_strand / features) * features;
  }
};

// Of the lines of a band: the pixels that warps go along.
struct Piece {
  int band_of_lines, column, count;

  __device__ Piece(const FilterRunsParams& q, int band) {
    int sequence, phase;
    band_of_lines = q.sequences.Div(band, &sequence);
    const int begin = q.phases.Div(sequence, &phase) * q.length, dilation = q.dilation.divisor;
    column = phase + begin * dilation;
    count = min(q.length, q.dilation.Div(q.columns - phase + dilation - 1) - begin);
  }
};

// Copies a four, of which so many exist, or zeros.
template <bool kWhole>
__device__ __forceinline__ void CopyFour(uint32_t to, const float* from, int count, bool exists) {
  if constexpr (kWhole) {
    const int bytes = exists ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) CopyAsync<4>(to + 4 * i, from + i, exists && i < count);
  }
}

__device__ __forceinline__ Four LoadFour(uint32_t shared) {
  Four v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.v[0]), "=f"(v.v[1]), "=f"(v.v[2]), "=f"(v.v[3])
               : "r"(shared)
               : "memory");
  return v;
}

// Brings a warp's stages, band after band.
template <class T>
struct RunsBringer {
  const FilterRunsParams& q;
  const RunsWork& work;
  const float *x_begin, *y_begin;  // of the problem, at the lane's fours
  int strand, x_count, y_count;    // how much there is of the fours that the lane brings
  const float *x, *y;              // at the next step
  bool exists;                     // the line of y
  unsigned lines;                  // of x, that the taps meet: bits, which exist
  int band, step, pixels;          // of the piece of a line
  int first, last;                 // columns of x that exist, from the first step's

  __device__ RunsBringer(const FilterRunsParams& q, const RunsWork& work, const RunsLane& of, const float* x,
                         const float* y)
      : q(q), work(work), strand(of.strand), band(work.first_band) {
    const RunsUnit unit(q, of.unit);
    const int channel = unit.channel * 4, feature = unit.feature * 4;
    const bool has_unit = of.unit < q.units;
    x_begin = x + (work.batch * q.images * q.x_image + int64_t{unit.group} * q.channels + channel);
    y_begin = y + (int64_t{work.batch} * q.lines * q.columns * q.y_pixel + int64_t{unit.group} * q.features + feature);
    x_count = has_unit && of.x_thread == threadIdx.x ? q.channels - channel : 0;
    y_count = has_unit && of.y_thread == threadIdx.x ? q.features - feature : 0;
    Begin();
  }

  __device__ void Begin() {
    const Piece piece(q, band);
    const int strands = kWarpLanes >> q.log_lanes;
    const int line = (piece.band_of_lines * kFilterRunsWarps + threadIdx.x / kWarpLanes) * strands + strand;
    int in_image, at[2];
    const int image = q.lines_box.plane.Div(line, &in_image);
    at[0] = q.lines_box.row.Div(in_image, &at[1]);
    const int plane = q.axis[0].Origin(at[0]) + work.part[0] * q.axis[0].tap_step;
    const int first_tap = work.part[1] * T::kLines, row = q.axis[1].Origin(at[1]) + first_tap * q.axis[1].tap_step;
    const int dilation = q.dilation.divisor, extent = q.axis[2].extent;
    const int column = q.axis[2].Origin(piece.column) + work.part[2] * T::kColumns * dilation;
    exists = line < q.lines;
    const bool in_plane = static_cast<unsigned>(plane) < unsigned(q.axis[0].extent);
    lines = 0;
#pragma unroll
    for (int a = 0; a < T::kLines; ++a) {
      const bool in_row = static_cast<unsigned>(row + a * q.axis[1].tap_step) < unsigned(q.axis[1].extent);
      if (exists && in_plane && in_row && first_tap + a < q.window[1]) lines |= 1u << a;
    }
    x = x_begin + (image * q.x_image + ((int64_t{plane} * q.axis[1].extent + row) * extent + column) * q.x_pixel);
    y = y_begin + (int64_t{line} * q.columns + piece.column) * q.y_pixel;
    step = 0;
    pixels = piece.count;
    first = column < 0 ? q.dilation.Div(dilation - 1 - column) : 0;
    last = column < extent ? q.dilation.Div(extent - column + dilation - 1) : 0;
  }

  // To the thread's place in a stage.
  __device__ __forceinline__ void Bring(uint32_t to) {
    if (band < work.end_band) {
      const int column = step * T::kStride;
      if (q.whole && column >= first && column + T::kSteps * T::kStride <= last && step + T::kSteps <= pixels) {
        if (x_count > 0) BringX<true, true>(to);
        if (y_count > 0) BringY<true, true>(to);
      } else {
        if (x_count > 0) q.whole_x ? BringX<true, false>(to) : BringX<false, false>(to);
        if (y_count > 0) q.whole_y ? BringY<true, false>(to) : BringY<false, false>(to);
      }
      step += T::kSteps;
      if (step >= pixels + T::kBack && ++band < work.end_band) Begin();
    }
    CommitCopies();
  }

  template <bool kWhole, bool kInside>
  __device__ __forceinline__ void BringX(uint32_t to) {
    const float* from[T::kLines];
#pragma unroll
    for (int a = 0; a < T::kLines; ++a) from[a] = x + a * q.x_line;
#pragma unroll
    for (int i = 0; i < T::kSteps * T::kStride; ++i) {
      const int column = step * T::kStride + i;
      const bool inside = kInside || (column >= first && column < last);
#pragma unroll
      for (int a = 0; a < T::kLines; ++a) {
        const int four = i / T::kStride * T::kFours + i % T::kStride * T::kLines + a;
        CopyFour<kWhole>(to + four * T::kFourBytes, from[a], x_count, (lines >> a & 1) && inside);
        from[a] += q.x_step;
      }
    }
    x = from[0];
  }

  template <bool kWhole, bool kInside>
  __device__ __forceinline__ void BringY(uint32_t to) {
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s, y += q.y_step) {
      const int four = s * T::kFours + T::kFours - 1;
      CopyFour<kWhole>(to + four * T::kFourBytes, y, y_count, exists && (kInside || step + s < pixels));
    }
  }
};

__device__ __forceinline__ void AddProducts(Four (&sums)[4], const Four& x, const Four& y) {
  // To and fro, so that from one product to the next only one operand changes.
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int k = c % 2 == 0 ? n : 3 - n;
      sums[c].v[Place(k)] += x.v[c] * y.v[k];
    }
}

// The warp's sums over the lines of its slice.
template <class T>
__device__ __forceinline__ void AddLines(const FilterRunsParams& q, const RunsWork& work, const RunsLane& of,
                                         uint32_t stages, RunsBringer<T>& bring, typename T::Sums& sums) {
  // Opaque, so that it stays in a register and is not found again for every stage.
  asm volatile("" : "+r"(stages));
  const uint32_t own = threadIdx.x * sizeof(Four), of_x = of.x_thread * sizeof(Four), of_y = of.y_thread * sizeof(Four);
  uint32_t now = stages, empty = stages;
  const auto next = [&](uint32_t stage) {
    stage += T::kStageBytes;
    return stage == stages + kStages * T::kStageBytes ? stages : stage;
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) bring.Bring(empty + own), empty = next(empty);
  for (int band = work.first_band; band < work.end_band; ++band) {
    const int pixels = Piece(q, band).count;
    Four y[T::kSteps];
    for (int first = 0; first < pixels + T::kBack; first += T::kSteps) {
      WaitForCopies<kStages - 2>();
      __syncwarp();  // the stage is there for all, and the one before is read
      bring.Bring(empty + own);
      const auto add = [&](int s, auto all) {
        const uint32_t at = now + s * T::kFours * T::kFourBytes;
        y[s] = LoadFour(at + of_y + (T::kFours - 1) * T::kFourBytes);
        Four x[T::kStride * T::kLines];
#pragma unroll
        for (int i = 0; i < T::kStride * T::kLines; ++i) x[i] = LoadFour(at + of_x + i * T::kFourBytes);
#pragma unroll
        for (int b = 0; b < T::kColumns; ++b) {
          const int back = b / T::kStride;
          if (decltype(all)::value || static_cast<unsigned>(first + s - back) < unsigned(pixels))
#pragma unroll
            for (int a = 0; a < T::kLines; ++a)
              AddProducts(sums[a * T::kColumns + b], x[b % T::kStride * T::kLines + a],
                          y[(s + T::kSteps - back) % T::kSteps]);
        }
      };
      if (first >= T::kBack && first + T::kBack < pixels) {
#pragma unroll
        for (int s = 0; s < T::kSteps; ++s) add(s, std::true_type{});
      } else {
#pragma unroll
        for (int s = 0; s < T::kSteps; ++s)
          if (first + s < pixels + T::kBack) add(s, std::false_type{});
      }
      now = next(now), empty = next(empty);
    }
  }
  WaitForCopies<0>();
}

// Adds up what the block's threads have of the same sums, in their order, and stores it.
template <class T>
__device__ __forceinline__ void StoreSums(const FilterRunsParams& q, const RunsWork& work,
                                          Four (&totals)[T::kTaps * 4][kThreads], const typename T::Sums& sums,
                                          float* out) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kTaps * 4; ++i) totals[i][threadIdx.x] = sums[i / 4][i % 4];
  __syncthreads();
  const int lanes = 1 << q.log_lanes;
#pragma unroll 1
  for (int i = threadIdx.x; i < T::kTaps * 4 << q.log_lanes; i += kThreads) {
    const int in_strand = i & (lanes - 1), of = i >> q.log_lanes, unit = (work.set << q.log_lanes) + in_strand;
    const int tap = of / 4, line = work.part[1] * T::kLines + tap / T::kColumns;
    const int column = work.part[2] * T::kColumns + tap % T::kColumns;
    const RunsUnit place(q, unit);
    const int channel = place.channel * 4 + of % 4, feature = place.feature * 4;
    if (unit >= q.units || line >= q.window[1] || column >= q.window[2] || channel >= q.channels) continue;
    Four sum = {};
#pragma unroll 8
    for (int thread = in_strand; thread < kThreads; thread += lanes) {
      const Four more = totals[of][thread];
#pragma unroll
      for (int k = 0; k < 4; ++k) sum.v[k] += more.v[Place(k)];
    }
    const int row = ((work.part[0] * q.window[1] + line) * q.window[2] + column) * q.channels + channel;
    float* const to = out + (row * q.y_pixel + int64_t{place.group} * q.features + feature);
    if (q.whole_out) {
      *reinterpret_cast<Four*>(to) = sum;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (feature + k < q.features) to[k] = sum.v[k];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, T::kBlocks)
    FilterRunsKernel(const __grid_constant__ FilterRunsParams q, const float* x, const float* y, float* out) {
  extern __shared__ __align__(16) unsigned char bytes[];
  const RunsWork work(q);
  const RunsLane of(q, work);
  RunsBringer<T> bring(q, work, of, x, y);
  typename T::Sums sums = {};
  AddLines<T>(q, work, of, SharedAddress(bytes), bring, sums);
  StoreSums<T>(q, work, *reinterpret_cast<Four(*)[T::kTaps * 4][kThreads]>(bytes), sums,
               out + (work.split * q.result_size + work.batch * q.filter_size));
}

FilterRunsParams MakeFilterRunsParams(const Problem& p, const FilterRunsShape& shape, int64_t splits) {
  FilterRunsParams q = {};
  for (int d = 0; d < kRank; ++d) q.axis[d] = InputAxis(p, d), q.window[d] = int(p.window[d]);
  const int64_t lines[] = {0, p.y[0], p.y[1]};
  q.lines_box = Box(lines);
  const int64_t parts[] = {p.window[0], CeilDiv(p.window[1], shape.tile.lines),
                           CeilDiv(p.window[2], shape.tile.columns)};
  q.parts = Box(parts);
  q.lines = int(p.images * p.y[0] * p.y[1]);
  q.columns = int(p.y[2]);
  const int64_t dilation = p.window[2] > 1 ? p.rhs_dilation[2] : 1;
  q.sequences = FastDiv(shape.sequences);
  q.phases = FastDiv(std::min(dilation, p.y[2]));
  q.dilation = FastDiv(dilation);
  q.length = int(shape.length);
  q.bands = int(shape.bands);
  q.channel_fours = FastDiv(CeilDiv(p.channels, 4));
  q.feature_fours = FastDiv(CeilDiv(p.features, 4));
  q.channels = int(p.channels), q.features = int(p.features);
  q.units = int(shape.units), q.sets = int(shape.sets), q.splits = int(splits);
  q.log_lanes = CeilLog2(shape.lanes);
  q.images = p.images;
  q.x_pixel = p.groups * p.channels, q.y_pixel = p.groups * p.features;
  q.x_image = p.XPixels() * q.x_pixel, q.x_line = p.rhs_dilation[1] * p.x[2] * q.x_pixel;
  q.x_step = dilation * q.x_pixel, q.y_step = dilation * q.y_pixel;
  q.result_size = p.FilterSize(), q.filter_size = p.FilterSize() / p.batch;
  return q;
}

}  // namespace

cudaError_t LaunchFilterRuns(const Problem& p, int64_t splits, const void* x, const void* y, float* out,
                             cudaStream_t stream) {
  const FilterRunsShape shape = FilterRunsShapeOf(p, splits);
  FilterRunsParams q = MakeFilterRunsParams(p, shape, splits);
  q.whole_x = p.channels % 4 == 0 && IsVectorAligned(x);
  q.whole_y = p.features % 4 == 0 && IsVectorAligned(y);
  q.whole = q.whole_x && q.whole_y;
  q.whole_out = p.features % 4 == 0 && IsVectorAligned(out);
  const auto launch = [&](auto tile) {
    using T = typename decltype(tile)::type;
    return LaunchKernel(FilterRunsKernel<T>, {splits * shape.Blocks(p), kThreads, T::kSharedBytes}, stream, q,
                        static_cast<const float*>(x), static_cast<const float*>(y), out);
  };
  const auto with_stride = [&](auto plain, auto strided) { return p.stride[2] == 1 ? launch(plain) : launch(strided); };
  if (shape.tile.lines == 3) return with_stride(TypeTag<RunsTile<3, 3, 1>>{}, TypeTag<RunsTile<3, 3, 2>>{});
  if (shape.tile.columns == 8) return with_stride(TypeTag<RunsTile<1, 8, 1>>{}, TypeTag<RunsTile<1, 8, 2>>{});
  return with_stride(TypeTag<RunsTile<1, 4, 1>>{}, TypeTag<RunsTile<1, 4, 2>>{});
}

}  // namespace jaxdnn::conv
