// Forward convolution and data gradient of small groups with 3x3 windows, or 3x3x3.
//
// A product of 16 pixels by eight channels is so small that nothing but memory should count. So each warp works by
// itself, once the block's filter is there: it goes down the lines of 16 columns of the result, for 32 to 64 bytes of
// each pixel's channels, whose filter it has in registers. The operand's lines come through a ring in its own part of
// shared memory, copies running some lines ahead. Each is read three times, once for every column of the window, and
// multiplied into the sums of all lines of the result that it belongs to. No warp waits for another, and columns of
// several images lie side by side, so that widths need not be multiples of 16.
//
// Of volumes the lines of three planes come side by side, and planes of the result are like images.
//
// In the data gradient of stride 2 a pixel of the operand belongs to results of all four phases, which take nine
// products altogether: a column is of two results, and two lines of them.
//
// What bounds it: memory, by design. A line of 16 columns and 64 bytes of channels moves 2 KB, which takes a
// multiprocessor some 115 cycles at its share of memory. In bfloat16 at stride 1 it takes 178 instructions (36 of them
// products), a fourth of that on each scheduler, and the copies that are under way together, 16 warps' of five lines,
// are 100 KB. What a worker reads twice, two lines and two columns more than it has, comes from the L2 cache. Where
// images are small, the time until all warps have begun counts as much: a multiprocessor takes some two chunks of 16
// bytes a cycle, so that a warp copies no pixel that is not read, and a block its filter once.
#include "cuda/conv/grouped.cuh"
#include "cuda/conv/grouped.h"
#include "cuda/conv/grouped_product.cuh"
#include "cuda/conv/grouped_store.cuh"
#include "cuda/conv/mma.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

// The compiler does not know that it is the same every time, and so keeps nothing that follows from it in registers.
__device__ GroupedWork FindWork(const GroupedParams& q) {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return {q, block};
}

// What sums begin with: the bias, or nothing.
template <class T>
using Begin = float[T::kTiles][2];

