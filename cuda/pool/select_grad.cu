// Max pooling's derivatives at a fixed index: the tangents of the winners, and the sum per input element of what its
// windows pass back.
//
// Bytes that must move: dy + index + dx backward; the tangent loads its elements one by one.
#include "cuda/common/launch.cuh"
#include "cuda/pool/spread.cuh"

namespace jaxdnn::pool {
namespace {

// Channels of one element have their winners in different places, so each is loaded on its own.
template <int N, class T, class Index>
__global__ void GatherKernel(const __grid_constant__ Geometry g, const __grid_constant__ Walk walk,
                             const __grid_constant__ Pitch in, FastDiv by_window1, FastDiv by_window2,
                             const T* __restrict__ t, const Index* __restrict__ index, T* __restrict__ y) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position o = walk.At(flat);
  const T* image = t + o.batch * in.batch + o.channel;
  int start[3];
#pragma unroll
  for (int d = 0; d < 3; ++d)
    start[d] = g.stride[d] ? o.at[d] * g.stride[d] - g.low[d] : BinOf(o.at[d], g.out[d], g.in[d]).begin;
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
    for (int d = 0; d < 3; ++d) offset += (start[d] + k[d] * g.dilation[d]) * in.dim[d];
    value.v[j] = image[offset];
  }
  Store(y + flat * N, value);
}

template <int N, class T, class Index>
struct Winners {
  using A = Accumulator<T>;
  static constexpr int kWidth = N;
  static constexpr bool kTiles = sizeof(T) < 8 && N > 2 && sizeof(Index) == 1;

  struct Share {
    Vec<T, N> value;
    Vec<Index, N> winner;

    __device__ void Clear() {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        value.v[j] = static_cast<T>(0.0f);
        winner.v[j] = static_cast<Index>(-1);
      }
    }
    __device__ void Load(const Winners& task, int64_t offset, int, int, int) {
      value = pool::Load<N>(task.dy + offset);
      winner = pool::Load<N>(task.index + offset);
    }
    __device__ void Add(A (&sum)[N], int cell) const {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (static_cast<int>(winner.v[j]) == cell) sum[j] += static_cast<A>(value.v[j]);
    }
  };

  Geometry g;
  Walk walk;
  Pitch in, out;
  Cover cover;
  const T* __restrict__ dy;
  const Index* __restrict__ index;
  T* __restrict__ dx;

  __device__ void Put(int64_t to, const A (&sum)[N]) const { StoreRounded(dx + to, sum); }
};

}  // namespace

cudaError_t Gather(const Geometry& g, DType dtype, IndexType index_type, const void* t, const void* index, void* y,
                   cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    return VisitIndexType(index_type, [&](auto stored) {
      using T = typename decltype(type)::type;
      using Index = typename decltype(stored)::type;
      const T* in = static_cast<const T*>(t);
      const Index* winner = static_cast<const Index*>(index);
      T* out = static_cast<T*>(y);
      return VisitWidth<T>(
          g.channels,
          [&](auto width) {
            const Walk walk(g.batch, g.out, g.channels, width);
            return LaunchKernel(GatherKernel<width(), T, Index>, CeilDiv(walk.total, kThreads), kThreads, stream, g,
                                walk, Pitch(g.in, g.channels), FastDiv(g.window[1]), FastDiv(g.window[2]), in, winner,
                                out);
          },
          in, winner, out);
    });
  });
}

cudaError_t Scatter(const Geometry& g, DType dtype, IndexType index_type, const void* dy, const void* index, void* dx,
                    cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    return VisitIndexType(index_type, [&](auto stored) {
      using T = typename decltype(type)::type;
      using Index = typename decltype(stored)::type;
      const T* in = static_cast<const T*>(dy);
      const Index* winner = static_cast<const Index*>(index);
      T* out = static_cast<T*>(dx);
      return VisitWidth<T>(
          g.channels,
          [&](auto width) {
            constexpr int N = decltype(width)::value;
            const Winners<N, T, Index> task = {g,
                                               Walk(0, g.in, g.channels, N),
                                               Pitch(g.in, g.channels),
                                               Pitch(g.out, g.channels),
                                               Cover(g),
                                               in,
                                               winner,
                                               out};
            return LaunchSpread(task, stream);
          },
          in, winner, out);
    });
  });
}

}  // namespace jaxdnn::pool
