// Data gradient of depthwise convolution with a stride of two, of 3x3 and 5x5 windows: memory bounds it. A thread loads
// each input once for all four phases, whose results it stores side by side. Segments are short: the order in which
// blocks run then follows memory, and what segments have in common is still in the cache.
#pragma once

#include "cuda/conv/depthwise_quads.cuh"

namespace jaxdnn::conv::depthwise {

// A window of kTaps x kTaps, each of whose inputs is part of results 2 i + u - lead, u < kTaps, of lines and columns.
// The lattice of pairs of results 2 j and 2 j + 1, less `lead`, has the inputs' pitch; pair j needs the inputs from
// j - kBefore to j.
template <int kTaps_>
struct Spread {
  static constexpr int kTaps = kTaps_, kBefore = kTaps / 2;
  static constexpr int kStrip = 4;                      // pairs of results in a line
  static constexpr int kSegment = 2 * kBefore;          // and of lines of them
  static constexpr int kTogether = kTaps == 3 ? 4 : 2;  // channels of a thread, whose filter is in its registers

  // Of a dimension. Against the direction of taps, u is kTaps - 1 - tap.
  static __host__ __device__ int Lead(const Axis& axis) {
    return axis.tap_step < 0 ? axis.offset : axis.offset + kTaps - 1;
  }
  static __host__ __device__ int First(const PhasedAxis& at) { return Lead(at.axis) >> 1; }
  static int Count(const PhasedAxis& at) { return ((at.out - 1 + Lead(at.axis)) >> 1) - First(at) + 1; }

  static bool Takes(const DataParams& q) {
    const auto is_spread = [](const PhasedAxis& at) {
      return at.window == kTaps && at.axis.step.divisor == 2 && at.axis.stride == 1 && std::abs(at.axis.tap_step) == 1;
    };
    return IsBiasAlone(q.epilogue) && q.at[0].window == 1 && q.at[0].axis.step.divisor == 1 && is_spread(q.at[1]) &&
           is_spread(q.at[2]);
  }

  // Sets how the work is shared out: strips, and segments, each of which begins with the lines before.
  static int64_t Share(DataParams& q, const Problem& p) {
    if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return 0;
    q.planes = FastDiv(q.at[0].MaxCount());
    q.strips = FastDiv(CeilDiv(Count(q.at[2]), kStrip));
    q.segment = kSegment;
    q.segments = FastDiv(CeilDiv(Count(q.at[1]), kSegment));
    return ShareOut(q, kTogether, p.batch * p.images * q.planes.divisor * q.segments.divisor * q.strips.divisor);
  }
};

template <class S, class T>
__global__ void __launch_bounds__(kDepthwiseThreads, 4)
    SpreadKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  constexpr int kTaps = S::kTaps, kBefore = S::kBefore, kStrip = S::kStrip, kTogether = S::kTogether;
  constexpr int kSeen = kStrip + kBefore;  // inputs of a line
  int together;
  const int unit = p.slabs.thread.Div(static_cast<int>(blockIdx.x) * kDepthwiseThreads + threadIdx.x, &together);
  if (unit >= p.units) return;
  const auto [strip, segment, plane, image] = Locate(p, unit);
  const int64_t problem = p.images.Div(image);
  const int channel = kTogether * together, lines = p.at[1].axis.extent;
  const int line_lead = S::Lead(p.at[1].axis), column_lead = S::Lead(p.at[2].axis);
  const int column = S::First(p.at[2]) + kStrip * strip;
  int line = S::First(p.at[1]) + p.segment * segment - kBefore;
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const bool inside = static_cast<unsigned>(in_plane) < static_cast<unsigned>(p.at[0].axis.extent);
  const int extent = inside ? p.at[2].axis.extent : 0;
  const char* from = in + image * p.in_image + in_plane * p.in_line[0] + line * p.in_line[1] +
                     int64_t{column - kBefore} * p.in_pixel + channel * sizeof(T);
  Packed<T, kTogether> next[kSeen];
  const auto load = [&] {
    const bool there = static_cast<unsigned>(line) < static_cast<unsigned>(lines);
    LoadPixels(from, p.in_pixel, column - kBefore, there ? extent : 0, next);
    from += p.in_line[1];
    ++line;
  };
  load();

