// The adjoint of log_partition: dx = exp(x - m - l) g[0] + q g[1] + ..., elementwise but for one value a row of each.
//
// Bound by memory: one read and one write. Threads take vectors of one row, or of columns, with the row's values in
// registers (spread.cuh says which); where rows are short and not whole vectors they take vectors of all of x.
#include "cuda/common/fast_div.cuh"
#include "cuda/loss/spread.cuh"
#include "cuda/loss/state.cuh"

namespace jaxdnn::loss {
namespace {

// Vectors that a thread has in flight.
constexpr int kBatch = 4;
// Rows below which neighbouring vectors are better taken from all of x.
constexpr int64_t kMaxPackedRow = 512;

template <class A>
struct Arrays {
  const A *g, *m, *sums;
};

// What a row's gradient takes from it.
template <class T>
struct Row {
  using A = Accumulator<T>;
  A m, l, g, label_g, q_g, smooth_g;
  int label;

  // Row `outer` of column `column`.
  __device__ Row(const TypedTargets<T>& t, const Arrays<A>& a, int64_t inner, int64_t outer, int64_t column) {
    const int64_t row = outer * inner + column, first = outer * t.sums * inner + column;
    m = a.m[row], l = a.sums[first], g = a.g[first];
    label = t.labels != nullptr ? t.labels[row] : -1;
    label_g = t.labels != nullptr ? a.g[first + inner] : A(0);
    q_g = t.q != nullptr ? a.g[first + inner] : A(0);
    smooth_g = t.smooth ? a.g[first + (t.sums - 1) * inner] : A(0);
  }
  __device__ Row() = default;

  // Rows without a cotangent are 0, whatever they hold.
  __device__ A Gradient(A x) const { return g == A(0) ? A(0) : Exp<T>((x - m) - l) * g; }
};

template <class T>
__device__ Accumulator<T> OfScores(const TypedTargets<T>& t, const Row<T>& row, T q, int64_t k) {
  using A = Accumulator<T>;
  return (row.q_g == A(0) ? A(0) : static_cast<A>(q) * row.q_g) +
         (row.smooth_g == A(0) ? A(0) : t.Weight(k) * row.smooth_g);
}

template <class T, int L, int W, bool kScores>
__global__ void __launch_bounds__(kThreads, kScores || sizeof(T) == 2 ? 2 : 3)
    RowsKernel(Spread spread, const __grid_constant__ TypedTargets<T> t, Arrays<Accumulator<T>> arrays, const T* x,
               T* dx) {
  using A = Accumulator<T>;
  const Place<L, W> p(spread);
  if (p.count == 0) return;
  Row<T> rows[W];
#pragma unroll
  for (int w = 0; w < W; ++w) rows[w] = Row<T>(t, arrays, spread.shape.inner, p.outer, p.across * W + w);
  const bool* keep =
      t.mask.data == nullptr ? nullptr : t.mask.data + t.mask.Row(p.outer) + p.across * W * t.mask.along_inner;
  for (int start = p.part; start < p.count; start += kBatch * p.parts) {
    Vec<T, L> v[kBatch], q[kScores ? kBatch : 1];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = start + b * p.parts;
      if (at >= p.count) continue;
      v[b] = p.Load(x, at, static_cast<T>(0.0f));
      if constexpr (kScores) q[b] = t.q != nullptr ? p.Load(t.q, at, static_cast<T>(0.0f)) : Vec<T, L>();
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = start + b * p.parts;
      if (at >= p.count) continue;
      Vec<T, L> out;
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const Row<T>& row = rows[i % W];
        A sum = row.Gradient(static_cast<A>(v[b].v[i]));
        if constexpr (kScores)
          sum += p.IsInside(at, i) ? OfScores(t, row, q[kScores ? b : 0].v[i], p.Along(at, i)) : A(0);
        if (W > 1 && p.Along(at, i) == row.label) sum += row.label_g;
        out.v[i] = static_cast<T>(sum);
      }
      // A row's label is in one of its vectors.
      const int64_t place = rows[0].label - p.Along(at, 0);
      if (W == 1 && rows[0].label >= 0 && place >= 0 && place < L) {
#pragma unroll
        for (int i = 0; i < L; ++i)
          if (i == place) {
            A sum = rows[0].Gradient(static_cast<A>(v[b].v[i])) + rows[0].label_g;
            if constexpr (kScores) sum += OfScores(t, rows[0], q[kScores ? b : 0].v[i], rows[0].label);
            out.v[i] = static_cast<T>(sum);
          }
      }
      if (keep != nullptr) {
#pragma unroll
        for (int i = 0; i < L; ++i)
          if (p.IsInside(at, i) && !keep[p.Along(at, i) * t.mask.along_n + (W > 1 ? i * t.mask.along_inner : 0)])
            out.v[i] = static_cast<T>(0.0f);
      }
      p.Store(dx, at, out);
    }
  }
}

