// What the kernels for any window share, in which each thread walks over the windows of a few elements.
#pragma once

#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {

constexpr int kDirectThreads = 256;

// Which elements a thread owns: N neighbouring ones of the inner dimension, in row-major order.
struct Walk {
  int64_t vectors, total;  // of an inner row, and in all
  FastDiv by_vectors;
  WideDiv by_extent[3];

  Walk(const Problem& p, int width)
      : vectors(p.inner / width),
        total(p.Elements() / width),
        by_vectors(vectors),
        by_extent{WideDiv(p.extent[0]), WideDiv(p.extent[1]), WideDiv(p.extent[2])} {}

  // Position in the three dimensions of vector number `flat`, and its number among those of an inner row; returns the
  // number of planes of the last two dimensions before it.
  __device__ int64_t At(int64_t flat, int (&at)[3], int64_t* vector) const {
    if (total <= INT32_MAX) {
      int first, rest = by_vectors.Div(static_cast<int>(flat), &first);
#pragma unroll
      for (int d = 2; d >= 1; --d) rest = by_extent[d].Div(rest, &at[d]);
      by_extent[0].Div(rest, &at[0]);
      *vector = first;
      return rest;
    }
    int64_t rest = flat / vectors;
    *vector = flat - rest * vectors;
#pragma unroll
    for (int d = 2; d >= 1; --d) rest = by_extent[d].Div(rest, &at[d]);
    by_extent[0].Div(rest, &at[0]);
    return rest;
  }
};

// Calls f(offset) for every element of the window, or mirrored window, around `at`.
template <class F>
__device__ void ForWindow(const Problem& p, const int (&at)[3], bool mirrored, F&& f) {
  int first[3], last[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    first[d] = -min(mirrored ? p.after[d] : p.before[d], at[d]);
    last[d] = min(mirrored ? p.before[d] : p.after[d], p.extent[d] - 1 - at[d]);
  }
  for (int i0 = first[0]; i0 <= last[0]; ++i0)
    for (int i1 = first[1]; i1 <= last[1]; ++i1) {
      const int64_t row = (int64_t{i0} * p.extent[1] + i1) * p.extent[2];
#pragma unroll 4
      for (int i2 = first[2]; i2 <= last[2]; ++i2) f((row + i2) * p.inner);
    }
}

// N neighbours, as the accumulator's type.
template <int N, class T>
__device__ void LoadWide(const T* p, Accumulator<T> (&wide)[N]) {
  const auto* packed = reinterpret_cast<const Packed<T, N>*>(p);
  if constexpr (sizeof(*packed) < 4)
    Widen<T>(*packed, wide);
  else
    Widen<T>(LoadConstant(packed), wide);
}

template <int N, class T>
__device__ void StoreNarrow(T* p, const Accumulator<T> (&wide)[N]) {
  StorePacked<T, N>(p, Narrow<T, N>(wide));
}

// Calls f with the width of a thread's vectors, as an integral constant.
template <class T, class F, class... P>
cudaError_t VisitDirectWidth(const Problem& p, F&& f, const P*... arrays) {
  if constexpr (sizeof(T) < 8) {
    if (p.inner % 4 == 0 && IsVectorAligned(arrays...)) return f(std::integral_constant<int, 4>{});
  }
  return f(std::integral_constant<int, 1>{});
}

inline bool Fits(const Problem& p, DType dtype, Scratch scratch) {
  return scratch.bytes >= static_cast<size_t>(p.Elements()) * 2 * (dtype == DType::kF64 ? 8 : 4);
}

}  // namespace jaxdnn::lrn