// The next line of the result comes first.
template <class T>
__device__ __forceinline__ void NextLine(typename T::Sums (&sums)[T::kSums], const Begin<T>& begin) {
#pragma unroll
  for (int i = 0; i < T::kSums; ++i)
#pragma unroll
    for (int j = 0; j < T::kTiles; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[i][j][k] = i + 1 < T::kSums ? sums[i + 1][j][k] : begin[j][k % 2];
}

// `so_far`, or NaN if one of the sums is not finite.
template <class T>
__device__ __forceinline__ float ZeroOrNan(const typename T::Sums& sums, float so_far) {
#pragma unroll
  for (int j = 0; j < T::kTiles; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) so_far = fmaf(sums[j][k], 0, so_far);
  return so_far;
}

// The filter's place, between two of a part's channels of the same group: from `k` of the operand to `n` of the result.
template <class T>
__device__ __forceinline__ int FilterPlace(const GroupedParams& q, int tap, int first, int k, int n) {
  const int in_group = (1 << q.group_log) - 1, line = (q.gradient ? n : k) & in_group;
  return (((q.mirrored ? T::kWindow - 1 - tap : tap) << q.group_log) + line) * q.channels + first +
         (q.gradient ? k : n);
}

// Zeros of the filter do not make up for an infinity of another group: computes a worker's results that met one again,
// of their own group's terms alone. Rarely called, hence out of line, when nothing is in registers any more.
template <class T, bool kPlain>
__device__ __noinline__ void Repair(const GroupedParams& q, const typename T::In* in, const typename T::In* filter,
                                    void* out) {
  using In = typename T::In;
  const GroupedWork work = FindWork(q);
  filter += work.problem * q.filter_problem;
  __syncwarp();  // after every lane's stores
  for (int at = work.first_line; at < work.end_line; ++at) {
    const GroupedBlock block(q, at, at + 1);
    constexpr int kEach = T::kResults * T::kResults * T::kChannels;
    for (int i = threadIdx.x % 32; i < block.Columns(q) * kEach; i += 32) {
      const int channel = work.part * T::kChannels + i % T::kChannels, n = channel % 8;
      const int a = i / T::kChannels / T::kResults % T::kResults, b = i / T::kChannels % T::kResults;
      int x;
      const int image = work.problem * q.images + q.image_columns.Div(block.first_column + i / kEach, &x);
      int first_plane;
      const int64_t volume = q.planes.Div(image, &first_plane);
      const int64_t y = block.first_line * T::kResults + a - q.outside_h, to_x = x * T::kResults + b - q.outside_w;
      if (channel >= q.channels || y < 0 || y >= q.result_height || to_x < 0 || to_x >= q.result_width) continue;
      float sum = 0, others = 0;
#pragma unroll 1
      for (int tap = 0; tap < T::kWindow; ++tap) {
        int r = tap % 9 / 3, s = tap % 3;
        if constexpr (T::kResults == 2) {
          if (r % 2 != a || s % 2 != b) continue;
          r = r < 2;
          s = s < 2;
        }
        const int row = block.first_line * T::kStep - q.pad_h + r, column = x * T::kStep - q.pad_w + s;
        const int plane = first_plane - q.pad_d + tap / 9;
        if (row < 0 || row >= q.height || column < 0 || column >= q.width || plane < 0 || plane >= q.depth) continue;
        const In* const eight =
            in + (((volume * q.depth + plane) * q.height + row) * q.width + column) * q.channels + channel - n;
#pragma unroll 1
        for (int k = 0; k < 8; ++k) {
          const float value = static_cast<float>(eight[k]);
          if (k >> q.group_log == n >> q.group_log) {
            sum += value * static_cast<float>(filter[FilterPlace<T>(q, tap, channel - n, k, n)]);
          } else {
            others += value * 0;
          }
        }
      }
      if (others == 0) continue;
      const int64_t to = ((int64_t{image} * q.result_height + y) * q.result_width + to_x) * q.channels + channel;
      if constexpr (kPlain) {
        static_cast<In*>(out)[to] = static_cast<In>(sum);
      } else {
        float v[] = {sum};
        AddTyped<In>(q.type, v, q.epilogue.bias, int64_t{work.problem} * q.channels + channel);
        AddTyped<In>(q.type, v, q.epilogue.residual, to);
        Activate<float>(v, q.epilogue.activation);
        WithFloats<In>(q.type, out,
                       [&](auto* typed) { typed[to] = Round<std::remove_pointer_t<decltype(typed)>>(v).v[0]; });
      }
    }
  }
}

// kPlain: the result is of the operands' type and has no epilogue.
template <class T, bool kPlain>
__global__ void __launch_bounds__(T::kThreads, kPlain ? T::kBlocks : T::kFinishing)
    GroupedKernel(const __grid_constant__ GroupedParams q, const typename T::In* in, const typename T::In* filter,
                  void* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr bool kFinish = !kPlain && T::kResults == 1;
  const uint32_t block_filter = SharedAddress(shared),
                 ring = block_filter + T::kFilterBytes + threadIdx.x / 32 * (T::kSlots * T::kSlotBytes);
  constexpr int kAhead = T::kSlots - 1;
  const GroupedWork work = FindWork(q);
  GroupedFilter<T>::Copy(q, filter + work.problem * q.filter_problem, work.part, block_filter);

  int at = work.first_line;
  GroupedBlock block(q, at, work.end_line);
  GroupedStrip<T> strip(q, block, work.problem, work.part);
  GroupedStore<T> store(q, block, work.problem, work.part);
  int place[T::kTaps];
  const auto begin_columns = [&](auto unroll) {
#pragma unroll decltype(unroll)::value
    for (int i = 0; i < kAhead; ++i) strip.Copy(q, in, ring + i * T::kSlotBytes, i < block.LinesRead<T>());
    // Rows of a fragment are columns; those that there are not read what the last one does.
    const int lane = threadIdx.x % 32, row = min(lane % 16, block.Columns(q) - 1);
    const int pixel = strip.Padded(q, block.first_column + row) - strip.Padded(q, block.first_column);
#pragma unroll
    for (int s = 0; s < T::kTaps; ++s) place[s] = T::Places::At(pixel + s, lane / 16);
  };
  // Wide groups, which have registers to spare, begin a little sooner so.
  begin_columns(std::integral_constant<int, T::kWide && kPlain ? kAhead : 1>());
  WaitForCopies<kAhead>();
  __syncthreads();
  if (at >= work.end_line) return;
  const GroupedFilter<T> words(q, block_filter);

  Begin<T> begin = {};
  if constexpr (kFinish) BiasOf<T>(q, work, begin);
  float not_finite = 0;  // or NaN
  while (true) {
    typename T::Sums sums[T::kSums];
#pragma unroll
    for (auto& each : sums)
#pragma unroll
      for (int j = 0; j < T::kTiles; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) each[j][k] = begin[j][k % 2];
    uint32_t slot = ring;
    const int lines = block.LinesRead<T>();
    const auto next_slot = [&](int index) {
      WaitForCopies<kAhead - 1>();
      // Every lane's copies are here, and nobody reads the line before any more.
      __syncwarp();
      strip.Copy(q, in, slot == ring ? ring + kAhead * T::kSlotBytes : slot - T::kSlotBytes, index + kAhead < lines);
      const uint32_t now = slot;
      slot = slot == ring + kAhead * T::kSlotBytes ? ring : slot + T::kSlotBytes;
      return now;
    };
    const auto finish = [&](typename T::Sums& finished, int b) {
      if constexpr (!T::kWide) not_finite = ZeroOrNan<T>(finished, not_finite);
      if constexpr (kFinish) FinishLine<T>(q, store, block.Columns(q), work.part, finished);
      StoreLine<T, kPlain>(q, store, b, finished, out);
    };
    const auto line = [&](int index, auto parity) {
      MultiplyLine<T, decltype(parity)::value>(next_slot(index), place, words, sums);
      if constexpr (decltype(parity)::value == 0) {
        if (index >= T::kTaps - 1) {
          finish(sums[0], 0);
          store.NextLine(q);
        }
        NextLine<T>(sums, begin);
      }
    };
    // Two lines of two results a column, of which those of the first line met the operand's line before as well.
    const auto two_lines = [&](int index) {
      const uint32_t now = next_slot(index);
      uint32_t a[2][T::kFragments][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) LoadPixels<T>(now, place, s, a[s]);
      const auto multiply = [&](typename T::Sums& to, int r, int b) {
        MultiplyTap<T>(to, a[1], words, 3 * r + b);
        if (b == 0) MultiplyTap<T>(to, a[0], words, 3 * r + 2);
      };
      if (index >= T::kTaps - 1) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          multiply(sums[b], 0, b);
          finish(sums[b], b);
        }
        store.NextLine(q);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          typename T::Sums second = {};
          multiply(second, 1, b);
          finish(second, b);
        }
        store.NextLine(q);
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int j = 0; j < T::kTiles; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[b][j][k] = 0;
        multiply(sums[b], 2, b);
      }
    };
    // So many that sums return to the registers they began in, where a line takes few instructions.
    constexpr int kUnrolled = T::kResults == 2 ? 1 : kFinish || T::kVolumes ? T::kStep : T::kStep == 1 ? 3 : 4;
    at += block.lines;
