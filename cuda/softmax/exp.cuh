// Exponentials as precise as an element type needs, maxima, and sums of
// exponentials that can be merged.
#pragma once

#include <cmath>

#include "cuda/common/dtype.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::softmax {

// exp(x) for results that are rounded to T. For 16-bit types one instruction,
// with a relative error of 2^-22 + |x| 2^-23 and without results below 2^-126;
// for others as exact as the library's.
template <class T, class A>
__device__ A Exp(A x) {
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
  } else {
    return exp(x);
  }
}

template <class A>
constexpr A kInfinity = static_cast<A>(INFINITY);
// The least finite number: what -inf is subtracted from, since -inf - -inf is
// NaN.
template <class A>
constexpr A kLowest = sizeof(A) == 8 ? static_cast<A>(-1.7976931348623157e308) : static_cast<A>(-3.4028234663852886e38);

template <class A>
__device__ A Origin(A m) {
  return Max{}(m, kLowest<A>);
}

// m[i % W] = max(m[i % W], v[i]); NaN is ignored. 16-bit rows go two at a time.
template <int W, int L, class A, class T>
__device__ void Maximum(A (&m)[W], const Vec<T, L>& v) {
  if constexpr (W == 1 && sizeof(T) == 2 && L % 2 == 0) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair* pairs = reinterpret_cast<const Pair*>(v.v);
    Pair largest = pairs[0];
#pragma unroll
    for (int i = 1; i < L / 2; ++i) largest = __hmax2(largest, pairs[i]);
    m[0] = Max{}(m[0], Max{}(static_cast<A>(largest.x), static_cast<A>(largest.y)));
  } else {
#pragma unroll
    for (int i = 0; i < L; ++i) m[i % W] = Max{}(m[i % W], static_cast<A>(v.v[i]));
  }
}

// s[i % W] += exp(v[i] - m[i % W]).
template <int W, int L, class A, class T>
__device__ void AddExps(A (&s)[W], const A (&m)[W], const Vec<T, L>& v) {
#pragma unroll
  for (int i = 0; i < L; ++i) s[i % W] += Exp<T>(static_cast<A>(v.v[i]) - m[i % W]);
}

}  // namespace jaxdnn::softmax
