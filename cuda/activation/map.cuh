// Elementwise kernels: a grid that covers the array once, a 16-byte vector of each operand a thread.
//
// That is what moves most on an H200: 4.3 TB/s, as much as a copy. Two vectors a thread or more take 1 to 4 % longer,
// and a grid of a few waves that strides over the array 10 %.
//
// An Op is one map. It holds its pointers and has
//   Vector(i)        maps the i-th vector
//   Tail(t, valid)   maps the t-th unit of what vectors do not reach: the ragged end, or all of buffers that are not
//                    aligned. Lanes of a warp come together and with neighbouring units, valid or not.
#pragma once

#include <algorithm>

#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::activation {

constexpr int kMapThreads = 256;
constexpr int kTailPerThread = 8;

// Doubles go one by one: their functions are long, and once in a kernel is enough.
template <class Op>
constexpr bool kHasVectors = sizeof(typename Op::A) == 4;

template <class Op>
__global__ __launch_bounds__(kMapThreads) void MapKernel(Op op, int64_t vectors, int64_t tail_begin, int64_t tail_end) {
  const int64_t i = blockIdx.x * int64_t{kMapThreads} + threadIdx.x;
  if constexpr (kHasVectors<Op>)
    if (i < vectors) op.Vector(i);
  const int64_t warps_end = (tail_end - tail_begin + 31) / 32 * 32;
#pragma unroll 1
  for (int64_t t = i; t < warps_end; t += gridDim.x * int64_t{kMapThreads})
    op.Tail(tail_begin + t, tail_begin + t < tail_end);
}

template <class Op>
cudaError_t Map(Op op, int64_t vectors, int64_t tail_begin, int64_t tail_end, cudaStream_t stream) {
  if (!kHasVectors<Op>) vectors = tail_begin = 0;
  const int64_t tail = CeilDiv(tail_end - tail_begin, kMapThreads * (kHasVectors<Op> ? kTailPerThread : 1));
  const int64_t blocks = std::max(CeilDiv(vectors, kMapThreads), tail);
  return LaunchKernel(MapKernel<Op>, blocks, kMapThreads, stream, op, vectors, tail_begin, tail_end);
}

// An array of independent rows whose bits are packed row by row into whole bytes, the first element in the lowest bit.
// Where no row is ragged, or there is but one, the bits of the whole are packed like those of one row.
struct BitRows {
  int64_t rows, length;
  FastDiv by_bits;  // The bits of a row, with those that fill up its last byte.

  BitRows(int64_t r, int64_t n)
      : rows(n % 8 == 0 ? 1 : r), length(n % 8 == 0 ? r * n : n), by_bits(rows == 1 ? 1 : CeilDiv(n, 8) * 8) {}
  int64_t Bits() const { return rows * CeilDiv(length, 8) * 8; }
  // Vectors of N elements, those of whole warps.
  template <int N>
  int64_t Vectors() const {
    return rows == 1 ? length / (32 * N) * 32 : 0;
  }
  // The element of a bit, or -1.
  __device__ int64_t Element(int64_t bit) const {
    if (rows == 1) return bit < length ? bit : -1;
    int within;
    const int64_t row = by_bits.Div(static_cast<int>(bit), &within);
    return within < length ? row * length + within : -1;
  }
};

// The N bits of vector i; N divides 8. Several lanes share a byte, and all lanes of the warp are here.
template <int N>
__device__ __forceinline__ void StoreBits(uint8_t* mask, int64_t i, unsigned bits) {
  constexpr int kShare = 8 / N;
  const int lane = threadIdx.x % kShare;
  bits <<= lane * N;
#pragma unroll
  for (int m = 1; m < kShare; m *= 2) bits |= __shfl_xor_sync(~0u, bits, m);
  if (lane == 0) mask[i / kShare] = static_cast<uint8_t>(bits);
}

// The same for one element a lane, of which the warp's first one is the first of a byte.
__device__ __forceinline__ void StoreBit(uint8_t* mask, int64_t t, bool valid, bool bit) {
  const unsigned bits = __ballot_sync(~0u, bit);
  if (valid && t % 8 == 0) mask[t / 8] = static_cast<uint8_t>(bits >> (threadIdx.x % 32));
}

template <int N>
__device__ __forceinline__ unsigned LoadBits(const uint8_t* mask, int64_t i) {
  constexpr int kShare = 8 / N;
  return mask[i / kShare] >> (i % kShare * N);
}

}  // namespace jaxdnn::activation
