// How the kernels of unaligned channels store their sums: straight from registers, since lines of results begin
// anywhere. What is written of a sector at different times meets in the L2 cache.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/unaligned.cuh"

namespace jaxdnn::conv {

// What a thread has of the sums of a warp's 16 rows, as wgmma leaves them: pairs of columns of two rows, eight apart,
// which are pixels of the result, or -1.
struct StorePlaces {
  int pixels[2];

  // pixel(i) is that of the i-th row.
  template <class Pixel>
  __device__ explicit StorePlaces(const Pixel& pixel) : pixels{pixel(Lane() / 4), pixel(Lane() / 4 + 8)} {}
  __device__ static int Lane() { return threadIdx.x % 32; }
  // The first of its columns.
  __device__ static int Column() { return 2 * (Lane() % 4); }
};

// The epilogue. What comes from far away is on its way together.
template <class Out, int kSums>
__device__ __forceinline__ void FinishSums(const UnalignedParams& q, const StorePlaces& at, int column, int width,
                                           float (&sums)[kSums]) {
  const auto visit = [&](const auto& add) {
#pragma unroll
    for (int k = 0; k < kSums; ++k)
      if (const int mine = k / 4 * 8 + at.Column() + k % 2; mine < width)
        add(reinterpret_cast<float (&)[1]>(sums[k]), column + mine, at.pixels[k / 2 % 2]);
  };
  if (q.epilogue.bias != nullptr)
    visit([&](float (&sum)[1], int feature, int) { Add<Out>(sum, q.epilogue.bias, feature); });
  if (q.epilogue.residual != nullptr)
    visit([&](float (&sum)[1], int feature, int pixel) {
      if (pixel >= 0) Add<Out>(sum, q.epilogue.residual, int64_t{pixel} * q.features + feature);
    });
  ActivateInTurn<Out, 4>(sums, q.epilogue.activation);
}

template <class Out>
__device__ __forceinline__ auto RoundPair(float a, float b) {
  if constexpr (sizeof(Out) == 2)
    return NarrowPair<Out>(a, b);
  else
    return float2{a, b};
}

// One of the thread's rows, every other pair of `sums`, from an address on, of which so many columns exist. Elements
// leave in pairs; where the first of a pair is not on one, these are a second and the next lane's first.
template <class Out, int kSums>
__device__ __forceinline__ void StoreRow(const float (&sums)[kSums], Out* to, int left) {
  constexpr int kPairs = kSums / 4;
  using Pair = decltype(RoundPair<Out>(0, 0));
  const int lane = threadIdx.x % 32, next = lane / 4 * 4 + (lane + 1) % 4;
  const bool odd = reinterpret_cast<uintptr_t>(to) % sizeof(Pair) != 0, first = lane % 4 == 0;
  float further[kPairs];  // all of them before the first store, which would wait for each
#pragma unroll
  for (int j = 0; j < kPairs; ++j)
    further[j] = __shfl_sync(~0u, first && j + 1 < kPairs ? sums[4 * j + 4] : sums[4 * j], next);
  if (odd && first && left > 0) *to = static_cast<Out>(sums[0]);
  to += odd;
  left -= odd;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const float a = odd ? sums[4 * j + 1] : sums[4 * j], b = odd ? further[j] : sums[4 * j + 1];
    if (8 * j + 1 < left) *reinterpret_cast<Pair*>(to + 8 * j) = RoundPair<Out>(a, b);
    if (8 * j + 1 == left) to[8 * j] = static_cast<Out>(a);
  }
}

template <class Out, int kSums>
__device__ __forceinline__ void StoreRows(const UnalignedParams& q, const StorePlaces& at, int column,
                                          float (&sums)[kSums], Out* out) {
  const int width = min(q.columns, q.features - column);
  if (q.finish) FinishSums<Out>(q, at, column, width, sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = at.pixels[half], mine = at.Column();
    StoreRow(sums, out + (int64_t{pixel} * q.features + column + mine), pixel < 0 ? 0 : width - mine);
    Rotate<2>(sums);
  }
}

// To the result's type: floats, or as the operands.
template <class In, int kSums>
__device__ __forceinline__ void StoreRowsAs(const UnalignedParams& q, const StorePlaces& at, int column,
                                            float (&sums)[kSums], void* out) {
  if (sizeof(In) == 4 || q.wide)
    StoreRows(q, at, column, sums, static_cast<float*>(out));
  else
    StoreRows(q, at, column, sums, static_cast<In*>(out));
}

}  // namespace jaxdnn::conv
