// m, l = log(sum(exp(x - m))) and scores sum(q (x - m)), each over the middle dimension of [outer, n, inner].
//
// Bound by memory: one read. A thread goes over its vectors once, raising its maximum and rescaling its sums batch by
// batch (spread.cuh says which vectors); the threads of a group combine in a fixed order, and groups that share a row
// leave their sums in the workspace for a second, small kernel. Rows that are short and not whole vectors are packed in
// shared memory. The score of a label is one element, read at the end.
#include "cuda/common/async_copy.cuh"
#include "cuda/loss/spread.cuh"
#include "cuda/loss/state.cuh"

namespace jaxdnn::loss {
namespace {

constexpr int64_t kMaxShares = 256;
constexpr int kBatch = 4;
// Elements of a short row that a thread takes, and the longest such row.
constexpr int kPackedSteps = 16;
constexpr int kMaxPackedRow = 32 * kPackedSteps;

template <class T, int L, int W, bool kSoft, bool kSmooth>
__global__ void __launch_bounds__(kThreads, kSoft || kSmooth ? 2 : 3)
    StreamKernel(Spread spread, const __grid_constant__ TypedTargets<T> t, const T* x, Accumulator<T>* m,
                 Accumulator<T>* sums, Accumulator<T>* workspace) {
  using A = Accumulator<T>;
  using RowState = State<T, W, kSoft, kSmooth>;
  __shared__ A scratch[W * kThreads];
  const Place<L, W> p(spread);
  const T lowest = static_cast<T>(-INFINITY), zero = static_cast<T>(0.0f);
  const bool* keep = t.mask.data == nullptr || p.count == 0
                         ? nullptr
                         : t.mask.data + t.mask.Row(p.outer) + p.across * W * t.mask.along_inner;
  RowState state;
  for (int start = p.part; start < p.count; start += kBatch * p.parts) {
    Vec<T, L> v[kBatch], q[kSoft ? kBatch : 1];
    A weights[kSmooth ? kBatch : 1][kSmooth ? L : 1];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = start + b * p.parts;
      const bool exists = at < p.count;
      if (exists) {
        v[b] = p.Load(x, at, lowest);
        if constexpr (kSoft) q[b] = p.Load(t.q, at, zero);
      } else {
        for (T& each : v[b].v) each = lowest;
        if constexpr (kSoft)
          for (T& each : q[b].v) each = zero;
      }
      if constexpr (kSmooth)
#pragma unroll
        for (int i = 0; i < L; ++i)
          weights[b][i] = !exists || !p.IsInside(at, i) ? A(0) : t.weights ? t.weights[p.Along(at, i)] : A(1);
    }
    if (keep != nullptr) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int at = start + b * p.parts;
#pragma unroll
        for (int i = 0; i < L; ++i)
          if (at < p.count && p.IsInside(at, i) &&
              !keep[p.Along(at, i) * t.mask.along_n + (W > 1 ? i * t.mask.along_inner : 0)])
            v[b].v[i] = lowest;
      }
    }
    state.template Add<kBatch, L>(v, q, weights, t.largest);
  }
  state.Combine([&](auto& values, auto operation) {
    // Fields that W rows share out are W long, and the reduction's scratch is as large.
    Reduce(values, operation, spread.group, scratch);
  });
  if (p.part != 0 || !p.IsActive(spread)) return;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const int64_t column = p.across * W + w, inner = spread.shape.inner;
    if (spread.shares == 1)
      state.Write(w, t, spread.shape, p.outer, column, x, m, sums);
    else
      state.Save(w, workspace + (p.outer * spread.shares + p.rank) * RowState::kFields * inner + column, inner);
  }
}

