// Vectors as they lie in memory, and as the accumulators that arithmetic is done in.
//
// A pair of 16-bit floats is a word: it is kept as one in registers, and converted both at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/dtype.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn {

template <class T, int N>
constexpr bool kIsPairs = sizeof(T) == 2 && N % 2 == 0;

// N elements as they lie in memory.
template <class T, int N>
using Packed = std::conditional_t<kIsPairs<T, N>, Vec<uint32_t, (N + 1) / 2>, Vec<T, N>>;

template <class T>
__device__ float2 WidenPair(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // A bfloat16 is the upper half of a float.
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  } else {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    return __half22float2(pair);
  }
}

template <class T>
__device__ uint32_t NarrowPair(float low, float high) {
  TwoOf<T> pair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    pair = __floats2bfloat162_rn(low, high);
  else
    pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

template <class T, int N>
__device__ void Widen(const Packed<T, N>& packed, Accumulator<T> (&wide)[N]) {
  if constexpr (kIsPairs<T, N>) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = WidenPair<T>(packed.v[i / 2]);
      wide[i] = pair.x;
      wide[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) wide[i] = static_cast<Accumulator<T>>(packed.v[i]);
  }
}

template <class T, int N>
__device__ Packed<T, N> Narrow(const Accumulator<T> (&wide)[N]) {
  Packed<T, N> packed;
  if constexpr (kIsPairs<T, N>) {
#pragma unroll
    for (int i = 0; i < N; i += 2) packed.v[i / 2] = NarrowPair<T>(wide[i], wide[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) packed.v[i] = static_cast<T>(wide[i]);
  }
  return packed;
}

// Stores N elements in one access. The compiler splits the store of a struct of words where it comes under a condition.
template <class T, int N>
__device__ void StorePacked(T* to, const Packed<T, N>& packed) {
  using Words = std::conditional_t<sizeof(packed) == 16, uint4, uint2>;
  if constexpr (sizeof(packed) == sizeof(Words)) {
    Words words;
    memcpy(&words, &packed, sizeof(words));
    *reinterpret_cast<Words*>(to) = words;
  } else {
    *reinterpret_cast<Packed<T, N>*>(to) = packed;
  }
}

// The same of 8 or 16 bytes where the compiler splits the store of words as well. Nothing moves across it, which
// elsewhere costs registers.
template <class T, int N>
__device__ void StoreUnsplit(T* to, const Packed<T, N>& packed) {
  static_assert(sizeof(packed) == 8 || sizeof(packed) == 16);
  std::conditional_t<sizeof(packed) == 16, uint4, uint2> words;
  memcpy(&words, &packed, sizeof(words));
  if constexpr (sizeof(words) == 16)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
  else
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
}

}  // namespace jaxdnn
