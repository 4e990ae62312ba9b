// The activations, one functor each, for the elementwise kernels and for whatever kernel fuses one.
//
// A functor of the stored type T works in A = Accumulator<T>. Forward(x) and Derivative(x) take the pre-activation. A
// function with two slopes is kMasked: a bit, IsInside(x), says which of them holds.
// The same rules, with their choices about kinks and NaN, are in jaxdnn/_activation.
#pragma once

#include "cuda/activation/kind.h"
#include "cuda/activation/math.cuh"

namespace jaxdnn::activation {

// g times the slope. A slope of 0 is a switch, not a factor: an infinite cotangent of a unit that is off vanishes.
template <class A>
__device__ __forceinline__ A ApplySlope(A g, A slope) {
  return slope == A(0) ? A(0) : slope * g;
}

template <class T>
struct Identity {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const { return x; }
  __device__ A Derivative(A) const { return A(1); }
};

// Two slopes ----------------------------------------------------------------------------------------------------------

// Comparisons are written so that NaN passes through.
template <class T>
struct Relu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  __device__ A Forward(A x) const { return MaxOrNan(x, A(0)); }
  __device__ bool IsInside(A x) const { return x > A(0); }
  __device__ A Derivative(A x) const { return IsInside(x) ? A(1) : A(0); }
};

template <class T>
struct ClippedRelu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  A ceiling;
  __device__ A Forward(A x) const { return MinOrNan(MaxOrNan(x, A(0)), ceiling); }
  __device__ bool IsInside(A x) const { return x > A(0) && x < ceiling; }
  __device__ A Derivative(A x) const { return IsInside(x) ? A(1) : A(0); }
};

template <class T>
struct LeakyRelu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  A slope;
  __device__ A Forward(A x) const { return x >= A(0) ? x : slope * x; }
  __device__ bool IsInside(A x) const { return x >= A(0); }
  __device__ A Derivative(A x) const { return IsInside(x) ? A(1) : slope; }
};

template <class T>
struct HardSigmoid {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  __device__ A Forward(A x) const { return MinOrNan(MaxOrNan(x + A(3), A(0)), A(6)) * A(1.0 / 6); }
  __device__ bool IsInside(A x) const { return x > A(-3) && x < A(3); }
  __device__ A Derivative(A x) const { return IsInside(x) ? A(1.0 / 6) : A(0); }
};

template <class T>
struct HardTanh {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  __device__ A Forward(A x) const { return MinOrNan(MaxOrNan(x, A(-1)), A(1)); }
  __device__ bool IsInside(A x) const { return !(x > A(1)) && !(x < A(-1)); }
  __device__ A Derivative(A x) const { return IsInside(x) ? A(1) : A(0); }
};

// Smooth, the derivative a function of the output too (visit.cuh) -----------------------------------------------------

// The logistic function and 1 minus it, each exact to a few roundings however small.
template <class T>
struct Logistic {
  using A = Accumulator<T>;
  A value, complement;
  __device__ explicit Logistic(A x) {
    const A e = Math<T>::Exp(-fabs(x)), larger = Math<T>::Reciprocal(A(1) + e), smaller = e * larger;
    value = x >= A(0) ? larger : smaller;
    complement = x >= A(0) ? smaller : larger;
  }
};

template <class T>
struct Sigmoid {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const { return Logistic<T>(x).value; }
  __device__ A Derivative(A x) const {
    const Logistic<T> s(x);
    return s.value * s.complement;
  }
};

template <class T>
struct Tanh {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const { return Math<T>::Tanh(x); }
  __device__ A Derivative(A x) const {
    const Logistic<T> s(A(2) * x);
    return A(4) * s.value * s.complement;
  }
};

// Smooth, the derivative from the input -------------------------------------------------------------------------------

// elu, celu and selu: scale x above 0, below scale alpha (exp(x / width) - 1). The derivative is not taken from the
// output, which rounds to -scale alpha long before it vanishes.
template <class T>
struct Elu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  A scale, alpha, inverse_width;
  __device__ A Forward(A x) const {
    const A below = scale * alpha * Math<T>::Expm1(x * inverse_width);
    return x >= A(0) ? scale * x : below;
  }
  __device__ A Derivative(A x) const {
    return x > A(0) ? scale : scale * alpha * inverse_width * Math<T>::Exp(x * inverse_width);
  }
};

