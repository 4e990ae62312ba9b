// Vectors of elements that move through memory in one access.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jaxdnn {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <class To, class From>
__device__ To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// N elements as they are loaded. Values that meet after a branch, or are used only when others have come, stay whole
// words that way, where the compiler would take 16-bit elements and bytes apart into a register each, and wait for
// that.
template <class T, int N>
using Words =
    Vec<std::conditional_t<sizeof(T) * N % 4 == 0, unsigned, std::conditional_t<sizeof(T) * N == 2, uint16_t, uint8_t>>,
        sizeof(T) * N % 4 == 0 ? sizeof(T) * N / 4 : 1>;

// So that the compiler does not move their load behind a branch or a call that uses them.
template <class V>
__device__ __forceinline__ void KeepLoaded(V& words) {
#pragma unroll
  for (auto& word : words.v) {
    if constexpr (sizeof(word) == 4)
      asm volatile("" : "+r"(word));
    else
      asm volatile("" : "+h"(word));
  }
}

// Elements in a 16-byte access, the widest that every supported architecture has.
template <class T>
constexpr int kVecLength = 16 / sizeof(T);

// Loads what nothing writes while the kernel runs, so that the compiler may do it before stores to anything else.
template <class V>
__device__ V LoadConstant(const V* p) {
  using Word = std::conditional_t<sizeof(V) == 16, uint4, std::conditional_t<sizeof(V) == 8, uint2, unsigned>>;
  static_assert(sizeof(V) == sizeof(Word), "one access");
  const Word word = __ldg(reinterpret_cast<const Word*>(p));
  V v;
  memcpy(&v, &word, sizeof(V));
  return v;
}

// XLA may hand a kernel a slice of a larger buffer, so alignment is a property of the pointer, not of the type.
template <class... P>
bool IsVectorAligned(const P*... pointers) {
  return (... && (reinterpret_cast<uintptr_t>(pointers) % 16 == 0));
}

}  // namespace jaxdnn
