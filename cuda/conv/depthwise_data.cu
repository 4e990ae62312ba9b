// Forward and data gradient of depthwise convolution, with no workspace.
//
// Windows that are compiled for: a thread goes down the lines of its strip with the whole filter in registers. Each
// line of the operand is loaded once and added to the sums of all lines of results that it is part of; the oldest sums
// are then complete, and the others move up, which costs nothing, since the first product of a line is added into the
// next place. All other windows: a thread computes one strip, tap by tap, the operand sliding through its registers.
#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/depthwise.h"
#include "cuda/conv/epilogue.cuh"

namespace jaxdnn::conv {
namespace {

struct DataParams {
  PhasedAxis at[kRank];
  Slabs slabs;
  FastDiv phases;
  FastDiv lines, strips, planes, segments, images;  // of the largest phase; images per problem
  int segment;                                      // lines in a segment
  int units;                                        // of work, in a phase
  int channels;                                     // of the result
  // Strides in bytes.
  int in_pixel;
  int64_t in_line[kRank], in_image, out_line[kRank], out_image;
  int64_t filter_tap[kRank], filter_batch;
  FastDiv features;  // results of an input channel
  bool forward, widened;
  PhaseLine whole[kRank];  // the only phase, if there is one
  Epilogue epilogue;
};

DataParams MakeParams(const Problem& p, const Epilogue& epilogue) {
  const bool forward = p.direction == Direction::kForward;
  const auto& in = forward ? p.x : p.y;
  const auto& out = forward ? p.y : p.x;
  const int64_t k = p.groups * p.features;
  DataParams q = {};
  q.epilogue = epilogue;
  q.forward = forward;
  q.widened = p.out != p.in;
  q.channels = int(forward ? k : p.groups);
  const int size = p.in == DType::kF32 ? 4 : 2;
  q.in_pixel = int(forward ? p.groups : k) * size;
  q.features = FastDiv(p.features);
  q.slabs = Slabs(q.channels);
  q.images = FastDiv(p.images);
  int64_t in_stride = q.in_pixel, out_stride = q.channels * (p.out == DType::kF32 ? 4 : 2), tap_stride = k * size;
  int64_t phases = 1;
  for (int d = kRank - 1; d >= 0; --d) {
    q.at[d] = PhasedAxis(forward ? InputAxis(p, d) : OutputAxis(p, d), out[d], p.window[d]);
    q.in_line[d] = in_stride;
    q.out_line[d] = out_stride;
    q.filter_tap[d] = tap_stride;
    in_stride *= in[d];
    out_stride *= out[d];
    tap_stride *= p.window[d];
    phases *= q.at[d].phases;
  }
  q.in_image = in_stride;
  q.out_image = out_stride;
  q.filter_batch = tap_stride;
  q.phases = FastDiv(phases);
  for (int d = 0; d < kRank; ++d) q.whole[d] = q.at[d].At(0);
  return q;
}

// What a block does.
struct DataBlock {
  PhaseLine at[kRank];
  int slab, unit;

  __device__ void Set(const DataParams& p) {
    int which, rest = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
    unit = p.phases.Div(rest, &which) * p.slabs.units;
    if (p.phases.divisor == 1) {
      for (int d = 0; d < kRank; ++d) at[d] = p.whole[d];
    } else {
      at[2] = p.at[2].At(which % p.at[2].phases);
      at[1] = p.at[1].At(which / p.at[2].phases % p.at[1].phases);
      at[0] = p.at[0].At(which / p.at[2].phases / p.at[1].phases);
    }
  }
};

// Which channels a thread has, of result, operand and filter.
struct Channels {
  int out, in, filter, in_second, filter_second;  // the second's distance from the first
  bool both;

