// Exponentials relative to a row's maximum, as precise as an element type needs.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/common/dtype.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::softmax {

template <class A>
constexpr A kInfinity = static_cast<A>(INFINITY);
// The least finite number: what -inf is subtracted from, since -inf - -inf is NaN.
template <class A>
constexpr A kLowest = sizeof(A) == 8 ? static_cast<A>(-1.7976931348623157e308) : static_cast<A>(-3.4028234663852886e38);

// 2^x. For 16-bit elements results below 2^-126 are 0, which saves the instructions that scale them.
template <class T>
__device__ float Exp2(float x) {
  float y;
  if constexpr (sizeof(T) == 2)
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  else
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(x).
template <class T>
__device__ float Exp(float x) {
  return Exp2<T>(x * 1.4426950408889634f);
}
template <class T>
__device__ double Exp(double x) {
  return exp(x);
}

// What exponentials of a row are relative to, exp(x - m), in two instructions: 2^(x scale - offset) with scale =
// log2(e) and offset = m scale. The product is not rounded before the offset goes off it, so this is as good as to
// subtract m first; that the offset is a rounded m scale makes no difference, since every exponential is relative to
// the same. Beyond 2^126 numbers differ by so much that exponentials are 0 or 1 at any scale, and 1/2 does not
// overflow.
template <class T, class A = Accumulator<T>>
struct Origin {
  float scale, offset;

  __device__ explicit Origin(float m) {
    m = fmaxf(m, kLowest<float>);
    scale = fabsf(m) < 8.5e37f ? 1.4426950408889634f : 0.5f;
    offset = m * scale;
  }
  __device__ float Exp(float x) const { return Exp2<T>(fmaf(x, scale, -offset)); }
  // What takes exponentials relative to `from` to this origin, which is not below it.
  __device__ float From(const Origin& from) const { return from.scale == scale ? Exp2<T>(from.offset - offset) : 0.0f; }
  // The logarithm of a sum of exponentials relative to m itself.
  __device__ float Log(float sum, float m) const {
    return logf(sum) - fmaf(fmaxf(m, kLowest<float>), scale, -offset) * 0.6931471805599453f;
  }
};

template <class T>
struct Origin<T, double> {
  double m;

  __device__ explicit Origin(double m) : m(fmax(m, kLowest<double>)) {}
  __device__ double Exp(double x) const { return exp(x - m); }
  __device__ double From(const Origin& from) const { return exp(from.m - m); }
  __device__ double Log(double sum, double) const { return log(sum); }
};

}  // namespace jaxdnn::softmax
