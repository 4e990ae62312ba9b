// Elements as bits, and what is done to them on their way: nothing, or conversion, scaling and accumulation.
//
// Kernels are instantiated by the sizes of their elements; which type of that size it is, they learn at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cuda/common/vec.cuh"
#include "cuda/transform/transform.h"

namespace jaxdnn::transform {

template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = uint8_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<4> {
  using type = uint32_t;
};
template <>
struct BitsOf<8> {
  using type = uint2;
};
template <>
struct BitsOf<16> {
  using type = uint4;
};

template <int kBytes>
using Bits = typename BitsOf<kBytes>::type;

// As many accesses of at most 16 bytes as N elements take.
template <int N, class T>
__device__ Vec<T, N> LoadVector(const T* p) {
  constexpr int kEach = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
  Vec<T, N> v;
#pragma unroll
  for (int i = 0; i < N; i += kEach) {
    const auto part = *reinterpret_cast<const Vec<T, kEach>*>(p + i);
#pragma unroll
    for (int j = 0; j < kEach; ++j) v.v[i + j] = part.v[j];
  }
  return v;
}

// 16 bytes to where only `kBytes` bytes are aligned.
template <int kBytes>
__device__ void Scatter(uint4 v, char* to) {
  if constexpr (kBytes == 4) {
    reinterpret_cast<uint32_t*>(to)[0] = v.x;
    reinterpret_cast<uint32_t*>(to)[1] = v.y;
    reinterpret_cast<uint32_t*>(to)[2] = v.z;
    reinterpret_cast<uint32_t*>(to)[3] = v.w;
  } else if constexpr (kBytes == 8) {
    reinterpret_cast<uint2*>(to)[0] = make_uint2(v.x, v.y);
    reinterpret_cast<uint2*>(to)[1] = make_uint2(v.z, v.w);
  } else {
    *reinterpret_cast<uint4*>(to) = v;
  }
}

// The i-th element in a word of them, or in 16 bytes.
template <class T, class Word>
__device__ T Part(Word word, int i) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    return word;
  } else if constexpr (std::is_same_v<Word, uint4> && sizeof(T) == 8) {
    return i == 0 ? make_uint2(word.x, word.y) : make_uint2(word.z, word.w);
  } else if constexpr (std::is_same_v<Word, uint4>) {
    constexpr int kEach = 4 / sizeof(T);
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
    return Part<T>(words[i / kEach], i % kEach);
  } else {
    return static_cast<T>(word >> (i * 8 * static_cast<int>(sizeof(T))));
  }
}

// By way of 2^23 + bits, in whose last place they stand: conversions of integers have a quarter of an addition's rate.
template <class C>
__device__ C Decode(uint8_t bits, ElementType type) {
  const bool is_unsigned = type == ElementType::kU8;
  const uint32_t shifted = is_unsigned ? bits : bits ^ 0x80u;
  return __uint_as_float(0x4B000000u | shifted) - (is_unsigned ? 8388608.0f : 8388736.0f);
}
template <class C>
__device__ C Decode(uint16_t bits, ElementType type) {
  return type == ElementType::kBF16 ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
}
template <class C>
__device__ C Decode(uint32_t bits, ElementType type) {
  return type == ElementType::kF32 ? static_cast<C>(__uint_as_float(bits)) : static_cast<C>(static_cast<int>(bits));
}
template <class C>
__device__ C Decode(uint2 bits, ElementType) {
  return static_cast<C>(__hiloint2double(bits.y, bits.x));
}

// To the nearest integer, ties to even, and to the nearest that the type has; NaN to 0.
__device__ inline int ToInt(float v) { return __float2int_rn(v); }
__device__ inline int ToInt(double v) { return v == v ? __double2int_rn(v) : 0; }

__device__ inline void Encode(float v, ElementType type, uint16_t* bits) {
  *bits =
      type == ElementType::kBF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v)) : __half_as_ushort(__float2half_rn(v));
}
__device__ inline void Encode(double v, ElementType type, uint16_t* bits) {
  *bits = type == ElementType::kBF16 ? __bfloat16_as_ushort(__double2bfloat16(v)) : __half_as_ushort(__double2half(v));
}
template <class C>
__device__ void Encode(C v, ElementType type, uint8_t* bits) {
  const bool is_unsigned = type == ElementType::kU8;
  *bits = static_cast<uint8_t>(min(max(ToInt(v), is_unsigned ? 0 : -128), is_unsigned ? 255 : 127));
}
template <class C>
__device__ void Encode(C v, ElementType type, uint32_t* bits) {
  *bits = type == ElementType::kF32 ? __float_as_uint(static_cast<float>(v)) : static_cast<uint32_t>(ToInt(v));
}
template <class C>
__device__ void Encode(C v, ElementType, uint2* bits) {
  const double d = v;
  *bits = make_uint2(__double2loint(d), __double2hiint(d));
}

