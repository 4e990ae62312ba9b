// Mean and biased variance of each channel: of a block's elements, then merged over the blocks that share a channel, in
// a fixed order.
//
// Bound by memory: one read.
#include "cuda/batch_norm/statistics.cuh"

namespace jaxdnn::batch_norm {
namespace {

constexpr int kPartialBlocks = 2;  // on a multiprocessor
constexpr int kFinalRows = 2;      // of partial results, which a thread loads at once

// One block for each channel leaves nothing to merge, and `partial` is null.
template <class M>
__global__ void __launch_bounds__(kThreads, kPartialBlocks)
    PartialKernel(Tiling t, const typename M::T* x, Summary<Accumulator<typename M::T>>* partial,
                  Statistic<Accumulator<typename M::T>> out) {
  using A = Accumulator<typename M::T>;
  __shared__ Summary<A> scratch[kThreads * M::W];
  const M m(t, false);
  Summarize(t, m, x, scratch, [&](int64_t channel, const Summary<A>& value) {
    if (partial)
      partial[(m.block.outer * t.slabs + m.block.slab) * t.copies * t.c + channel] = value;
    else
      out.Set(m.block.outer * t.c + channel, value);
  });
}

// Merges partial[outer, rows, c]. Threads that agree modulo 1 << group.stride share a channel.
template <class A>
__global__ void __launch_bounds__(kThreads) FinalKernel(const Summary<A>* __restrict__ partial, int64_t rows, int64_t c,
                                                        int64_t tiles, Group group, Statistic<A> out) {
  __shared__ Summary<A> scratch[kThreads];
  const int64_t outer = blockIdx.x / tiles;
  const int width = 1 << group.stride, column = threadIdx.x & (width - 1), step = kThreads >> group.stride;
  const int64_t channel = (blockIdx.x - outer * tiles) * width + column;
  partial += outer * rows * c + min(channel, c - 1);
  Summary<A> m[1] = {};
  for (int64_t r = threadIdx.x >> group.stride; r < rows; r += kFinalRows * step) {
    Summary<A> loaded[kFinalRows];
#pragma unroll
    for (int i = 0; i < kFinalRows; ++i) {
      loaded[i] = partial[min(r + i * step, rows - 1) * c];
      if (r + i * step >= rows) loaded[i].count = A(0);
    }
#pragma unroll
    for (int i = 0; i < kFinalRows; ++i) m[0] = Merge{}(m[0], loaded[i]);
  }
  Reduce(m, Merge{}, group, scratch);
  if (threadIdx.x != column || channel >= c) return;
  out.Set(outer * c + channel, m[0]);
}

template <class A>
cudaError_t Finish(const Tiling& t, const Summary<A>* partial, const Statistic<A>& out, cudaStream_t stream) {
  const int64_t rows = t.Partials();
  // As many channels side by side as leave a thread few rows, which it reads at once.
  Group group = {kSpan, kSpan};
  while (group.stride > 0 && rows > int64_t{kFinalRows} * (kThreads >> group.stride)) --group.stride;
  const int64_t tiles = CeilDiv(t.c, 1 << group.stride);
  return LaunchKernel(FinalKernel<A>, t.outer * tiles, kThreads, stream, partial, rows, t.c, tiles, group, out);
}

}  // namespace

cudaError_t Statistics(const Problem& p, const void* x, void* mean, void* var, Workspace workspace,
                       cudaStream_t stream) {
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const size_t channels = static_cast<size_t>(p.outer * p.c);
    if (channels == 0) return cudaSuccess;
    if (p.n * p.s == 0) {
      const cudaError_t e = cudaMemsetAsync(mean, 0, channels * sizeof(A), stream);
      return e != cudaSuccess ? e : cudaMemsetAsync(var, 0, channels * sizeof(A), stream);
    }
    const int64_t limit = static_cast<int64_t>(workspace.bytes / (channels * sizeof(Summary<A>)));
    if (limit < 1) return cudaErrorInvalidValue;
    const Statistic<A> out = {static_cast<A*>(mean), static_cast<A*>(var)};
    return VisitTiling<T, sizeof(T) < 8>(
        p, IsVectorAligned(x), limit, kPartialBlocks * kMultiprocessors, [&](auto access, const Tiling& t) {
          using M = typename decltype(access)::type;
          auto* partial = t.Partials() == 1 ? nullptr : static_cast<Summary<A>*>(workspace.data);
          const cudaError_t e =
              LaunchKernel(PartialKernel<M>, t.Blocks(), kThreads, stream, t, static_cast<const T*>(x), partial, out);
          return e != cudaSuccess || !partial ? e : Finish(t, partial, out, stream);
        });
  });
}

}  // namespace jaxdnn::batch_norm
