// The response curve: what an element is multiplied by, as a function of the energy of its window.
#pragma once

#include "cuda/common/approximate.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/lrn/lrn.h"

namespace jaxdnn::lrn {

// Where it is not 3 / 4: a function, since it is long and few ask for it.
template <class A>
static __device__ __noinline__ A AnyPower(A d, A exponent) {
  if constexpr (sizeof(A) == 4)
    return exp2f(exponent * log2f(d));
  else
    return pow(d, exponent);
}

// D^-beta, and q = 2 scale beta D^(-beta - 1), for results stored as T. kIsThreeQuarters: beta is known to be 3 / 4,
// which saves a 16-bit type one of three slow instructions and a 32-bit one a choice.
template <class T, bool kIsThreeQuarters = false>
struct Response {
  static constexpr bool kThreeQuarters = kIsThreeQuarters;
  using A = Accumulator<T>;
  A scale, k, beta, slope;
  bool three_quarters;

  explicit Response(const Problem& p)
      : scale(static_cast<A>(p.scale)),
        k(static_cast<A>(p.k)),
        beta(static_cast<A>(p.beta)),
        slope(static_cast<A>(2 * p.scale * p.beta)),
        three_quarters(p.beta == 0.75) {}

  template <bool kOther>
  __device__ explicit Response(const Response<T, kOther>& r)
      : scale(r.scale), k(r.k), beta(r.beta), slope(r.slope), three_quarters(r.three_quarters) {}

  __device__ A Divisor(A energy) const { return k + scale * energy; }

  __device__ A Gain(A d) const {
    if constexpr (sizeof(T) == 2 && kThreeQuarters) {
      const float root = ApproximateRsqrt(d);
      return root * ApproximateSqrt(root);
    } else if constexpr (sizeof(T) == 2) {
      // An error of 2^-21 or so, far below the rounding of the result. A divisor below 2^-126 counts as 0.
      return ApproximateExp2(-beta * ApproximateLog2(d));
    } else {
      if constexpr (sizeof(T) == 4) {
        // Each step is good to 2^-22.
        if (kThreeQuarters || three_quarters) {
          const float root = rsqrtf(d);
          return root * ApproximateSqrt(root);
        }
      }
      return AnyPower(d, -beta);
    }
  }

  // D^-beta, and q D^beta = 2 scale beta / D.
  __device__ A GainAndRate(A d, A* rate) const {
    if constexpr (sizeof(T) < 8 && kThreeQuarters) {
      const float root = sizeof(T) == 2 ? ApproximateRsqrt(d) : rsqrtf(d);
      *rate = slope * (root * root);
      return root * ApproximateSqrt(root);
    } else if constexpr (sizeof(T) == 2) {
      const float log = ApproximateLog2(d);
      *rate = slope * ApproximateExp2(-log);
      return ApproximateExp2(-beta * log);
    } else if constexpr (sizeof(T) == 4) {
      *rate = __fdividef(slope, d);
      return Gain(d);
    } else {
      *rate = slope / d;
      return Gain(d);
    }
  }

  __device__ A Gain(A d, A* q) const {
    A rate;
    const A gain = GainAndRate(d, &rate);
    *q = gain * rate;
    return gain;
  }

  // Of several divisors, which are raised to the same power: one choice for all.
  template <int N>
  __device__ void GainsAndRates(const A (&d)[N], A (&gain)[N], A (&rate)[N]) const {
    const auto all = [&](const auto& response) {
#pragma unroll
      for (int i = 0; i < N; ++i) gain[i] = response.GainAndRate(d[i], &rate[i]);
    };
    if (sizeof(T) == 4 && three_quarters)
      all(Response<T, true>(*this));
    else
      all(*this);
  }
};

}  // namespace jaxdnn::lrn
