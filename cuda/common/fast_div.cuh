// Division by a divisor that is known before the kernel starts: a multiplication and a shift.
//
// Granlund and Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994, figure 4.1, for
// dividends below 2^31.
#pragma once

#include <cstdint>

namespace jaxdnn {

struct FastDiv {
  uint32_t divisor, multiplier, shift;

  // Trivial, so that it can be in shared memory.
  FastDiv() = default;
  // A divisor of 0 (an empty dimension, of which no index is ever taken) counts as 1.
  __host__ __device__ explicit FastDiv(int64_t d) : divisor(d > 0 ? static_cast<uint32_t>(d) : 1), shift(0) {
#ifdef __CUDA_ARCH__
    shift = divisor > 1 ? 32 - __clz(divisor - 1) : 0;
#else
    while ((uint64_t{1} << shift) < divisor) ++shift;
#endif
    const uint64_t numerator = ((uint64_t{1} << shift) - divisor) << 32;
#ifdef __CUDA_ARCH__
    // Exact as a double, for all but 32 of its bits are zeros; and so is the quotient's whole part. A division of
    // 64-bit integers takes four times the instructions.
    multiplier = static_cast<uint32_t>(__ddiv_rz(static_cast<double>(numerator), divisor)) + 1;
#else
    multiplier = static_cast<uint32_t>(numerator / divisor + 1);
#endif
  }

  __device__ int Div(int n) const {
    return static_cast<int>((__umulhi(static_cast<uint32_t>(n), multiplier) + static_cast<uint32_t>(n)) >> shift);
  }
  // Quotient and remainder.
  __device__ int Div(int n, int* remainder) const {
    const int q = Div(n);
    *remainder = n - q * static_cast<int>(divisor);
    return q;
  }
};

// The same, and of 64-bit dividends whose quotients are below 2^50.
struct WideDiv : FastDiv {
  double inverse;

  WideDiv() = default;
  explicit WideDiv(int64_t d) : FastDiv(d), inverse(1.0 / divisor) {}

  using FastDiv::Div;
  __device__ int64_t Div(int64_t n, int* remainder) const {
    const int d = static_cast<int>(divisor);
    int64_t q = static_cast<int64_t>(static_cast<double>(n) * inverse), rest = n - q * d;  // or one off
    if (rest < 0) --q, rest += d;
    if (rest >= d) ++q, rest -= d;
    *remainder = static_cast<int>(rest);
    return q;
  }
};

}  // namespace jaxdnn
