// Integer division that rounds up or down, by a positive divisor.
#pragma once

#include <cstdint>

namespace jaxdnn {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t FloorMod(int64_t a, int64_t b) { return (a % b + b) % b; }
constexpr int64_t FloorDiv(int64_t a, int64_t b) { return (a - FloorMod(a, b)) / b; }

}  // namespace jaxdnn
