// m, l = log(sum(exp(x - m))) and scores sum(q (x - m)), each over the middle dimension of [outer, n, inner].
//
// Bound by memory: one read. A thread goes over its vectors once, raising its maximum and rescaling its sums batch by
// batch; the threads of a group combine in a fixed order. Rows of vectors have groups up to clusters
// (log_partition_rows.cu); columns and what is rare are spread as spread.cuh says, and groups that share a row leave
// their sums in the workspace for a second, small kernel. Rows that are short and not whole vectors are packed in
// shared memory. The score of a label is one element, read at the end.
#include "cuda/loss/packed.cuh"
#include "cuda/loss/spread.cuh"
#include "cuda/loss/state.cuh"
#include "cuda/softmax/held.cuh"

namespace jaxdnn::loss {
namespace {

constexpr int64_t kMaxShares = 256;
constexpr int kBatch = 4;

template <class T, int L, int W, bool kScores>
__global__ void __launch_bounds__(kThreads, kScores ? 2 : 3)
    StreamKernel(Spread spread, const __grid_constant__ TypedTargets<T> t, const T* x, Results<T> results,
                 Accumulator<T>* workspace) {
  // Scores take registers that loads could have.
  constexpr int kLoads = kScores && L > 1 ? kBatch / 2 : kBatch;
  using A = Accumulator<T>;
  using RowState = State<T, W, kScores>;
  __shared__ A scratch[W * kThreads];
  const Place<L, W> p(spread);
  const T lowest = static_cast<T>(-INFINITY), zero = static_cast<T>(0.0f);
  Vec<T, L> nothing;
#pragma unroll
  for (T& each : nothing.v) each = lowest;
  const bool* keep = t.mask.data == nullptr || p.count == 0
                         ? nullptr
                         : t.mask.data + t.mask.Row(p.outer) + p.across * W * t.mask.along_inner;
  RowState state;
  for (int start = p.part; start < p.count; start += kLoads * p.parts) {
    Words<T, L> of_x[kLoads], of_q[kScores ? kLoads : 1];
    A weights[kScores ? kLoads : 1][kScores ? L : 1];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      const int at = start + b * p.parts;
      const bool exists = at < p.count;
      of_x[b] = exists ? p.LoadWords(x, at, lowest) : BitCast<Words<T, L>>(nothing);
      if constexpr (kScores) {
        of_q[b] = exists && t.q != nullptr ? p.LoadWords(t.q, at, zero) : Words<T, L>();
#pragma unroll
        for (A& each : weights[b]) each = A(0);
        if (exists && t.smooth) {
          const auto part = p.PartOf(at);
#pragma unroll
          for (int i = 0; i < L; ++i) weights[b][i] = part.Has(i) ? t.Weight(p.Along(at) + i) : A(0);
        }
      }
    }
    Vec<T, L> v[kLoads], q[kScores ? kLoads : 1];
#pragma unroll
    for (int b = 0; b < kLoads; ++b) {
      v[b] = BitCast<Vec<T, L>>(of_x[b]);
      if constexpr (kScores) q[b] = BitCast<Vec<T, L>>(of_q[b]);
    }
    if (keep != nullptr) {
#pragma unroll
      for (int b = 0; b < kLoads; ++b) {
        const int at = start + b * p.parts;
        const auto part = p.PartOf(at);
#pragma unroll
        for (int i = 0; i < L; ++i)
          if (at < p.count && part.Has(i) && !p.IsKept(keep, t.mask, at, i)) v[b].v[i] = lowest;
      }
    }
    state.template Add<kLoads, L>(v, q, weights, t.largest);
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
      state.Write(w, t, spread.shape, p.outer, column, x, results);
    else
      state.Save(w, workspace + (p.outer * spread.shares + p.rank) * RowState::kFields * inner + column, inner);
  }
}

// A warp adds up what the shares of a row have left, each `fields` numbers.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    FinishKernel(Spread spread, const __grid_constant__ TypedTargets<T> t, const T* x, Results<T> results,
                 const Accumulator<T>* workspace, int fields) {
  using RowState = State<T, 1, true>;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32, inner = spread.shape.inner;
  if (row >= spread.shape.outer * inner) return;
  const int64_t outer = row / inner, column = row - outer * inner;
  const int lane = threadIdx.x % 32;
  RowState state;
#pragma unroll 1
  for (int rank = lane; rank < spread.shares; rank += 32)
    state.MergeSaved(workspace + (outer * spread.shares + rank) * fields * inner + column, inner, fields);
  state.Combine([](auto& values, auto operation) { Reduce(values, operation, Group{0, 5}, &values[0]); });
  if (lane == 0) state.Write(0, t, spread.shape, outer, column, x, results);
}

