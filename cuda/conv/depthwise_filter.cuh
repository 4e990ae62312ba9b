// What the kernels of depthwise convolution's filter gradient share: their parameters, and how the sums of a block come
// together.
#pragma once

#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/edges.cuh"

namespace jaxdnn::conv::depthwise {

struct FilterParams {
  PhasedAxis at[kRank];
  Slabs slabs;
  FastDiv strips, segments, rows, planes, images, phases[kRank];  // of units of work; images per problem
  int segment;                                                    // steps in a segment
  int units, splits, tasks;
  int line_tasks, column_tasks;
  FastDiv line_residues, column_residues;  // taps apart by the stride, where that is not compiled for
  int channels;
  FastDiv features;
  // Strides in bytes.
  int x_pixel, y_pixel;
  int64_t x_line[kRank], x_image, y_line[kRank], y_image;
  int64_t x_step[kRank], y_step[kRank];  // between neighbours of a phase
  int64_t size;                          // elements of the filter
  bool widened, is_half;
  Edges edges[kRank];  // of x
};

inline FilterParams MakeParams(const Problem& p) {
  FilterParams q = {};
  const int64_t k = p.groups * p.features, size = p.in == DType::kF32 ? 4 : 2;
  q.channels = int(k);
  q.features = FastDiv(p.features);
  q.slabs = Slabs(k);
  q.images = FastDiv(p.images);
  q.x_pixel = int(p.groups * size);
  q.y_pixel = int(k * size);
  int64_t x_stride = q.x_pixel, y_stride = q.y_pixel;
  for (int d = kRank - 1; d >= 0; --d) {
    q.at[d] = PhasedAxis(InputAxis(p, d), p.y[d], p.window[d]);
    q.phases[d] = FastDiv(q.at[d].phases);
    q.edges[d] = OperandEdges(p, d);
    q.x_line[d] = x_stride;
    q.y_line[d] = y_stride;
    q.x_step[d] = x_stride * q.at[d].pitch;
    q.y_step[d] = y_stride * q.at[d].period;
    x_stride *= p.x[d];
    y_stride *= p.y[d];
  }
  q.x_image = x_stride;
  q.y_image = y_stride;
  q.size = p.FilterSize();
  q.widened = p.out != p.in;
  q.is_half = p.in == DType::kF16;
  return q;
}

// Writes the sum of a channel and the next, if there is one, at a tap, to a row of partial sums or to the result.
template <class T>
__device__ void StoreSum(const FilterParams& p, float2 sum, int split, int64_t tap, int channel, float* partial,
                         char* out) {
  const int64_t to = tap * p.channels + channel;
  const bool second = channel + 1 < p.channels;
  if (partial || p.widened || sizeof(T) == 4) {
    float* floats = partial ? partial + split * p.size + to : reinterpret_cast<float*>(out) + to;
    floats[0] = sum.x;
    if (second) floats[1] = sum.y;
  } else {
    WithKind<T>(p.is_half, [&](auto type) {
      using Out = typename decltype(type)::type;
      Out* const result = reinterpret_cast<Out*>(out) + to;
      result[0] = static_cast<Out>(sum.x);
      if (second) result[1] = static_cast<Out>(sum.y);
    });
  }
}

// Adds the terms of tap [d, r, s] of some lines and columns of y in a plane, of a convolution without stride in these.
// Padding beside a line of x is zero.
template <class T>
__device__ void AddTerms(const FilterParams& p, const char* x, const char* y, int image, int plane, int line, int lines,
                         int column0, int columns, int d, int r, int s, int channel, float& sum) {
  const int x_plane = p.at[0].axis.Origin(plane) + d;
  if (static_cast<unsigned>(x_plane) >= static_cast<unsigned>(p.at[0].axis.extent)) return;
  const char* const x_at = x + image * p.x_image + x_plane * p.x_line[0] + channel * sizeof(T);
  const char* const y_at = y + image * p.y_image + plane * p.y_line[0] + channel * sizeof(T);
#pragma unroll 1
  for (; line < min(lines, p.at[1].out); ++line) {
    const int x_line = p.at[1].axis.offset + line + r;
    if (static_cast<unsigned>(x_line) >= static_cast<unsigned>(p.at[1].axis.extent)) continue;
#pragma unroll 1
    for (int column = column0; column < min(columns, p.at[2].out); ++column) {
      const int x_column = p.at[2].axis.offset + column + s;
      const bool inside = static_cast<unsigned>(x_column) < static_cast<unsigned>(p.at[2].axis.extent);
      const char* const from_x = x_at + x_line * p.x_line[1] + int64_t{x_column} * p.x_pixel;
      const char* const from_y = y_at + line * p.y_line[1] + int64_t{column} * p.y_pixel;
      sum = fmaf(inside ? static_cast<float>(*reinterpret_cast<const T*>(from_x)) : 0,
                 static_cast<float>(*reinterpret_cast<const T*>(from_y)), sum);
    }
  }
}

// Writes the sums of a tap, of which add_all(channel, sum) adds those that are not finite once more: a zero that stands
// for no pixel does not make up for an infinity or NaN.
template <class T, class AddAll>
__device__ __forceinline__ void StoreFinite(const FilterParams& p, float2 two, const AddAll& add_all, int split,
                                            int64_t tap, int channel, float* partial, char* out) {
#pragma unroll 1
  for (int c = 0; c < 2; ++c) {
    if (!isfinite(two.x)) {
      two.x = 0;
      add_all(channel + c, two.x);
    }
    two = {two.y, two.x};
  }
  StoreSum<T>(p, two, split, tap, channel, partial, out);
}

// Adds up the sums of a block's threads that have the same channels, and writes them: rows of partial sums, or the
// result. Those in [r][s] are of tap(r, s) of the window, and of none if that is negative.
template <class T, int kLines, int kColumns, class Tap>
__device__ void WriteSums(const FilterParams& p, float2 (&sums)[kLines][kColumns], int slab, int split, const Tap& tap,
                          float* partial, char* out) {
  __shared__ float2 scratch[kColumns][kDepthwiseThreads];
#pragma unroll 1
  for (int r = 0; r < kLines; ++r) {
#pragma unroll
    for (int s = 0; s < kColumns; ++s) {
      scratch[s][threadIdx.x] = sums[0][s];
#pragma unroll
      for (int i = 0; i + 1 < kLines; ++i) sums[i][s] = sums[i + 1][s];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kColumns * p.slabs.width; i += kDepthwiseThreads) {
      int lane;
      const int s = p.slabs.thread.Div(i, &lane), channel = 2 * (slab * p.slabs.width + lane);
      const int64_t of = tap(r, s);
      if (channel >= p.channels || of < 0) continue;
      float2 sum = {0, 0};
#pragma unroll 4
      for (int u = 0; u < p.slabs.units; ++u) {
        const float2 term = scratch[s][u * p.slabs.width + lane];
        sum.x += term.x;
        sum.y += term.y;
      }
      StoreSum<T>(p, sum, split, of, channel, partial, out);
    }
    __syncthreads();
  }
}

}  // namespace jaxdnn::conv::depthwise
