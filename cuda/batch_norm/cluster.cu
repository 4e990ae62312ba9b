// A training step and its gradients of channels-last problems that are too large for a block's registers, and small
// enough for the shared memory of a cluster: its blocks share a tile of columns, and send each other what they have of
// the channels' sums. Memory is read once, by one kernel, whose time is that of its latencies; to fetch instructions is
// one of them, so that no loop is unrolled.
#include <cfloat>

#include "cuda/batch_norm/small.cuh"
#include "cuda/batch_norm/statistics.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/device_code.h"

namespace jaxdnn::batch_norm {
namespace {

constexpr int kBlocks = 2;  // on a multiprocessor
// Vectors side by side, which are a whole sector, and rows of a step.
constexpr int kWidth = 2, kHeight = kThreads / kWidth;
constexpr int kMostRanks = 16;
// Vectors that a thread holds.
constexpr int kMostHeld = 24, kVectorBytes = 16;

struct ClusterTiling {
  int64_t n, c;
  FastDiv tiles;  // of one outer index
  int ranks;      // blocks of a cluster
  int rows;       // of a block; the last have fewer
  int held;       // vectors of a thread, of each array
};

// A thread's place: it keeps to V columns, and walks down its block's rows.
template <class Type>
struct ClusterPlace {
  using T = Type;
  static constexpr int V = kVecLength<T>, kChannels = kWidth * V;

  int64_t tile, first, base;  // the tile's first channel in parameters and in a row; the thread's first element
  int rank, column, rows;
  const ClusterTiling& t;

  __device__ explicit ClusterPlace(const ClusterTiling& t) : t(t) {
    int across;
    const int cluster = static_cast<int>(blockIdx.x) / t.ranks, outer = t.tiles.Div(cluster, &across);
    rank = static_cast<int>(blockIdx.x) - cluster * t.ranks;
    column = threadIdx.x % kWidth * V;
    first = int64_t{across} * kChannels;
    tile = outer * t.c + first;
    const int y = threadIdx.x / kWidth;
    base = (outer * t.n + int64_t{rank} * t.rows + y) * t.c + first + column;
    rows = first + column < t.c ? max(0, (Count(rank) - y + kHeight - 1) / kHeight) : 0;
  }

  // The rows of a block.
  __device__ int Count(int of) const {
    return static_cast<int>(max(int64_t{0}, min(int64_t{t.rows}, t.n - int64_t{of} * t.rows)));
  }
  __device__ bool HasChannel(int i) const { return first + i < t.c; }
  __device__ int64_t At(int k) const { return base + int64_t{k} * kHeight * t.c; }

  // Starts to copy the thread's vectors, which are kThreads apart. All are under way at once.
  __device__ void Load(const T* from, Vec<T, V>* held) const {
#pragma unroll 1
    for (int k = 0; k < rows; ++k) CopyAsync(held + k * kThreads, reinterpret_cast<const Vec<T, V>*>(from + At(k)));
  }
};

// Sums over the threads of a column, in each of them. Within a warp every step halves the channels that a lane has.
template <class Value, int V, class Op>
__device__ void SumColumn(Value (&v)[V], Op op, Value (&of_warps)[kThreads / 32][kWidth * V]) {
  const int column = threadIdx.x % kWidth * V;
  int channel = column;
#pragma unroll
  for (int half = V / 2, mask = kWidth; half > 0; half /= 2, mask *= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const Value given = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
      v[i] = op(kept, ShuffleXor(given, mask));
    }
    if (upper) channel += half;
  }
#pragma unroll
  for (int mask = kWidth * V; mask < 32; mask *= 2) v[0] = op(v[0], ShuffleXor(v[0], mask));
  of_warps[threadIdx.x / 32][channel] = v[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = of_warps[0][column + i];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp)
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = op(v[i], of_warps[warp][column + i]);
}

// What the cluster's blocks have of a channel, N numbers, in each of them.
template <class P, int N>
class Exchange {
 public:
  using A = Accumulator<typename P::T>;
  static constexpr int V = P::V;