  __device__ Channels(const DataParams& p, int pair) : out(2 * pair), both(2 * pair + 1 < p.channels) {
    if (p.forward) {
      in = p.features.Div(out);
      in_second = both ? p.features.Div(out + 1) - in : 0;
      filter = out;
      filter_second = both;
    } else {
      in = filter = out * static_cast<int>(p.features.divisor);
      in_second = filter_second = both ? static_cast<int>(p.features.divisor) : 0;
    }
  }
};

template <class T, bool kPaired>
__device__ void StorePair(char* to, float2 v, bool both) {
  if constexpr (!kPaired) {
    reinterpret_cast<T*>(to)[0] = static_cast<T>(v.x);
    if (both) reinterpret_cast<T*>(to)[1] = static_cast<T>(v.y);
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(to) = NarrowPair<T>(v.x, v.y);
  } else {
    *reinterpret_cast<float2*>(to) = v;
  }
}

// The first `count` of a strip's results, `step` bytes apart.
template <class Out, bool kPaired, int kStrip>
__device__ void StoreStrip(char* to, int step, int count, const float2 (&sums)[kStrip], bool both) {
#pragma unroll
  for (int j = 0; j < kStrip; ++j)
    if (j < count) StorePair<Out, kPaired>(to + int64_t{step} * j, sums[j], both);
}

// Calls f with the TypeTag of the result's type: the operands', or that of the sums.
template <class T, class F>
__device__ void WithOut(bool widened, F&& f) {
  if constexpr (sizeof(T) == 2) {
    if (widened) return f(TypeTag<float>{});
  }
  f(TypeTag<T>{});
}

// The bias of a thread's channels, or zeros.
template <class T>
__device__ float2 BiasOf(const Epilogue& e, int64_t index, bool both, bool widened) {
  float bias[2][1] = {};
  WithOut<T>(widened, [&](auto type) {
    using Out = typename decltype(type)::type;
    Add<Out>(bias[0], e.bias, index);
    if (both) Add<Out>(bias[1], e.bias, index + 1);
  });
  return {bias[0][0], bias[1][0]};
}

// What is left of the epilogue when the bias is in the sums.
template <class Out, int kStrip>
__device__ void Finish(const Epilogue& e, int64_t offset, int step, int count, float2 (&sums)[kStrip], bool both) {
  if (e.residual == nullptr && e.activation.kind == activation::Kind::kIdentity) return;
#pragma unroll 1
  for (int j = 0; j < kStrip; ++j) {
    float v[2][1] = {{sums[0].x}, {sums[0].y}};
    if (j < count) {
      Add<Out>(v[0], e.residual, offset + int64_t{step} * j);
      if (both) Add<Out>(v[1], e.residual, offset + int64_t{step} * j + 1);
    }
    float pair[2] = {v[0][0], v[1][0]};
    Activate<Out>(pair, e.activation);
    Rotate<1>(sums);
    sums[kStrip - 1] = {pair[0], pair[1]};
  }
}

// A window of kPlanes x kLines x kColumns taps, results kStride lines and columns apart, kStrip of them in a strip.
// With kRagged some phases have a tap less along a dimension, or none.
template <class T, int kPlanes, int kLines, int kColumns, int kStride, bool kRagged, int kStrip, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    SlideKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  constexpr int kSums = (kLines + kStride - 1) / kStride;    // lines of results that a line of the operand is part of
  constexpr int kWidth = (kStrip - 1) * kStride + kColumns;  // of the operand's strip
  __shared__ DataBlock block;
  if (threadIdx.x == 0) block.Set(p);
  __syncthreads();
  int lane, strip, segment, plane, image;
  const int unit = p.slabs.thread.Div(static_cast<int>(threadIdx.x), &lane);
  const Channels channels(p, block.slab * p.slabs.width + lane);
  if (unit >= p.slabs.units || channels.out >= p.channels || block.unit + unit >= p.units) return;
  image = p.planes.Div(block.unit + unit, &plane);
  image = p.strips.Div(image, &strip);
  image = p.segments.Div(image, &segment);
  const int64_t problem = p.images.Div(image);
  const int column0 = strip * kStrip, line0 = segment * p.segment, line1 = min(line0 + p.segment, block.at[1].count);
  if (plane >= block.at[0].count || column0 >= block.at[2].count || line0 >= line1) return;