// Short rows, per_block of them, which are a run of memory that begins on a vector. Groups of 1 << span lanes.
template <class T, int kWhole>
__global__ void __launch_bounds__(kThreads)
    PackedKernel(softmax::Shape shape, int per_block, int span, const __grid_constant__ TypedTargets<T> t, const T* x,
                 Results<T> results) {
  using Op = softmax::ForwardOp<T>;
  const auto [held, first, n, rows] = PackedBlock<T>(shape, per_block, x);
  WaitRun();
  for (int top = 0; top < rows; top += kThreads >> span) {
    const int wanted = top + (threadIdx.x >> span);  // all lanes of a warp take part
    PackedRow<Op, T, kWhole> row(held, 0, min(wanted, rows - 1), n, {span, kWhole});
    Accumulator<T> most[1] = {kLowest<Accumulator<T>>};
    row.Each([&](auto& word) { softmax::Fold(most, word[0], Max{}); });
    typename Op::Stats stats[1] = {{fmin(most[0], t.largest), 0}};
    Op{true}.Exponentiate(stats, [&](auto&& visit) { row.Each(visit); });
    Op::Combine(stats, softmax::ShuffleReduce{span});
    if (wanted < rows && row.lane == 0) WriteRow(stats[0], t, shape, first + wanted, x, results);
  }
}

// The same with a mask, element by element.
template <class T>
__global__ void __launch_bounds__(kThreads)
    MaskedKernel(softmax::Shape shape, int per_block, int span, const __grid_constant__ TypedTargets<T> t, const T* x,
                 Results<T> results) {
  using A = Accumulator<T>;
  using Op = softmax::ForwardOp<T>;
  const auto [held, first, n, rows] = PackedBlock<T>(shape, per_block, x);
  WaitRun();
  const int lane = threadIdx.x & ((1 << span) - 1);
  for (int top = 0; top < rows; top += kThreads >> span) {
    const int wanted = top + (threadIdx.x >> span), row = min(wanted, rows - 1), left = n - lane;
    const bool* keep = t.mask.data + t.mask.Row(first + row);
    const T* mine = held + row * n + lane;
    A v[kMaskedSteps][1][1];
#pragma unroll
    for (int s = 0; s < kMaskedSteps; ++s) {
      v[s][0][0] = -softmax::kInfinity<A>;
      if (s << span < left && keep[(lane + (s << span)) * t.mask.along_n]) v[s][0][0] = static_cast<A>(mine[s << span]);
    }
    softmax::MaxSum<A> stats[1] = {{kLowest<A>, A(0)}};
#pragma unroll
    for (int s = 0; s < kMaskedSteps; ++s) stats[0].m = Max{}(stats[0].m, v[s][0][0]);
    stats[0].m = fmin(stats[0].m, t.largest);
    Op{true}.Exponentiate(stats, [&](auto&& visit) {
#pragma unroll
      for (int s = 0; s < kMaskedSteps; ++s) visit(v[s]);
    });
    Op::Combine(stats, softmax::ShuffleReduce{span});
    if (wanted < rows && lane == 0) WriteRow(stats[0], t, shape, first + row, x, results);
  }
}

// How x is read: L elements a vector, W rows.
template <int kL, int kW, bool kWithScores>
struct Access {
  static constexpr int L = kL, W = kW;
  static constexpr bool kScores = kWithScores;
};

