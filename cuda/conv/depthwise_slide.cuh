// Depthwise convolution with a window that is compiled for: a thread goes down the lines of its strip with the whole
// filter in registers. Each line of the operand is loaded once and added to the sums of all lines of results that it is
// part of; the oldest sums are then complete, and the others move up, which costs nothing, since the first product of a
// line is added into the next place.
#pragma once

#include "cuda/conv/depthwise_data.cuh"

namespace jaxdnn::conv::depthwise {

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
    const char* from = FirstTap<T>(p, block.at, filter, problem, channels.filter);
    if (empty) from = filter;
    constexpr int kAll = kPlanes * kLines * kColumns;
    Pair<T> taps[kPlanes][kLines][kColumns];
#pragma unroll
    for (int d = 0; d < kPlanes; ++d)
      LoadTaps<T, kRagged>(p, block.at, from + d * block.at[0].tap_step * p.filter_tap[0], channels.filter_second,
                           d < block.at[0].taps, taps[d]);
    WidenTaps<T>(p, reinterpret_cast<const Pair<T>(&)[kAll]>(taps), reinterpret_cast<float2(&)[kAll]>(w));
  }

  const int first_column = block.at[2].origin + p.at[2].pitch * kStride * column0;
  const int first_plane = block.at[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const int in_lines = p.at[1].axis.extent, step = p.at[2].pitch * p.in_pixel;
  // The first step only loads.
  int line = block.at[1].origin + p.at[1].pitch * kStride * line0 - (kStride - 1) * p.at[1].pitch;
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
  bool there = false;  // the line that was loaded last
  const auto load_line = [&](Pair<T>(&x)[kPlanes][kWidth]) {
    there = static_cast<unsigned>(line) < static_cast<unsigned>(in_lines);
#pragma unroll
    for (int d = 0; d < kPlanes; ++d)
      LoadStrip<T, true>(from + d * plane_step, step, first_column, p.at[2].pitch, there ? in_columns[d] : 0, 1, x[d]);
    from += line_step;
    Keep(from);
    line += p.at[1].pitch;
  };

  const float2 bias = BiasOf<T>(p, problem * p.channels + channels.out, channels.both);
  float2 sums[kSums][kStrip] = {};
  Pair<T> next[kPlanes][kWidth] = {};
  int out_column = static_cast<int>(p.out_line[2]) * p.at[2].period;
  char* to = out + image * p.out_image + (block.at[0].first + int64_t{p.at[0].period} * plane) * p.out_line[0] +
             (block.at[1].first + int64_t{p.at[1].period} * (line0 - kSums)) * p.out_line[1] +
             (block.at[2].first + int64_t{p.at[2].period} * column0) * p.out_line[2] +
             channels.out * (p.widened ? sizeof(float) : sizeof(T));
#pragma unroll 1
  for (int i = line0 - 1; i < line1 + kSums - 1; ++i) {
#pragma unroll
    for (int a = 0; a < kStride; ++a) {
      float2 x[kPlanes][kWidth];
#pragma unroll
      for (int d = 0; d < kPlanes; ++d) WidenStrip<T>(next[d], p.is_half, x[d]);
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
      ClampAll(p, sums[kSums - 1]);
      WithOut<T>(p, [&](auto type) {
        StoreStrip<typename decltype(type)::type, true>(to, out_column, count, sums[kSums - 1], true);
      });
    }
    to += p.out_line[1] * p.at[1].period;
  }
}

template <int kPlanes_, int kLines_, int kColumns_, int kStride_, bool kRagged_, int kStrip_, int kBlocks_>
struct Slide {
  static constexpr int kPlanes = kPlanes_, kLines = kLines_, kColumns = kColumns_, kStride = kStride_, kStrip = kStrip_,
                       kBlocks = kBlocks_;
  static constexpr bool kRagged = kRagged_;

  static bool Takes(const DataParams& q) {
    return IsClampAlone(q.epilogue) && q.at[0].MaxTaps() == kPlanes && q.at[1].MaxTaps() == kLines &&
           q.at[2].MaxTaps() == kColumns && q.at[1].stride == kStride && q.at[2].stride == kStride &&
           kRagged == (q.at[0].axis.step.divisor * q.at[1].axis.step.divisor * q.at[2].axis.step.divisor > 1);
  }

  // Lines of a segment. Short ones are work for more blocks, which also end together, but each begins with lines that
  // the one before has as well: a device runs kBlocks on each multiprocessor in turns, each as long as its lines are
  // many.
  static int Segment(DataParams& q, const Problem& p) {
    const int lines = q.at[1].MaxCount(), places = kMultiprocessors * kBlocks;
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

}  // namespace jaxdnn::conv::depthwise