// log(1 + exp(beta x)) / beta; beta = -1 is log_sigmoid.
template <class T>
struct Softplus {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  A beta, inverse_beta;
  __device__ A Forward(A x) const {
    const A z = beta * x;
    return (z > A(0) ? x : A(0)) + Math<T>::Log1p(Math<T>::Exp(-fabs(z))) * inverse_beta;
  }
  __device__ A Derivative(A x) const { return Logistic<T>(beta * x).value; }
};

template <class T>
struct Silu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  A beta;
  __device__ A Forward(A x) const { return x * Logistic<T>(beta * x).value; }
  __device__ A Derivative(A x) const {
    // Far out the logistic function or its complement is 0, and z must not be infinite.
    const A z = Clamp(beta * x, A(1024));
    const Logistic<T> s(z);
    return s.value * (A(1) + z * s.complement);
  }
};

template <class T>
struct HardSwish {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const { return x * HardSigmoid<T>{}.Forward(x); }
  __device__ A Derivative(A x) const { return x <= A(-3) ? A(0) : x >= A(3) ? A(1) : (A(2) * x + A(3)) * A(1.0 / 6); }
};

// x times the standard normal distribution function.
template <class T>
struct Gelu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const {
    A density, tail;
    Math<T>::Normal(x, &density, &tail);
    return x * (x >= A(0) ? A(1) - tail : tail);
  }
  __device__ A Derivative(A x) const {
    A density, tail;
    Math<T>::Normal(x, &density, &tail);
    return (x >= A(0) ? A(1) - tail : tail) + x * density;
  }
};

// 0.5 x (1 + tanh u) = x logistic(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3), without cancellation below 0.
template <class T>
struct GeluTanh {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  static constexpr double kLinear = 1.5957691216057308, kCubic = kLinear * 0.044715;
  __device__ A Forward(A x) const { return x * Logistic<T>(x * (A(kLinear) + A(kCubic) * x * x)).value; }
  __device__ A Derivative(A x) const {
    const A square = x * x;
    const Logistic<T> s(x * (A(kLinear) + A(kCubic) * square));
    const A derivative = s.value * (A(1) + x * (A(kLinear) + A(3 * kCubic) * square) * s.complement);
    return square > A(576) ? s.value : derivative;  // 0 or 1 from there on, where the cube would overflow farther out
  }
};

// x tanh(softplus(x)), the tanh as a rational function of exp(x).
template <class T>
struct Mish {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const {
    A tanh, slope;
    TanhOfSoftplus(MinOrNan(x, kLargest), &tanh, &slope);
    return x * tanh;
  }
  __device__ A Derivative(A x) const {
    A tanh, slope;
    x = MinOrNan(x, kLargest);
    TanhOfSoftplus(x, &tanh, &slope);
    return tanh + x * slope;
  }

 private:
  // From here on the tanh is 1, and its derivative 0, to a rounding.
  static constexpr A kLargest = A(24);

  // With w = exp(x) it is q / (q + 2), q = w (w + 2), and its derivative 4 w (w + 1) / (q + 2)^2.
  static __device__ void TanhOfSoftplus(A x, A* tanh, A* slope) {
    const A w = Math<T>::Exp(x), q = w * (w + A(2)), inverse = Math<T>::Reciprocal(q + A(2));
    *tanh = q * inverse;
    *slope = A(4) * w * inverse * ((w + A(1)) * inverse);
  }
};

// x / (1 + |x|); the factor of 1/8 keeps the reciprocal of the largest numbers normal.
template <class T>
struct SoftSign {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  __device__ A Forward(A x) const { return x * A(0.125) * Math<T>::Reciprocal(A(0.125) + A(0.125) * fabs(x)); }
  __device__ A Derivative(A x) const {
    const A inverse = Math<T>::Reciprocal(A(1) + fabs(x));
    return inverse * inverse;
  }
};

// (x + sqrt(x^2 + b)) / 2, below 0 as b / (2 (sqrt(x^2 + b) - x)).
template <class T>
struct Squareplus {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false;
  A b;
  __device__ A Forward(A x) const {
    const A root = Root(x);
    return x > A(0) ? A(0.5) * x + A(0.5) * root : A(0.5) * b * Math<T>::Reciprocal(root - x);
  }
  __device__ A Derivative(A x) const {
    const A root = Root(x);
    const A below = A(0.5) * b * Math<T>::Reciprocal(root) * Math<T>::Reciprocal(root + fabs(x));
    return x > A(0) ? A(1) - below : below;
  }

