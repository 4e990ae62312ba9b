// Batch normalization of [outer, n, c, s]: statistics over n and s, for each of the channels c of each outer index.
// s = 1 is channels-last, s > 1 channels-first. Statistics and parameters are [outer, c], in the accumulator's type.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/activation/kind.h"
#include "cuda/common/dtype.h"

namespace jaxdnn::batch_norm {

struct Problem {
  DType dtype;
  int64_t outer, n, c, s;
  // Booleans [outer, n, s], or null. Entries that are false take no part: results there are 0.
  const void* where;
};

// The affine map p = (x - mean) a + bias with a = scale / sqrt(var + epsilon).
struct Affine {
  const void *mean, *var, *scale, *bias;
  double epsilon;
};

// Partial results of the blocks. As many blocks share a channel as there is room for; one always has to fit.
struct Workspace {
  void* data;
  size_t bytes;
};

// mean and var, the biased variance, of x.
cudaError_t Statistics(const Problem& problem, const void* x, void* mean, void* var, Workspace workspace,
                       cudaStream_t stream);

// y = f(p), or f(p + residual) where a residual is not null.
cudaError_t Apply(const Problem& problem, const Affine& affine, activation::Activation f, const void* x,
                  const void* residual, void* y, cudaStream_t stream);

// Both: the statistics, which are affine.mean and affine.var, and y from them.
cudaError_t Train(const Problem& problem, const Affine& affine, activation::Activation f, const void* x,
                  const void* residual, void* y, void* mean, void* var, Workspace workspace, cudaStream_t stream);

// The gradients of y in a training step without a residual or a mask, not of float64 and not of nothing. With D the
// diagonal matrix f'(p) and sums over the m elements of each channel,
//   d_bias = sum D g,  d_scale = sum D g (x - mean) / sqrt(var + epsilon),
//   dx = a (D g - d_bias / m - d_scale / m (x - mean) / sqrt(var + epsilon)).
cudaError_t TrainGradient(const Problem& problem, const Affine& affine, activation::Activation f, const void* g,
                          const void* x, void* dx, void* d_scale, void* d_bias, Workspace workspace,
                          cudaStream_t stream);

// What enters the derivatives of Apply as a linear map, D being the diagonal matrix f'. It is computed from x and, if
// `source` is not null, from it: the output y of a relu, for other activations the residual.
//
// What the big tangent t meets.
enum class Slot {
  kNone,    // there is none
  kOuter,   // t + D (...)
  kInner,   // D (t + ...)
  kScaled,  // D (a t + ...)
};

// out = D (k0 + k1 (x - mean)) with t in its slot; k is [outer, 2, c].
cudaError_t Tangent(const Problem& problem, const Affine& affine, activation::Activation f, Slot slot, const void* t,
                    const void* k, const void* x, const void* source, void* out, cudaStream_t stream);

// The adjoint: sums[outer, 2, c] of D g and D g (x - mean), and in `out` D g (kInner) or a D g (kScaled).
cudaError_t Sums(const Problem& problem, const Affine& affine, activation::Activation f, Slot slot, const void* g,
                 const void* x, const void* source, void* sums, void* out, Workspace workspace, cudaStream_t stream);

// out = a D t, and moments[outer, 2, c]: the sums of t and of t (x - mean).
cudaError_t Moments(const Problem& problem, const Affine& affine, activation::Activation f, const void* t,
                    const void* x, void* out, void* moments, Workspace workspace, cudaStream_t stream);

// The adjoint: dx = a D g + c0 + c1 (x - mean), where k = (c0, c1) is [outer, 2, c].
cudaError_t Gradient(const Problem& problem, const Affine& affine, activation::Activation f, const void* g,
                     const void* k, const void* x, void* dx, cudaStream_t stream);

}  // namespace jaxdnn::batch_norm
