// Exponentials relative to a row's maximum, as precise as an element type needs.
#pragma once

#include <cmath>

#include "cuda/common/approximate.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::softmax {

template <class A>
constexpr A kInfinity = static_cast<A>(INFINITY);
// The least finite number: what -inf is subtracted from, since -inf - -inf is NaN.
template <class A>
constexpr A kLowest = sizeof(A) == 8 ? static_cast<A>(-1.7976931348623157e308) : static_cast<A>(-3.4028234663852886e38);

// exp(x): as exact as the library's, or for 16-bit elements in two instructions and 0 below 2^-126.
template <class T, class A>
__device__ A Exp(A x) {
  if constexpr (sizeof(T) == 2) {
    return ApproximateExp2(x * 1.4426950408889634f);
  } else {
    return exp(x);
  }
}

// a / b: for 16-bit elements without the steps that round it correctly. b is less than 2^126, or no number.
template <class T, class A>
__device__ A Divide(A a, A b) {
  if constexpr (sizeof(T) == 2)
    return __fdividef(a, b);
  else
    return a / b;
}

// What the exponentials of a row are relative to: exp(x - m).
template <class T, bool kFused = sizeof(T) == 2>
struct Origin {
  using A = Accumulator<T>;
  A m;

  __device__ explicit Origin(A m) : m(Max{}(m, kLowest<A>)) {}
  __device__ A Exp(A x) const { return exp(x - m); }
  // What takes exponentials relative to `from` to this origin, which is not below it.
  __device__ A From(const Origin& from) const { return exp(from.m - m); }
  // The logarithm of a sum of exponentials relative to m itself.
  __device__ A Log(A sum, A) const { return log(sum); }
};

// For 16-bit elements 2^(x scale - offset) with scale = log2(e) and offset = m scale: two instructions. The product is
// not rounded before the offset goes off it, so this is as good as to subtract m first; that the offset is a rounded
// m scale makes no difference, since every exponential is relative to the same. Beyond 2^126 numbers differ by so much
// that exponentials are 0 or 1 at any scale, and 1/2 does not overflow.
template <class T>
struct Origin<T, true> {
  float scale, offset;

  __device__ explicit Origin(float m) {
    m = fmaxf(m, kLowest<float>);
    scale = fabsf(m) < 8.5e37f ? 1.4426950408889634f : 0.5f;
    offset = m * scale;
  }
  __device__ float Exp(float x) const { return ApproximateExp2(fmaf(x, scale, -offset)); }
  __device__ float From(const Origin& from) const {
    return from.scale == scale ? ApproximateExp2(from.offset - offset) : 0.0f;
  }
  __device__ float Log(float sum, float m) const {
    return logf(sum) - fmaf(fmaxf(m, kLowest<float>), scale, -offset) * 0.6931471805599453f;
  }
};

}  // namespace jaxdnn::softmax
