// Layer norm and RMS norm over the rows of [problems, rows, n], and their gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda/common/dtype.h"

namespace jaxdnn::layer_norm {

// Rows of one problem share its scale and bias, which are [problems, n].
struct Shape {
  int64_t problems, rows, n;
};

struct Options {
  bool center;     // layer norm subtracts the mean; RMS norm takes it to be 0
  double epsilon;  // added to the variance
  double offset;   // added to scale
};

// Data is of one element type; parameters and statistics are in its accumulator's type. `mean` is [problems, rows, 2]:
// the unevaluated sum of two numbers, since the rounding of one may exceed the deviation. Null where absent.

// s = x + residual,  y = (s - mean) rstd (scale + offset) + bias
struct Forward {
  const void *x, *residual, *scale, *bias;
  void *y, *sum, *mean, *rstd;
};

// dx is the gradient of s: of the norm at the cotangent `g` of y, plus the cotangent `g_sum` of s.
struct Backward {
  const void *g, *g_sum, *x, *scale, *mean, *rstd;
  void *dx, *dscale, *dbias;
};

// Scratch memory, as a pure function of the shape: what a device makes of it does not change what it needs.

// Rows longer than this, which a block holds of every element type, may be split into chunks. Each leaves two numbers,
// and a sum over a block, so that they are longer where there are plenty.
constexpr int64_t kChunk = 2048;
constexpr int64_t kMaxChunks = 256, kPlentyOfChunks = 8192;

inline int64_t Chunks(const Shape& s) {
  if (s.n <= kChunk) return 0;
  const int64_t chunk = std::max(kChunk, s.problems * s.rows * s.n / kPlentyOfChunks);
  return std::clamp<int64_t>((s.n + chunk - 1) / chunk, 1, kMaxChunks);
}

// Rows so few, and so long, that blocks which go down all of them leave no sums behind, and their data stays in the L2
// cache between two readings.
constexpr int64_t kFewRows = 128;
inline bool HasFewRows(const Shape& s, int64_t element_bytes) {
  return element_bytes < 8 && s.problems == 1 && s.rows <= kFewRows && s.n > kChunk && s.n <= int64_t{1} << 18 &&
         s.rows * s.n <= element_bytes << 18;
}

// Whether such blocks make the gradient where buffers are aligned.
inline bool GoesDownColumns(const Shape& s, DType dtype) {
  const int64_t bytes = static_cast<int64_t>(SizeOf(dtype));
  return dtype != DType::kF16 && s.n * bytes % 16 == 0 && HasFewRows(s, bytes);
}

// So few elements, in rows of vectors of 16 bytes, that one kernel makes their gradient and leaves no partial sums.
// Rows of less than two vectors are packed.
inline bool IsSmall(const Shape& s, DType dtype) {
  constexpr int64_t kMostElements = 1 << 20, kMostRows = 1024, kLongest = 256 << 10;
  const int64_t bytes = static_cast<int64_t>(SizeOf(dtype)) * s.n;
  return dtype != DType::kF64 && bytes % 16 == 0 && bytes > 16 && bytes <= kLongest && s.rows <= kMostRows &&
         s.problems * s.rows * s.n <= kMostElements;
}

// How many rows apart those are that start equally far into a vector of 16 bytes.
inline int64_t Period(const Shape& s, DType dtype) {
  int64_t period = 1;
  while (period * s.n * static_cast<int64_t>(SizeOf(dtype)) % 16 != 0) period *= 2;
  return period;
}

// Rows of dscale and of dbias that a problem's blocks may leave to be summed; a single one is the result. They are as
// many as the rows of a period at least, so that a block can have rows a period apart alone; and of rows that a cluster
// of blocks holds, as many again as the largest clusters that run at once.
inline int64_t PartialRows(const Shape& s, DType dtype) {
  constexpr int64_t kElements = 5 << 18, kMost = 1024, kClusters = 8, kLong = 4096, kLongest = 1 << 18;
  if (IsSmall(s, dtype) || GoesDownColumns(s, dtype)) return 1;
  const int64_t useful = std::min(kMost, (s.rows + 3) / 4), period = std::min(Period(s, dtype), s.rows);
  const int64_t clusters =
      s.n > kLong && s.n <= kLongest ? std::min(kClusters / std::max<int64_t>(1, s.problems), s.rows) : 1;
  return std::max(
      {period, clusters + period - 1, std::min(useful, kElements / std::max<int64_t>(1, s.problems * s.n))});
}

inline int64_t ForwardWorkspace(const Shape& s) { return s.problems * s.rows * Chunks(s) * 2 * sizeof(double); }

// `gradients`: how many of dscale and dbias are wanted.
inline int64_t BackwardWorkspace(const Shape& s, DType dtype, int gradients) {
  const int64_t chunks = Chunks(s), parts = PartialRows(s, dtype), accumulator = dtype == DType::kF64 ? 8 : 4;
  const int64_t sums = chunks == 0 ? 0 : s.problems * s.rows * (chunks + 1) * 2 * int64_t{sizeof(double)};
  return sums + (parts == 1 ? 0 : gradients * s.problems * parts * s.n * accumulator);
}

cudaError_t RunForward(const Forward& f, DType dtype, Shape shape, Options options, void* workspace,
                       cudaStream_t stream);
cudaError_t RunBackward(const Backward& b, DType dtype, Shape shape, Options options, void* workspace,
                        cudaStream_t stream);

}  // namespace jaxdnn::layer_norm
