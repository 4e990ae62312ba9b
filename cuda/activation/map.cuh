// Elementwise kernels: a grid that covers the array once, a 16-byte vector of each operand a thread.
//
// That is what moves most on an H200: 4.3 TB/s, as much as a copy. Two vectors a thread or more take 1 to 4 % longer,
// and a grid of a few waves that strides over the array 10 %.
//
// An Op is one map. It holds its pointers and has
//   Vector(i)   maps the i-th vector
//   Tail(t)     maps the t-th unit of what vectors do not reach: the ragged end, or all of buffers that are not aligned
#pragma once

#include <algorithm>

#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::activation {

constexpr int kMapThreads = 256;
constexpr int kTailPerThread = 8;

template <class Op>
__global__ __launch_bounds__(kMapThreads) void MapKernel(Op op, int64_t vectors, int64_t tail_begin, int64_t tail_end) {
  const int64_t i = blockIdx.x * int64_t{kMapThreads} + threadIdx.x;
  if (i < vectors) op.Vector(i);
  for (int64_t t = tail_begin + i; t < tail_end; t += gridDim.x * int64_t{kMapThreads}) op.Tail(t);
}

template <class Op>
cudaError_t Map(Op op, int64_t vectors, int64_t tail_begin, int64_t tail_end, cudaStream_t stream) {
  const int64_t blocks =
      std::max(CeilDiv(vectors, kMapThreads), CeilDiv(tail_end - tail_begin, kMapThreads * kTailPerThread));
  return LaunchKernel(MapKernel<Op>, blocks, kMapThreads, stream, op, vectors, tail_begin, tail_end);
}

// An array of independent rows whose bits are packed row by row, the first element in the lowest bit of a byte.
// Where no row is ragged, or there is but one, the bits of the whole are packed like those of one row.
struct BitRows {
  int64_t rows, length;
  FastDiv by_bytes;

  BitRows(int64_t r, int64_t n)
      : rows(n % 8 == 0 ? 1 : r), length(n % 8 == 0 ? r * n : n), by_bytes(rows == 1 ? 1 : CeilDiv(n, 8)) {}
  int64_t Bytes() const { return rows * CeilDiv(length, 8); }
  // Vectors of N elements that lie in whole bytes, those of whole warps.
  template <int N>
  int64_t Vectors() const {
    return rows == 1 ? length / (32 * N) * 32 : 0;
  }
  // Calls f(element, bit) for the elements of byte `b`.
  template <class F>
  __device__ void ForEach(int64_t b, F&& f) const {
    int64_t row = 0, begin = b * 8;
    if (rows > 1) {
      int byte;
      row = by_bytes.Div(static_cast<int>(b), &byte);
      begin = int64_t{byte} * 8;
    }
    const int count = static_cast<int>(length - begin < 8 ? length - begin : 8);
#pragma unroll 1
    for (int bit = 0; bit < count; ++bit) f(row * length + begin + bit, bit);
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

template <int N>
__device__ __forceinline__ unsigned LoadBits(const uint8_t* mask, int64_t i) {
  constexpr int kShare = 8 / N;
  return mask[i / kShare] >> (i % kShare * N);
}

}  // namespace jaxdnn::activation
