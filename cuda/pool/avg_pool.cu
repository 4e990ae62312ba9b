// Average pooling and its transpose.
//
// One thread computes N neighbouring channels of one element: forward it sums the cells of its window, backward what
// the windows over its input element pass to it. Bytes that must move: x + y; neighbours' reads overlap in L1.
#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {
namespace {

template <int N, class T>
__global__ void AvgPoolKernel(const __grid_constant__ Geometry g, const __grid_constant__ Walk walk,
                              const __grid_constant__ Pitch in, bool include_pad, const T* __restrict__ x,
                              T* __restrict__ y) {
  using A = Accumulator<T>;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position o = walk.At(flat);
  const Cells c0 = CellsOf(g, 0, o.at[0]), c1 = CellsOf(g, 1, o.at[1]), c2 = CellsOf(g, 2, o.at[2]);
  A sum[N] = {};
  const T* first =
      x + o.batch * in.batch + c0.first * in.dim[0] + c1.first * in.dim[1] + c2.first * in.dim[2] + o.channel;
  for (int k0 = 0; k0 < c0.count; ++k0) {
    for (int k1 = 0; k1 < c1.count; ++k1) {
      const T* p = first + k0 * g.dilation[0] * in.dim[0] + k1 * g.dilation[1] * in.dim[1];
      for (int k2 = 0; k2 < c2.count; ++k2, p += g.dilation[2] * in.dim[2]) {
        const Vec<T, N> v = Load<N>(p);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += static_cast<A>(v.v[j]);
      }
    }
  }
  const int count = include_pad ? g.window[0] * g.window[1] * g.window[2] : c0.count * c1.count * c2.count;
  const A divisor = static_cast<A>(max(count, 1));
  Vec<T, N> result;
#pragma unroll
  for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(sum[j] / divisor);
  Store(y + flat * N, result);
}

template <int N, class T>
__global__ void AvgPoolBwdKernel(const __grid_constant__ Geometry g, const __grid_constant__ Walk walk,
                                 const __grid_constant__ Pitch out, const __grid_constant__ Cover cover,
                                 bool include_pad, const T* __restrict__ dy, T* __restrict__ dx) {
  using A = Accumulator<T>;
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position i = walk.At(flat);
  const Windows w0 = cover.Of(g, 0, i.at[0]), w1 = cover.Of(g, 1, i.at[1]), w2 = cover.Of(g, 2, i.at[2]);
  A sum[N] = {};
  A share = A(1) / static_cast<A>(g.window[0] * g.window[1] * g.window[2]);
  const int64_t image = i.batch * out.batch + i.channel;
  for (int o0 = w0.first; o0 <= w0.last; o0 += w0.step) {
    for (int o1 = w1.first; o1 <= w1.last; o1 += w1.step) {
      const T* p = dy + image + o0 * out.dim[0] + o1 * out.dim[1] + w2.first * out.dim[2];
      const int count01 = include_pad ? 0 : CellsOf(g, 0, o0).count * CellsOf(g, 1, o1).count;
      for (int o2 = w2.first; o2 <= w2.last; o2 += w2.step, p += w2.step * out.dim[2]) {
        if (!include_pad) share = A(1) / static_cast<A>(count01 * CellsOf(g, 2, o2).count);
        const Vec<T, N> v = Load<N>(p);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += share * static_cast<A>(v.v[j]);
      }
    }
  }
  Vec<T, N> result;
#pragma unroll
  for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(sum[j]);
  Store(dx + flat * N, result);
}

}  // namespace

cudaError_t AvgPool(const Geometry& g, DType dtype, bool include_pad, const void* x, void* y, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    return VisitWidth<T>(
        g.channels,
        [&](auto width) {
          const Walk walk(g.batch, g.out, g.channels, width);
          return LaunchKernel(AvgPoolKernel<width(), T>, CeilDiv(walk.total, kThreads), kThreads, stream, g, walk,
                              Pitch(g.in, g.channels), include_pad, in, out);
        },
        in, out);
  });
}

cudaError_t AvgPoolBwd(const Geometry& g, DType dtype, bool include_pad, const void* dy, void* dx,
                       cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    return VisitWidth<T>(
        g.channels,
        [&](auto width) {
          const Walk walk(g.batch, g.in, g.channels, width);
          return LaunchKernel(AvgPoolBwdKernel<width(), T>, CeilDiv(walk.total, kThreads), kThreads, stream, g, walk,
                              Pitch(g.out, g.channels), Cover(g), include_pad, in, out);
        },
        in, out);
  });
}

}  // namespace jaxdnn::pool
