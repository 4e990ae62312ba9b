// From a problem to the kernel that takes it.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/activation/functions.cuh"
#include "cuda/common/approximate.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/group_norm/tiling.cuh"

namespace jaxdnn::group_norm {

// How a kernel reads: vectors of kV elements of type T, channels last (columns) or first (rows), which need not begin
// with whole vectors (ragged).
enum class Layout { kColumns, kRows, kRagged };

template <class T, int kV, Layout kIn>
struct Access {
  using Type = T;
  static constexpr int V = kV;
  static constexpr bool kColumns = kIn == Layout::kColumns, kRagged = kIn == Layout::kRagged;
};

// The same data with the channels where it is more: with one position, or channel, the layouts are the same.
inline Problem Canonical(Problem p) {
  p.channels_last = p.spatial == 1 || (p.channels_last && p.channels > 1);
  return p;
}

// Calls f(Access, tiling) for arrays that begin with whole vectors, or do not. Doubles go one by one.
template <class T, class F>
cudaError_t PlanAndCall(const Problem& p, int arrays, const Device& d, bool aligned, F&& f) {
  constexpr int kLength = sizeof(T) < sizeof(double) ? kVecLength<T> : 1;
  const bool whole = aligned && (p.channels_last ? p.spatial * p.channels : p.spatial) % kLength == 0;
  if (p.channels_last) {
    if (whole) return f(Access<T, kLength, Layout::kColumns>{}, PlanColumns<T, kLength>(p, arrays, d));
    return f(Access<T, 1, Layout::kColumns>{}, PlanColumns<T, 1>(p, arrays, d));
  }
  auto t = PlanRows<T, kLength>(p, arrays, d);
  t.aligned = aligned;
  if constexpr (kLength > 1)
    if (!whole) return f(Access<T, kLength, Layout::kRagged>{}, t);
  return f(Access<T, kLength, Layout::kRows>{}, t);
}

// The same on the current device, of any type.
template <int kArrays, class F>
cudaError_t VisitTiling(const Problem& p, bool aligned, F&& f) {
  if (p.Empty()) return cudaSuccess;
  Device d;
  if (cudaError_t e = Query(&d)) return e;
  return VisitDType(p.dtype, [&](auto type) {
    return PlanAndCall<typename decltype(type)::type>(Canonical(p), kArrays, d, aligned, f);
  });
}

// The most that bytes(tiling, an accumulator) is for any alignment; none if a block would need more shared
// memory than there is.
template <int kArrays, class F>
std::optional<int64_t> MostBytes(const Problem& p, F&& bytes) {
  if (p.Empty()) return 0;
  // Slabs and parameters have 32-bit numbers, also slabs that would fill up the last block.
  if (p.batch * p.n * p.channels > INT32_MAX - kThreads) return std::nullopt;
  int64_t most = 0;
  bool fits = true;
  VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto take = [&](auto, const auto& t) {
      most = std::max(most, static_cast<int64_t>(bytes(t, Accumulator<T>())));
      fits &= t.shared <= (t.team.size == 1 ? kNominal.shared_per_block : ResidentShared(kNominal, kFewest));
      return cudaSuccess;
    };
    PlanAndCall<T>(Canonical(p), kArrays, kNominal, true, take);
    return PlanAndCall<T>(Canonical(p), kArrays, kNominal, false, take);
  });
  if (!fits) return std::nullopt;
  return most;
}

// The logistic function of p in the fewest instructions, for what is rounded to 16 bits: 1 / (1 + exp(-p)).
__device__ inline float ShortLogistic(float p) {
  return ApproximateReciprocal(1.0f + ApproximateExp2(-1.44269504f * p));
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

// Calls f with a functor of the activation: the identity's own, where the arithmetic of a choice would show, or one for
// all.
template <class T, bool kOwnIdentity, class F>
cudaError_t VisitActivation(activation::Kind kind, F&& f) {
  using activation::Kind;
  if constexpr (kOwnIdentity)
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
