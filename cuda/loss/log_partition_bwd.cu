// The adjoint of log_partition: dx = exp(x - m - l) g[0] + q g[1] + ..., elementwise but for one value a row of each.
//
// Bound by memory: one read and one write. Threads take vectors of one row, or of columns, with the row's values in
// registers; short rows that are not whole vectors are packed in shared memory.
#include "cuda/common/convert.cuh"
#include "cuda/loss/packed.cuh"
#include "cuda/loss/spread.cuh"
#include "cuda/loss/state.cuh"
#include "cuda/softmax/held.cuh"

namespace jaxdnn::loss {
namespace {

// Vectors that a thread has in flight.
constexpr int kBatch = 4;

template <class T>
struct Arrays {
  using A = Accumulator<T>;
  const void* g;  // of T where it is narrow, else of A
  bool narrow;
  const A *m, *sums;

  __device__ A G(int64_t i) const {
    return narrow ? static_cast<A>(static_cast<const T*>(g)[i]) : static_cast<const A*>(g)[i];
  }
};

// What a row's gradient takes from it.
template <class T>
struct Row {
  using A = Accumulator<T>;
  A m, l, g, label_g, q_g, smooth_g;
  int label;

  // Row `outer` of column `column`.
  __device__ Row(const TypedTargets<T>& t, const Arrays<T>& a, int64_t inner, int64_t outer, int64_t column) {
    const int64_t row = outer * inner + column, first = outer * t.sums * inner + column;
    m = a.m[row], l = a.sums[first], g = a.G(first);
    label = t.labels != nullptr ? t.labels[row] : -1;
    label_g = t.labels != nullptr ? a.G(first + inner) : A(0);
    q_g = t.q != nullptr ? a.G(first + inner) : A(0);
    smooth_g = t.smooth ? a.G(first + (t.sums - 1) * inner) : A(0);
  }
  __device__ Row() = default;

  // Rows without a cotangent are 0, whatever they hold.
  __device__ A Gradient(A x) const { return g == A(0) ? A(0) : Exp<T>((x - m) - l) * g; }
};

// The same without scores: what an element becomes by its row alone.
template <class T>
struct RowMap {
  using A = Accumulator<T>;
  Origin<T> origin;
  A factor, label_g;
  bool empty;
  int label;

  __device__ RowMap(const TypedTargets<T>& t, const Arrays<T>& a, int64_t row) : origin(a.m[row]) {
    const A g = a.G(row * t.sums);
    factor = g * Exp<T>(-a.sums[row * t.sums]);
    empty = g == A(0);
    label = t.labels != nullptr ? t.labels[row] : -1;
    label_g = t.labels != nullptr ? a.G(row * t.sums + 1) : A(0);
  }
  __device__ A operator()(A x) const { return empty ? A(0) : origin.Exp(x) * factor; }
};

template <class T>
__device__ Accumulator<T> OfScores(const TypedTargets<T>& t, const Row<T>& row, T q, int64_t k) {
  using A = Accumulator<T>;
  return (row.q_g == A(0) ? A(0) : static_cast<A>(q) * row.q_g) +
         (row.smooth_g == A(0) ? A(0) : t.Weight(k) * row.smooth_g);
}

template <class T, int L, int W>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    RowsKernel(Spread spread, const __grid_constant__ TypedTargets<T> t, Arrays<T> arrays, const T* x, T* dx) {
  using A = Accumulator<T>;
  // Columns of vectors have no scores. With them, there are two arrays to load.
  constexpr bool kScores = W == 1;
  constexpr int kLoads = kScores && L > 1 ? kBatch / 2 : kBatch;
  const Place<L, W> p(spread);
  if (p.count == 0) return;
  Row<T> rows[W];
#pragma unroll
  for (int w = 0; w < W; ++w) rows[w] = Row<T>(t, arrays, spread.shape.inner, p.outer, p.across * W + w);
  const bool* keep =
      t.mask.data == nullptr ? nullptr : t.mask.data + t.mask.Row(p.outer) + p.across * W * t.mask.along_inner;
  const bool scores = kScores && (t.q != nullptr || t.smooth);
  for (int start = p.part; start < p.count; start += kLoads * p.parts) {
    Words<T, L> v[kLoads], q[kScores ? kLoads : 1];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const int at = start + b * p.parts;
      if (at >= p.count) continue;
      v[b] = p.LoadWords(x, at, static_cast<T>(0.0f));
      if constexpr (kScores) q[b] = t.q != nullptr ? p.LoadWords(t.q, at, static_cast<T>(0.0f)) : Words<T, L>();
    }
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const int at = start + b * p.parts;
      if (at >= p.count) break;
      const auto part = p.PartOf(at);
      const auto of_x = BitCast<Vec<T, L>>(v[b]), of_q = BitCast<Vec<T, L>>(q[kScores ? b : 0]);
      Vec<T, L> out;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const Row<T>& row = rows[i % W];
        A sum = row.Gradient(static_cast<A>(of_x.v[i]));
        if constexpr (kScores)
          if (scores && part.Has(i)) sum += OfScores(t, row, of_q.v[i], p.Along(at) + i);
        if (row.label - p.Along(at) == (W == 1 ? i : 0)) sum += row.label_g;
        out.v[i] = static_cast<T>(sum);
        if (keep != nullptr && part.Has(i) && !p.IsKept(keep, t.mask, at, i)) out.v[i] = static_cast<T>(0.0f);
      }
      p.Store(dx, at, out);
    }
  }
}

