// What the kernels of rings hold on to while rows come and go.
#pragma once

#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {

// Keeps the compiler from making an address anew wherever it is used.
template <class P>
__device__ P* Kept(P* p) {
  asm("" : "+l"(p));
  return p;
}

// x - mean; the mean goes first: a constant row becomes exactly 0.
template <class T, class A>
__device__ A Centered(A x, const StoredStatistics<A>& stats) {
  return kWideMean<T> ? (x - stats.mean) - stats.rest : x - stats.mean;
}

}  // namespace jaxdnn::layer_norm
