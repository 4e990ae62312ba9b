// A line of the operand times the filter of small groups, a warp's columns at a time (grouped.cu).
#pragma once

#include "cuda/conv/grouped.cuh"

namespace jaxdnn::conv {

// sums += those of one tap and tile, of whole fragments.
template <class T>
__device__ __forceinline__ void MultiplyTile(float (&sums)[4], const uint32_t (&a)[T::kFragments][4], const uint32_t* b,
                                             int tile) {
  using In = typename T::In;
  if constexpr (T::kWords == 1) {
    Mma<In>(sums, a[tile / 2][tile % 2 * 2], a[tile / 2][tile % 2 * 2 + 1], b[0]);
  } else if constexpr (!T::kWide) {
    Mma<In>(sums, a[tile], b[0], b[1]);
  } else {
#pragma unroll
    for (int f = 0; f < T::kChunks / 2; ++f) Mma<In>(sums, a[f], b[2 * f], b[2 * f + 1]);
  }
}

// The operand's pixels that the columns' tap s meets, in the line at `slot`. `place` are the lane's addresses there.
template <class T>
__device__ __forceinline__ void LoadPixels(uint32_t slot, const int (&place)[T::kTaps], int s,
                                           uint32_t (&a)[T::kFragments][4]) {
#pragma unroll
  for (int f = 0; f < T::kFragments; ++f) {
    LoadMatrices<false>(a[f], T::Places::In(slot, place, s, f));
    if constexpr (sizeof(typename T::In) == 4) RoundToTf32(a[f]);
  }
}

template <class T>
__device__ __forceinline__ void MultiplyTap(typename T::Sums& sums, const uint32_t (&a)[T::kFragments][4],
                                            const GroupedFilter<T>& filter, int tap) {
  constexpr int kLast = T::kFragments - 1;
#pragma unroll
  for (int j = 0; j < T::kTiles; ++j) {
    const uint32_t* const b = &filter.words[tap][j * T::kWords];
    MultiplyTile<T>(sums[j], a, b, j);
    if constexpr (T::kHasHalf) Mma<typename T::In>(sums[j], a[kLast][0], a[kLast][1], b[2 * kLast]);
  }
}

// A line of the operand times the filter, into the sums of those lines of the result it belongs to. kParity is its
// number's, counted from the first that a result reads.
template <class T, int kParity>
__device__ __forceinline__ void MultiplyLine(uint32_t slot, const int (&place)[T::kTaps],
                                             const GroupedFilter<T>& filter, typename T::Sums (&sums)[T::kSums]) {
  const auto for_each_result = [&](auto&& multiply) {
#pragma unroll
    for (int r = 0; r < T::kTaps; ++r)
      if ((r + kParity) % T::kStep == 0) multiply(sums[T::kStep == 1 ? 2 - r : r == 0], r);
  };
  if constexpr (T::kHasHalf) {
    // Two halves are a product too. All sums take turns, so that none waits for its last product.
    constexpr int kLast = T::kFragments - 1;
    uint32_t a[3][T::kFragments][4];
#pragma unroll
    for (int s = 0; s < 3; ++s) LoadPixels<T>(slot, place, s, a[s]);
    const uint32_t halves[4] = {a[0][kLast][0], a[0][kLast][1], a[1][kLast][0], a[1][kLast][1]};
#pragma unroll
    for (int step = 0; step < 5; ++step)
      for_each_result([&](typename T::Sums& to, int r) {
#pragma unroll
        for (int j = 0; j < T::kTiles; ++j) {
          const auto words = [&](int s) { return &filter.words[3 * r + s][j * T::kWords]; };
          if (step < 3)
            MultiplyTile<T>(to[j], a[step], words(step), j);
          else if (step == 3)
            Mma<typename T::In>(to[j], halves, words(0)[2 * kLast], words(1)[2 * kLast]);
          else
            Mma<typename T::In>(to[j], a[2][kLast][0], a[2][kLast][1], words(2)[2 * kLast]);
        }
      });
  } else {
#pragma unroll
    for (int i = 0; i < T::kPlanes * T::kTaps; ++i) {
      const int plane = i / T::kTaps, s = i % T::kTaps;
      uint32_t a[T::kFragments][4];
      LoadPixels<T>(slot + plane * T::kPlaneBytes, place, s, a);
      for_each_result([&](typename T::Sums& to, int r) { MultiplyTap<T>(to, a, filter, 9 * plane + 3 * r + s); });
    }
  }
}

}  // namespace jaxdnn::conv