#pragma unroll 1
    for (int index = 0; index < lines;) {
#pragma unroll
      for (int k = 0; k < kUnrolled; ++k) {
        if (index >= lines) break;
        if constexpr (T::kResults == 2) {
          two_lines(index++);
        } else if (T::kStep == 1 || k % 2 == 0) {
          line(index++, std::integral_constant<int, 0>());
        } else {
          line(index++, std::integral_constant<int, 1>());
        }
      }
    }
    const GroupedWork again = FindWork(q);
    if (at >= again.end_line) break;
    __syncwarp();
    block = GroupedBlock(q, at, again.end_line);
    strip = GroupedStrip<T>(q, block, again.problem, again.part);
    store = GroupedStore<T>(q, block, again.problem, again.part);
    begin_columns(std::integral_constant<int, 1>());
  }
  if constexpr (!T::kWide) {
    const bool repair = q.group_log < 3 && __any_sync(0xFFFFFFFFu, not_finite != 0);
    if (repair) Repair<T, kPlain>(q, in, filter, out);
  }
}

// Shares the lines out to at most `most` blocks, and returns how many there are. A warp that goes on in other columns
// reads more lines, and waits once more for the first of them; but warps that share the lines of the same columns may
// be fewer, or not as many in every multiprocessor.
int64_t Share(GroupedParams* q, int64_t batch, int64_t most) {
  // A worker's lines should be some more than the kMore that it reads besides.
  constexpr int64_t kWarps = kGroupedWarps, kLeastLines = 4, kMore = 2;
  const int64_t lines = q->image_lines.divisor, columns = CeilDiv(q->all_columns, q->columns);
  const int64_t problems = q->parts.divisor * batch, places = std::max<int64_t>(1, most / problems) * kWarps;
  const auto blocks = [&](int64_t workers) { return problems * CeilDiv(workers, kWarps); };
  const auto time = [&](int64_t workers, double each) { return CeilDiv(blocks(workers), kMultiprocessors) * each; };
  int64_t workers = std::min(places, CeilDiv(columns * lines, kLeastLines)), sharers = 0;
  const double each = double(columns * lines) / workers;
  double least = time(workers, std::ceil(each) + kMore + kMore * each / lines);
  for (int64_t n = 1; n * columns <= places && (n - 1) * kLeastLines < lines; ++n) {
    const double of_n = time(n * columns, CeilDiv(lines, n) + kMore);
    if (blocks(n * columns) >= std::min<int64_t>(blocks(workers), kMultiprocessors) && of_n < least) {
      least = of_n;
      workers = n * columns;
      sharers = n;
    }
  }
  ShareLines(q, CeilDiv(workers, kWarps) * kWarps, sharers);
  return blocks(workers);
}

