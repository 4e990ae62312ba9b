// Max pooling, the tangent of its winners, and their sum per input element.
//
// One thread computes N neighbouring channels of one element: forward it visits the cells of its window, backward the
// windows over its input element (at most ceil(window / stride) in a dimension), which replaces atomics. Bytes that
// must move: x + y forward (+ index), dy + index + dx backward; neighbours' reads overlap in L1.
#include <cmath>

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/pool.cuh"

namespace jaxdnn::pool {
namespace {

struct NoIndex {};

// The winners so far of N channels. A cell wins over all before it when it is larger, or the first NaN. The search
// starts at -inf with the window's first cell inside the input, which therefore wins when there is nothing larger.
template <class T, int N>
struct Best {
  T value[N];
  int index[N];

  __device__ explicit Best(int first) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      value[j] = static_cast<T>(-INFINITY);
      index[j] = first;
    }
  }
  __device__ void Consider(const Vec<T, N>& v, int cell) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const auto candidate = static_cast<Accumulator<T>>(v.v[j]), best = static_cast<Accumulator<T>>(value[j]);
      if (!(candidate <= best) && best == best) {
        value[j] = v.v[j];
        index[j] = cell;
      }
    }
  }
  __device__ T Value(int j) const { return value[j]; }
  __device__ int Index(int j) const { return index[j]; }
};

__device__ inline unsigned Bits(__half2 v) { return reinterpret_cast<unsigned&>(v); }
__device__ inline unsigned Bits(__nv_bfloat162 v) { return reinterpret_cast<unsigned&>(v); }

// The same with two 16-bit channels an instruction, cell numbers too: comparisons that give masks, and selections by
// them. That takes half the instructions, of which a 3x3 window already has more than its memory traffic hides.
template <class T, int N>
struct PairBest {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  unsigned value[N / 2], index[N / 2];

  __device__ explicit PairBest(int first) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      value[j] = std::is_same_v<T, __half> ? 0xFC00FC00u : 0xFF80FF80u;
      index[j] = Twice(first);
    }
  }
  __device__ void Consider(const Vec<T, N>& v, int cell) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const Pair candidate(v.v[2 * j], v.v[2 * j + 1]);
      const Pair best = reinterpret_cast<const Pair&>(value[j]);
      const unsigned wins = __hgtu2_mask(candidate, best) & __heq2_mask(best, best);
      value[j] = (Bits(candidate) & wins) | (value[j] & ~wins);
      index[j] = (Twice(cell) & wins) | (index[j] & ~wins);
    }
  }
  __device__ T Value(int j) const { return reinterpret_cast<const T*>(value)[j]; }
  __device__ int Index(int j) const { return static_cast<int16_t>(index[j / 2] >> (j % 2 * 16)); }

  static __device__ unsigned Twice(int k) { return (k & 0xFFFF) * 0x10001u; }
};

template <int N, class T, class Index>
__global__ void MaxPoolKernel(const __grid_constant__ Geometry g, const __grid_constant__ Walk walk,
                              const __grid_constant__ Pitch in, const T* __restrict__ x, T* __restrict__ y,
                              Index* __restrict__ index) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position o = walk.At(flat);
  const Cells c0 = CellsOf(g, 0, o.at[0]), c1 = CellsOf(g, 1, o.at[1]), c2 = CellsOf(g, 2, o.at[2]);
  const bool none = c0.count == 0 || c1.count == 0 || c2.count == 0;
  const auto cell = [&](int k0, int k1) {
    return ((c0.begin + k0) * g.window[1] + c1.begin + k1) * g.window[2] + c2.begin;
  };

  using Winner =
      std::conditional_t<sizeof(T) == 2 && N % 2 == 0 && !std::is_same_v<Index, int32_t>, PairBest<T, N>, Best<T, N>>;
  Winner best(none ? -1 : cell(0, 0));
  if (!none) {
    const T* first =
        x + o.batch * in.batch + c0.first * in.dim[0] + c1.first * in.dim[1] + c2.first * in.dim[2] + o.channel;
    for (int k0 = 0; k0 < c0.count; ++k0) {
      for (int k1 = 0; k1 < c1.count; ++k1) {
        const T* p = first + k0 * g.dilation[0] * in.dim[0] + k1 * g.dilation[1] * in.dim[1];
        int k = cell(k0, k1);
        for (int k2 = 0; k2 < c2.count; ++k2, ++k, p += g.dilation[2] * in.dim[2]) best.Consider(Load<N>(p), k);
      }
    }
  }

  Vec<T, N> value;
#pragma unroll
  for (int j = 0; j < N; ++j) value.v[j] = best.Value(j);
  Store(y + flat * N, value);
  if constexpr (!std::is_same_v<Index, NoIndex>) {
    Vec<Index, N> winner;
#pragma unroll
    for (int j = 0; j < N; ++j) winner.v[j] = static_cast<Index>(best.Index(j));
    Store(index + flat * N, winner);
  }
}

// Channels of one element have their winners in different places, so each is loaded on its own.
template <int N, class T, class Index>
__global__ void GatherKernel(const __grid_constant__ Geometry g, const __grid_constant__ Walk walk,
                             const __grid_constant__ Pitch in, FastDiv by_window1, FastDiv by_window2,
                             const T* __restrict__ t, const Index* __restrict__ index, T* __restrict__ y) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position o = walk.At(flat);
  const T* image = t + o.batch * in.batch + o.channel;
  const Vec<Index, N> winner = Load<N>(index + flat * N);
  Vec<T, N> value;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    value.v[j] = static_cast<T>(0.0f);
    if (winner.v[j] == static_cast<Index>(-1)) continue;
    int k[3];
    k[0] = by_window1.Div(by_window2.Div(static_cast<int>(winner.v[j]), &k[2]), &k[1]);
    int64_t offset = j;