  float w[kTaps][kTaps][kTogether], bias[kTogether];
  {
    const char* tap = filter + problem * p.filter_batch + channel * sizeof(T);
    const int64_t line_step = p.at[1].axis.tap_step < 0 ? p.filter_tap[1] : -p.filter_tap[1];
    const int64_t step = p.at[2].axis.tap_step < 0 ? p.filter_tap[2] : -p.filter_tap[2];
    if (line_step < 0) tap += (kTaps - 1) * p.filter_tap[1];
    if (step < 0) tap += (kTaps - 1) * p.filter_tap[2];
#pragma unroll
    for (int u = 0; u < kTaps; ++u)
#pragma unroll
      for (int v = 0; v < kTaps; ++v) LoadTap<T>(tap + u * line_step + v * step, w[u][v]);
  }
  BiasOf<T>(p, problem * p.channels + channel, bias);
  // The last lines' inputs, the newest in the end.
  float x[kBefore + 1][kSeen][kTogether];
#pragma unroll
  for (int l = 0; l < kBefore; ++l) {
#pragma unroll
    for (int i = 0; i < kSeen; ++i) Widen<T>(next[i], x[l][i]);
    load();
  }

  const int size = p.widened ? sizeof(float) : sizeof(T), out_pixel = static_cast<int>(p.out_line[2]);
  const int out_column = 2 * column - column_lead, out_columns = p.at[2].out, out_lines = p.at[1].out;
  int out_line = 2 * (line - 1) - line_lead;
  const int last = min(out_line + 2 * p.segment, out_lines);
  char* to = out + image * p.out_image + plane * p.out_line[0] + out_line * p.out_line[1] +
             int64_t{out_column} * out_pixel + channel * size;
#pragma unroll 1
  for (; out_line < last; out_line += 2) {
#pragma unroll
    for (int i = 0; i < kSeen; ++i) Widen<T>(next[i], x[kBefore][i]);
    load();
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (static_cast<unsigned>(out_line + u) < static_cast<unsigned>(out_lines)) {
#pragma unroll
        for (int i = 0; i < 2 * kStrip; ++i) {
          float sum[kTogether];
#pragma unroll
          for (int c = 0; c < kTogether; ++c) sum[c] = bias[c];
#pragma unroll
          for (int r = u; r < kTaps; r += 2)
#pragma unroll
            for (int s = i % 2; s < kTaps; s += 2)
              AddProducts(sum, w[r][s], x[kBefore - r / 2][kBefore + i / 2 - s / 2]);
          if (static_cast<unsigned>(out_column + i) >= static_cast<unsigned>(out_columns)) continue;
          WithOut<T>(p.widened, [&](auto type) {
            using Out = typename decltype(type)::type;
            StorePacked<Out, kTogether>(reinterpret_cast<Out*>(to + int64_t{out_pixel} * i), Narrow<Out>(sum));
          });
        }
      }
      to += p.out_line[1];
    }
#pragma unroll
    for (int l = 0; l < kBefore; ++l)
#pragma unroll
      for (int i = 0; i < kSeen; ++i)
#pragma unroll
        for (int c = 0; c < kTogether; ++c) x[l][i][c] = x[l + 1][i][c];
  }
}

// Calls f with a kernel that memory bounds and that takes the problem, and how many blocks it runs, or fails as an
// invalid value.
template <class T, class F>
cudaError_t VisitStreaming(DataParams& q, const Problem& p, F&& f) {
  const auto run = [&](auto* kernel, int64_t blocks) {
    // Threads are numbered with 32 bits.
    return blocks > INT32_MAX / kDepthwiseThreads ? cudaErrorInvalidValue : f(kernel, blocks);
  };
  if (Line::Takes(q)) return run(LineKernel<T>, Line::Share(q, p));
  if (Spread<3>::Takes(q)) return run(SpreadKernel<Spread<3>, T>, Spread<3>::Share(q, p));
  if (Spread<5>::Takes(q)) return run(SpreadKernel<Spread<5>, T>, Spread<5>::Share(q, p));
  return cudaErrorInvalidValue;
}

}  // namespace jaxdnn::conv::depthwise