// A warp adds up what the shares of a row have left.
template <class T, bool kSoft, bool kSmooth>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(Spread spread, const __grid_constant__ TypedTargets<T> t, const T* x, Accumulator<T>* m,
                 Accumulator<T>* sums, const Accumulator<T>* workspace) {
  using RowState = State<T, 1, kSoft, kSmooth>;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32, inner = spread.shape.inner;
  if (row >= spread.shape.outer * inner) return;
  const int64_t outer = row / inner, column = row - outer * inner;
  const int lane = threadIdx.x % 32;
  RowState state;
  for (int rank = lane; rank < spread.shares; rank += 32)
    state.MergeSaved(workspace + (outer * spread.shares + rank) * RowState::kFields * inner + column, inner);
  state.Combine([](auto& values, auto operation) { Reduce(values, operation, Group{0, 5}, &values[0]); });
  if (lane == 0) state.Write(0, t, spread.shape, outer, column, x, m, sums);
}

// Short rows, per_block of them, which are a run of memory that begins on a vector. Groups of 1 << span threads.
template <class T, bool kSoft, bool kSmooth>
__global__ void __launch_bounds__(kThreads)
    PackedKernel(softmax::Shape shape, int per_block, int span, const __grid_constant__ TypedTargets<T> t, const T* x,
                 Accumulator<T>* m, Accumulator<T>* sums) {
  using A = Accumulator<T>;
  constexpr int L = kVecLength<T>, kInputs = 1 + kSoft;
  extern __shared__ __align__(16) unsigned char shared[];
  T* held = reinterpret_cast<T*>(shared);
  const int n = static_cast<int>(shape.n), size = per_block * n;
  const int64_t first = int64_t{blockIdx.x} * per_block;
  const int rows = static_cast<int>(min(int64_t{per_block}, shape.outer - first)), count = rows * n, whole = count / L;
#pragma unroll
  for (int j = 0; j < kInputs; ++j) {
    const T* from = (j == 0 ? x : t.q) + first * n;
#pragma unroll 4
    for (int i = threadIdx.x; i < whole; i += kThreads)
      CopyAsync(reinterpret_cast<Vec<T, L>*>(held + j * size) + i, reinterpret_cast<const Vec<T, L>*>(from) + i);
    for (int i = whole * L + threadIdx.x; i < count; i += kThreads) held[j * size + i] = from[i];
  }
  CommitAsync();
  WaitAsync<0>();
  __syncthreads();

  const int lane = threadIdx.x & ((1 << span) - 1), steps = (n + (1 << span) - 1) >> span;
  for (int top = 0; top < rows; top += kThreads >> span) {
    const int row = top + (threadIdx.x >> span);
    const bool active = row < rows;
    const bool* keep = t.mask.data == nullptr || !active ? nullptr : t.mask.data + t.mask.Row(first + row);
    const T* mine = held + (active ? row : 0) * n;
    State<T, 1, kSoft, kSmooth> state;
    Vec<T, 1> v[kPackedSteps], q[kSoft ? kPackedSteps : 1];
    A weights[kSmooth ? kPackedSteps : 1][1];
#pragma unroll
    for (int s = 0; s < kPackedSteps; ++s) {
      const int k = lane + (s << span);
      const bool exists = s < steps && active && k < n;
      v[s].v[0] = exists && (keep == nullptr || keep[k * t.mask.along_n]) ? mine[k] : static_cast<T>(-INFINITY);
      if constexpr (kSoft) q[s].v[0] = exists ? mine[size + k] : static_cast<T>(0.0f);
      if constexpr (kSmooth) weights[s][0] = !exists ? A(0) : t.weights ? t.weights[k] : A(1);
    }
    state.template Add<kPackedSteps, 1>(v, q, weights, t.largest);
    state.Combine([&](auto& values, auto operation) { Reduce(values, operation, Group{0, span}, &values[0]); });
    if (active && lane == 0) state.Write(0, t, shape, first + row, 0, x, m, sums);
  }
}

// How x is read: L elements a vector, W rows.
template <int kL, int kW>
struct Access {
  static constexpr int L = kL, W = kW;
};

