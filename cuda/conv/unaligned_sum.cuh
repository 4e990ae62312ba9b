// The filter gradient of unaligned channels: what slices of the rows leave behind, and their sum.
#pragma once

#include "cuda/conv/unaligned.cuh"

namespace jaxdnn::conv {

struct UnalignedSlices : UnalignedParams {
  int splits, rows;  // slices; rows in all
  int64_t result_size;
};

inline UnalignedSlices SliceParams(const Problem& p, const UnalignedRows& rows) {
  UnalignedSlices q = {};
  static_cast<UnalignedParams&>(q) = RowParams(p, rows);
  q.channels = int(p.channels);
  q.features = int(p.features);
  q.plane_groups = int(p.window[1]);
  q.rows = int(rows.Rows(p.images * p.y[0]));
  q.result_size = p.FilterSize();
  return q;
}

// out[i] = partial[0][i] + partial[1][i] + ..., a warp for 32 elements and some of the slices.
constexpr int kSumWarps = 8;
template <class In, class Out>
__global__ void __launch_bounds__(32 * kSumWarps)
    UnalignedSumKernel(const __grid_constant__ UnalignedSlices q, const In* x, const In* y, const float* partial,
                       Out* out) {
  __shared__ float sums[kSumWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t i = blockIdx.x * int64_t{32} + lane;
  float sum = 0;
#pragma unroll 4
  for (int s = warp; s < q.splits; s += kSumWarps) sum += i < q.result_size ? partial[s * q.result_size + i] : 0;
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || i >= q.result_size) return;
#pragma unroll
  for (int w = 1; w < kSumWarps; ++w) sum += sums[w][lane];
  if (!isfinite(sum)) {
    const int feature = static_cast<int>(i % q.features), row = static_cast<int>(i / q.features);
    const int channel = row % q.channels, tap = row / q.channels, line = tap / q.window_width;
    const int plane_tap = line / q.plane_groups, first = (line - plane_tap * q.plane_groups) * q.line_step;
    const int further = first + (tap - line * q.window_width) * q.dilation[2];
    sum = 0;
    for (int r = 0; r < q.rows; ++r) {
      const int pixel = ResultPixel(q, r);
      if (pixel < 0) continue;
      const int from = OperandPixel(q, r + further, plane_tap);
      const float value = from < 0 ? 0.0f : static_cast<float>(x[int64_t{from} * q.channels + channel]);
      sum += value * static_cast<float>(y[int64_t{pixel} * q.features + feature]);
    }
  }
  out[i] = static_cast<Out>(sum);
}

template <class In>
cudaError_t SumUnaligned(const Problem& p, const UnalignedSlices& q, const void* x, const void* y, const float* partial,
                         void* out, cudaStream_t stream) {
  const auto sum = [&](auto* to) {
    return LaunchKernel(UnalignedSumKernel<In, std::remove_pointer_t<decltype(to)>>, CeilDiv(q.result_size, 32),
                        32 * kSumWarps, stream, q, static_cast<const In*>(x), static_cast<const In*>(y), partial, to);
  };
  if constexpr (sizeof(In) == 2)
    if (p.out != p.in) return sum(static_cast<float*>(out));
  return sum(static_cast<In*>(out));
}

}  // namespace jaxdnn::conv