// `v` as an element, its bytes repeated to 16; and what that element holds.
struct Element {
  alignas(16) char bytes[16];
  double value;

  Element(double v, ElementType type) { Set(v, type); }

  void Set(double v, ElementType type) {
    switch (type) {
      case ElementType::kF32:
        return Fill(static_cast<float>(v), static_cast<float>(v));
      case ElementType::kF64:
        return Fill(v, v);
      case ElementType::kF16:
        return Fill(__double2half(v), __half2float(__double2half(v)));
      case ElementType::kBF16:
        return Fill(__double2bfloat16(v), __bfloat162float(__double2bfloat16(v)));
      case ElementType::kS8:
        return FillInteger<int8_t>(v);
      case ElementType::kU8:
        return FillInteger<uint8_t>(v);
      case ElementType::kS32:
        return FillInteger<int32_t>(v);
    }
  }

  template <class T>
  void FillInteger(double v) {
    using Limits = std::numeric_limits<T>;
    const double held = std::isnan(v) ? 0 : std::clamp<double>(std::nearbyint(v), Limits::min(), Limits::max());
    Fill(static_cast<T>(held), held);
  }
  template <class T>
  void Fill(T element, double held) {
    for (size_t i = 0; i < sizeof(bytes); i += sizeof(T)) std::memcpy(bytes + i, &element, sizeof(T));
    value = held;
  }

  template <class B>
  B As() const {
    B bits;
    std::memcpy(&bits, bytes, sizeof(B));
    return bits;
  }
};

// The operations of a kernel: Prepare takes an element as it comes from memory, Store writes it. `Value` is what the
// kernel holds between the two. After(n) is the operation on the result's elements from the n-th on. The constants say
// for what it has kernels: vectors of kVector elements, gathering from dense rows, transposition through shared memory
// from any rows and from aligned ones, taking images of few channels apart and weaving them. What is rare does with the
// one that takes all.

// Moves bits.
template <int kBytes>
struct Copy {
  using In = Bits<kBytes>;
  using Out = Bits<kBytes>;
  using Value = Bits<kBytes>;
  static constexpr int kVector = 16 / kBytes;
  static constexpr bool kVectors = kBytes == 16, kDense = true, kTiles = true, kSquares = true,
                        kTakesApart = kBytes <= 4, kWeaves = kBytes == 2 || kBytes == 4;

  Out* out;
  Value pad;
  In pad_bits;
  uint4 pad_chunk;

  bool Aligned() const { return IsVectorAligned(out); }
  Copy After(int64_t n) const { return {out + n, pad, pad_bits, pad_chunk}; }

  __device__ Value Prepare(In bits) const { return bits; }

  template <int N>
  __device__ void Store(int i, const Value (&v)[N]) const {
    Vec<Out, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = v[j];
    *reinterpret_cast<Vec<Out, N>*>(out + i) = result;
  }
  __device__ void Store(int i, Value v) const { out[i] = v; }
};

// alpha * x + beta * y, in float, or in double where an operand is double.
template <int kInBytes, int kOutBytes>
struct Convert {
  using In = Bits<kInBytes>;
  using Out = Bits<kOutBytes>;
  using Value = std::conditional_t<kInBytes == 8 || kOutBytes == 8, double, float>;
  static constexpr int kVector = 16 / kOutBytes;
  static constexpr bool kVectors = std::is_same_v<Value, float>, kDense = false,
                        kTiles = kVectors && kInBytes + kOutBytes > 2,
                        kSquares = kVectors && kInBytes > 1 && kOutBytes > 1,
                        kTakesApart = kInBytes == 1 && (kOutBytes == 2 || kOutBytes == 4), kWeaves = false;

  Out* out;
  const Out* y;  // Null for beta = 0.
  ElementType in_type, out_type;
  Value pad, alpha, beta;
  In pad_bits;  // The input element nearest to `pad`, and 16 bytes of it.
  uint4 pad_chunk;

  bool Aligned() const { return IsVectorAligned(out, y); }
  Convert After(int64_t n) const {
    Convert later = *this;
    later.out += n;
    if (y) later.y += n;
    return later;
  }

  __device__ Value Prepare(In bits) const { return Decode<Value>(bits, in_type); }

  template <int N>
  __device__ void Store(int i, const Value (&v)[N]) const {
    Vec<Out, N> result, prior;
    if (y) prior = *reinterpret_cast<const Vec<Out, N>*>(y + i);
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = Combine(v[j], prior.v[j]);
    *reinterpret_cast<Vec<Out, N>*>(out + i) = result;
  }
  __device__ void Store(int i, Value v) const { out[i] = Combine(v, y ? y[i] : Out{}); }

  __device__ Out Combine(Value v, Out prior) const {
    Out bits;
    v *= alpha;
    if (y) v += beta * Decode<Value>(prior, out_type);
    Encode(v, out_type, &bits);
    return bits;
  }
};

}  // namespace jaxdnn::transform
