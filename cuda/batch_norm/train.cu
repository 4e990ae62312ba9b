// A training step's statistics and result at once, where a block can see to its channels alone: no other block's, and
// no other kernel's launch, is waited for. It reads x twice, the second time from the cache.
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/statistics.cuh"

namespace jaxdnn::batch_norm {
namespace {

constexpr int kBlocks = 2;  // on a multiprocessor
// The most steps of a thread that cost less than to share them and launch what merges the results.
template <class M>
constexpr int64_t kMostSteps = M::kRuns ? 12 : 16;
// A tile of columns: as narrow as whole sectors allow, for the most blocks.
constexpr int kNarrow = 4;

template <class M, class G>
__global__ void __launch_bounds__(kThreads, kBlocks)
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

// Calls f(AccessTag, Tiling) with one block for each channel, or returns false where that would take too long or more
// than one wave of blocks.
template <class T, class F>
bool VisitAlone(const Problem& p, F&& f) {
  constexpr int kV = kVecLength<T>;
  if (p.outer > 1 && p.n * p.c * p.s % kV != 0) return false;
  const auto visit = [&](auto access, const Tiling& t) {
    if (t.Blocks() > kBlocks * kMultiprocessors || t.steps > kMostSteps<typename decltype(access)::type>) return false;
    f(access, t);
    return true;
  };
  if (p.s > 1) return visit(AccessTag<Runs<T, kV>>{}, ByRuns(p, kV, 1, 1));
  if (p.c % kV != 0) return false;
  return visit(AccessTag<Columns<T, kV>>{}, ByColumns(p, kV, 1, 1, kNarrow));
}

}  // namespace

cudaError_t Train(const Problem& p, const Affine& affine, activation::Activation f, const void* x, const void* residual,
                  void* y, void* mean, void* var, Workspace workspace, cudaStream_t stream) {
  const bool plain = f.kind == activation::Kind::kIdentity || f.kind == activation::Kind::kRelu;
  bool alone = false;
  cudaError_t e = cudaSuccess;
  if (plain && !residual && !p.where && p.dtype != DType::kF64 && p.outer * p.n * p.c * p.s > 0 &&
      IsVectorAligned(x, y))
    e = VisitDType(p.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using A = Accumulator<T>;
      if constexpr (sizeof(T) < 8)
        alone = VisitAlone<T>(p, [&](auto access, const Tiling& t) {
          using M = typename decltype(access)::type;
          using G = PlainGroup<T>;
          const Arrays<T> arrays = {{static_cast<const T*>(x)}, static_cast<T*>(y)};
          const typename ApplyOp<M, G, false>::Arguments arguments = {
              affine, {f.kind == activation::Kind::kRelu}, Source::kNone};
          const Statistic<A> statistic = {static_cast<A*>(mean), static_cast<A*>(var)};
          e = LaunchKernel(TrainKernel<M, G>, t.Blocks(), kThreads, stream, t, arrays, arguments, statistic);
        });
      return e;
    });
  if (alone || e != cudaSuccess) return e;
  e = Statistics(p, x, mean, var, workspace, stream);
  return e != cudaSuccess ? e : Apply(p, affine, f, x, residual, y, stream);
}

}  // namespace jaxdnn::batch_norm
