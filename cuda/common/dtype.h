// Element types, as host code names them.
#pragma once

#include <cstddef>

namespace jaxdnn {

enum class DType { kF32, kF64, kF16, kBF16 };

constexpr size_t SizeOf(DType t) { return t == DType::kF64 ? 8 : t == DType::kF32 ? 4 : 2; }

}  // namespace jaxdnn