// Rows of n below 2^31 / kVectorsPerBlock elements, end to end: a vector's elements may be of several rows.
constexpr int kVectorsPerThread = 4;
constexpr int kVectorsPerBlock = kThreads * kVectorsPerThread;

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 3)
    PackedKernel(int64_t size, FastDiv n, const __grid_constant__ TypedTargets<T> t, Arrays<Accumulator<T>> arrays,
                 const T* x, T* dx) {
  using A = Accumulator<T>;
  constexpr int L = kVecLength<T>;
  using V = Vec<T, L>;
  const int64_t first = int64_t{blockIdx.x} * kVectorsPerBlock * L;
  const int64_t first_row = first / n.divisor;
  const int skew = static_cast<int>(first - first_row * n.divisor);
  V v[kVectorsPerThread];
#pragma unroll
  for (int b = 0; b < kVectorsPerThread; ++b) {
    const int64_t at = first + (b * kThreads + static_cast<int>(threadIdx.x)) * L;
    if (at + L <= size) {
      v[b] = *reinterpret_cast<const V*>(x + at);
    } else {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        v[b].v[i] = at + i < size ? x[at + i] : static_cast<T>(0.0f);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kVectorsPerThread; ++b) {
    const int offset = (b * kThreads + static_cast<int>(threadIdx.x)) * L;
    const int64_t at = first + offset;
    if (at >= size) continue;
    int k;
    int64_t row = first_row + n.Div(skew + offset, &k);
    Row<T> values(t, arrays, 1, row, 0);
    const bool* keep = t.mask.data == nullptr ? nullptr : t.mask.data + t.mask.Row(row);
    V out;
#pragma unroll
    for (int i = 0; i < L; ++i) {
      A sum = values.Gradient(static_cast<A>(v[b].v[i]));
      if (k == values.label) sum += values.label_g;
      out.v[i] =
          keep == nullptr || at + i >= size || keep[k * t.mask.along_n] ? static_cast<T>(sum) : static_cast<T>(0.0f);
      if (i + 1 < L && ++k == static_cast<int>(n.divisor) && at + i + 1 < size) {
        k = 0;
        values = Row<T>(t, arrays, 1, ++row, 0);
        if (keep != nullptr) keep = t.mask.data + t.mask.Row(row);
      }
    }
    if (at + L <= size) {
      *reinterpret_cast<V*>(dx + at) = out;
    } else {
#pragma unroll
      for (int i = 0; i < L; ++i)
        if (at + i < size) dx[at + i] = out.v[i];
    }
  }
}

template <class T, int L, int W, bool kScores>
cudaError_t RunRows(const softmax::Shape& shape, const TypedTargets<T>& t, const Arrays<Accumulator<T>>& arrays,
                    const T* x, T* dx, cudaStream_t stream) {
  Spread spread = PlanSpread<L, W>(shape, sizeof(T), kBatch, 1);
  // No more than two batches a thread: nothing is gained by staying.
  const int64_t vectors = int64_t{2 * kBatch} << (spread.group.span - spread.group.stride);
  spread.shares = static_cast<int>(CeilDiv(spread.share, vectors));
  spread.share = CeilDiv(CeilDiv(spread.share, spread.shares), kBatch) * kBatch;
  return LaunchKernel(RowsKernel<T, L, W, kScores>, spread.Blocks(), kThreads, stream, spread, t, arrays, x, dx);
}

template <class T, bool kScores>
cudaError_t Run(const softmax::Shape& shape, const TypedTargets<T>& t, const Arrays<Accumulator<T>>& arrays, const T* x,
                T* dx, cudaStream_t stream) {
  constexpr int L = kVecLength<T>;
  const int64_t size = shape.outer * shape.n * shape.inner;
  if (size == 0) return cudaSuccess;
  const bool aligned = IsVectorAligned(x, t.q, dx);
  // What is rare takes fewer ways: doubles go element by element, and so do columns with scores.
  if constexpr (sizeof(T) < 8) {
    if constexpr (!kScores) {
      if (aligned && shape.inner == 1 && shape.n <= kMaxPackedRow && shape.n % L != 0)
        return LaunchKernel(PackedKernel<T>, CeilDiv(size, kVectorsPerBlock * L), kThreads, stream, size,
                            FastDiv(shape.n), t, arrays, x, dx);
      if (aligned && shape.inner % 4 == 0) return RunRows<T, 4, 4, kScores>(shape, t, arrays, x, dx, stream);
    }
    if (aligned && shape.inner == 1) return RunRows<T, L, 1, kScores>(shape, t, arrays, x, dx, stream);
  }
  return RunRows<T, 1, 1, kScores>(shape, t, arrays, x, dx, stream);
}

}  // namespace

cudaError_t LogPartitionBwd(const Problem& p, const void* g, const void* x, const void* m, const void* sums, void* dx,
                            cudaStream_t stream) {
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const TypedTargets<T> t(p.targets);
    const Arrays<A> arrays = {static_cast<const A*>(g), static_cast<const A*>(m), static_cast<const A*>(sums)};
    const auto run = [&](auto scores) {
      return Run<T, decltype(scores)::value>(p.shape, t, arrays, static_cast<const T*>(x), static_cast<T*>(dx), stream);
    };
    if constexpr (sizeof(T) < 8)
      if (t.q == nullptr && !t.smooth) return run(std::false_type());
    return run(std::true_type());
  });
}

}  // namespace jaxdnn::loss
