// The two stages of dscale and dbias: each of a problem's `parts` blocks leaves
// a row, and a second kernel adds them up.
#pragma once

#include <utility>

#include "cuda/common/column_sum.cuh"
#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

// Calls first(b), with dscale and dbias pointing to [problems, parts, n], and
// sums what that leaves. One part needs no second stage.
template <class A, class F>
cudaError_t WithPartialRows(const Backward& b, const Shape& shape, int64_t parts, void* workspace, cudaStream_t stream,
                            F&& first) {
  if (parts == 1) return first(b);
  Backward partial = b;
  A* const scratch = static_cast<A*>(workspace);
  if (b.dscale != nullptr) partial.dscale = scratch;
  if (b.dbias != nullptr) partial.dbias = scratch + shape.problems * parts * shape.n;
  cudaError_t e = first(partial);
  for (const auto& [from, to] : {std::pair{partial.dscale, b.dscale}, std::pair{partial.dbias, b.dbias}})
    if (e == cudaSuccess && to != nullptr)
      e = SumRows(static_cast<const A*>(from), shape.problems, parts, shape.n, static_cast<A*>(to), stream);
  return e;
}

}  // namespace jaxdnn::layer_norm
