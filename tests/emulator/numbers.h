// Element types, and numbers of them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace emulator {

// Unsigned integers and plain bits first, then signed integers, floats, and pairs in the order of their parts.
enum class Scalar : uint8_t {
  kNone,
  kPred,
  kB8,
  kB16,
  kB32,
  kB64,
  kB128,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kE4M3,
  kE5M2,
  kF16,
  kBF16,
  kTF32,
  kF32,
  kF64,
  kE4M3x2,
  kE5M2x2,
  kF16x2,
  kBF16x2
};
Scalar ScalarOf(std::string_view word);  // kNone if it is none
int Bytes(Scalar type);
inline bool IsSigned(Scalar t) { return t >= Scalar::kS8 && t <= Scalar::kS64; }
inline bool IsFloat(Scalar t) { return t >= Scalar::kE4M3; }
inline bool IsPair(Scalar t) { return t >= Scalar::kE4M3x2; }
inline Scalar PartOf(Scalar t) {
  const int to_pair = static_cast<int>(Scalar::kE4M3x2) - static_cast<int>(Scalar::kE4M3);
  return IsPair(t) ? static_cast<Scalar>(static_cast<int>(t) - to_pair) : t;
}

// The number that these bits are.
float FloatOf(Scalar type, uint32_t bits);
inline double DoubleOf(Scalar type, uint64_t bits) {
  return type == Scalar::kF64 ? std::bit_cast<double>(bits) : FloatOf(type, static_cast<uint32_t>(bits));
}

// How results become numbers of their type: what the words of an instruction ask for.
enum Rounding : uint32_t {
  kFtz = 1,   // subnormal floats are 0
  kSat = 2,   // between 0 and 1
  kRelu = 4,  // not negative
  kRm = 8,    // down, up, to zero; else to nearest, ties to even
  kRp = 16,
  kRz = 32,
  kNan = 64  // of two numbers, if one is none, so is the result
};
float Flush(float v);
// The bits of the number of this type that v is rounded to, once. Those of 8 bits are the largest beyond it.
uint64_t BitsOf(Scalar type, double v, uint32_t rounding = 0);
float RoundToFloat(long double v, uint32_t rounding);
uint32_t RoundToTf32(uint32_t float_bits, bool ties_away = false);

}  // namespace emulator
