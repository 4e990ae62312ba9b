// The block-level matrix product of the CUDA-core kernels for float32 whose channels come in fours, in wide tiles.
//
// A thread has 8 x 8 sums: 16 numbers for 64 products. They are four squares of 4 x 4, apart, so that what lanes read
// at once lies side by side. While a block multiplies a step, cp.async brings the next.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/conv/tile.cuh"

namespace jaxdnn::conv {

constexpr int kFloatDepth = SimtDepth(DType::kF32);

template <int kColumns_>
struct FloatTile {
  static constexpr int kRows = 128, kColumns = kColumns_, kDepth = kFloatDepth, kThreads = kRows * kColumns / 64;
  static constexpr int kBlocks = kColumns == 128 ? 2 : 3;  // of a multiprocessor, by their shared memory
  // Steps that are summed by themselves, so that rounding errors grow with the square root of their number and of the
  // terms of one, not with all terms.
  static constexpr int kChunk = 8;
  static constexpr int kFours = 16;  // of a thread's sums
  using Four = Vec<float, 4>;

  // An operand's numbers of a step. Four lines of depths lie side by side, and eight banks further the next four, so
  // that lanes which store along the depth meet in none.
  template <int kExtent>
  struct Lines {
    float of[kDepth / 4][4 * kExtent + 8];
    __device__ float* At(int k, int i) { return &of[k / 4][k % 4 * kExtent + i]; }
    __device__ Four Get(int k, int i) const { return *reinterpret_cast<const Four*>(&of[k / 4][k % 4 * kExtent + i]); }
  };

  struct Shared {
    Lines<kRows> a[2];
    Lines<kColumns> b[2];
    Four sums[kFours][kThreads];  // of whole chunks
  };

  // Of this thread's first square. Of the lanes' numbers bits 1 to 3 are rows, bits 0 and 4 are columns: eight lanes
  // then read neighbouring fours of either.
  static __device__ int Row() { return threadIdx.x / 32 % 2 * 32 + threadIdx.x / 2 % 8 * 4; }
  static __device__ int Column() { return threadIdx.x / 64 * 16 + threadIdx.x / 16 % 2 * 8 + threadIdx.x % 2 * 4; }
  // Of number `four` of its sums.
  static __device__ int RowOf(int four) { return Row() + four / 8 * (kRows / 2) + four / 2 % 4; }
  static __device__ int ColumnOf(int four) { return Column() + four % 2 * (kColumns / 2); }
};

// Brings the steps of an operand, one after the other, to lines of kExtent numbers. element(k, i) is where in `array`
// the first of four neighbours lies whose depth is k and which belong to number i of the tile, or null for zeros; they
// are neighbours along the depth if element.Deep(). Where steps follow each other in memory, element.Advance() is how
// far apart.
template <class T, int kExtent, class Element>
struct Bringer {
  static constexpr int kEach = kExtent * T::kDepth / 4 / T::kThreads;
  static constexpr uint32_t kNone = UINT32_MAX;
  const float* array;
  const Element& element;
  uint32_t from[kEach];  // fours from the array's beginning, which take half the registers of pointers

  __device__ Bringer(const float* array, const Element& element) : array(array), element(element) {}

  // `follows` says that this step does, and must be the same for all threads.
  __device__ __forceinline__ void Start(typename T::template Lines<kExtent>& lines, int step, bool follows) {
    const Share<T, kExtent, 4> share{element.Deep()};
#pragma unroll
    for (int each = 0; each < kEach; ++each) {
      const int k = share.Depth(4 * each), i = share.Position(4 * each);
      if (!follows) {
        const float* found = element(step * T::kDepth + k, i);
        from[each] = found == nullptr ? kNone : static_cast<uint32_t>((found - array) / 4);
      } else if (from[each] != kNone) {
        from[each] += element.Advance() / 4;
      }
      const bool exist = from[each] != kNone;
      const float* source = array + int64_t{exist ? from[each] : 0} * 4;
      const uint32_t to = SharedAddress(lines.At(k, i));
      if (share.deep) {
#pragma unroll
        for (int j = 0; j < 4; ++j) CopyAsync<4>(to + j * kExtent * sizeof(float), source + j, exist);
      } else {
        CopyAsync<16>(to, source, exist);
      }
    }
  }
};

// shared.sums = A B over `steps` steps, each thread its own. Of `run` steps from a multiple of `run` on, all but the
// first follow the one before in memory.
template <class T, class ElementA, class ElementB>
__device__ __forceinline__ void MultiplyFloats(typename T::Shared& shared, const int& steps, const int& run,
                                               const float* array_a, const ElementA& element_a, const float* array_b,
                                               const ElementB& element_b) {
  using Four = typename T::Four;
  Bringer<T, T::kRows, ElementA> bring_a(array_a, element_a);
  Bringer<T, T::kColumns, ElementB> bring_b(array_b, element_b);
  int left = 0;
  const auto bring = [&](int step) {
    const bool follows = left != 0;
    bring_a.Start(shared.a[step % 2], step, follows);
    bring_b.Start(shared.b[step % 2], step, follows);
    left = (follows ? left : run) - 1;
    CommitCopies();
  };
  bring(0);
  float part[T::kFours][4] = {};
  for (int step = 0; step == 0 || step < steps; ++step) {
    WaitForCopies<0>();
    __syncthreads();  // the step is there for all, and the one before is read
    if (step + 1 < steps) bring(step + 1);
    const auto& a = shared.a[step % 2];
    const auto& b = shared.b[step % 2];
#pragma unroll
    for (int k = 0; k < T::kDepth; ++k) {
      const Four rows[] = {a.Get(k, T::Row()), a.Get(k, T::Row() + T::kRows / 2)};
      const Four columns[] = {b.Get(k, T::Column()), b.Get(k, T::Column() + T::kColumns / 2)};
#pragma unroll
      for (int four = 0; four < T::kFours; ++four)
#pragma unroll
        for (int j = 0; j < 4; ++j) part[four][j] += rows[four / 8].v[four / 2 % 4] * columns[four % 2].v[j];
    }
    if (step % T::kChunk < T::kChunk - 1 && step + 1 < steps) continue;
#pragma unroll
    for (int four = 0; four < T::kFours; ++four) {
      Four& sum = shared.sums[four][threadIdx.x];
      Four more = step < T::kChunk ? Four{} : sum;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        more.v[j] += part[four][j];
        part[four][j] = 0;
      }
      sum = more;
    }
  }
}

}  // namespace jaxdnn::conv
