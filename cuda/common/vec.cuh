// Vectors of elements that move through memory in one access.
#pragma once

#include <cstdint>

namespace jaxdnn {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Elements in a 16-byte access, the widest that every supported architecture has.
template <class T>
constexpr int kVecLength = 16 / sizeof(T);

// XLA may hand a kernel a slice of a larger buffer, so alignment is a property of the pointer, not of the type.
template <class... P>
bool IsVectorAligned(const P*... pointers) {
  return (... && (reinterpret_cast<uintptr_t>(pointers) % 16 == 0));
}

}  // namespace jaxdnn
