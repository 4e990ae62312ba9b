// Gated units: y = value * f(gate) for x [outer, 2, inner], of which one half is the gate.
//
// Bound by memory: 3 passes over half of x forward, 5 backward. A vector lies in one row of `inner` elements; of rows
// that do not fill whole vectors the halves are read, and their gradients written, element by element.
#include "cuda/activation/activation.h"
#include "cuda/activation/functions.cuh"
#include "cuda/activation/map.cuh"

namespace jaxdnn::activation {
namespace {

// Where the halves of row `o` begin, in vectors or elements: x + (2 o + half) * length.
template <class T>
struct Halves {
  FastDiv by_row;     // Vectors in a row.
  FastDiv by_length;  // Elements in a row.
  int value, gate;    // The numbers of the two halves.
  bool whole;         // Rows are whole vectors.

  explicit Halves(const GateShape& s)
      : by_row(s.inner / kVecLength<T>),
        by_length(s.inner),
        value(s.gate_first),
        gate(!s.gate_first),
        whole(s.inner % kVecLength<T> == 0) {}

  struct Places {
    int64_t value, gate;
    int left;  // In this row.
  };
  __device__ Places Of(int i, const FastDiv& by) const {
    int within;
    const int64_t row = by.Div(i, &within);
    const int64_t length = by.divisor;
    return {(2 * row + value) * length + within, (2 * row + gate) * length + within, static_cast<int>(length) - within};
  }
  __device__ Places OfVector(int64_t i) const { return Of(static_cast<int>(i), by_row); }
  __device__ Places OfElement(int64_t i) const { return Of(static_cast<int>(i), by_length); }
};

// Of the kinds that gate, those that seldom do: one is chosen as the kernel runs. Of doubles, any.
template <class T>
struct RareGate {
  Kind kind;
  Accumulator<T> beta;
};

template <class T, class G>
__device__ void With(const RareGate<T>& f, G&& g) {
  switch (f.kind) {
    case Kind::kRelu:
      return g(Relu<T>{});
    case Kind::kTanh:
      return g(Tanh<T>{});
    case Kind::kGelu:
      return g(Gelu<T>{});
    case Kind::kIdentity:
      return g(Identity<T>{});
    default:
      break;
  }
  if constexpr (std::is_same_v<T, double>) {
    if (f.kind == Kind::kSigmoid) return g(Sigmoid<T>{});
    if (f.kind == Kind::kSilu) return g(Silu<T>{f.beta});
    g(GeluTanh<T>{});
  }
}

template <class T, class F>
struct GateForwardOp {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  F f;
  Halves<T> halves;
  const T* x;
  T* y;

  __device__ void Vector(int64_t i) const {
    Vec<T, N> value, gate, out;
    if (halves.whole) {
      const auto at = halves.OfVector(i);
      value = reinterpret_cast<const Vec<T, N>*>(x)[at.value];
      gate = reinterpret_cast<const Vec<T, N>*>(x)[at.gate];
    } else {
      // The result is aligned where its operands are not; it may end one row and begin the next.
      auto at = halves.OfElement(i * N);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        value.v[j] = x[at.value + j];
        gate.v[j] = x[at.gate + j];
        if (--at.left == 0) {
          at.value += halves.by_length.divisor;
          at.gate += halves.by_length.divisor;
          at.left = static_cast<int>(halves.by_length.divisor);
        }
      }
    }
    With(f, [&](auto functor) {
#pragma unroll
      for (int j = 0; j < N; ++j) out.v[j] = Element(functor, value.v[j], gate.v[j]);
    });
    reinterpret_cast<Vec<T, N>*>(y)[i] = out;
  }
  __device__ void Tail(int64_t i, bool valid) const {
    if (!valid) return;
    const auto at = halves.OfElement(i);
    With(f, [&](auto functor) { y[i] = Element(functor, x[at.value], x[at.gate]); });
  }

 private:
  template <class Functor>
  static __device__ T Element(const Functor& functor, T value, T gate) {
    return static_cast<T>(static_cast<A>(value) * functor.Forward(static_cast<A>(gate)));
  }
};

template <class T, class F>
struct GateBackwardOp {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  F f;
  Halves<T> halves;
  const T* g;
  const T* x;
  T* dx;

