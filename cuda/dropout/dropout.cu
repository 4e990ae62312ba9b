// Dropout, forward and backward alike: the mask is not kept but drawn again.
//
// Bound by memory, 2 passes, if the generator is not asked for too much: a call gives 8 elements 16 bits each, which is
// one call for a 16-byte vector of a 16-bit type. Of these 15 are compared with the upper bits of the threshold, two
// elements in an instruction. Where they tie, once in 32768 elements, the 16th and those of a second call are the lower
// bits, so that the probability is exact to 2^-32.
#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/dropout/dropout.h"
#include "cuda/dropout/philox.cuh"

namespace jaxdnn::dropout {
namespace {

constexpr int kThreads = 256;
constexpr int kPerCall = 8;

constexpr uint32_t kSigns = 0x80008000;  // The upper bits of both halves of a word.

struct Generator {
  uint4 key;
  uint32_t threshold;

  // Which of the call's 8 elements are kept: the upper bits of the halves of four words.
  __device__ uint4 Kept(uint64_t call) const {
    uint4 words = Draw(call, 0);
    // Of 15-bit numbers a and b, a + 0x7FFF - b has its upper bit set where a > b.
    const uint32_t limit = threshold >> 17, pair = (0x7FFF - limit) * 0x10001;
    uint32_t ties = 0;
    const auto compare = [&](uint32_t word) {
      const uint32_t above = (word & ~kSigns) + pair;
      ties |= above ^ (above + 0x10001);
      return above;
    };
    uint4 kept = {compare(words.x), compare(words.y), compare(words.z), compare(words.w)};
    if (ties & kSigns) {
      const uint4 lower = Draw(call, 1);
      kept = {Exact(words.x, lower.x), Exact(words.y, lower.y), Exact(words.z, lower.z), Exact(words.w, lower.w)};
    }
    return kept;
  }

 private:
  __device__ uint4 Draw(uint64_t call, uint32_t stream) const {
    const uint32_t low = static_cast<uint32_t>(call), high = static_cast<uint32_t>(call >> 32);
    return Philox({low, high | stream << 31, key.z, key.w}, {key.x, key.y});
  }
  // Two elements' numbers of 32 bits: the lower 15 of a half, its upper one, and the 16 of the second call's.
  __device__ uint32_t Exact(uint32_t word, uint32_t lower) const {
    uint32_t kept = 0;
#pragma unroll
    for (int shift = 0; shift < 32; shift += 16) {
      const uint32_t half = word >> shift & 0xFFFF;
      const uint32_t number = (half & 0x7FFF) << 17 | (half >> 15) << 16 | (lower >> shift & 0xFFFF);
      kept |= static_cast<uint32_t>(number >= threshold) << (shift + 15);
    }
    return kept;
  }
};

// Whether the j-th element of a call is kept.
__device__ __forceinline__ bool IsKept(const uint4& kept, int j) {
  const uint32_t word = j < 4 ? (j < 2 ? kept.x : kept.y) : (j < 6 ? kept.z : kept.w);
  return word & (j % 2 ? 0x80000000 : 0x8000);
}

// The blocks of a problem, and where its data and its numbers begin.
template <class T>
struct Problem {
  const T* x;
  T* y;
  int64_t thread;  // Of this problem's.
  Generator generator;
  uint64_t start;

