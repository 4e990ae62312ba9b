#include "numbers.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace emulator {
namespace {

constexpr struct {
  std::string_view name;
  int bytes;
} kTypes[] = {{"", 4},    {"pred", 1},   {"b8", 1},     {"b16", 2},   {"b32", 4},   {"b64", 8},  {"b128", 16},
              {"u8", 1},  {"u16", 2},    {"u32", 4},    {"u64", 8},   {"s8", 1},    {"s16", 2},  {"s32", 4},
              {"s64", 8}, {"e4m3", 1},   {"e5m2", 1},   {"f16", 2},   {"bf16", 2},  {"tf32", 4}, {"f32", 4},
              {"f64", 8}, {"e4m3x2", 2}, {"e5m2x2", 2}, {"f16x2", 4}, {"bf16x2", 4}};

// A sign, an exponent and a mantissa of so many bits. Codes above that of infinity are no numbers.
struct Format {
  int exponent, mantissa;
  uint32_t infinity;
  int Bias() const { return (1 << (exponent - 1)) - 1; }
  int Sign() const { return exponent + mantissa; }
};
constexpr Format kHalf = {5, 10, 0x7C00}, kBrain = {8, 7, 0x7F80}, kE5M2 = {5, 2, 0x7C};
constexpr Format kE4M3 = {4, 3, 0x7F};  // no infinity: its code is the NaN

float Decode(uint32_t bits, const Format& f) {
  const uint32_t code = bits & ((1u << f.Sign()) - 1), field = code >> f.mantissa;
  const uint32_t rest = code & ((1u << f.mantissa) - 1);
  float v;
  if (code >= f.infinity)
    v = code > f.infinity || f.infinity == kE4M3.infinity ? NAN : INFINITY;
  else if (field == 0)
    v = std::ldexp(static_cast<float>(rest), 1 - f.Bias() - f.mantissa);
  else
    v = std::bit_cast<float>((field - f.Bias() + 127) << 23 | rest << (23 - f.mantissa));
  return bits >> f.Sign() & 1 ? -v : v;
}

// To nearest, ties to even. What passes the largest number becomes infinity, or stays the largest one.
uint32_t Encode(double v, const Format& f, bool finite) {
  if (std::isnan(v)) return (1u << f.Sign()) - 1;
  const auto bits = std::bit_cast<uint64_t>(v);
  const int of_double = static_cast<int>(bits >> 52 & 0x7FF) - 1023, exponent = std::max(of_double, 1 - f.Bias());
  const int lost = std::min(52 - f.mantissa + exponent - of_double, 63);
  const uint64_t all = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{of_double > -1023} << 52;
  const uint64_t rest = all & ((uint64_t{1} << lost) - 1), half = uint64_t{1} << (lost - 1);
  uint64_t code = all >> lost;
  code += rest > half || (rest == half && code & 1);
  code += static_cast<uint64_t>(exponent + f.Bias() - 1) << f.mantissa;  // a mantissa that overflows carries into it
  return static_cast<uint32_t>(std::min<uint64_t>(code, f.infinity - finite) | bits >> 63 << f.Sign());
}

}  // namespace

Scalar ScalarOf(std::string_view word) {
  const auto found = std::find_if(std::begin(kTypes) + 1, std::end(kTypes), [&](auto& t) { return t.name == word; });
  return found == std::end(kTypes) ? Scalar::kNone : static_cast<Scalar>(found - kTypes);
}

int Bytes(Scalar type) { return kTypes[static_cast<int>(type)].bytes; }

float Flush(float v) { return std::fabs(v) < std::numeric_limits<float>::min() ? std::copysign(0.0f, v) : v; }

float FloatOf(Scalar type, uint32_t bits) {
  switch (type) {
    case Scalar::kF32:
      return std::bit_cast<float>(bits);
    case Scalar::kTF32:  // the low bits are not looked at
      return std::bit_cast<float>(bits & ~0x1FFFu);
    case Scalar::kBF16:
      return std::bit_cast<float>(bits << 16);
    case Scalar::kF16:
      return Decode(bits, kHalf);
    case Scalar::kE4M3:
      return Decode(bits, kE4M3);
    case Scalar::kE5M2:
      return Decode(bits, kE5M2);
    case Scalar::kS8:
      return static_cast<int8_t>(bits);
    default:
      return static_cast<uint8_t>(bits);
  }
}

float RoundToFloat(long double v, uint32_t rounding) {
  float f = static_cast<float>(v);
  if ((rounding & kRm || (rounding & kRz && v > 0)) && f > v) f = std::nextafter(f, -INFINITY);
  if ((rounding & kRp || (rounding & kRz && v < 0)) && f < v) f = std::nextafter(f, INFINITY);
  return rounding & kFtz ? Flush(f) : f;
}

uint64_t BitsOf(Scalar type, double v, uint32_t rounding) {
  if (rounding & kSat) v = v > 0 ? std::min(v, 1.0) : 0;
  if (rounding & kRelu && v <= 0) v = 0;
  switch (type) {
    case Scalar::kF64:
      return std::bit_cast<uint64_t>(v);
    case Scalar::kF32:
      return std::bit_cast<uint32_t>(RoundToFloat(v, rounding));
    case Scalar::kF16:
      return Encode(v, kHalf, false);
    case Scalar::kBF16:
      return Encode(v, kBrain, false);
    case Scalar::kE4M3:
      return Encode(v, kE4M3, true);
    case Scalar::kE5M2:
      return Encode(v, kE5M2, true);
    default:
      throw std::runtime_error("no such float type");
  }
}

uint32_t RoundToTf32(uint32_t bits, bool ties_away) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFFFFFF;
  if ((bits & 0x7F800000) == 0x7F800000) return bits;
  return (bits + (ties_away ? 0x1000 : 0xFFF + (bits >> 13 & 1))) & ~0x1FFFu;
}

}  // namespace emulator