  // The last tap of a dimension may be missing.
  const bool all_planes = !kRagged || block.at[0].taps == kPlanes, all_lines = !kRagged || block.at[1].taps == kLines,
             all_columns = !kRagged || block.at[2].taps == kColumns;
  const bool empty = kRagged && (block.at[0].taps == 0 || block.at[1].taps == 0 || block.at[2].taps == 0);
  float2 w[kPlanes][kLines][kColumns];
  {
    const char* from = filter + problem * p.filter_batch + channels.filter * sizeof(T);
#pragma unroll
    for (int d = 0; d < kRank; ++d) from += block.at[d].first_tap * p.filter_tap[d];
    if (empty) from = filter;
#pragma unroll
    for (int d = 0; d < kPlanes; ++d)
#pragma unroll
      for (int r = 0; r < kLines; ++r)
#pragma unroll
        for (int s = 0; s < kColumns; ++s) {
          const bool there = !kRagged || (d < block.at[0].taps && r < block.at[1].taps && s < block.at[2].taps);
          w[d][r][s] = {0, 0};
          if (there)
            w[d][r][s] = ToFloats<T>(LoadPair<T, true>(from + d * block.at[0].tap_step * p.filter_tap[0] +
                                                           r * block.at[1].tap_step * p.filter_tap[1] +
                                                           s * block.at[2].tap_step * p.filter_tap[2],
                                                       channels.filter_second));
          Keep(w[d][r][s]);
        }
  }

  const int first_column = block.at[2].origin + p.at[2].pitch * kStride * column0;
  const int first_plane = block.at[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const int in_lines = p.at[1].axis.extent, step = p.at[2].pitch * p.in_pixel;
  int line = block.at[1].origin + p.at[1].pitch * kStride * line0;
  const char* from = in + image * p.in_image + first_plane * p.in_line[0] + line * p.in_line[1] +
                     int64_t{first_column} * p.in_pixel + channels.in * sizeof(T);
  const int64_t line_step = p.at[1].pitch * p.in_line[1], plane_step = p.at[0].pitch * p.in_line[0];
  int in_columns[kPlanes];  // of each plane: none, if it is not there
#pragma unroll
  for (int d = 0; d < kPlanes; ++d) {
    const unsigned at = first_plane + p.at[0].pitch * d;
    in_columns[d] = at < static_cast<unsigned>(p.at[0].axis.extent) && !empty ? p.at[2].axis.extent : 0;
  }
  Keep(from);
  bool there;  // the line that was loaded last
  const auto load_line = [&](Pair<T>(&x)[kPlanes][kWidth]) {
    there = static_cast<unsigned>(line) < static_cast<unsigned>(in_lines);
#pragma unroll
    for (int d = 0; d < kPlanes; ++d)
      LoadStrip<T, true>(from + d * plane_step, step, first_column, p.at[2].pitch, there ? in_columns[d] : 0, 1, x[d]);
    from += line_step;
    Keep(from);
    line += p.at[1].pitch;
  };

  const float2 bias = BiasOf<T>(p.epilogue, problem * p.channels + channels.out, channels.both, p.widened);
  float2 sums[kSums][kStrip] = {};
  Pair<T> next[kPlanes][kWidth];
  load_line(next);
  int out_column = static_cast<int>(p.out_line[2]) * p.at[2].period;
  char* to = out + image * p.out_image + (block.at[0].first + int64_t{p.at[0].period} * plane) * p.out_line[0] +
             (block.at[1].first + int64_t{p.at[1].period} * (line0 - (kSums - 1))) * p.out_line[1] +
             (block.at[2].first + int64_t{p.at[2].period} * column0) * p.out_line[2] +
             channels.out * (p.widened ? sizeof(float) : sizeof(T));
#pragma unroll 1
  for (int i = line0; i < line1 + kSums - 1; ++i) {
#pragma unroll
    for (int a = 0; a < kStride; ++a) {
      float2 x[kPlanes][kWidth];
#pragma unroll
      for (int d = 0; d < kPlanes; ++d)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[d][i] = ToFloats<T>(next[d][i]);
      const bool any = there;
      load_line(next);
      const auto up = [&](int k) {
#pragma unroll
        for (int j = 0; a == 0 && j < kStrip; ++j) sums[k][j] = k > 0 ? sums[k - 1][j] : bias;
      };
      if (!any) {
#pragma unroll
        for (int k = kSums - 1; k >= 0; --k) up(k);
        continue;
      }
      // Tap a + kStride k of the results `k` lines up.
#pragma unroll
      for (int k = kSums - 1; k >= 0; --k) {
        const int r = a + kStride * k;
        up(k);
        if (r >= kLines || (r == kLines - 1 && kLines > 1 && !all_lines)) continue;
#pragma unroll
        for (int d = 0; d < kPlanes; ++d) {
          if (d == kPlanes - 1 && kPlanes > 1 && !all_planes) continue;
#pragma unroll
          for (int s = 0; s < kColumns; ++s) {
            if (s == kColumns - 1 && kColumns > 1 && !all_columns) continue;
#pragma unroll
            for (int j = 0; j < kStrip; ++j) MultiplyAdd(sums[k][j], w[d][r][s], x[d][j * kStride + s]);
          }
        }
      }
    }
    if (i >= line0 + kSums - 1) {
      const int count = block.at[2].count - column0;
      WithOut<T>(p.widened, [&](auto type) {
        StoreStrip<typename decltype(type)::type, true>(to, out_column, count, sums[kSums - 1], true);
      });
    }
    to += p.out_line[1] * p.at[1].period;
  }
}

// Any window: kChunk of its columns at a time.
template <class T, bool kPaired, int kStrip, int kChunk>
__global__ void __launch_bounds__(kDepthwiseThreads, kStrip* kChunk > 64 ? 2 : 4)
    StripKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  __shared__ DataBlock block;
  if (threadIdx.x == 0) block.Set(p);
  __syncthreads();
  int lane, line, strip, plane, image;
  const int unit = p.slabs.thread.Div(static_cast<int>(threadIdx.x), &lane);
  const Channels channels(p, block.slab * p.slabs.width + lane);
  if (unit >= p.slabs.units || channels.out >= p.channels || block.unit + unit >= p.units) return;
  image = p.lines.Div(block.unit + unit, &line);
  image = p.strips.Div(image, &strip);
  image = p.planes.Div(image, &plane);
  const int64_t problem = p.images.Div(image);
  const int column0 = strip * kStrip;
  if (plane >= block.at[0].count || line >= block.at[1].count || column0 >= block.at[2].count) return;

