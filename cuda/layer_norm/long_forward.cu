// Layer norm and RMS norm of long rows that start anywhere in a vector of 16 bytes, each shared by a cluster of blocks.
//
// Blocks are persistent, and each has a slice of every row's vectors. A thread takes the same vectors of each row, and
// has their parameters in its part of shared memory. Those change where a row starts elsewhere in a vector than the one
// before, and so rows are taken by where they start. Rows to come are on their way into a ring in shared memory. The
// cluster needs about as long to exchange a row's sums as to move the row: a block sends those of the next row before
// it waits for this one's.
#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/paths.h"
#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kThreads = 256, kMostStages = 4;
// Sums of two rows are on their way, and another block may be one row ahead or behind.
constexpr int kExchanges = 4;
// Dynamic shared memory of a block, where two share a multiprocessor and where it has one to itself; less where the
// device has less than Hopper. And what a kernel has of its own, at most.
constexpr size_t kHalf = 110 << 10, kWhole = 225 << 10, kOwn = 2816;

// Until no more than `pending` of the thread's groups of copies are unfinished.
__device__ void WaitForStage(int pending) {
  static_assert(kMostStages == 4, "two are waited for at least");
  if (pending == 2) return WaitAsync<2>();
  if (pending == 1) return WaitAsync<1>();
  WaitAsync<0>();
}

// The vectors that cover a row of n elements from `start` on: of the first, `shift` elements belong to the row before,
// and the last may reach into the next row.
template <int L>
struct Cover {
  int64_t start, first;
  int shift, n, vectors;

  __device__ Cover(int64_t start, int n)
      : start(start),
        first(static_cast<int64_t>(static_cast<uint64_t>(start) / L)),
        shift(static_cast<int>(start) & (L - 1)),
        n(n),
        vectors((shift + n + L - 1) / L) {}
  // Column of element i of vector k, and whether there is one.
  __device__ int Column(int k, int i) const { return k * L - shift + i; }
  __device__ bool Has(int k, int i) const { return static_cast<unsigned>(Column(k, i)) < static_cast<unsigned>(n); }

  // Of the block's slice, from vector `begin` on, calls f(k, is_whole) for the thread's vectors k in the slice.
  template <class F>
  __device__ void ForEach(int begin, int slice, F&& f) const {
    const int count = min(slice, vectors - begin), whole = min(slice, (shift + n) / L - begin);
    int k = threadIdx.x;
    if (k == 0 && begin == 0 && shift > 0) {
      f(k, std::false_type());
      k += blockDim.x;
    }
    for (; k < whole; k += blockDim.x) f(k, std::true_type());
    if (k < count) f(k, std::false_type());
  }
};

// The starts of rows, `period` at a time apart as long as there are any, and then of those behind the first ones.
struct Starts {
  int64_t now, first, last, apart;  // in elements; first: of the rows that lie as far apart
  int n;

  // From the `index`-th on.
  __device__ Starts(int64_t begin, int64_t rows, int n, int64_t period, int64_t index) : n(n) {
    int64_t c = 0, count = CountOf(rows, period, c);
    while (index >= count && c + 1 < period) {
      index -= count;
      count = CountOf(rows, period, ++c);
    }
    first = begin + c * n;
    last = begin + (rows - 1) * n;
    apart = period * n;
    now = first + index * apart;
  }
  __device__ void Next() {
    now += apart;
    if (now > last) now = first += n;
  }

