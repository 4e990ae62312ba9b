// Log-sum-exp over the middle dimension of [outer, n, inner] with scores of targets, and the adjoint map.
#pragma once

#include "cuda/softmax/softmax.h"

namespace jaxdnn::loss {

// What a row's elements are weighted with, besides the exponentials. Which of these there are decides which sums:
//   l = log(sum(exp(x - m)));  the score of labels or of q, sum(q (x - m));  with q, sum(q);  with smoothing, the score
//   of the weights, or of 1.
struct Targets {
  softmax::Mask mask;               // entries that take no part in l; only without the others
  const int32_t* labels = nullptr;  // [outer, inner], a class or -1
  const void* q = nullptr;          // like x
  bool smooth = false;
  const void* weights = nullptr;  // [n] of the accumulator's type; null is 1

  int Sums() const { return 1 + (labels != nullptr) + 2 * (q != nullptr) + smooth; }
};

struct Problem {
  DType dtype;
  softmax::Shape shape;
  Targets targets;
};

int64_t WorkspaceBytes(DType dtype, softmax::Shape shape);

// m [outer, 1, inner] and sums [outer, k, inner], both of the accumulator's type, and m + l like m but of x's, or null.
cudaError_t LogPartition(const Problem& problem, const void* x, void* m, void* sums, void* total, void* workspace,
                         cudaStream_t stream);

// dx = exp(x - m - l) g[0] + q g[1] + ..., with g like sums, or of x's type where it is narrow. Rows whose g[0] is 0
// have no part of the first term.
cudaError_t LogPartitionBwd(const Problem& problem, const void* g, bool narrow, const void* x, const void* m,
                            const void* sums, void* dx, cudaStream_t stream);

}  // namespace jaxdnn::loss