// What is rare takes fewer ways: doubles go element by element, as if there were scores, and so do columns with scores.
template <class T, bool kScores, class F>
auto VisitAccess(const softmax::Shape& shape, bool aligned, F&& f) {
  if constexpr (sizeof(T) < 8) {
    if (aligned && shape.inner == 1) return f(Access<kVecLength<T>, 1, kScores>());
    // Columns of four, since every one more is one more of each sum to hold.
    if constexpr (!kScores)
      if (aligned && shape.inner % 4 == 0) return f(Access<4, 4, false>());
  }
  return f(Access<1, 1, kScores || sizeof(T) == 8>());
}

template <class T, class C>
Spread PlanStream(const softmax::Shape& shape) {
  return PlanSpread<C::L, C::W>(shape, sizeof(T), kBatch, kMaxShares);
}

template <class T, bool kScores>
cudaError_t Run(const softmax::Shape& shape, const TypedTargets<T>& t, const T* x, const Results<T>& results,
                Accumulator<T>* workspace, cudaStream_t stream) {
  constexpr int L = kVecLength<T>;
  if (shape.outer == 0 || shape.inner == 0) return cudaSuccess;
  const bool aligned = IsVectorAligned(x, t.q);
  if constexpr (!kScores)
    if (aligned && shape.inner == 1 && shape.n > 0) {
      const bool masked = t.mask.data != nullptr;
      const auto run = [&](auto kernel, int span) {
        const PackedRows rows = PlanPackedRows(shape, span, sizeof(T), 16 << 10);
        return LaunchKernel(kernel, rows.grid, stream, shape, rows.per_block, span, t, x, results);
      };
      if (masked && shape.n <= kMaxMaskedRow && shape.n % L != 0) return run(MaskedKernel<T>, MaskedSpan(shape));
      if (!masked && shape.n <= kMaxPackedRow<T> && shape.n % L != 0)
        return VisitPackedWords(SpanOf<T>(shape.n).whole,
                                [&](auto whole) { return run(PackedKernel<T, whole>, SpanOf<T>(shape.n).span); });
      bool done = false;
      if (const cudaError_t e = RunLongRows(shape, t, x, results, stream, &done); done || e != cudaSuccess) return e;
    }
  return VisitAccess<T, kScores>(shape, aligned, [&](auto access) {
    using C = decltype(access);
    const Spread spread = PlanStream<T, C>(shape);
    if (const cudaError_t e = LaunchKernel(StreamKernel<T, C::L, C::W, C::kScores>, spread.Blocks(), kThreads, stream,
                                           spread, t, x, results, workspace);
        e != cudaSuccess || spread.shares == 1)
      return e;
    return LaunchKernel(FinishKernel<T>, CeilDiv(shape.outer * shape.inner * 32, kThreads), kThreads, stream, spread, t,
                        x, results, workspace, State<T, 1, C::kScores>::kFields);
  });
}

}  // namespace

int64_t WorkspaceBytes(DType dtype, softmax::Shape shape) {
  int64_t bytes = 0;
  // As much as either takes: whether buffers are aligned is only known later.
  for (const bool aligned : {false, true})
    VisitDType(dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const auto plan = [&](auto access) { return PlanStream<T, decltype(access)>(shape); };
      const Spread spread = VisitAccess<T, false>(shape, aligned, plan);
      const int64_t states = spread.shares > 1 ? shape.outer * spread.shares * shape.inner : 0;
      bytes = std::max<int64_t>(bytes, states * State<T, 1, true>::kFields * sizeof(Accumulator<T>));
      return cudaSuccess;
    });
  return bytes;
}

cudaError_t LogPartition(const Problem& p, const void* x, void* m, void* sums, void* total, void* workspace,
                         cudaStream_t stream) {
  return VisitDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const TypedTargets<T> t(p.targets);
    const Results<T> results = {static_cast<A*>(m), static_cast<A*>(sums), static_cast<T*>(total)};
    const auto run = [&](auto scores) {
      return Run<T, decltype(scores)::value>(p.shape, t, static_cast<const T*>(x), results, static_cast<A*>(workspace),
                                             stream);
    };
    if constexpr (sizeof(T) < 8)
      if (t.q == nullptr && !t.smooth) return run(std::false_type());
    return run(std::true_type());
  });
}

}  // namespace jaxdnn::loss