 private:
  static __device__ int64_t CountOf(int64_t rows, int64_t period, int64_t c) {
    return (rows - c + period - 1) / period;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 3) LongForwardKernel(Forward f, Shape shape, Constants<float> constants,
                                                                 Spread spread, int stages, int parts, int period) {
  constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  using Four = Vec<float, 4>;
  extern __shared__ uint4 shared[];
  __shared__ Exchange<float, 2, true> exchanges[kExchanges];
  __shared__ Exchange<float, 2, true> again[2];
  // Of each row under way, for every warp, the vector of x and of the residual with the row's first element.
  __shared__ X firsts[kMostStages][2][kThreads / 32];
  static_assert(sizeof(exchanges) + sizeof(again) + sizeof(firsts) <= kOwn, "fits");
  const Place p(spread, true);
  const int problem = p.block / parts, part = p.block - problem * parts, n = static_cast<int>(shape.n);
  const int slice = spread.n, begin = p.rank * slice, warp = threadIdx.x / 32;
  const int64_t from = shape.rows * part / parts, rows = shape.rows * (part + 1) / parts - from;
  const int64_t total = shape.problems * shape.rows * shape.n;
  if (threadIdx.x == 0)
    for (auto& each : again) each.Open();
  OpenExchanges(exchanges);

  // [stage][x or residual][vector], of which a thread reads what it has copied itself.
  const int inputs = f.residual == nullptr ? 1 : 2;
  X* const ring = reinterpret_cast<X*>(shared);
  const auto slot = [&](int stage, int input) { return ring + (stage * inputs + input) * slice; };
  const auto fetch = [&](int64_t start, int stage) {
    const Cover<L> row(start, n);
    // Nothing behind the array's end is read.
    const int left = static_cast<int>(min((total - row.first * L) * int64_t{sizeof(T)}, int64_t{1} << 30));
    const auto copy = [&](const void* from, int input) {
      const X* const in = static_cast<const X*>(from) + row.first;
      row.ForEach(begin, slice, [&](int k, auto is_whole) {
        if constexpr (decltype(is_whole)::value) {
          CopyAsync(slot(stage, input) + k, in + begin + k);
        } else {
          CopyAsyncPart(slot(stage, input) + k, in + begin + k, min(16, left - (begin + k) * 16));
        }
      });
      if (threadIdx.x % 32 == 0) CopyAsync(&firsts[stage][input][warp], in);
    };
    copy(f.x, 0);
    if (f.residual != nullptr) copy(f.residual, 1);
  };

  // Rows whose sums are sent, and rows that are fetched.
  Starts sent(problem * shape.rows * shape.n, shape.rows, n, period, from), fetched = sent;
  for (int stage = 0; stage < stages; ++stage, fetched.Next()) {
    if (stage < rows) fetch(fetched.now, stage);
    CommitAsync();
  }

  // The thread's parameters: [scale + offset or bias][a fourth of a vector at a time][vector].
  Four* const parameters = reinterpret_cast<Four*>(ring + stages * inputs * slice);
  const auto load_parameters = [&](const Cover<L>& row) {
    const int count = min(slice, row.vectors - begin);
    const auto load = [&](const void* from, float absent, float offset, Four* to) {
      const float* const in = static_cast<const float*>(from) + int64_t{problem} * n;
      for (int k = threadIdx.x; k < count; k += blockDim.x)
#pragma unroll
        for (int j = 0; j < L / 4; ++j) {
          Four v;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            v.v[i] = from == nullptr ? absent : in[min(max(row.Column(begin + k, 4 * j + i), 0), n - 1)] + offset;
          to[j * slice + k] = v;
        }
    };
    load(f.scale, 1, constants.offset, parameters);
    load(f.bias, 0, 0, parameters + L / 4 * slice);
  };

  // The elements of a vector that are the row's.
  const auto store = [&](void* to, const Cover<L>& row, int k, const X& v, auto is_whole) {
    X* const out = static_cast<X*>(to) + row.first + begin + k;
    if constexpr (decltype(is_whole)::value) {
      *out = v;
    } else {
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (row.Has(begin + k, i)) out->v[i] = v.v[i];
    }
  };
  const auto add_up = [&](float (&sums)[2], const Cover<L>& row, int stage, float pivot) {
    sums[0] = sums[1] = 0;
    row.ForEach(begin, slice, [&](int k, auto is_whole) {
      float v[L];
      Widen(v, slot(stage, 0)[k]);
      if constexpr (!decltype(is_whole)::value)
#pragma unroll
        for (int i = 0; i < L; ++i) v[i] = row.Has(begin + k, i) ? v[i] : pivot;
#pragma unroll
      for (float& each : v) {
        each -= pivot;
        sums[1] = fma(each, each, sums[1]);
      }
      sums[0] += SumOf(v);
    });
  };
  // Sends the row's sums, and returns what they are about.
  const auto send = [&](const Cover<L>& row, int stage, int turn) {
    __syncwarp();
    float pivot = 0;
    if (constants.center) {
      pivot = static_cast<float>(firsts[stage][0][warp].v[row.shift]);
      if (f.residual != nullptr) pivot += static_cast<float>(firsts[stage][1][warp].v[row.shift]);
    }
    if (f.residual != nullptr)
      row.ForEach(begin, slice, [&](int k, auto is_whole) {
        const X sum = AddRounded<T>(slot(stage, 0)[k], slot(stage, 1)[k]);
        slot(stage, 0)[k] = sum;
        store(f.sum, row, k, sum, is_whole);
      });
    float sums[2];
    add_up(sums, row, stage, pivot);
    SendSum(sums, p, exchanges[turn % kExchanges]);
    return pivot;
  };

  ClusterWait();
  Cover<L> row(sent.now, n);
  float pivot = 0;
  int shift = -1, repeats = 0;
  // The sums of the first row are sent before there is a row to receive those of.
  for (int turn = -1, stage = -1; turn < rows; ++turn) {
    const int after = stage + 1 == stages ? 0 : stage + 1;
    const Cover<L> next(sent.now, n);
    float next_pivot = 0;
    WaitForStage(stages - 2);
    if (turn + 1 < rows) next_pivot = send(next, after, turn + 1);
    sent.Next();
    if (turn >= 0) {
      if (row.shift != shift) load_parameters(row);
      shift = row.shift;
      float sums[2];
      ReceiveSum(sums, p, exchanges[turn % kExchanges], turn / kExchanges);
      Central<float> moments(pivot, constants.center ? sums[0] : 0.0f, sums[1], constants.inverse);
      // Rarely, and once more where the mean of equal numbers was rounded.
      for (int round = 1; moments.far && round < 4; ++round) {
        add_up(sums, row, stage, moments.mean);
        GroupSum(sums, p, again, repeats++);
        moments = Central<float>(moments.mean, constants.center ? sums[0] : 0.0f, sums[1], constants.inverse);
      }
      const float rest = kWideMean<T> ? moments.rest : 0.0f, rstd = InverseRoot(moments.variance + constants.epsilon);
      if (p.IsLeader() && f.rstd != nullptr) StoreStatistics(f, row.start / n, moments.mean, rest, rstd);
      const Statistics<T> stats({moments.mean, rest, rstd});
      row.ForEach(begin, slice, [&](int k, auto is_whole) {
        float scale[L], bias[L];
#pragma unroll
        for (int i = 0; i < L; ++i) {
          scale[i] = parameters[i / 4 * slice + k].v[i % 4];
          bias[i] = parameters[(L / 4 + i / 4) * slice + k].v[i % 4];
        }
        store(f.y, row, k, Apply<T>(slot(stage, 0)[k], stats, scale, bias), is_whole);
      });
      if (turn + stages < rows) fetch(fetched.now, stage);
      CommitAsync();
      fetched.Next();
    }
    row = next;
    pivot = next_pivot;
    stage = after;
  }
}

// How a row is spread, and how many stages the ring has: fewer than two where no cluster holds that.
struct Plan {
  Spread spread;
  int stages;
  size_t bytes;
};

Plan PlanRows(int64_t n, int L, int inputs, size_t most_shared, int max_cluster) {
  const int64_t vectors = (n + 2 * L - 2) / L;
  Plan plan = {};
  int64_t slice = 0;
  const auto share = [&](int cluster, size_t room) {
    slice = CeilDiv(vectors, cluster);
    const size_t stage = size_t(slice) * inputs * 16, parameters = size_t(slice) * L * 2 * sizeof(float);
    room = std::min(room, most_shared);
    plan.stages = parameters > room ? 0 : static_cast<int>(std::min<size_t>(kMostStages, (room - parameters) / stage));
    plan.bytes = parameters + plan.stages * stage;
    return plan.stages;
  };
  // As few blocks as hold a row, two to a multiprocessor. A block alone is no cluster, and cannot send itself its sums.
  int cluster = 2;
  while (cluster < max_cluster && share(cluster, kHalf) < kMostStages) cluster *= 2;
  if (share(cluster, kHalf) < kMostStages) share(cluster, kWhole);
  const int64_t steps = CeilDiv(slice, kThreads);
  plan.spread = {static_cast<int>(slice), 32 * static_cast<int>(CeilDiv(slice, 32 * steps)), 1, cluster,
                 static_cast<int>(steps)};
  return plan;
}

}  // namespace

cudaError_t RunLongForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                           const Device& device, cudaStream_t stream, bool* done) {
  *done = device.max_cluster > 1;
  if (!*done) return cudaSuccess;
  const int inputs = f.residual == nullptr ? 1 : 2;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
      const Plan plan =
          PlanRows(shape.n, kVecLength<T>, inputs, static_cast<size_t>(device.shared_bytes) - kOwn, device.max_cluster);
      *done = plan.stages >= 2;
      if (!*done) return cudaSuccess;
      const auto kernel = LongForwardKernel<T>;
      Grid grid = {1, plan.spread.Threads(), plan.bytes, plan.spread.cluster};
      int64_t resident = 0;
      if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
      const int64_t wanted = std::max<int64_t>(1, resident / grid.cluster / shape.problems);
      const int64_t parts = std::min(shape.rows, wanted);
      grid.blocks = shape.problems * parts * grid.cluster;
      return LaunchKernel(kernel, grid, stream, f, shape, Constants<float>(options, shape.n), plan.spread, plan.stages,
                          static_cast<int>(parts), static_cast<int>(Period(shape, dtype)));
    } else {
      *done = false;
      return cudaSuccess;
    }
  });
}

}  // namespace jaxdnn::layer_norm
