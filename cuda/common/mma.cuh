// Matrix products on the tensor cores, a warp at a time (sm_80 and newer), of 16-bit floats, of floats as TF32 and of
// 8-bit integers, and the asynchronous copies and matrix loads that feed them. PTX ISA 8.0: cp.async, ldmatrix,
// mma.m16n8k32, mma.m16n8k16, mma.m16n8k8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxdnn {

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies kBytes (4, 8 or 16) into shared memory in the background, or zeros where `valid` is false.
template <int kBytes>
__device__ inline void CopyAsync(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

// Copies the first `bytes` of 16, and zeros behind them.
__device__ inline void CopyPart(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but this thread's newest kPending groups of copies have arrived.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint32_t LoadWord(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

// An element of 2 or 4 bytes.
template <class T>
__device__ __forceinline__ T LoadElement(uint32_t shared) {
  T value;
  if constexpr (sizeof(T) == 2)
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(reinterpret_cast<uint16_t&>(value)) : "r"(shared) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(reinterpret_cast<uint32_t&>(value)) : "r"(shared) : "memory");
  return value;
}
template <class T>
__device__ __forceinline__ void StoreElement(uint32_t shared, const T& value) {
  if constexpr (sizeof(T) == 2)
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(reinterpret_cast<const uint16_t&>(value)) : "memory");
  else
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(reinterpret_cast<const uint32_t&>(value)) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8. Of each matrix, or of
// its transpose, lane i then holds the elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4: of an 8x4 matrix of floats
// that is element i % 4.
template <bool kTransposed>
__device__ inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// To TF32's 11 bits of mantissa, to nearest; the product cuts the others off. Before Hopper there is no instruction for
// it: half of the last bit is added, and what is beyond that bit stays.
template <int kCount>
__device__ inline void RoundToTf32(uint32_t (&r)[kCount]) {
#pragma unroll
  for (uint32_t& v : r) {
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(v) : "f"(__uint_as_float(v)));
#else
    constexpr uint32_t kHalf = 1 << 12;
    if (isfinite(__uint_as_float(v))) v += kHalf;
#endif
  }
}

// Into r and what that leaves, both TF32. An infinity or NaN goes to the rest, which meets the large part of the other
// operand alone: times its rest, most often 0, it would be NaN.
__device__ inline void SplitTf32(uint32_t (&r)[4], uint32_t (&rest)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) rest[i] = r[i];
  RoundToTf32(r);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    constexpr uint32_t kBeyond = (1 << 13) - 1;
    r[i] &= ~kBeyond;
    const float large = __uint_as_float(r[i]);
    if (isfinite(large)) {
      rest[i] = __float_as_uint(__uint_as_float(rest[i]) - large);
    } else {
      r[i] = 0;
    }
  }
  RoundToTf32(rest);
}

// d += A B with A 16x16 and B 16x8, or 16x8 and 8x8 of floats. Lane i holds of d the columns 2 (i % 4) and
// 2 (i % 4) + 1 in rows i / 4 and i / 4 + 8.
template <class T>
__device__ inline void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void Mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void Mma<float>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of 8-bit integers, A 16x32 and B 32x8: lane i has of A the bytes 4 (i % 4) to 4 (i % 4) + 3 of its rows' first half,
// then of their second, and of B the same of column i / 4. Sums wrap.
template <class T>
__device__ inline void Mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Mma<int8_t>(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 16-bit floats with half the depth: A 16x8 and B 8x8.
template <class T>
__device__ inline void Mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b);

template <>
__device__ inline void Mma<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

template <>
__device__ inline void Mma<__half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace jaxdnn