// Rows of vectors, dealt out to groups of lanes, to blocks, or to several blocks (held.cuh of softmax says how).
template <class T, int V>
__global__ void __launch_bounds__(kThreads, 5)
    LongRowsKernel(const __grid_constant__ softmax::HeldRows r, const __grid_constant__ TypedTargets<T> t,
                   Arrays<T> arrays, const T* x, T* dx) {
  using A = Accumulator<T>;
  constexpr int L = kVecLength<T>;
  using P = Packed<T, L>;
  const bool shared = r.width <= 32;
  const int lane = shared ? threadIdx.x & (r.width - 1) : threadIdx.x;
  const int64_t row = shared ? (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> (31 - __clz(r.width))
                             : blockIdx.x / static_cast<unsigned>(r.shares);
  if (row >= r.rows) return;
  const int rank = r.shares == 1 ? 0 : static_cast<int>(blockIdx.x % r.shares);
  const int64_t start = row * r.n;
  const int head = static_cast<int>(-start & (L - 1));
  const int vectors = (r.n - head) / L, first = rank * V * r.width + lane;
  const P* const from = reinterpret_cast<const P*>(x + start + head);
  T* const to = dx + start + head;
  P v[V];
#pragma unroll
  for (int s = 0; s < V; ++s) {
    const int at = first + s * r.width;
    if (at < vectors) v[s] = from[at];
  }
  const RowMap<T> map(t, arrays, row);
#pragma unroll
  for (int s = 0; s < V; ++s) {
    const int at = first + s * r.width;
    if (at >= vectors) break;
    A wide[L];
    Widen<T, L>(v[s], wide);
#pragma unroll
    for (A& each : wide) each = map(each);
    const int place = map.label - head - at * L;
    if (static_cast<unsigned>(place) < L) {
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (i == place) wide[i] += map.label_g;
    }
    StorePacked<T, L>(to + at * L, Narrow<T, L>(wide));
  }
  if (first < 32) {
    const int at = lane < head ? lane : vectors * L + lane;
    if (at >= r.n) return;
    const A value = map(static_cast<A>(x[start + at]));
    dx[start + at] = static_cast<T>(at == map.label ? value + map.label_g : value);
  }
}

// Short rows, one to each group of 1 << span lanes of a block, whose rows are a run of memory that begins on a vector.
// Up to kMost words a lane: where few are the most, the kernel takes fewer registers.
constexpr int kFewWords = 4;
template <class T, int kMost>
__global__ void __launch_bounds__(kThreads)
    PackedKernel(softmax::Shape shape, int per_block, softmax::PackedSpan shares,
                 const __grid_constant__ TypedTargets<T> t, Arrays<T> arrays, const T* x, T* dx) {
  using A = Accumulator<T>;
  const auto [held, first, n, rows] = PackedBlock<T>(shape, per_block, x);
  const int wanted = threadIdx.x >> shares.span;
  const int at = min(wanted, rows - 1);
  const RowMap<T> map(t, arrays, first + at);
  WaitRun();
  if (softmax::FirstOfWarp(shares.span) < rows) {  // what a warp without a row would read, another one writes
    PackedRow<softmax::ForwardOp<T>, T, kMost> row(held, 0, at, n, shares);
    const bool has_label = wanted < rows && row.lane == 0 && static_cast<unsigned>(map.label) < n;
    T* const label = held + at * n + (has_label ? map.label : 0);
    const A of_label = map(static_cast<A>(*label)) + map.label_g;
    __syncwarp();
    if (wanted < rows) row.Store([&](auto& word, int i) { return map(word[0][i]); });
    __syncwarp();
    if (has_label) *label = static_cast<T>(of_label);
  }
  StoreRun(dx + first * n, held, rows * n);
}

// The same with a mask, element by element.
template <class T>
__global__ void __launch_bounds__(kThreads)
    MaskedKernel(softmax::Shape shape, int per_block, int span, const __grid_constant__ TypedTargets<T> t,
                 Arrays<T> arrays, const T* x, T* dx) {
  using A = Accumulator<T>;
  const auto [held, first, n, rows] = PackedBlock<T>(shape, per_block, x);
  const int lane = threadIdx.x & ((1 << span) - 1), row = threadIdx.x >> span;
  const RowMap<T> map(t, arrays, first + min(row, rows - 1));
  WaitRun();
  if (row < rows) {
    const bool* keep = t.mask.data + t.mask.Row(first + row);
    T* const mine = held + row * n;
#pragma unroll 4
    for (int k = lane; k < n; k += 1 << span)
      mine[k] = static_cast<T>(keep[k * t.mask.along_n] ? map(static_cast<A>(mine[k])) : A(0));
  }
  StoreRun(dx + first * n, held, rows * n);
}

template <class T, int L, int W>
cudaError_t RunRows(const softmax::Shape& shape, const TypedTargets<T>& t, const Arrays<T>& arrays, const T* x, T* dx,
                    cudaStream_t stream) {
  Spread spread = PlanSpread<L, W>(shape, sizeof(T), kBatch, 1);
  // No more than two batches a thread: nothing is gained by staying.
  const int64_t vectors = int64_t{2 * kBatch} << (spread.group.span - spread.group.stride);
  spread.shares = static_cast<int>(CeilDiv(spread.share, vectors));
  spread.share = CeilDiv(CeilDiv(spread.share, spread.shares), kBatch) * kBatch;
  return LaunchKernel(RowsKernel<T, L, W>, spread.Blocks(), kThreads, stream, spread, t, arrays, x, dx);
}

template <class T>
cudaError_t RunLongRows(const softmax::Shape& shape, const TypedTargets<T>& t, const Arrays<T>& arrays, const T* x,
                        T* dx, cudaStream_t stream) {
  constexpr int L = kVecLength<T>, V = kBatch;
  const int64_t vectors = shape.n / L;
  softmax::HeldRows r = {shape.outer, static_cast<int>(shape.n), 1, 1, 0};
  while (r.width < 32 && (shape.n % L != 0 || r.width * V < vectors)) r.width *= 2;
  if (vectors > 32 * V) {
    r.shares = static_cast<int>(CeilDiv(vectors, kThreads * V));
    r.width = 32 * static_cast<int>(CeilDiv(vectors, int64_t{32} * V * r.shares));
  }
  const Grid grid =
      r.width <= 32 ? Grid{CeilDiv(shape.outer * r.width, kThreads), kThreads} : Grid{shape.outer * r.shares, r.width};
  return LaunchKernel(LongRowsKernel<T, V>, grid, stream, r, t, arrays, x, dx);
}

// Threads of a block of packed rows: few, that do not wait long for each other, but rows of a kilobyte; and those of
// rows that begin on a vector of L elements.
constexpr int PackedThreads(int64_t row_bytes, int span, int L) {
  return std::max(row_bytes >= 16 && row_bytes < 32 ? 64 : 128, L << span);
}

template <class T>
cudaError_t Run(const softmax::Shape& shape, const TypedTargets<T>& t, const Arrays<T>& arrays, const T* x, T* dx,
                cudaStream_t stream) {
  constexpr int L = kVecLength<T>;
  const int64_t size = shape.outer * shape.n * shape.inner;
  if (size == 0) return cudaSuccess;
  // What is rare takes fewer ways: doubles go element by element, and so do columns with scores.
  if constexpr (sizeof(T) < 8) {
    const bool aligned = IsVectorAligned(x, t.q, dx), scores = t.q != nullptr || t.smooth;
    const bool masked = t.mask.data != nullptr;
    if (aligned && shape.inner == 1 && !scores) {
      const auto run = [&](auto kernel, int span, auto shares, int threads) {
        const PackedRows rows = PlanPackedRows(shape, span, sizeof(T), 1, threads);
        return LaunchKernel(kernel, rows.grid, stream, shape, rows.per_block, shares, t, arrays, x, dx);
      };
      const int masked_span = MaskedSpan(shape);
      const softmax::PackedSpan shares = SpanOf<T>(shape.n);
      if (shape.n % L != 0 && masked && shape.n <= kMaxMaskedRow)
        return run(MaskedKernel<T>, masked_span, masked_span, kThreads);
      if (shape.n % L != 0 && !masked && shape.n <= kMaxPackedRow<T>)
        return run(shares.whole <= kFewWords ? PackedKernel<T, kFewWords> : PackedKernel<T, softmax::kMaxPackedWords>,
                   shares.span, shares, PackedThreads(shape.n * sizeof(T), shares.span, L));
      if (!masked && shape.n < softmax::kMaxHeldRow) return RunLongRows(shape, t, arrays, x, dx, stream);
    }
    if (aligned && shape.inner % 4 == 0 && !scores) return RunRows<T, 4, 4>(shape, t, arrays, x, dx, stream);
    if (aligned && shape.inner == 1) return RunRows<T, L, 1>(shape, t, arrays, x, dx, stream);
  }
  return RunRows<T, 1, 1>(shape, t, arrays, x, dx, stream);
}

}  // namespace

cudaError_t LogPartitionBwd(const Problem& p, const void* g, bool narrow, const void* x, const void* m,
                            const void* sums, void* dx, cudaStream_t stream) {
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const TypedTargets<T> t(p.targets);
    const Arrays<T> arrays = {g, narrow, static_cast<const A*>(m), static_cast<const A*>(sums)};
    return Run(p.shape, t, arrays, static_cast<const T*>(x), static_cast<T*>(dx), stream);
  });
}

}  // namespace jaxdnn::loss
