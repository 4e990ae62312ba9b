// The activations that batch normalization fuses, in two groups, so that a kernel is built twice at most and not ten
// times.
#pragma once

#include <cmath>

#include "cuda/activation/functions.cuh"

namespace jaxdnn::batch_norm {

// The identity and relu, which differ in the least value: an instruction for each element, two in the derivative.
template <class T>
struct PlainGroup {
  using A = Accumulator<T>;
  static constexpr bool kSwitch = false;
  bool relu;

  template <class F>
  __device__ void Visit(F&& f) const {
    f(*this);
  }
  __device__ A Forward(A p) const { return activation::MaxOrNan(p, relu ? A(0) : -A(INFINITY)); }
  // g f'(p)
  __device__ A Slope(A g, A p) const { return !relu || p > A(0) ? g : A(0); }
};

template <class F>
struct Member {
  using A = typename F::A;
  F f;

  __device__ A Forward(A p) const { return f.Forward(p); }
  __device__ A Slope(A g, A p) const { return activation::ApplySlope(g, f.Derivative(p)); }
};

// Any. A kernel branches among them once a vector.
template <class T>
struct SwitchGroup {
  using A = Accumulator<T>;
  static constexpr bool kSwitch = true;
  activation::Kind kind;
  A parameter;

  template <class F>
  __device__ void Visit(F&& f) const {
    using namespace activation;
    switch (kind) {
      case Kind::kRelu:
        return f(Member<Relu<T>>{});
      case Kind::kClippedRelu:
        return f(Member<ClippedRelu<T>>{{parameter}});
      case Kind::kLeakyRelu:
        return f(Member<LeakyRelu<T>>{{parameter}});
      case Kind::kSigmoid:
        return f(Member<Sigmoid<T>>{});
      case Kind::kTanh:
        return f(Member<Tanh<T>>{});
      case Kind::kSilu:
        return f(Member<Silu<T>>{{parameter}});
      case Kind::kHardSwish:
        return f(Member<HardSwish<T>>{});
      case Kind::kGelu:
        return f(Member<Gelu<T>>{});
      case Kind::kGeluTanh:
        return f(Member<GeluTanh<T>>{});
      default:
        return f(Member<Identity<T>>{});
    }
  }
};

inline bool IsFused(activation::Kind kind) {
  using activation::Kind;
  switch (kind) {
    case Kind::kIdentity:
    case Kind::kRelu:
    case Kind::kClippedRelu:
    case Kind::kLeakyRelu:
    case Kind::kSigmoid:
    case Kind::kTanh:
    case Kind::kSilu:
    case Kind::kHardSwish:
    case Kind::kGelu:
    case Kind::kGeluTanh:
      return true;
    default:
      return false;
  }
}

}  // namespace jaxdnn::batch_norm