#pragma unroll
    for (int d = 0; d < 3; ++d) offset += (o.at[d] * g.stride[d] - g.low[d] + k[d] * g.dilation[d]) * in.dim[d];
    value.v[j] = image[offset];
  }
  Store(y + flat * N, value);
}

template <int N, class T, class Index>
__global__ void ScatterKernel(const __grid_constant__ Geometry g, const __grid_constant__ Walk walk,
                              const __grid_constant__ Pitch out, const __grid_constant__ Cover cover,
                              const T* __restrict__ dy, const Index* __restrict__ index, T* __restrict__ dx) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position i = walk.At(flat);
  const Windows w0 = cover.Of(g, 0, i.at[0]), w1 = cover.Of(g, 1, i.at[1]), w2 = cover.Of(g, 2, i.at[2]);
  Accumulator<T> sum[N] = {};
  const int64_t image = i.batch * out.batch + i.channel;
  int k0 = w0.cell;
  for (int o0 = w0.first; o0 <= w0.last; o0 += w0.step, k0 -= w0.cell_step) {
    int k1 = w1.cell;
    for (int o1 = w1.first; o1 <= w1.last; o1 += w1.step, k1 -= w1.cell_step) {
      int64_t offset = image + o0 * out.dim[0] + o1 * out.dim[1] + w2.first * out.dim[2];
      int cell = (k0 * g.window[1] + k1) * g.window[2] + w2.cell;
      for (int o2 = w2.first; o2 <= w2.last; o2 += w2.step, offset += w2.step * out.dim[2], cell -= w2.cell_step) {
        const Vec<Index, N> winner = Load<N>(index + offset);
        const Vec<T, N> value = Load<N>(dy + offset);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (static_cast<int>(winner.v[j]) == cell) sum[j] += static_cast<Accumulator<T>>(value.v[j]);
        }
      }
    }
  }
  Vec<T, N> result;
#pragma unroll
  for (int j = 0; j < N; ++j) result.v[j] = static_cast<T>(sum[j]);
  Store(dx + flat * N, result);
}

template <class F>
cudaError_t VisitTypes(DType dtype, IndexType index_type, F&& f) {
  return VisitDType(dtype, [&](auto type) {
    return index_type == IndexType::kUint8 ? f(type, TypeTag<uint8_t>{}) : f(type, TypeTag<int32_t>{});
  });
}

template <class T, class Index>
cudaError_t LaunchMaxPool(const Geometry& g, const T* x, T* y, Index* index, cudaStream_t stream) {
  return VisitWidth<T>(
      g.channels,
      [&](auto width) {
        const Walk walk(g.batch, g.out, g.channels, width);
        return LaunchKernel(MaxPoolKernel<width(), T, Index>, CeilDiv(walk.total, kThreads), kThreads, stream, g, walk,
                            Pitch(g.in, g.channels), x, y, index);
      },
      x, y, index);
}

}  // namespace

cudaError_t MaxPool(const Geometry& g, DType dtype, IndexType index_type, const void* x, void* y, void* index,
                    cudaStream_t stream) {
  return VisitTypes(dtype, index_type, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(stored)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    if (index == nullptr) return LaunchMaxPool(g, in, out, static_cast<NoIndex*>(nullptr), stream);
    return LaunchMaxPool(g, in, out, static_cast<Index*>(index), stream);
  });
}

cudaError_t Gather(const Geometry& g, DType dtype, IndexType index_type, const void* t, const void* index, void* y,
                   cudaStream_t stream) {
  return VisitTypes(dtype, index_type, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(stored)::type;
    const T* in = static_cast<const T*>(t);
    const Index* winner = static_cast<const Index*>(index);
    T* out = static_cast<T*>(y);
    return VisitWidth<T>(
        g.channels,
        [&](auto width) {
          const Walk walk(g.batch, g.out, g.channels, width);
          return LaunchKernel(GatherKernel<width(), T, Index>, CeilDiv(walk.total, kThreads), kThreads, stream, g, walk,
                              Pitch(g.in, g.channels), FastDiv(g.window[1]), FastDiv(g.window[2]), in, winner, out);
        },
        in, winner, out);
  });
}

cudaError_t Scatter(const Geometry& g, DType dtype, IndexType index_type, const void* dy, const void* index, void* dx,
                    cudaStream_t stream) {
  return VisitTypes(dtype, index_type, [&](auto type, auto stored) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(stored)::type;
    const T* in = static_cast<const T*>(dy);
    const Index* winner = static_cast<const Index*>(index);
    T* out = static_cast<T*>(dx);
    return VisitWidth<T>(
        g.channels,
        [&](auto width) {
          const Walk walk(g.batch, g.in, g.channels, width);
          return LaunchKernel(ScatterKernel<width(), T, Index>, CeilDiv(walk.total, kThreads), kThreads, stream, g,
                              walk, Pitch(g.out, g.channels), Cover(g), in, winner, out);
        },
        in, winner, out);
  });
}

}  // namespace jaxdnn::pool