template <class T, bool kPlain>
cudaError_t LaunchKind(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  using In = typename T::In;
  GroupedParams q = MakeGroupedParams<T>(p, T::kPixels);
  q.epilogue = epilogue;

  const auto kernel = GroupedKernel<T, kPlain>;
  Grid grid = {0, T::kThreads, T::kSharedBytes};
  int64_t resident;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  resident = std::min<int64_t>(resident, kMultiprocessors * T::kBlocks);
  grid.blocks = Share(&q, p.batch, resident);
  return LaunchKernel(kernel, grid, stream, q, static_cast<const In*>(operand), static_cast<const In*>(filter), out);
}

template <class In>
cudaError_t LaunchType(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  const auto with_tile = [&](auto tile) {
    using T = typename decltype(tile)::type;
    // Floats of two results to a column have nothing else.
    if (p.out == p.in && (IsNone(epilogue) || T::kResults == 2))
      return LaunchKind<T, true>(p, operand, filter, out, epilogue, stream);
    if constexpr (T::kResults == 1 || sizeof(In) == 2)
      return LaunchKind<T, false>(p, operand, filter, out, epilogue, stream);
    return cudaErrorInvalidValue;
  };
  const auto with_stride = [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    if constexpr (kGroup == 8 || (kGroup == 16 && sizeof(In) == 2))
      if (p.window[0] == 3) return with_tile(TypeTag<GroupedTile<In, kGroup, Stride::kOne, 3>>());
    if (p.stride[2] == 1) return with_tile(TypeTag<GroupedTile<In, kGroup, Stride::kOne>>());
    return p.direction == Direction::kForward ? with_tile(TypeTag<GroupedTile<In, kGroup, Stride::kTwo>>())
                                              : with_tile(TypeTag<GroupedTile<In, kGroup, Stride::kHalf>>());
  };
  if constexpr (sizeof(In) == 2)
    if (p.channels == 24) return with_stride(std::integral_constant<int, 24>());
  return p.channels == 16 ? with_stride(std::integral_constant<int, 16>())
                          : with_stride(std::integral_constant<int, 8>());
}

}  // namespace

cudaError_t LaunchGrouped(const Problem& p, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream) {
  if (!IsVectorAligned(operand, filter, static_cast<const void*>(out), epilogue.bias, epilogue.residual)) {
    const Config config = {Tile::kMma128x64, 1, 0, 0};
    return LaunchDataMma(p, config, operand, filter, out, epilogue, stream);
  }
  return VisitSingleDType(p.in, [&](auto in) {
    return LaunchType<typename decltype(in)::type>(p, operand, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