  const int in_lines = p.at[1].axis.extent, in_planes = p.at[0].axis.extent, in_columns = p.at[2].axis.extent;
  const int stride = p.at[2].stride, taps = block.at[2].taps;
  const int first_plane = block.at[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const int first_line = block.at[1].origin + p.at[1].pitch * p.at[1].stride * line;
  const int reps = p.forward ? 1 : static_cast<int>(p.features.divisor);
  const int tap_step = block.at[2].tap_step * static_cast<int>(p.filter_tap[2]) * stride;
  const float2 bias = BiasOf<T>(p.epilogue, problem * p.channels + channels.out, channels.both, p.widened);
  float2 sums[kStrip];
#pragma unroll
  for (int j = 0; j < kStrip; ++j) sums[j] = bias;
  for (int m = 0; m < reps; ++m) {
    for (int d = 0; d < block.at[0].taps; ++d) {
      const int in_plane = first_plane + p.at[0].pitch * d;
      if (in_plane < 0 || in_plane >= in_planes) continue;
      for (int r = 0; r < block.at[1].taps; ++r) {
        const int in_line = first_line + p.at[1].pitch * r;
        if (in_line < 0 || in_line >= in_lines) continue;
        const char* line_at =
            in + image * p.in_image + in_plane * p.in_line[0] + in_line * p.in_line[1] + (channels.in + m) * sizeof(T);
        const char* w_from = filter + problem * p.filter_batch + (channels.filter + m) * sizeof(T) +
                             (block.at[0].first_tap + d * block.at[0].tap_step) * p.filter_tap[0] +
                             (block.at[1].first_tap + r * block.at[1].tap_step) * p.filter_tap[1] +
                             block.at[2].first_tap * p.filter_tap[2];
        // Taps a stride apart see the operand without one.
        for (int q = 0; q < min(stride, taps); ++q) {
          const int pitch = p.at[2].pitch * stride;
          const int begin = block.at[2].origin + p.at[2].pitch * q + pitch * column0;
          const int count = (taps - q + stride - 1) / stride;
          const char* w_at = w_from + q * block.at[2].tap_step * p.filter_tap[2];
          const char* from = line_at + int64_t{begin} * p.in_pixel;
          const int step = pitch * p.in_pixel;
          float2 x[kStrip + kChunk - 1];
          {
            Pair<T> first[kStrip - 1];
            LoadStrip<T, kPaired>(from, step, begin, pitch, in_columns, channels.in_second, first);
#pragma unroll
            for (int i = 0; i < kStrip - 1; ++i) x[i] = ToFloats<T>(first[i]);
          }
          from += int64_t{step} * (kStrip - 1);
          int next_column = begin + pitch * (kStrip - 1);
          const auto multiply = [&](int t, auto whole) {
            constexpr bool kWhole = decltype(whole)::value;
            Pair<T> w[kChunk], next[kChunk];
            LoadStrip<T, kPaired>(from, step, next_column, pitch, in_columns, channels.in_second, next);
            LoadStrip<T, kPaired>(w_at, tap_step, t, 1, kWhole ? INT32_MAX : count, channels.filter_second, w);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) x[kStrip - 1 + i] = ToFloats<T>(next[i]);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
              if (!kWhole && t + i >= count) continue;
              const float2 wide = ToFloats<T>(w[i]);
#pragma unroll
              for (int j = 0; j < kStrip; ++j) MultiplyAdd(sums[j], wide, x[i + j]);
            }
          };
          int t = 0;
#pragma unroll 1
          for (; t + kChunk <= count; t += kChunk) {
            multiply(t, std::true_type{});
#pragma unroll
            for (int i = 0; i < kStrip - 1; ++i) x[i] = x[i + kChunk];
            w_at += int64_t{tap_step} * kChunk;
            from += int64_t{step} * kChunk;
            next_column += pitch * kChunk;
          }
          if (t < count) multiply(t, std::false_type{});
        }
      }
    }
  }
  char* to = out + image * p.out_image + (block.at[0].first + int64_t{p.at[0].period} * plane) * p.out_line[0] +
             (block.at[1].first + int64_t{p.at[1].period} * line) * p.out_line[1] +
             (block.at[2].first + int64_t{p.at[2].period} * column0) * p.out_line[2] +
             channels.out * (p.widened ? sizeof(float) : sizeof(T));
  const int out_column = static_cast<int>(p.out_line[2]) * p.at[2].period, count = block.at[2].count - column0;
  WithOut<T>(p.widened, [&](auto type) {
    using Out = typename decltype(type)::type;
    constexpr int kSize = sizeof(Out);
    Finish<Out>(p.epilogue, (to - out) / kSize, out_column / kSize, count, sums, channels.both);
    StoreStrip<Out, kPaired>(to, out_column, count, sums, channels.both);
  });
}

