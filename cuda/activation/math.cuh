// Elementary functions, as exact as the stored type T deserves.
//
// float: a few units in the last place. The 16-bit types are computed in float too, where only the rounding to T
// shows: the approximations of the special-function unit, whose relative error here is below 2^-14 (where the
// tanh of bfloat16 enters, 2^-11). Their throughput is what counts, since a copy moves a 16-bit element every 28
// instruction slots. Nothing is flushed to zero: small results become subnormal as they should.
#pragma once

#include <type_traits>

#include "cuda/common/approximate.cuh"
#include "cuda/common/dtype.cuh"

namespace jaxdnn::activation {

// Maximum and minimum of which NaN wins over numbers.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float MinOrNan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ double MaxOrNan(double a, double b) { return a <= b ? b : a; }
__device__ __forceinline__ double MinOrNan(double a, double b) { return a >= b ? b : a; }

// x within [-bound, bound], or NaN.
template <class A>
__device__ __forceinline__ A Clamp(A x, A bound) {
  return MinOrNan(MaxOrNan(x, -bound), bound);
}

// c[0] + c[1] x + c[2] x^2 + ...
template <class A, int N>
__device__ __forceinline__ A Polynomial(A x, const A (&c)[N]) {
  A sum = c[N - 1];
#pragma unroll
  for (int i = N - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

// The 16-bit types.
template <class T>
struct Math {
  // Squared, half the exponent becomes a subnormal number where the unit itself would flush.
  static __device__ float Exp(float x) {
    const float root = ApproximateExp2(x * 0.72134752f);  // log2(e) / 2
    return root * root;
  }
  // Of x up to 0. With t = tanh(x / 2) it is 2 t / (1 - t).
  static __device__ float Expm1(float x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const float t = Tanh(0.5f * x);
      return t * Reciprocal(0.5f - 0.5f * t);
    } else {
      return x > -0.0625f ? x * Polynomial(x, {1.0f, 0.5f, 1 / 6.0f}) : Exp(x) - 1.0f;
    }
  }
  // Of x in [0, 1].
  static __device__ float Log1p(float x) {
    return x * Polynomial(x, {0.99994328f, -0.49697773f, 0.30630044f, -0.15742634f, 0.041346843f});
  }
  static __device__ float Tanh(float x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      float y;
      asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
      return y;
    } else {
      const float e = Exp(-2.0f * fabsf(x));
      return fabsf(x) < 0.0625f ? x - x * x * x * (1 / 3.0f) : copysignf((1.0f - e) * Reciprocal(1.0f + e), x);
    }
  }
  // Of a number whose reciprocal is not subnormal.
  static __device__ float Reciprocal(float x) { return ApproximateReciprocal(x); }
  static __device__ float Sqrt(float x) { return ApproximateSqrt(x); }
  // The standard normal density at x, and its integral up to -|x|.
  static __device__ void Normal(float x, float* density, float* tail) {
    const float root = ApproximateExp2(-0.36067376f * x * x);  // As Exp of -x^2 / 2.
    const float e = root * root;
    *density = 0.39894228f * e;
    *tail = e * Polynomial(ApproximateReciprocal(1.0f + 0.36f * fabsf(x)),
                           {1.8059766e-4f, 0.14026181f, 0.16804364f, 0.036539042f, 0.25294802f, -0.097970772f});
  }
};

template <>
struct Math<float> {
  static __device__ float Exp(float x) { return expf(x); }
  // 2^n (exp(r) - 1) + (2^n - 1) for x = n log(2) + r. Without branches, which would keep the elements of a vector from
  // running side by side.
  static __device__ float Expm1(float x) {
    x = MinOrNan(MaxOrNan(x, -86.0f), 89.0f);
    const float shifted = fmaf(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;  // n is in its last bits.
    const float r = fmaf(n, 1.90465421e-9f, fmaf(n, -0.693147182f, x));
    const float small = r * Polynomial(r, {1.0f, 1 / 2.0f, 1 / 6.0f, 1 / 24.0f, 1 / 120.0f, 1 / 720.0f, 1 / 5040.0f});
    const float half = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3F000000u);  // 2^n / 2, which is finite.
    return 2.0f * fmaf(half, small, half - 0.5f);
  }
  // Of x in [0, 1].
  static __device__ float Log1p(float x) {
    return x * Polynomial(x, {1.0f, -0.49999902f, 0.33329964f, -0.24954133f, 0.19675936f, -0.15305583f, 0.10603637f,
                              -0.056959353f, 0.019851360f, -0.0032440020f});
  }
  static __device__ float Tanh(float x) { return tanhf(x); }
  static __device__ float Reciprocal(float x) { return ApproximateReciprocal(x); }
  static __device__ float Sqrt(float x) { return ApproximateSqrt(x); }
  // exp(-x^2 / 2), with the rounding error of the square put back, times half the scaled complementary error function,
  // which is a polynomial in 1 / (1 + 0.3 |x|) as far out as the product is not zero.
  static __device__ void Normal(float x, float* density, float* tail) {
    const float a = fminf(fabsf(x), 20.0f);
    const float square = a * a, lost = fmaf(a, a, -square);
    const float e = fmaf(-0.5f * lost, 1.0f, 1.0f) * expf(-0.5f * square);
    *density = 0.39894228f * e;
    *tail = e * Polynomial(ApproximateReciprocal(1.0f + 0.3f * a),
                           {7.4061380e-6f, 0.11948362f, 0.12194950f, 0.094569039f, 0.14280530f, -0.076898309f,
                            0.22900360f, -0.16933278f, 0.038412645f});
  }
};

template <>
struct Math<double> {
  static __device__ double Exp(double x) { return exp(x); }
  static __device__ double Expm1(double x) { return expm1(x); }
  static __device__ double Log1p(double x) { return log1p(x); }
  static __device__ double Tanh(double x) { return tanh(x); }
  static __device__ double Reciprocal(double x) { return 1.0 / x; }
  static __device__ double Sqrt(double x) { return sqrt(x); }
  static __device__ void Normal(double x, double* density, double* tail) {
    *density = 0.39894228040143268 * exp(-0.5 * x * x);
    *tail = normcdf(-fabs(x));
  }
};

}  // namespace jaxdnn::activation