  // The block begins with this.
  __device__ void Open(int ranks) {
    if (threadIdx.x == 0) {
      mailbox_.Open();
      mailbox_.Expect(ranks * N * P::kChannels * static_cast<int>(sizeof(A)));
    }
    ClusterArriveRelaxed();
  }
  // What the thread's block has, which all threads of a column have, goes to every block: a thread to each.
  __device__ void Send(const P& p, const A (&of_block)[N][V]) {
    const int to = threadIdx.x / kWidth;
    ClusterWait();  // The others run.
    if (to >= p.t.ranks) return;
#pragma unroll
    for (int k = 0; k < N; ++k)
#pragma unroll
      for (int i = 0; i < V; i += 4)
        mailbox_.Send(reinterpret_cast<float4*>(&letters_[p.rank][k * P::kChannels + p.column + i]), to,
                      make_float4(of_block[k][i], of_block[k][i + 1], of_block[k][i + 2], of_block[k][i + 3]));
  }
  // Calls f(channel, rank, what that block has of the channel) in one thread for each; those of a channel are the lanes
  // of a half of a warp.
  template <class F>
  __device__ void ForEach(const P& p, F&& f) {
    const int channel = threadIdx.x / kMostRanks, rank = threadIdx.x % kMostRanks;
    mailbox_.Wait();
    if (channel >= P::kChannels) return;
    A of_rank[N] = {};
    if (rank < p.t.ranks)
#pragma unroll
      for (int k = 0; k < N; ++k) of_rank[k] = letters_[rank][k * P::kChannels + channel];
    f(channel, rank, of_rank);
  }

 private:
  alignas(16) A letters_[kMostRanks][N * P::kChannels + 4];  // Four more, for the banks' sake.
  Mailbox mailbox_;
};

// The sum over the ranks' lanes.
template <class V, class Op>
__device__ V SumRanks(V value, Op op) {
#pragma unroll
  for (int mask = 1; mask < kMostRanks; mask *= 2) value = op(value, ShuffleXor(value, mask));
  return value;
}

// What y = f(fma(x - mean, a, bias)) takes of a channel.
template <class A>
struct alignas(16) Numbers {
  A mean, a, bias;
};

template <class T, class G>
__global__ void __launch_bounds__(kThreads, kBlocks)
    TrainClusterKernel(const __grid_constant__ ClusterTiling t, const T* x, T* y,
                       const __grid_constant__ Parameters<Accumulator<T>> affine, G group,
                       Statistic<Accumulator<T>> statistic) {
  using P = ClusterPlace<T>;
  using A = Accumulator<T>;
  constexpr int V = P::V;
  __shared__ __align__(16) A means[kThreads / 32][P::kChannels];
  __shared__ __align__(16) Pair<A> deviations[kThreads / 32][P::kChannels];
  __shared__ Exchange<P, 3> exchange;
  __shared__ Numbers<A> numbers[P::kChannels];
  extern __shared__ __align__(16) unsigned char shared[];
  exchange.Open(t.ranks);
  const P p(t);
  Vec<T, V>* const held = reinterpret_cast<Vec<T, V>*>(shared) + threadIdx.x;
  p.Load(x, held);
  CommitAsync();
  WaitAsync<0>();
  const auto for_each = [&](auto&& f) {
#pragma unroll 1
    for (int k = 0; k < p.rows; ++k) {
      A wide[V];
      Widen<T, V>(reinterpret_cast<const Packed<T, V>*>(held)[k * kThreads], wide);
      f(k, wide);
    }
  };
  // The block's own mean and squared deviations. A first mean is a sum that cannot overflow; the second pass says how
  // far it is off.
  const A count = static_cast<A>(p.Count(p.rank)), share = p.Count(p.rank) > 0 ? A(1) / count : A(0);
  A mean[V] = {};
  for_each([&](int, const A(&wide)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) mean[i] = fma(wide[i], share, mean[i]);
  });
  SumColumn(mean, Add{}, means);
  Pair<A> sums[V] = {};
  for_each([&](int, const A(&wide)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const A d = wide[i] - mean[i];
      sums[i].first += d;
      sums[i].second += d * d;
    }
  });
  SumColumn(sums, AddPairs{}, deviations);
  A of_block[3][V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const A off = sums[i].first * share;
    of_block[0][i] = mean[i], of_block[1][i] = off;
    of_block[2][i] = max(sums[i].second - off * sums[i].first, A(0));
  }
  exchange.Send(p, of_block);
  // Those of all blocks, merged as in statistics.cuh: about the first block's mean, from which the others' differ by
  // less than what they are rounded by.
  exchange.ForEach(p, [&](int channel, int rank, const A(&of_rank)[3]) {
    const A rows = static_cast<A>(p.Count(rank)), inverse = A(1) / static_cast<A>(t.n);
    const A first = __shfl_sync(~0u, of_rank[0], 0, kMostRanks), about = fabs(first) <= A(FLT_MAX) ? first : A(0);
    const A mean = rows > A(0) ? of_rank[0] - about + of_rank[1] : A(0);
    const A rest = SumRanks(mean * (rows * inverse), Add{}), d = rows > A(0) ? mean - rest : A(0), all = about + rest;
    const A var = SumRanks((of_rank[2] + d * d * rows) * inverse, Add{});
    if (rank > 0 || !p.HasChannel(channel)) return;
    const int64_t c = p.tile + channel;
    numbers[channel] = {all, affine.scale[c] * InverseRoot(var + affine.epsilon), affine.bias[c]};
    if (p.rank == 0) statistic.mean[c] = all, statistic.var[c] = var;
  });
  __syncthreads();
  for_each([&](int k, A(&wide)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Numbers<A> n = numbers[p.column + i];
      wide[i] = group.Forward(fma(wide[i] - n.mean, n.a, n.bias));
    }
    StoreUnsplit<T, V>(y + p.At(k), Narrow<T, V>(wide));
  });
}

