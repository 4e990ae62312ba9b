// The activations that batch normalization fuses, in two groups, so that a kernel is built twice and not ten times.
#pragma once

#include <limits>

#include "cuda/activation/functions.cuh"

namespace jaxdnn::batch_norm {

// slope p below `start`, which is 0 or the number after it, then p, and `ceiling` from there on: the identity, relu,
// clipped relu and leaky relu. Without a ceiling it is NaN, which nothing reaches. A NaN passes through, and has the
// derivative `slope`.
template <class T>
struct LinearGroup {
  using A = Accumulator<T>;
  static constexpr bool kSmooth = false;
  A start, slope, ceiling;

  template <class F>
  __device__ void Visit(F&& f) const {
    f(*this);
  }
  __device__ A Forward(A p) const { return p < start ? activation::ApplySlope(p, slope) : p >= ceiling ? ceiling : p; }
  // g f'(p)
  __device__ A Slope(A g, A p) const { return p >= start ? p >= ceiling ? A(0) : g : activation::ApplySlope(g, slope); }
};

template <class F>
struct Member {
  using A = typename F::A;
  F f;

  __device__ A Forward(A p) const { return f.Forward(p); }
  __device__ A Slope(A g, A p) const { return activation::ApplySlope(g, f.Derivative(p)); }
};

// A kernel branches among them once a vector.
template <class T>
struct SmoothGroup {
  using A = Accumulator<T>;
  static constexpr bool kSmooth = true;
  activation::Kind kind;
  A parameter;

  template <class F>
  __device__ void Visit(F&& f) const {
    using namespace activation;
    switch (kind) {
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
      default:
        return f(Member<GeluTanh<T>>{});
    }
  }
};

// Calls f with the group of the activation.
template <class T, class F>
cudaError_t VisitGroup(activation::Activation a, F&& f) {
  using activation::Kind;
  using A = Accumulator<T>;
  const A none = std::numeric_limits<A>::quiet_NaN(), above = std::numeric_limits<A>::denorm_min();
  const A parameter = static_cast<A>(a.parameter);
  switch (a.kind) {
    case Kind::kIdentity:
      return f(LinearGroup<T>{A(0), A(1), none});
    case Kind::kRelu:
      return f(LinearGroup<T>{above, A(0), none});
    case Kind::kClippedRelu:
      return f(LinearGroup<T>{above, A(0), parameter});
    case Kind::kLeakyRelu:
      return f(LinearGroup<T>{A(0), parameter, none});
    case Kind::kSigmoid:
    case Kind::kTanh:
    case Kind::kSilu:
    case Kind::kHardSwish:
    case Kind::kGelu:
    case Kind::kGeluTanh:
      return f(SmoothGroup<T>{a.kind, parameter});
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace jaxdnn::batch_norm
