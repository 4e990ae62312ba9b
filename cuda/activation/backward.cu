// dx = g f', the derivative from the mask, the output or the input.
//
// Bound by memory: g is read and dx written, besides a residual that is one bit an element or as large as g.
#include "cuda/activation/activation.h"
#include "cuda/activation/map.cuh"
#include "cuda/activation/visit.cuh"

namespace jaxdnn::activation {
namespace {

template <class T, class F>
struct BackwardOp {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  F f;
  const T* g;
  const T* residual;
  T* dx;

  __device__ void Vector(int64_t i) const {
    const auto along = reinterpret_cast<const Vec<T, N>*>(g)[i], r = reinterpret_cast<const Vec<T, N>*>(residual)[i];
    Vec<T, N> out;
    WithSmooth(f, [&](auto functor) {
#pragma unroll
      for (int j = 0; j < N; ++j) out.v[j] = Element(functor, along.v[j], r.v[j]);
    });
    reinterpret_cast<Vec<T, N>*>(dx)[i] = out;
  }
  __device__ void Tail(int64_t i, bool valid) const {
    if (valid) WithSmooth(f, [&](auto functor) { dx[i] = Element(functor, g[i], residual[i]); });
  }

 private:
  template <class Functor>
  static __device__ T Element(const Functor& functor, T g, T residual) {
    return static_cast<T>(static_cast<A>(g) * functor.Derivative(static_cast<A>(residual)));
  }
};

template <class T>
struct MaskBackwardOp {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  A inside, outside;
  const T* g;
  const uint8_t* mask;
  T* dx;
  BitRows rows;

  __device__ void Vector(int64_t i) const {
    const auto along = reinterpret_cast<const Vec<T, N>*>(g)[i];
    const unsigned bits = LoadBits<N>(mask, i);
    Vec<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = Element(along.v[j], bits >> j & 1);
    reinterpret_cast<Vec<T, N>*>(dx)[i] = out;
  }
  __device__ void Tail(int64_t t, bool valid) const {
    const int64_t i = valid ? rows.Element(t) : -1;
    if (i >= 0) dx[i] = Element(g[i], mask[t / 8] >> (t % 8) & 1);
  }

 private:
  __device__ T Element(T g, bool is_inside) const {
    return static_cast<T>(ApplySlope(static_cast<A>(g), is_inside ? inside : outside));
  }
};

}  // namespace

cudaError_t Backward(const Activation& activation, DType dtype, const void* g, const void* residual, void* dx,
                     int64_t rows, int64_t n, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = kVecLength<T>;
    const auto gradient = static_cast<const T*>(g);
    const auto out = static_cast<T*>(dx);
    if (const auto slopes = SlopesOf(activation)) {
      using A = Accumulator<T>;
      const BitRows bits(rows, n);
      const int64_t vectors = IsVectorAligned(g, dx) ? bits.Vectors<N>() : 0;
      const MaskBackwardOp<T> op{static_cast<A>(slopes->inside),
                                 static_cast<A>(slopes->outside),
                                 gradient,
                                 static_cast<const uint8_t*>(residual),
                                 out,
                                 bits};
      return Map(op, vectors, vectors * N, bits.Bits(), stream);
    }
    const int64_t size = rows * n;
    const int64_t vectors = IsVectorAligned(g, residual, dx) ? size / N : 0;
    return VisitSmooth<T>(activation, [&](auto f) {
      const BackwardOp<T, decltype(f)> op{f, gradient, static_cast<const T*>(residual), out};
      return Map(op, vectors, vectors * N, size, stream);
    });
  });
}

}  // namespace jaxdnn::activation
