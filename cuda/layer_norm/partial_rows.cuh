// The two stages of dscale and dbias: each of a problem's `parts` blocks leaves a row, and a second kernel adds them
// up.
#pragma once

#include "cuda/common/column_sum.cuh"
#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

// Calls first(b), with dscale and dbias pointing to [problems, parts, n], and sums what that leaves. One part needs no
// second stage.
template <class A, class F>
cudaError_t WithPartialRows(const Backward& b, const Shape& shape, int64_t parts, void* workspace, cudaStream_t stream,
                            F&& first) {
  if (parts == 1 || (b.dscale == nullptr && b.dbias == nullptr)) return first(b);
  // [dscale or dbias, problem, part, n], or one of the two alone.
  A* const partial = static_cast<A*>(workspace);
  Backward to_partial = b;
  if (b.dscale != nullptr) to_partial.dscale = partial;
  if (b.dbias != nullptr) to_partial.dbias = b.dscale == nullptr ? partial : partial + shape.problems * parts * shape.n;
  if (const cudaError_t e = first(to_partial); e != cudaSuccess) return e;
  A *const dscale = static_cast<A*>(b.dscale), *const dbias = static_cast<A*>(b.dbias);
  if (dscale == nullptr) return SumRows(partial, shape.problems, parts, shape.n, dbias, stream);
  return SumRows(partial, shape.problems, parts, shape.n, dscale, dbias, stream);
}

}  // namespace jaxdnn::layer_norm
