// A training step's statistics and result at once, where a block can see to its channels alone: no other block's, and
// no other kernel's launch, is waited for. It reads x twice, the second time from the cache.
#include "cuda/batch_norm/small.cuh"
#include "cuda/batch_norm/statistics.cuh"

namespace jaxdnn::batch_norm {
namespace {

constexpr int kTrainBlocks = 2;  // on a multiprocessor
// The most steps of a thread that cost less than to share them and launch what merges the results.
constexpr Most kMostTrained = {kTrainBlocks * kMultiprocessors, 12, 16};

template <class M, class G>
__global__ void __launch_bounds__(kThreads, kTrainBlocks)
    TrainKernel(Tiling t, Arrays<typename M::T> arrays, typename ApplyOp<M, G, false>::Arguments arguments,
                Statistic<Accumulator<typename M::T>> statistic) {
  using Op = ApplyOp<M, G, false>;
  using A = Accumulator<typename M::T>;
  __shared__ union {
    typename MapStream<M, Op>::Ring ring;
    Summary<A> scratch[kThreads * M::W];
  } shared;
  const M m(t, false);
  Summarize(t, m, arrays.in[0], shared.scratch,
            [&](int64_t channel, const Summary<A>& s) { statistic.Set(m.block.outer * t.c + channel, s); });
  __syncthreads();
  Map<M, Op>(t, m, arrays, arguments, shared.ring);
}

}  // namespace

cudaError_t Train(const Problem& p, const Affine& affine, activation::Activation f, const void* x, const void* residual,
                  void* y, void* mean, void* var, Workspace workspace, cudaStream_t stream) {
  cudaError_t e = cudaSuccess;
  if (!residual) {
    if (TrainSmall(p, affine, f, x, y, mean, var, stream, &e)) return e;
    if (TrainCluster(p, affine, f, x, y, mean, var, stream, &e)) return e;
    if (VisitAlone(p, f, IsVectorAligned(x, y), kMostTrained, [&](auto access, const Tiling& t) {
          using M = typename decltype(access)::type;
          using T = typename M::T;
          using G = PlainGroup<T>;
          const Arrays<T> arrays = {{static_cast<const T*>(x)}, static_cast<T*>(y)};
          const typename ApplyOp<M, G, false>::Arguments arguments = {
              affine, {f.kind == activation::Kind::kRelu}, Source::kNone};
          const Statistic<float> statistic = {static_cast<float*>(mean), static_cast<float*>(var)};
          e = LaunchKernel(TrainKernel<M, G>, t.Blocks(), kThreads, stream, t, arrays, arguments, statistic);
        }))
      return e;
  }
  e = Statistics(p, x, mean, var, workspace, stream);
  return e != cudaSuccess ? e : Apply(p, affine, f, x, residual, y, stream);
}

}  // namespace jaxdnn::batch_norm
