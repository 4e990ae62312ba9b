// Training steps in which each block sees to its channels alone.
#pragma once

#include "cuda/batch_norm/elements.cuh"

namespace jaxdnn::batch_norm {

// A tile of columns: as narrow as whole sectors allow, for the most blocks.
constexpr int kNarrow = 4;

struct Most {
  int64_t blocks;
  int run_steps, column_steps;  // of a thread
};

// Calls f(AccessTag, Tiling) with one block for each channel; or returns false where that would be more than `most`, or
// there is no such kernel: for the plain activations alone, without a mask, and not of float64.
template <class F>
bool VisitAlone(const Problem& p, activation::Activation a, bool aligned, const Most& most, F&& f) {
  bool called = false;
  const bool plain = a.kind == activation::Kind::kIdentity || a.kind == activation::Kind::kRelu;
  if (!plain || !aligned || p.where || p.dtype == DType::kF64 || p.outer * p.n * p.c * p.s == 0) return false;
  VisitSingleDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kV = kVecLength<T>;
    if (p.outer > 1 && p.n * p.c * p.s % kV != 0) return cudaSuccess;
    const auto visit = [&](auto access, const Tiling& t, int steps) {
      called = t.Blocks() <= most.blocks && t.steps <= steps;
      if (called) f(access, t);
    };
    if (p.s > 1)
      visit(AccessTag<Runs<T, kV>>{}, ByRuns(p, kV, 1, 1), most.run_steps);
    else if (p.c % kV == 0)
      visit(AccessTag<Columns<T, kV>>{}, ByColumns(p, kV, 1, 1, kNarrow), most.column_steps);
    return cudaSuccess;
  });
  return called;
}

// Train where a thread has a vector or two; returns false, and does nothing, elsewhere.
bool TrainSmall(const Problem& p, const Affine& affine, activation::Activation f, const void* x, void* y, void* mean,
                void* var, cudaStream_t stream, cudaError_t* e);

// The same where a cluster holds what its blocks share, of channels-last problems. On a GPU without clusters, nowhere.
bool TrainCluster(const Problem& p, const Affine& affine, activation::Activation f, const void* x, void* y, void* mean,
                  void* var, cudaStream_t stream, cudaError_t* e);

// What the gradients of a training step are made of (see TrainGradient), `share` being 1 / m.
template <class A>
struct Coefficients {
  A *d_scale, *d_bias;

  // From the sums of D g and D g (x - mean); what dx has beside a D g.
  __device__ Pair<A> Set(int64_t c, const Pair<A>& sums, A scale, A root, A share, bool writes) const {
    if (writes) d_bias[c] = sums.first, d_scale[c] = sums.second * root;
    const A a = -scale * root * share;
    return {a * sums.first, a * root * root * sums.second};
  }
};

bool GradientCluster(const Problem& p, const Affine& affine, activation::Activation f, const void* g, const void* x,
                     void* dx, const Coefficients<float>& coefficients, cudaStream_t stream, cudaError_t* e);

}  // namespace jaxdnn::batch_norm
