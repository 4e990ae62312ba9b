// Group normalization of small arrays with channels last, where a pass takes about as long as its latencies: that of a
// launch, of memory, of the sums over a block's threads and of those over its blocks.
//
// A slab is one group of one example, whose channels are whole vectors, or which are all. Threads hold it in registers;
// blocks that share one are a cluster, and send their sums to each other's shared memory.
#include "cuda/common/cluster.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/group_norm/ring_plan.cuh"
#include "cuda/group_norm/small.h"

namespace jaxdnn::group_norm {
namespace {

constexpr int kMostThreads = 512, kMostBlocks = 8;
// Vectors of a thread.
constexpr int kHeld = 4;
// Of a slab, for each of which the block keeps scale and bias.
constexpr int kMostParameters = 1024;
// Above that, memory and not latency decides.
constexpr int64_t kMostBytes = 4 << 20;

struct SmallTiling {
  int64_t example;        // vectors of an example
  int rows, row;          // of a slab, and vectors from one to the next
  int columns, parallel;  // vectors of a slab's row, and rows that a block's threads take side by side
  int block_rows, blocks, threads;
  int period;  // channels: an element of the slab's row is of channel e % period
  int n, groups, channels;
};

template <class T, int V>
struct SmallOperands {
  using A = Accumulator<T>;
  const Vec<T, V>* x;
  const A *scale, *bias;
  Vec<T, V>* y;
  Statistics<A>* statistics;
  A epsilon;
  double inverse;  // of the elements of a group
};

template <class F, class T, int V>
__global__ void __launch_bounds__(kMostThreads)
    SmallForwardKernel(const __grid_constant__ SmallTiling t, const __grid_constant__ SmallOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  __shared__ A scales[kMostParameters], biases[kMostParameters];
  __shared__ Moments of_warps[32], of_blocks[kMostBlocks];
  if (t.blocks > 1) ClusterArriveRelaxed();
  const int unit = blockIdx.x / t.blocks, rank = blockIdx.x - unit * t.blocks;
  const int example = unit / t.groups, group = unit - example * t.groups;
  const int down = threadIdx.x / t.columns, across = threadIdx.x - down * t.columns;
  const int first = rank * t.block_rows + down, end = min(t.rows, (rank + 1) * t.block_rows);
  const int rows = down < t.parallel && first < end ? (end - first - 1) / t.parallel + 1 : 0;
  const int64_t slab = example * t.example + group * t.columns, base = slab + int64_t{first} * t.row + across;
  const int64_t step = int64_t{t.parallel} * t.row;

  Packed<T, V> held[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    held[k] = LoadConstant(reinterpret_cast<const Packed<T, V>*>(o.x + (k < rows ? base + k * step : slab)));
  const A pivot = static_cast<A>(reinterpret_cast<const T*>(o.x + slab)[0]);
  const int parameter = example / t.n * t.channels + group * t.period;
  for (int c = threadIdx.x; c < t.period; c += blockDim.x)
    scales[c] = o.scale[parameter + c], biases[c] = o.bias[parameter + c];

  // Several sums, so that additions need not wait for each other.
  constexpr int kParts = 4;
  Shifted<A> part[kParts] = {};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    A x[V];
    Widen<T, V>(held[k], x);
    if (k == 0)
#pragma unroll
      for (int j = 0; j < kParts; ++j) part[j].first = x[0];
    if (k < rows)
#pragma unroll
      for (int j = 0; j < V; ++j) part[j % kParts].Add(x[j]);
  }
#pragma unroll
  for (int j = 1; j < kParts; ++j) part[0].sum += part[j].sum, part[0].squares += part[j].squares;
  Moments sum[1] = {rows > 0 ? part[0].About(pivot, V * rows) : Moments{}};
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  Moments* none = nullptr;
  Reduce(sum, AddPairs{}, {0, 5}, none);
  if (lane == 0) of_warps[threadIdx.x / 32] = sum[0];
  __syncthreads();
  sum[0] = lane < warps ? of_warps[lane] : Moments{};
  Reduce(sum, AddPairs{}, {0, 5}, none);
  if (t.blocks > 1) {
    ClusterWait();  // The others run.
    if (threadIdx.x < t.blocks) {
      StoreRemote(&of_blocks[rank].first, threadIdx.x, sum[0].first);
      StoreRemote(&of_blocks[rank].second, threadIdx.x, sum[0].second);
    }
    ClusterArrive();
    ClusterWait();
    sum[0] = lane < t.blocks ? of_blocks[lane] : Moments{};
    Reduce(sum, AddPairs{}, {0, 5}, none);
  }
  const Statistics<A> statistics(sum[0], o.inverse, pivot, o.epsilon);
  if (rank == 0 && threadIdx.x == 0) o.statistics[unit] = statistics;

  Affine<A> affine[V];
  int channel = across * V % t.period;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    affine[j] = Affine<A>(statistics, scales[channel], biases[channel]);
    channel = channel + 1 == t.period ? 0 : channel + 1;
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k >= rows) break;
    A x[V];
    Widen<T, V>(held[k], x);
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = affine[j](x[j]);
    f.Forward(x);
    Write<T, V>(o.y + base + k * step, x);
  }
}

