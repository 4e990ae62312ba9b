// From a problem to the kernel that takes it.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/activation/functions.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/group_norm/tiling.cuh"

namespace jaxdnn::group_norm {

// How a kernel reads: vectors of kV elements of type T, channels last (columns) or first (rows).
template <class T, int kV, bool kInColumns>
struct Access {
  using Type = T;
  static constexpr int V = kV;
  static constexpr bool kColumns = kInColumns;
};

template <class T, int V, class F>
auto PlanAndCall(const Problem& p, int arrays, const Device& d, F&& f) {
  // With one position the layouts are the same; rows would have a channel for every element.
  if (p.channels_last || p.spatial == 1) return f(Access<T, V, true>{}, PlanColumns<T, V>(p, arrays, d));
  return f(Access<T, V, false>{}, PlanRows<T, V>(p, arrays, d));
}

template <class T>
bool WholeVectors(const Problem& p) {
  const bool columns = p.channels_last || p.spatial == 1;
  return (columns ? p.spatial * p.channels : p.spatial) % kVecLength<T> == 0;
}

// Calls f(Access, tiling) for a problem whose arrays allow 16-byte accesses or do not. Doubles go one by one.
template <int kArrays, class F>
cudaError_t VisitTiling(const Problem& p, bool aligned, F&& f) {
  if (p.Empty()) return cudaSuccess;
  Device d;
  if (cudaError_t e = Query(&d)) return e;
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) < sizeof(double))
      if (aligned && WholeVectors<T>(p)) return PlanAndCall<T, kVecLength<T>>(p, kArrays, d, f);
    return PlanAndCall<T, 1>(p, kArrays, d, f);
  });
}

// The most that bytes(tiling, an accumulator) is for any alignment; none if a block would need more shared
// memory than there is.
template <int kArrays, class F>
std::optional<int64_t> MostBytes(const Problem& p, F&& bytes) {
  if (p.Empty()) return 0;
  if (p.batch * p.n * p.channels > INT32_MAX) return std::nullopt;  // Slabs and parameters have 32-bit numbers.
  int64_t most = 0;
  bool fits = true;
  VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto take = [&](auto, const auto& t) {
      most = std::max(most, static_cast<int64_t>(bytes(t, Accumulator<T>())));
      fits &= t.shared <= (t.team.size == 1 ? kNominal.shared_per_block : ResidentShared(kNominal, kFewest));
      return cudaSuccess;
    };
    if constexpr (sizeof(T) < sizeof(double))
      if (WholeVectors<T>(p)) PlanAndCall<T, kVecLength<T>>(p, kArrays, kNominal, take);
    return PlanAndCall<T, 1>(p, kArrays, kNominal, take);
  });
  if (!fits) return std::nullopt;
  return most;
}

// The logistic function of p in the fewest instructions, for what is rounded to 16 bits: 1 / (1 + exp(-p)).
__device__ inline float ShortLogistic(float p) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.44269504f * p));
  return activation::ApproximateReciprocal(1.0f + e);
}

// No activation.
template <class T>
struct None {
  template <class A, int V>
  __device__ void Forward(A (&)[V]) const {}
  template <class A, int V>
  __device__ void TimesDerivative(A (&)[V], const A (&)[V]) const {}
};

// One of the activations that are fused, the few that follow a normalization, chosen as the kernel runs: for a whole
// vector at once, as a branch for every element would keep them apart.
template <class T>
struct Chosen {
  using A = Accumulator<T>;
  activation::Kind kind;

  // p = f(p).
  template <int V>
  __device__ void Forward(A (&p)[V]) const {
    if (kind == activation::Kind::kSilu) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if constexpr (sizeof(T) == 2)
          p[j] *= ShortLogistic(p[j]);
        else
          p[j] = activation::Silu<T>{1}.Forward(p[j]);
      }
    } else if (kind == activation::Kind::kRelu) {
#pragma unroll
      for (int j = 0; j < V; ++j) p[j] = activation::Relu<T>{}.Forward(p[j]);
    }
  }
  // w = w f'(p).
  template <int V>
  __device__ void TimesDerivative(A (&w)[V], const A (&p)[V]) const {
    if (kind == activation::Kind::kSilu) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        A slope;
        if constexpr (sizeof(T) == 2) {
          const A s = ShortLogistic(p[j]);
          slope = s * (p[j] - s * p[j]) + s;
        } else {
          slope = activation::Silu<T>{1}.Derivative(p[j]);
        }
        w[j] = activation::ApplySlope(w[j], slope);
      }
    } else if (kind == activation::Kind::kRelu) {
#pragma unroll
      for (int j = 0; j < V; ++j) w[j] = activation::ApplySlope(w[j], activation::Relu<T>{}.Derivative(p[j]));
    }
  }
};

// Calls f with a functor of the activation: the identity's own, for whole vectors, or one for all.
template <class T, int V, class F>
cudaError_t VisitActivation(activation::Kind kind, F&& f) {
  using activation::Kind;
  if constexpr (V > 1)
    if (kind == Kind::kIdentity) return f(None<T>{});
  if (kind == Kind::kIdentity || kind == Kind::kRelu || kind == Kind::kSilu) return f(Chosen<T>{kind});
  return cudaErrorInvalidValue;
}

// What a team's blocks exchange, a value for each group.
template <class Value>
int64_t ExchangeBytes(const Team& team, int64_t slab_groups) {
  return team.size == 1 ? 0 : team.ExchangedRows() * slab_groups * sizeof(Letter<Value>);
}

}  // namespace jaxdnn::group_norm