 private:
  // Past 2^60 the square would overflow, and b is less than a rounding.
  __device__ A Root(A x) const { return fabs(x) > A(1.15e18) ? fabs(x) : Math<T>::Sqrt(x * x + b); }
};

// A kind becomes a functor --------------------------------------------------------------------------------------------

// 1 / x, on the device a short instruction for all types but double.
template <class A>
__host__ __device__ A Inverse(A x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<A, float>) return ApproximateReciprocal(x);
#endif
  return A(1) / x;
}

// One of those that few networks have, chosen as the kernel runs: a branch for each vector, but no kernels of its own.
template <class T>
struct RareActivation {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;  // or not
  Kind kind;                             // the first of those that differ in their numbers alone
  A p;
  Elu<T> elu;
  Softplus<T> softplus;

  __host__ __device__ explicit RareActivation(const Activation& activation)
      : kind(activation.kind), p(static_cast<A>(activation.parameter)), elu{A(1), p, A(1)}, softplus{p, Inverse(p)} {
    if (kind == Kind::kCelu) elu.inverse_width = Inverse(p);
    if (kind == Kind::kSelu) elu = {A(1.0507009873554804934193349852946), A(1.6732632423543772848170429916717), A(1)};
    if (kind == Kind::kCelu || kind == Kind::kSelu) kind = Kind::kElu;
    if (kind == Kind::kLogSigmoid) kind = Kind::kSoftplus, softplus = {A(-1), A(-1)};
  }
};

// Calls g with the functor that f is, or stands for.
#pragma nv_exec_check_disable
template <class F, class G>
__host__ __device__ auto With(const F& f, G&& g) {
  return g(f);
}
#pragma nv_exec_check_disable
template <class T, class G>
__host__ __device__ auto With(const RareActivation<T>& f, G&& g) {
  switch (f.kind) {
    case Kind::kClippedRelu:
      return g(ClippedRelu<T>{f.p});
    case Kind::kLeakyRelu:
      return g(LeakyRelu<T>{f.p});
    case Kind::kHardSigmoid:
      return g(HardSigmoid<T>{});
    case Kind::kHardTanh:
      return g(HardTanh<T>{});
    case Kind::kElu:
      return g(f.elu);
    case Kind::kSoftplus:
      return g(f.softplus);
    case Kind::kHardSwish:
      return g(HardSwish<T>{});
    case Kind::kMish:
      return g(Mish<T>{});
    case Kind::kSoftSign:
      return g(SoftSign<T>{});
    case Kind::kSquareplus:
      return g(Squareplus<T>{f.p});
    default:
      return g(Identity<T>{});
  }
}

// Calls f with the functor of `activation` for the stored type T, and `rare` with one that stands for all others.
#pragma nv_exec_check_disable
template <class T, class F, class G>
__host__ __device__ auto WithCommon(const Activation& activation, F&& f, G&& rare) {
  switch (activation.kind) {
    case Kind::kRelu:
      return f(Relu<T>{});
    case Kind::kSigmoid:
      return f(Sigmoid<T>{});
    case Kind::kTanh:
      return f(Tanh<T>{});
    case Kind::kSilu:
      return f(Silu<T>{static_cast<Accumulator<T>>(activation.parameter)});
    case Kind::kGelu:
      return f(Gelu<T>{});
    case Kind::kGeluTanh:
      return f(GeluTanh<T>{});
    default:
      return rare(RareActivation<T>(activation));
  }
}

// Calls f with the functor of `activation` for the stored type T.
template <class T, class F>
__host__ __device__ auto WithFunctor(const Activation& activation, F&& f) {
  return WithCommon<T>(activation, f, [&](const auto& rare) { return With(rare, f); });
}

// Any of them, chosen as the kernel runs. Out of line: what is compiled once need not be fast.
template <class T>
struct AnyActivation {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  Activation activation;
  __noinline__ __device__ A Forward(A x) const {
    return WithFunctor<T>(activation, [x](auto f) { return f.Forward(x); });
  }
  __noinline__ __device__ bool IsInside(A x) const {
    return WithFunctor<T>(activation, [x](auto f) {
      if constexpr (decltype(f)::kMasked) return f.IsInside(x);
      return false;
    });
  }
  __noinline__ __device__ A Derivative(A x) const {
    return WithFunctor<T>(activation, [x](auto f) { return f.Derivative(x); });
  }
};

}  // namespace jaxdnn::activation