template <class T, class G>
__global__ void __launch_bounds__(kThreads, kBlocks)
    GradientClusterKernel(const __grid_constant__ ClusterTiling t, const T* g, const T* x, T* dx,
                          const __grid_constant__ Parameters<Accumulator<T>> affine, G group,
                          Coefficients<Accumulator<T>> coefficients) {
  using P = ClusterPlace<T>;
  using A = Accumulator<T>;
  constexpr int V = P::V;
  __shared__ __align__(16) Pair<A> of_warps[kThreads / 32][P::kChannels];
  __shared__ Exchange<P, 2> exchange;
  __shared__ Numbers<A> numbers[P::kChannels];
  __shared__ Pair<A> pairs[P::kChannels];
  extern __shared__ __align__(16) unsigned char shared[];
  exchange.Open(t.ranks);
  const P p(t);
  Vec<T, V>*const held_x = reinterpret_cast<Vec<T, V>*>(shared) + threadIdx.x, *const held_g =
                                                                                   held_x + t.held * kThreads;
  p.Load(x, held_x);
  p.Load(g, held_g);
  CommitAsync();
  if (threadIdx.x < P::kChannels && p.HasChannel(threadIdx.x)) {
    const int64_t c = p.tile + threadIdx.x;
    numbers[threadIdx.x] = {affine.mean[c], affine.scale[c] * InverseRoot(affine.var[c] + affine.epsilon),
                            affine.bias[c]};
  }
  WaitAsync<0>();
  __syncthreads();
  // What f(i, numbers of the channel, x - mean, D g) makes of each element, and at the end of a vector, done(k, those).
  const auto for_each = [&](auto&& f, auto&& done) {
#pragma unroll 1
    for (int k = 0; k < p.rows; ++k) {
      A wide_g[V], wide[V];
      Widen<T, V>(reinterpret_cast<const Packed<T, V>*>(held_g)[k * kThreads], wide_g);
      Widen<T, V>(reinterpret_cast<const Packed<T, V>*>(held_x)[k * kThreads], wide);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const Numbers<A> n = numbers[p.column + i];
        const A centered = wide[i] - n.mean;
        wide[i] = f(i, n, centered, group.Slope(wide_g[i], fma(centered, n.a, n.bias)));
      }
      done(k, wide);
    }
  };
  Pair<A> sums[V] = {};
  for_each(
      [&](int i, const Numbers<A>&, A centered, A h) {
        sums[i].first += h;
        sums[i].second += h * centered;
        return h;
      },
      [](int, const A(&)[V]) {});
  SumColumn(sums, AddPairs{}, of_warps);
  A of_block[2][V];
