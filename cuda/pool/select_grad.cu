// Max pooling's derivatives at a fixed index: the tangents of the winners, and the sum per input element of what its
// windows pass back.
//
// Bytes that must move: dy + index + dx backward; the tangent loads its elements one by one.
#include "cuda/common/launch.cuh"
#include "cuda/pool/march_grad.cuh"
#include "cuda/pool/ring_grad.cuh"
#include "cuda/pool/rows.cuh"
#include "cuda/pool/scatter.cuh"
#include "cuda/pool/spread.cuh"

namespace jaxdnn::pool {
namespace {

// Cell numbers of either width; -1 for no cell.
template <int N>
__device__ Vec<int, N> LoadIndex(const void* index, int64_t offset, bool wide) {
  Vec<int, N> cells;
  if (wide) {
#pragma unroll
    for (int j = 0; j < N; ++j) cells.v[j] = static_cast<const int32_t*>(index)[offset + j];
  } else {
    const auto bytes = Load<N>(static_cast<const uint8_t*>(index) + offset);
#pragma unroll
    for (int j = 0; j < N; ++j) cells.v[j] = bytes.v[j] == 255 ? -1 : bytes.v[j];
  }
  return cells;
}

// Channels of one element have their winners in different places, so each is loaded on its own.
template <int N, class T>
__global__ void GatherKernel(const __grid_constant__ Shape g, const __grid_constant__ Walk walk,
                             const __grid_constant__ Pitch in, FastDiv by_window1, FastDiv by_window2,
                             const T* __restrict__ t, const void* __restrict__ index, bool wide, T* __restrict__ y) {
  const int64_t flat = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  const Position o = walk.At(flat);
  const T* image = t + o.batch * in.batch + o.channel;
  int start[3];
#pragma unroll
  for (int d = 0; d < 3; ++d)
    start[d] = g.stride[d] ? o.at[d] * g.stride[d] - g.low[d] : BinOf(o.at[d], g.in[d], g.by_out[d]).begin;
  const Vec<int, N> winner = LoadIndex<N>(index, flat * N, wide);
  Vec<T, N> value;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    value.v[j] = static_cast<T>(0.0f);
    if (winner.v[j] < 0) continue;
    int k[3];
    k[0] = by_window1.Div(by_window2.Div(winner.v[j], &k[2]), &k[1]);
    int64_t offset = j;
#pragma unroll
    for (int d = 0; d < 3; ++d) offset += (start[d] + k[d] * g.dilation[d]) * in.dim[d];
    value.v[j] = image[offset];
  }
  Store(y + flat * N, value);
}

// kBytes: the index is known to take a byte, so that a thread can hold many.
template <int N, class T, bool kBytes>
struct Winners {
  using A = Accumulator<T>;
  using Element = T;
  static constexpr int kWidth = N;
  static constexpr bool kShortcuts = sizeof(T) < 8, kSame = false, kWhole = kShortcuts;
  using Index = std::conditional_t<kBytes, uint8_t, int>;

  struct Share {
    Words<T, N> value;
    Words<Index, N> winner;

    __device__ void Clear() {
      value = {};
      memset(&winner, -1, sizeof(winner));
    }
    template <bool = false>
    __device__ void Load(const Winners& task, int64_t offset, int, int, int) {
      value = LoadWords<N>(task.dy + offset);
      if constexpr (kBytes) {
        winner = LoadWords<N>(static_cast<const uint8_t*>(task.index) + offset);
      } else {
        winner = BitCast<Words<Index, N>>(LoadIndex<N>(task.index, offset, task.wide));
      }
    }
    __device__ void LoadBin(const Winners& task, int64_t offset, int) { Load(task, offset, 0, 0, 0); }
    __device__ void Add(A (&sum)[N], int cell) const {
      const auto v = BitCast<Vec<T, N>>(value);
      const auto cells = BitCast<Vec<Index, N>>(winner);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if constexpr (kBytes && N % 4 == 0) {
          AddIfByte(winner.v[j / 4], cell * 0x01010101u, j % 4, static_cast<A>(v.v[j]), sum[j]);
        } else {
          if (static_cast<int>(cells.v[j]) == cell) sum[j] += static_cast<A>(v.v[j]);
        }
      }
    }
  };

  Shape g;
  Walk walk;
  Pitch in, out;
  Cover cover;
  const T* __restrict__ dy;
  const void* __restrict__ index;
  T* __restrict__ dx;
  bool wide;

  __device__ Vec<T, N> Final(int64_t, const A (&sum)[N]) const { return Rounded<T>(sum); }
};

}  // namespace

cudaError_t Gather(const Geometry& g, DType dtype, IndexType index_type, const void* t, const void* index, void* y,
                   cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(t);
    T* out = static_cast<T*>(y);
    return VisitWidth<T>(
        g.channels,
        [&](auto width) {
          const Walk walk(g.batch, g.out, g.channels, width);
          return LaunchKernel(GatherKernel<width(), T>, CeilDiv(walk.total, kThreads), kThreads, stream, Shape(g), walk,
                              Pitch(g.in, g.channels), FastDiv(g.window[1]), FastDiv(g.window[2]), in, index,
                              index_type == IndexType::kInt32, out);
        },
        in, static_cast<const uint8_t*>(index), out);
  });
}

cudaError_t Scatter(const Geometry& g, DType dtype, IndexType index_type, const void* dy, const void* index, void* dx,
                    cudaStream_t stream) {
  const Geometry apart = WithLoneWindowsApart(g);
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const uint8_t* bytes = static_cast<const uint8_t*>(index);
    const bool wide = index_type == IndexType::kInt32;
    const auto launch = [&](auto width, auto in_bytes) {
      constexpr int N = decltype(width)::value;
      const Winners<N, T, in_bytes()> task = {Shape(apart),
                                              Walk(0, g.in, g.channels, N),
                                              Pitch(g.in, g.channels),
                                              Pitch(g.out, g.channels),
                                              Cover(apart),
                                              in,
                                              index,
                                              out,
                                              wide};
      const auto spread = [&] {
        const auto any = [&] { return LaunchSpread(task, stream); };
        if constexpr (in_bytes() && kIsTuned<T>) return LaunchTiles(task, stream, any);
        return any();
      };
      if constexpr (in_bytes() && kIsTuned<T> && N == kVecLength<T>) {
        if (!WindowsAreApart(apart))
          return LaunchRingGrad<3>(g, in, bytes, out, stream,
                                   [&] { return LaunchMarchGrad(g, in, bytes, out, stream, spread); });
      }
      return spread();
    };
    const auto general = [&] {
      return VisitWidth<T>(
          g.channels,
          [&](auto width) {
            if constexpr (sizeof(T) < 8) {  // for double there is the general kernel alone
              if (!wide) return launch(width, std::true_type{});
            }
            return launch(width, std::false_type{});
          },
          in, bytes, out);
    };
    if constexpr (kIsTuned<T>) {
      if (wide) return general();
      const auto scatter = [&] { return LaunchScatter(g, in, bytes, out, stream, general); };
      // Measured: 2-byte types lose by sums in shared memory where another kernel will do.
      return sizeof(T) == 2 ? LaunchRowsGrad(g, in, bytes, out, stream, scatter) : scatter();
    } else {
      return general();
    }
  });
}

}  // namespace jaxdnn::pool
