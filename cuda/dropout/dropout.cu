// Dropout, forward and backward alike: the mask is not kept but drawn again.
//
// Bound by memory, 2 passes, if the generator is not asked for too much: a call gives 8 elements 16 bits each, which is
// one call for a 16-byte vector of a 16-bit type. Of these 15 are compared with the upper bits of the threshold, two
// elements in an instruction. Where they tie, once in 32768 elements, the 16th and those of a second call are the lower
// bits, so that the probability is exact to 2^-32.
#include "cuda/common/convert.cuh"
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
constexpr int64_t kMultiprocessors = 132;

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
  int64_t size;
  int block;  // Of this problem's.
  Seeds seed;
  uint32_t threshold;

  __device__ Problem(const T* all_x, const Seeds& seeds, T* all_y, const Shape& shape, const FastDiv& by_blocks,
                     uint32_t threshold)
      : size(shape.rows * shape.columns), threshold(threshold) {
    const int64_t problem = by_blocks.Div(static_cast<int>(blockIdx.x), &block);
    x = all_x + problem * size;
    y = all_y + problem * size;
    seed = {seeds.words + problem * seeds.each, seeds.each};
  }
  __device__ Generator MakeGenerator() const { return {{Word(0), Word(1), Word(2), Word(3)}, threshold}; }
  __device__ uint64_t Start() const { return Word(4) | static_cast<uint64_t>(Word(5)) << 32; }

 private:
  __device__ uint32_t Word(int i) const {
    const uint32_t word = seed.words[i < kLeastSeedWords ? i : min(i, seed.each - 1)];
    return i < kLeastSeedWords || i < seed.each ? word : 0;
  }
};

template <class T>
__device__ __forceinline__ T Apply(T value, bool kept, Accumulator<T> scale) {
  return kept ? static_cast<T>(static_cast<Accumulator<T>>(value) * scale) : T(0.0f);
}

// All ones in the halves of a word whose upper bit is set.
__device__ __forceinline__ uint32_t Spread(uint32_t word) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(mask) : "r"(word));
  return mask;
}

template <class T, int N>
__device__ __forceinline__ Packed<T, N> ApplyAll(const Packed<T, N>& v, const uint4& kept, Accumulator<T> scale) {
  Packed<T, N> result;
  if constexpr (kIsPairs<T, N>) {
    const uint32_t words[4] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = WidenPair<T>(v.v[i]);
      result.v[i] = NarrowPair<T>(pair.x * scale, pair.y * scale) & Spread(words[i]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) result.v[j] = Apply(v.v[j], IsKept(kept, j), scale);
  }
  return result;
}

// The elements of a vector that exist, up to `left` of them.
template <class T, int N>
__device__ __forceinline__ Packed<T, N> LoadPart(const T* from, int64_t left) {
  T elements[N];
#pragma unroll
  for (int j = 0; j < N; ++j) elements[j] = j < left ? from[j] : T(0.0f);
  Packed<T, N> v;
  memcpy(&v, elements, sizeof(v));
  return v;
}

template <class T, int N>
__device__ __forceinline__ void StorePart(T* to, int64_t left, const Packed<T, N>& v) {
  T elements[N];
  memcpy(elements, &v, sizeof(v));
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < left) to[j] = elements[j];
}