  __device__ Problem(const T* all_x, const uint32_t* seeds, T* all_y, const Shape& shape, const FastDiv& by_blocks,
                     uint32_t threshold) {
    int block;
    const int64_t problem = by_blocks.Div(static_cast<int>(blockIdx.x), &block);
    const int64_t size = shape.rows * shape.columns;
    x = all_x + problem * size;
    y = all_y + problem * size;
    thread = int64_t{block} * kThreads + threadIdx.x;
    const uint32_t* const seed = seeds + problem * kSeedWords;
    generator = {{seed[0], seed[1], seed[2], seed[3]}, threshold};
    start = seed[4] | static_cast<uint64_t>(seed[5]) << 32;
  }
};

template <class T>
__device__ __forceinline__ T Apply(T value, bool kept, Accumulator<T> scale) {
  return kept ? static_cast<T>(static_cast<Accumulator<T>>(value) * scale) : T(0.0f);
}

// A vector a thread, whose elements are numbered from a multiple of its length, so that their bits are of one call.
template <class T>
__global__ __launch_bounds__(kThreads, 6) void VectorKernel(const T* all_x, const uint32_t* seeds, T* all_y,
                                                            Shape shape, FastDiv by_blocks, FastDiv by_row,
                                                            uint32_t threshold, Accumulator<T> scale, bool aligned) {
  constexpr int N = kVecLength<T>;
  const Problem<T> p(all_x, seeds, all_y, shape, by_blocks, threshold);
  const int64_t i = p.thread, left = shape.rows * shape.columns - i * N;
  if (left <= 0) return;
  Vec<T, N> v;
  if (aligned && left >= N) {
    v = reinterpret_cast<const Vec<T, N>*>(p.x)[i];
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = j < left ? p.x[i * N + j] : T(0.0f);
  }
  uint64_t number = p.start + i * N;
  if (shape.pitch != shape.columns) {
    int within;
    const int64_t row = by_row.Div(static_cast<int>(i), &within);
    number = p.start + row * shape.pitch + int64_t{within} * N;
  }
  uint4 kept = p.generator.Kept(number / kPerCall);
  // A shorter vector's elements are among the later ones of the call.
  if (N <= 4 && number & 4) kept = {kept.z, kept.w, 0, 0};
  if (N <= 2 && number & 2) kept.x = kept.y;
#pragma unroll
  for (int j = 0; j < N; ++j) v.v[j] = Apply(v.v[j], IsKept(kept, j), scale);
  if (aligned && left >= N) {
    reinterpret_cast<Vec<T, N>*>(p.y)[i] = v;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < left) p.y[i * N + j] = v.v[j];
  }
}

// An element a thread, and a call for each.
template <class T>
__global__ __launch_bounds__(kThreads) void ElementKernel(const T* all_x, const uint32_t* seeds, T* all_y, Shape shape,
                                                          FastDiv by_blocks, uint32_t threshold, Accumulator<T> scale) {
  const Problem<T> p(all_x, seeds, all_y, shape, by_blocks, threshold);
  if (p.thread >= shape.rows * shape.columns) return;
  const int64_t row = p.thread / shape.columns;
  const uint64_t number = p.start + row * shape.pitch + (p.thread - row * shape.columns);
  const bool kept = IsKept(p.generator.Kept(number / kPerCall), static_cast<int>(number % kPerCall));
  p.y[p.thread] = Apply(p.x[p.thread], kept, scale);
}

}  // namespace

cudaError_t Run(DType dtype, const Shape& shape, const void* x, const uint32_t* seeds, void* y, uint32_t threshold,
                double scale, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = kVecLength<T>;
    const auto in = static_cast<const T*>(x);
    const auto out = static_cast<T*>(y);
    const auto factor = static_cast<Accumulator<T>>(scale);
    const int64_t size = shape.rows * shape.columns;
    // Rows begin at whole vectors, or join.
    const bool rows =
        shape.pitch == shape.columns || (shape.columns % N == 0 && shape.pitch % N == 0 && size / N < int64_t{1} << 31);
    if (rows && shape.start_multiple % N == 0) {
      const int64_t blocks = CeilDiv(size, int64_t{N} * kThreads);
      const bool aligned = IsVectorAligned(x, y) && (shape.problems == 1 || size % N == 0);
      return LaunchKernel(VectorKernel<T>, shape.problems * blocks, kThreads, stream, in, seeds, out, shape,
                          FastDiv(blocks), FastDiv(shape.columns / N), threshold, factor, aligned);
    }
    const int64_t blocks = CeilDiv(size, kThreads);
    return LaunchKernel(ElementKernel<T>, shape.problems * blocks, kThreads, stream, in, seeds, out, shape,
                        FastDiv(blocks), threshold, factor);
  });
}

}  // namespace jaxdnn::dropout