// Sets how the work is shared out: strips, and segments of `segment` lines.
int64_t Blocks(DataParams& q, const Problem& p, int strip, int segment) {
  q.planes = FastDiv(q.at[0].MaxCount());
  q.lines = FastDiv(q.at[1].MaxCount());
  q.strips = FastDiv(CeilDiv(q.at[2].MaxCount(), strip));
  q.segment = std::max(segment, 1);
  q.segments = FastDiv(CeilDiv(q.at[1].MaxCount(), q.segment));
  q.units = int(p.batch * p.images * q.at[0].MaxCount() * q.segments.divisor * q.strips.divisor);
  if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0 || q.channels == 0) return 0;
  return CeilDiv(q.units, q.slabs.units) * q.phases.divisor * q.slabs.count.divisor;
}

template <int kPlanes_, int kLines_, int kColumns_, int kStride_, bool kRagged_, int kStrip_, int kBlocks_>
struct Slide {
  static constexpr int kPlanes = kPlanes_, kLines = kLines_, kColumns = kColumns_, kStride = kStride_, kStrip = kStrip_,
                       kBlocks = kBlocks_;
  static constexpr bool kRagged = kRagged_;

  static bool Takes(const DataParams& q) {
    return q.epilogue.residual == nullptr && q.epilogue.activation.kind == activation::Kind::kIdentity &&
           q.at[0].MaxTaps() == kPlanes && q.at[1].MaxTaps() == kLines && q.at[2].MaxTaps() == kColumns &&
           q.at[1].stride == kStride && q.at[2].stride == kStride &&
           kRagged == (q.at[0].axis.step.divisor * q.at[1].axis.step.divisor * q.at[2].axis.step.divisor > 1);
  }