template <class T, class F>
auto VisitAccess(const softmax::Shape& shape, bool aligned, F&& f) {
  constexpr int L = kVecLength<T>;
  // Columns of four, since every one more is one more of each sum to hold.
  constexpr int kColumns = sizeof(T) == 8 ? 2 : 4;
  if (aligned && shape.inner == 1) return f(Access<L, 1>());
  if (aligned && shape.inner % kColumns == 0) return f(Access<kColumns, kColumns>());
  return f(Access<1, 1>());
}

template <class T, class C>
Spread PlanStream(const softmax::Shape& shape) {
  return PlanSpread<C::L, C::W>(shape, sizeof(T), kBatch, kMaxShares);
}

template <class T, bool kSoft, bool kSmooth>
cudaError_t Run(const softmax::Shape& shape, const TypedTargets<T>& t, const T* x, Accumulator<T>* m,
                Accumulator<T>* sums, Accumulator<T>* workspace, cudaStream_t stream) {
  constexpr int L = kVecLength<T>;
  if (shape.outer == 0 || shape.inner == 0) return cudaSuccess;
  const bool aligned = IsVectorAligned(x, t.q);
  if (aligned && shape.inner == 1 && shape.n > 0 && shape.n <= kMaxPackedRow && shape.n % L != 0) {
    const int n = static_cast<int>(shape.n), bytes = n * sizeof(T);
    const int per_block = std::max(1, (16 << 10) / (bytes * L)) * L;
    const Grid grid = {CeilDiv(shape.outer, per_block), kThreads, size_t{1 + kSoft} * per_block * bytes};
    return LaunchKernel(PackedKernel<T, kSoft, kSmooth>, grid, stream, shape, per_block,
                        CeilLog2(CeilDiv(n, kPackedSteps)), t, x, m, sums);
  }
  return VisitAccess<T>(shape, aligned, [&](auto access) {
    using C = decltype(access);
    const Spread spread = PlanStream<T, C>(shape);
    if (const cudaError_t e = LaunchKernel(StreamKernel<T, C::L, C::W, kSoft, kSmooth>, spread.Blocks(), kThreads,
                                           stream, spread, t, x, m, sums, workspace);
        e != cudaSuccess || spread.shares == 1)
      return e;
    return LaunchKernel(FinishKernel<T, kSoft, kSmooth>, CeilDiv(shape.outer * shape.inner * 32, kThreads), kThreads,
                        stream, spread, t, x, m, sums, workspace);
  });
}

}  // namespace

int64_t WorkspaceBytes(DType dtype, softmax::Shape shape) {
  int64_t bytes = 0;
  // As much as either takes: whether buffers are aligned is only known later.
  for (const bool aligned : {false, true})
    VisitDType(dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const Spread spread =
          VisitAccess<T>(shape, aligned, [&](auto access) { return PlanStream<T, decltype(access)>(shape); });
      const int64_t states = spread.shares > 1 ? shape.outer * spread.shares * shape.inner : 0;
      bytes = std::max<int64_t>(bytes, states * State<T, 1, true, true>::kFields * sizeof(Accumulator<T>));
      return cudaSuccess;
    });
  return bytes;
}

cudaError_t LogPartition(const Problem& p, const void* x, void* m, void* sums, void* workspace, cudaStream_t stream) {
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const TypedTargets<T> t(p.targets);
    const auto run = [&](auto soft, auto smooth) {
      return Run<T, decltype(soft)::value, decltype(smooth)::value>(p.shape, t, static_cast<const T*>(x),
                                                                    static_cast<A*>(m), static_cast<A*>(sums),
                                                                    static_cast<A*>(workspace), stream);
    };
    if (t.q != nullptr && p.targets.smooth) return run(std::true_type(), std::true_type());
    if (t.q != nullptr) return run(std::true_type(), std::false_type());
    if (p.targets.smooth) return run(std::false_type(), std::true_type());
    return run(std::false_type(), std::false_type());
  });
}

}  // namespace jaxdnn::loss