std::optional<SmallTiling> PlanSmall(const Problem& p) {
  if (p.Empty() || p.dtype == DType::kF64 || !p.channels_last) return std::nullopt;
  const int64_t vector = p.dtype == DType::kF32 ? 4 : 8, size = p.batch * p.n * p.spatial * p.channels;
  const int64_t group = p.channels / p.groups, common = std::gcd(group, vector);
  if (size / vector * 16 > kMostBytes || p.spatial * p.channels % vector != 0 || group > kMostParameters ||
      (p.groups > 1 && common != vector))
    return std::nullopt;
  SmallTiling t = {};
  t.example = p.spatial * p.channels / vector;
  t.columns = static_cast<int>(group / common);
  t.row = static_cast<int>(p.channels / common);
  t.rows = static_cast<int>(p.spatial * common / vector);
  t.period = static_cast<int>(group);
  t.n = static_cast<int>(p.n), t.groups = static_cast<int>(p.groups), t.channels = static_cast<int>(p.channels);
  if (t.columns > kMostThreads) return std::nullopt;
  t.blocks = static_cast<int>(CeilDiv(t.rows, kMostThreads / t.columns * kHeld));
  if (t.blocks > kMostBlocks) return std::nullopt;
  t.block_rows = static_cast<int>(CeilDiv(t.rows, t.blocks));
  t.parallel = std::min(t.block_rows, kMostThreads / t.columns);
  t.threads = static_cast<int>(CeilDiv(t.parallel * t.columns, 32) * 32);
  return t;
}

}  // namespace

std::optional<cudaError_t> SmallForward(const Problem& given, const void* x, const void* scale, const void* bias,
                                        void* y, void* statistics, cudaStream_t stream) {
  const Problem p = Canonical(given);
  const auto t = PlanSmall(p);
  if (!t || !IsVectorAligned(x, y) || !HasRings()) return std::nullopt;
  return VisitSingleDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    constexpr int kLength = kVecLength<T>;
    using V = Vec<T, kLength>;
    const SmallOperands<T, kLength> o = {static_cast<const V*>(x),
                                         static_cast<const A*>(scale),
                                         static_cast<const A*>(bias),
                                         static_cast<V*>(y),
                                         static_cast<Statistics<A>*>(statistics),
                                         static_cast<A>(p.epsilon),
                                         1.0 / static_cast<double>(p.channels / p.groups * p.spatial)};
    return VisitActivation<T, false>(p.activation, [&](auto f) {
      const Grid grid = {p.batch * p.n * p.groups * t->blocks, t->threads, 0, t->blocks};
      return LaunchKernel(SmallForwardKernel<decltype(f), T, kLength>, grid, stream, *t, o, f);
    });
  });
}

}  // namespace jaxdnn::group_norm