  // Lines of a segment. Short ones are work for more blocks, which also end together, but each begins with lines that
  // the one before has as well: a device runs kBlocks on each multiprocessor in turns, each as long as its lines are
  // many.
  static int Segment(DataParams& q, const Problem& p) {
    const int lines = q.at[1].MaxCount(), places = 132 * kBlocks;
    int best = std::max(lines, 1);
    int64_t best_steps = INT64_MAX;
    for (int count = 1; count == 1 || count * kLines <= lines; ++count) {
      const int segment = int(CeilDiv(lines, count));
      const int64_t steps = CeilDiv(Blocks(q, p, kStrip, segment), places) * (segment + kLines - 1);
      if (steps < best_steps) best = segment, best_steps = steps;
    }
    return best;
  }
};

template <class F, class... Each>
cudaError_t VisitSlide(const DataParams& q, F&& f, TypeTag<Each>... each) {
  cudaError_t status = cudaErrorInvalidValue;
  (void)((Each::Takes(q) && (status = f(each), true)) || ...);
  return status;
}

}  // namespace

cudaError_t LaunchDepthwiseData(const Problem& p, const void* operand, const void* filter, void* out,
                                const Epilogue& epilogue, cudaStream_t stream) {
  DataParams q = MakeParams(p, epilogue);
  const auto with_type = [&](auto type) {
    using T = typename decltype(type)::type;
    const char *in = static_cast<const char*>(operand), *w = static_cast<const char*>(filter);
    const auto launch = [&](auto* kernel, int64_t blocks) {
      return LaunchKernel(kernel, blocks, kDepthwiseThreads, stream, q, in, w, static_cast<char*>(out));
    };
    const bool paired = Paired(p, {operand, filter, out});
    if (paired) {
      const cudaError_t status = VisitSlide(
          q,
          [&](auto tag) {
            using S = typename decltype(tag)::type;
            const int64_t blocks = Blocks(q, p, S::kStrip, S::Segment(q, p));
            return launch(
                SlideKernel<T, S::kPlanes, S::kLines, S::kColumns, S::kStride, S::kRagged, S::kStrip, S::kBlocks>,
                blocks);
          },
          TypeTag<Slide<1, 3, 3, 1, false, 8, 2>>{}, TypeTag<Slide<1, 3, 3, 2, false, 4, 4>>{},
          TypeTag<Slide<1, 5, 5, 1, false, 8, 2>>{}, TypeTag<Slide<1, 5, 5, 2, false, 4, 2>>{},
          TypeTag<Slide<1, 7, 7, 1, false, sizeof(T) == 4 ? 3 : 4, 2>>{}, TypeTag<Slide<3, 3, 3, 1, false, 7, 2>>{},
          TypeTag<Slide<1, 2, 2, 1, true, 4, 4>>{}, TypeTag<Slide<1, 3, 3, 1, true, 4, 4>>{});
      if (status != cudaErrorInvalidValue) return status;
    }
    const auto strip = [&](auto tag) {
      constexpr bool kPaired = decltype(tag)::value;
      if (q.at[2].MaxTaps() <= 4 * q.at[2].stride) {
        const int64_t blocks = Blocks(q, p, 8, 1);
        return launch(StripKernel<T, kPaired, 8, 4>, blocks);
      }
      const int64_t blocks = Blocks(q, p, 16, 1);
      return launch(StripKernel<T, kPaired, 16, 16>, blocks);
    };
    return paired ? strip(std::true_type{}) : strip(std::false_type{});
  };
  switch (p.in) {
    case DType::kF32:
      return with_type(TypeTag<float>{});
    case DType::kF16:
      return with_type(TypeTag<__half>{});
    case DType::kBF16:
      return with_type(TypeTag<__nv_bfloat16>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jaxdnn::conv