  __device__ void Vector(int64_t i) const {
    const auto at = halves.OfVector(i);
    const auto along = reinterpret_cast<const Vec<T, N>*>(g)[i];
    const auto value = reinterpret_cast<const Vec<T, N>*>(x)[at.value];
    const auto gate = reinterpret_cast<const Vec<T, N>*>(x)[at.gate];
    Vec<T, N> dvalue, dgate;
    With(f, [&](auto functor) {
#pragma unroll
      for (int j = 0; j < N; ++j) Element(functor, along.v[j], value.v[j], gate.v[j], &dvalue.v[j], &dgate.v[j]);
    });
    reinterpret_cast<Vec<T, N>*>(dx)[at.value] = dvalue;
    reinterpret_cast<Vec<T, N>*>(dx)[at.gate] = dgate;
  }
  __device__ void Tail(int64_t i, bool valid) const {
    if (!valid) return;
    const auto at = halves.OfElement(i);
    With(f, [&](auto functor) { Element(functor, g[i], x[at.value], x[at.gate], &dx[at.value], &dx[at.gate]); });
  }

 private:
  template <class Functor>
  static __device__ void Element(const Functor& functor, T g, T value, T gate, T* dvalue, T* dgate) {
    const A along = static_cast<A>(g), at = static_cast<A>(gate);
    *dvalue = static_cast<T>(along * functor.Forward(at));
    *dgate = static_cast<T>(along * static_cast<A>(value) * functor.Derivative(at));
  }
};

// Of the kinds that gate in practice.
template <class T, class F>
cudaError_t VisitGate(const Activation& activation, F&& f) {
  constexpr bool kRare = std::is_same_v<T, double>;
  const auto beta = static_cast<Accumulator<T>>(activation.parameter);
  switch (activation.kind) {
    case Kind::kSigmoid:
      if constexpr (!kRare) return f(Sigmoid<T>{});
      break;
    case Kind::kSilu:
      if constexpr (!kRare) return f(Silu<T>{beta});
      break;
    case Kind::kGeluTanh:
      if constexpr (!kRare) return f(GeluTanh<T>{});
      break;
    case Kind::kIdentity:
    case Kind::kRelu:
    case Kind::kTanh:
    case Kind::kGelu:
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return f(RareGate<T>{activation.kind, beta});
}

// Calls launch(first, elements) for chunks of eight rows or a multiple of that, so that all begin aligned: `elements`
// of y from element `first` on, below 2^31.
template <class F>
cudaError_t ForEachChunk(const GateShape& shape, F&& launch) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (shape.inner == 0) return cudaSuccess;
  const int64_t rows = kMost / shape.inner / 8 * 8;
  if (shape.outer * shape.inner <= kMost) return launch(int64_t{0}, shape.outer * shape.inner);
  if (rows == 0) return cudaErrorInvalidValue;
  for (int64_t row = 0; row < shape.outer; row += rows) {
    const int64_t elements = std::min(rows, shape.outer - row) * shape.inner;
    if (const cudaError_t e = launch(row * shape.inner, elements); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t GateForward(const Activation& activation, DType dtype, const GateShape& shape, const void* x, void* y,
                        cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitGate<T>(activation, [&](auto f) {
      return ForEachChunk(shape, [&](int64_t first, int64_t elements) {
        const Halves<T> halves(shape);
        const bool aligned = IsVectorAligned(y) && (!halves.whole || IsVectorAligned(x));
        const int64_t vectors = aligned ? elements / kVecLength<T> : 0;
        const GateForwardOp<T, decltype(f)> op{f, halves, static_cast<const T*>(x) + 2 * first,
                                               static_cast<T*>(y) + first};
        return Map(op, vectors, vectors * kVecLength<T>, elements, stream);
      });
    });
  });
}

cudaError_t GateBackward(const Activation& activation, DType dtype, const GateShape& shape, const void* g,
                         const void* x, void* dx, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitGate<T>(activation, [&](auto f) {
      return ForEachChunk(shape, [&](int64_t first, int64_t elements) {
        const Halves<T> halves(shape);
        const int64_t vectors = halves.whole && IsVectorAligned(g, x, dx) ? elements / kVecLength<T> : 0;
        const GateBackwardOp<T, decltype(f)> op{f, halves, static_cast<const T*>(g) + first,
                                                static_cast<const T*>(x) + 2 * first, static_cast<T*>(dx) + 2 * first};
        return Map(op, vectors, vectors * kVecLength<T>, elements, stream);
      });
    });
  });
}

}  // namespace jaxdnn::activation
