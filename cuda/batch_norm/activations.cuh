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

  __device__ A Forward(A p) const { return activation::MaxOrNan(p, relu ? A(0) : -A(INFINITY)); }
  // g f'(p)
  __device__ A Slope(A g, A p) const { return !relu || p > A(0) ? g : A(0); }

  // The same of vectors, in place.
  template <int V>
  __device__ void Forward(A (&p)[V]) const {
#pragma unroll
    for (A& each : p) each = Forward(each);
  }
  template <int V>
  __device__ void Slope(A (&g)[V], const A (&p)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = Slope(g[i], p[i]);
  }
};

// Any. A kernel branches among them once a vector, around nothing but what they differ in.
template <class T>
struct SwitchGroup {
  using A = Accumulator<T>;
  static constexpr bool kSwitch = true;
  activation::Kind kind;
  A parameter;

  template <int V>
  __device__ void Forward(A (&p)[V]) const {
    Visit([&](auto f) {
#pragma unroll
      for (A& each : p) each = f.Forward(each);
    });
  }
  template <int V>
  __device__ void Slope(A (&g)[V], const A (&p)[V]) const {
    Visit([&](auto f) {
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] = activation::ApplySlope(g[i], f.Derivative(p[i]));
    });
  }

 private:
  template <class F>
  __device__ void Visit(F&& f) const {
    using namespace activation;
    switch (kind) {
      case Kind::kRelu:
        return f(Relu<T>{});
      case Kind::kClippedRelu:
        return f(ClippedRelu<T>{parameter});
      case Kind::kLeakyRelu:
        return f(LeakyRelu<T>{parameter});
      case Kind::kSigmoid:
        return f(Sigmoid<T>{});
      case Kind::kTanh:
        return f(Tanh<T>{});
      case Kind::kSilu:
        return f(Silu<T>{parameter});
      case Kind::kHardSwish:
        return f(HardSwish<T>{});
      case Kind::kGelu:
        return f(Gelu<T>{});
      case Kind::kGeluTanh:
        return f(GeluTanh<T>{});
      default:
        return;  // the identity
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