// Vectors whose elements are numbered from a multiple of their length, so that the bits of each are of one call. A
// thread has one of a small array, which is a matter of latency, and two of a large one.
template <class T, int kVectors>
__global__ __launch_bounds__(kThreads, kVectors == 1 ? 4 : 6) void VectorKernel(const T* all_x, Seeds seeds, T* all_y,
                                                                                Shape shape, FastDiv by_blocks,
                                                                                FastDiv by_row, uint32_t threshold,
                                                                                Accumulator<T> scale, bool aligned) {
  constexpr int N = kVecLength<T>;
  const Problem<T> p(all_x, seeds, all_y, shape, by_blocks, threshold);
  const int64_t first = int64_t{p.block} * (kVectors * kThreads) + threadIdx.x;
  Packed<T, N> v[kVectors];
  // What of a block lies inside, or is a thread's only vector, is loaded before anything else.
  const int64_t last = kVectors == 1 ? first : (int64_t{p.block} + 1) * (kVectors * kThreads) - 1;
  const bool whole = aligned && (last + 1) * N <= p.size;
  if (whole) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) v[u] = *reinterpret_cast<const Packed<T, N>*>(p.x + (first + u * kThreads) * N);
  }
  const Generator generator = p.MakeGenerator();
  const uint64_t start = p.Start();
  const auto kept = [&](int64_t i) {
    uint64_t number = start + i * N;
    if (shape.pitch != shape.columns) {
      int within;
      const int64_t row = by_row.Div(static_cast<int>(i), &within);
      number = start + row * shape.pitch + int64_t{within} * N;
    }
    uint4 kept = generator.Kept(number / kPerCall);
    // A shorter vector's elements are among the later ones of the call.
    if (N <= 4 && number & 4) kept = {kept.z, kept.w, 0, 0};
    if (N <= 2 && number & 2) kept.x = kept.y;
    return kept;
  };
  if (whole) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int64_t i = first + u * kThreads;
      StoreUnsplit<T, N>(p.y + i * N, ApplyAll<T, N>(v[u], kept(i), scale));
    }
  } else {
#pragma unroll 1
    for (int64_t i = first; i < first + kVectors * kThreads && i * N < p.size; i += kThreads) {
      const bool vector = aligned && (i + 1) * N <= p.size;
      v[0] = vector ? *reinterpret_cast<const Packed<T, N>*>(p.x + i * N) : LoadPart<T, N>(p.x + i * N, p.size - i * N);
      v[0] = ApplyAll<T, N>(v[0], kept(i), scale);
      if (vector)
        StoreUnsplit<T, N>(p.y + i * N, v[0]);
      else
        StorePart<T, N>(p.y + i * N, p.size - i * N, v[0]);
    }
  }
}

// An element a thread, and a call for each.
template <class T>
__global__ __launch_bounds__(kThreads) void ElementKernel(const T* all_x, Seeds seeds, T* all_y, Shape shape,
                                                          FastDiv by_blocks, uint32_t threshold, Accumulator<T> scale) {
  const Problem<T> p(all_x, seeds, all_y, shape, by_blocks, threshold);
  const int64_t i = int64_t{p.block} * kThreads + threadIdx.x;
  if (i >= p.size) return;
  const int64_t row = i / shape.columns;
  const uint64_t number = p.Start() + row * shape.pitch + (i - row * shape.columns);
  const bool kept = IsKept(p.MakeGenerator().Kept(number / kPerCall), static_cast<int>(number % kPerCall));
  p.y[i] = Apply(p.x[i], kept, scale);
}

}  // namespace

cudaError_t Run(DType dtype, const Shape& shape, const void* x, const Seeds& seeds, void* y, uint32_t threshold,
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
      const bool aligned = IsVectorAligned(x, y) && (shape.problems == 1 || size % N == 0);
      const auto launch = [&](auto kernel, int vectors) {
        const int64_t blocks = CeilDiv(size, int64_t{N} * vectors * kThreads);
        return LaunchKernel(kernel, shape.problems * blocks, kThreads, stream, in, seeds, out, shape, FastDiv(blocks),
                            FastDiv(shape.columns / N), threshold, factor, aligned);
      };
      const bool small = shape.problems * size <= kMultiprocessors * kThreads * 2 * N;
      return small ? launch(VectorKernel<T, 1>, 1) : launch(VectorKernel<T, 2>, 2);
    }
    const int64_t blocks = CeilDiv(size, kThreads);
    return LaunchKernel(ElementKernel<T>, shape.problems * blocks, kThreads, stream, in, seeds, out, shape,
                        FastDiv(blocks), threshold, factor);
  });
}

}  // namespace jaxdnn::dropout
