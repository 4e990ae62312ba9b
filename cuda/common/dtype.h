// Element types, as host code names them.
#pragma once

#include <cstddef>

namespace jaxdnn {

// Those of 8 bits, and the integers that their products are summed in, are the convolution's alone.
enum class DType { kF32, kF64, kF16, kBF16, kS8, kS32, kE4M3, kE5M2 };

constexpr bool IsFloat8(DType t) { return t == DType::kE4M3 || t == DType::kE5M2; }
constexpr bool IsByte(DType t) { return t == DType::kS8 || IsFloat8(t); }
constexpr size_t SizeOf(DType t) {
  return t == DType::kF64 ? 8 : t == DType::kF32 || t == DType::kS32 ? 4 : IsByte(t) ? 1 : 2;
}

}  // namespace jaxdnn