#pragma unroll
  for (int i = 0; i < V; ++i) of_block[0][i] = sums[i].first, of_block[1][i] = sums[i].second;
  exchange.Send(p, of_block);
  exchange.ForEach(p, [&](int channel, int rank, const A(&of_rank)[2]) {
    const Pair<A> sum = SumRanks(Pair<A>{of_rank[0], of_rank[1]}, AddPairs{});
    if (rank > 0 || !p.HasChannel(channel)) return;
    const int64_t c = p.tile + channel;
    const A root = InverseRoot(affine.var[c] + affine.epsilon);
    pairs[channel] = coefficients.Set(c, sum, affine.scale[c], root, A(1) / static_cast<A>(t.n), p.rank == 0);
  });
  __syncthreads();
  for_each(
      [&](int i, const Numbers<A>& n, A centered, A h) {
        const Pair<A> pair = pairs[p.column + i];
        return fma(n.a, h, fma(centered, pair.second, pair.first));
      },
      [&](int k, const A(&wide)[V]) { StoreUnsplit<T, V>(dx + p.At(k), Narrow<T, V>(wide)); });
}

// Calls f(TypeTag, ClusterTiling, Grid) where the problem is one of these, of so many arrays that are read.
template <class F>
bool VisitClusters(const Problem& p, activation::Activation a, bool aligned, int arrays, F&& f) {
  const bool plain = a.kind == activation::Kind::kIdentity || a.kind == activation::Kind::kRelu;
  int most = 1;
  if (!plain || !aligned || p.where || p.s > 1 || p.dtype == DType::kF64 || p.outer * p.n * p.c == 0 ||
      QueryMaxCluster(&most) != cudaSuccess || most == 1)
    return false;
  bool called = false;
  VisitSingleDType(p.dtype, [&](auto type) {
    using P = ClusterPlace<typename decltype(type)::type>;
    const int64_t tiles = CeilDiv(p.c, P::kChannels), clusters = p.outer * tiles, steps = CeilDiv(p.n, kHeight);
    most = std::min(most, kMostRanks);
    // All blocks run at once; as many as there are multiprocessors share the work, at least two that of a cluster.
    int64_t ranks = 2;
    const auto held = [&] { return CeilDiv(CeilDiv(p.n, ranks), kHeight); };
    while (2 * ranks <= most && ranks < steps &&
           (clusters * ranks * 2 <= kMultiprocessors || held() * arrays > kMostHeld))
      ranks *= 2;
    called = p.c % P::V == 0 && held() * arrays <= kMostHeld && clusters * ranks <= kBlocks * kMultiprocessors;
    const ClusterTiling t = {p.n,
                             p.c,
                             FastDiv(tiles),
                             static_cast<int>(ranks),
                             static_cast<int>(CeilDiv(p.n, ranks)),
                             static_cast<int>(held())};
    const size_t bytes = held() * arrays * kThreads * kVectorBytes;
    if (called) f(type, t, Grid{clusters * ranks, kThreads, bytes, static_cast<int>(ranks)});
    return cudaSuccess;
  });
  return called;
}

}  // namespace

bool TrainCluster(const Problem& p, const Affine& affine, activation::Activation f, const void* x, void* y, void* mean,
                  void* var, cudaStream_t stream, cudaError_t* e) {
  return VisitClusters(p, f, IsVectorAligned(x, y), 1, [&](auto type, const ClusterTiling& t, const Grid& grid) {
    using T = typename decltype(type)::type;
    const Statistic<float> statistic = {static_cast<float*>(mean), static_cast<float*>(var)};
    *e = LaunchKernel(TrainClusterKernel<T, PlainGroup<T>>, grid, stream, t, static_cast<const T*>(x),
                      static_cast<T*>(y), affine, PlainGroup<T>{f.kind == activation::Kind::kRelu}, statistic);
  });
}

bool GradientCluster(const Problem& p, const Affine& affine, activation::Activation f, const void* g, const void* x,
                     void* dx, const Coefficients<float>& coefficients, cudaStream_t stream, cudaError_t* e) {
  return VisitClusters(p, f, IsVectorAligned(g, x, dx), 2, [&](auto type, const ClusterTiling& t, const Grid& grid) {
    using T = typename decltype(type)::type;
    *e = LaunchKernel(GradientClusterKernel<T, PlainGroup<T>>, grid, stream, t, static_cast<const T*>(g),
                      static_cast<const T*>(x), static_cast<T*>(dx), affine,
                      PlainGroup<T>{f.kind == activation::Kind::kRelu}, coefficients);
  });
}

}  // namespace jaxdnn::batch_norm
