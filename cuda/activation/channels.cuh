// An operand with one value per channel (a bias, or the slopes of prelu), met by elements in memory order.
#pragma once

#include "cuda/activation/activation.h"
#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::activation {

__host__ __device__ inline int64_t GroupSize(const ChannelShape& s) { return s.outer * s.channels * s.inner; }
__host__ __device__ inline int64_t Size(const ChannelShape& s) { return s.groups * GroupSize(s); }

// One channel is one run of elements, whatever the shape says.
inline ChannelShape MergedIfOne(const ChannelShape& s) {
  return s.channels == 1 ? ChannelShape{s.groups, 1, 1, s.outer * s.inner} : s;
}

// Fewer than 2^31 elements: launchers cut larger arrays (`ForEachChunk`).
template <class T>
struct ChannelOperand {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  const T* values;  // [groups, channels], or null where there is none
  bool rows_of_vectors;
  int channels, inner;
  FastDiv by_channels, by_inner, by_outer;
  FastDiv by_row;  // Vectors in a row of channels, where the channels are last and fill whole vectors.

  ChannelOperand(const void* p, const ChannelShape& shape) : values(static_cast<const T*>(p)) {
    const ChannelShape s = MergedIfOne(shape);
    rows_of_vectors = s.groups == 1 && s.inner == 1 && s.channels % N == 0 && IsVectorAligned(p);
    channels = static_cast<int>(s.channels);
    inner = static_cast<int>(s.inner);
    by_channels = FastDiv(s.channels);
    by_inner = FastDiv(s.inner);
    by_outer = FastDiv(s.outer);
    by_row = FastDiv(s.channels / N);
  }

  // Without an operand it is -0, which changes nothing that it is added to.
  __device__ A At(int64_t element) const {
    return values == nullptr ? A(-0.0) : Of(by_inner.Div(static_cast<int>(element)));
  }

  // Of vector i's elements.
  __device__ void Get(int64_t i, A (&out)[N]) const {
    if (values == nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = A(-0.0);
    } else if (rows_of_vectors) {
      int column;
      by_row.Div(static_cast<int>(i), &column);
      const auto v = reinterpret_cast<const Vec<T, N>*>(values)[column];
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = static_cast<A>(v.v[j]);
    } else if (inner >= N) {
      int within;
      const int slab = by_inner.Div(static_cast<int>(i * N), &within);
      const A first = Of(slab), second = within + N > inner ? Of(slab + 1) : first;
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = j < inner - within ? first : second;
    } else {
      int within, channel;
      int row = by_channels.Div(by_inner.Div(static_cast<int>(i * N), &within), &channel);
      int base = by_outer.Div(row) * channels;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        out[j] = static_cast<A>(values[base + channel]);
        if (++within == inner) {
          within = 0;
          if (++channel == channels) {
            channel = 0;
            base = by_outer.Div(++row) * channels;
          }
        }
      }
    }
  }

 private:
  // Of a slab, a run of `inner` elements that share a value.
  __device__ A Of(int slab) const {
    int channel;
    const int row = by_channels.Div(slab, &channel);
    return static_cast<A>(values[by_outer.Div(row) * channels + channel]);
  }
};

// Calls launch(chunk, first) for chunks of fewer than 2^31 elements that begin at element `first`, a multiple of 8 at
// the beginning of a row of channels.
template <class F>
cudaError_t ForEachChunk(const ChannelShape& shape, F&& launch) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (Size(shape) <= kMost) return launch(shape, int64_t{0});
  const int64_t row = shape.channels * shape.inner;
  const int64_t rows = kMost / row / 8 * 8;
  if (rows == 0 || shape.groups > 1) return cudaErrorInvalidValue;
  for (int64_t begin = 0; begin < shape.outer; begin += rows) {
    ChannelShape chunk = shape;
    chunk.outer = std::min(rows, shape.outer - begin);
    if (const cudaError_t e = launch(chunk, begin * row); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace jaxdnn::activation
