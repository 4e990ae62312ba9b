// Short rows of any length in shared memory: a run of them that begins on a vector is copied as it is, the results take
// its place, and it is copied back.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/softmax/ops.cuh"

namespace jaxdnn::softmax {

// N elements of Fill.
template <class Op, class T, int N>
__device__ Packed<T, N> Filled(int input) {
  typename Op::A fill[N];
#pragma unroll
  for (auto& each : fill) each = Op::Fill(input);
  return Narrow<T, N>(fill);
}

// Starts to copy `count` elements to shared memory, which are there after WaitRun.
template <class T>
__device__ void LoadRun(T* held, const T* from, int count) {
  constexpr int L = kVecLength<T>;
  using V = Vec<T, L>;
  const int whole = count / L;
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += blockDim.x)
    CopyAsync(reinterpret_cast<V*>(held) + i, reinterpret_cast<const V*>(from) + i);
  if (const int i = whole * L + threadIdx.x; i < count) held[i] = from[i];
}
__device__ inline void WaitRun() {
  CommitAsync();
  WaitAsync<0>();
  __syncthreads();
}

template <class T>
__device__ void StoreRun(T* to, const T* held, int count) {
  constexpr int L = kVecLength<T>;
  using V = Vec<T, L>;
  const int whole = count / L;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += blockDim.x)
    reinterpret_cast<V*>(to)[i] = reinterpret_cast<const V*>(held)[i];
  if (const int i = whole * L + threadIdx.x; i < count) to[i] = held[i];
}

// The first of the groups of 1 << span lanes that the thread's warp has.
__device__ inline int FirstOfWarp(int span) { return static_cast<int>(threadIdx.x & ~31u) >> span; }

// The most whole words of a lane, and the longest row.
constexpr int kMaxPackedWords = 8;
template <class T>
constexpr int kMaxPackedRow = 32 * kMaxPackedWords * (4 / sizeof(T));

// The fewest lanes that hold a row, 1 << span, and their whole words.
struct PackedSpan {
  int span, whole;
};

// A row as the words of 4 bytes that it lies in, dealt out to the 1 << span lanes of a group. With elements of 2 bytes,
// the first word can have one of the row before, and the last one of the row after. A lane holds its words widened:
// `whole` of them, up to kMost, or just as many, and one more where there may be no word, or half of one.
template <class Op, class T, int kMost>
struct PackedRow {
  using A = Accumulator<T>;
  static constexpr int kInputs = Op::kInputs, kWord = 4 / sizeof(T);
  using Word = Packed<T, kWord>;

  T* held;    // of the first input
  int pitch;  // from there to the next
  int lane, first, span, whole;
  bool is_first_shared;
  int left;  // elements of the row from the lane's last word on
  A v[kMost > 0 ? kMost : 1][kInputs][kWord], last[kInputs][kWord];

  // Row `row` of those of n elements that begin at `held`.
  __device__ PackedRow(T* held, int pitch, int row, int n, PackedSpan shares)
      : held(held), pitch(pitch), span(shares.span), whole(shares.whole) {
    const int start = row * n, skew = start % kWord;
    lane = threadIdx.x & ((1 << span) - 1);
    first = start / kWord + lane;
    is_first_shared = kWord > 1 && lane == 0 && skew != 0;
    left = n + skew - (lane + (whole << span)) * kWord;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
#pragma unroll
      for (int s = 0; s < kMost; ++s) {
        if (s >= whole) break;
        Widen<T, kWord>(*At(k, s), v[s][k]);
      }
      if (is_first_shared) v[0][k][0] = Op::Fill(k);
#pragma unroll
      for (int i = 0; i < kWord; ++i) {
        last[k][i] = Op::Fill(k);
        if (IsInLast(i)) last[k][i] = static_cast<A>(reinterpret_cast<const T*>(At(k, whole))[i]);
      }
    }
  }

  __device__ Word* At(int k, int s) const { return reinterpret_cast<Word*>(held + k * pitch) + first + (s << span); }
  __device__ bool IsInLast(int i) const { return i < left && !(i == 0 && whole == 0 && is_first_shared); }

  // Hands out the lane's words.
  template <class Visit>
  __device__ void Each(Visit&& visit) {
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      if (s >= whole) break;
      visit(v[s]);
    }
    visit(last);
  }

  // Puts result(word, i) in the place of element i of each word.
  template <class Result>
  __device__ void Store(Result&& result) const {
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      if (s >= whole) break;
      A results[kWord];
#pragma unroll
      for (int i = 0; i < kWord; ++i) results[i] = result(v[s], i);
      if (s == 0 && is_first_shared)
        reinterpret_cast<T*>(At(0, 0))[kWord - 1] = static_cast<T>(results[kWord - 1]);
      else
        *At(0, s) = Narrow<T, kWord>(results);
    }
#pragma unroll
    for (int i = 0; i < kWord; ++i)
      if (IsInLast(i)) reinterpret_cast<T*>(At(0, whole))[i] = static_cast<T>(result(last, i));
  }
};

template <class T>
PackedSpan SpanOf(int64_t n) {
  const int words = static_cast<int>(CeilDiv(n * sizeof(T), 4));
  int span = 0;
  while ((words - 1) >> span > kMaxPackedWords) ++span;
  return {span, (words - 1) >> span};
}

// Calls run(whole) with a lane's whole words as a constant.
template <int kWhole = kMaxPackedWords, class Run>
cudaError_t VisitPackedWords(int whole, Run&& run) {
  if constexpr (kWhole > 0)
    if (whole < kWhole) return VisitPackedWords<kWhole - 1>(whole, run);
  return run(std::integral_constant<int, kWhole>());
}

}  // namespace jaxdnn::softmax
