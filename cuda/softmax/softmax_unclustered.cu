// Short rows and columns, and those that are read twice: unclustered.cuh, for every tuned operator and type.
#include "cuda/softmax/rows.cuh"
#include "cuda/softmax/shares.cuh"
#include "cuda/softmax/unclustered.cuh"

namespace jaxdnn::softmax {
namespace {

template <class T, int kSteps, class Op>
cudaError_t RunVectorRows(const Unclustered<T, Op>& u, int span) {
  const int rows_at_once = kRowVectors<Op, T> / kSteps;
  const Shape& s = u.p.shape;
  const Rows rows = {s.outer, static_cast<int>(s.n), span, rows_at_once * (kRowThreads >> span)};
  return LaunchKernel(VectorRowsKernel<Op, T, kSteps>, rows.Blocks(), kRowThreads, u.stream, rows, u.op, u.in0, u.in1,
                      u.out);
}

template <class T, int kN, class Op>
cudaError_t RunRowsOfVector(const Unclustered<T, Op>& u) {
  const int64_t vectors = u.p.shape.outer * u.p.shape.n / kVecLength<T>;
  return LaunchKernel(RowsOfVectorKernel<Op, T, kN>, CeilDiv(vectors, 4 * kRowThreads), kRowThreads, u.stream, vectors,
                      u.op, u.in0, u.in1, u.out);
}

template <class Op, class T>
Grid PackedGrid(const Rows& rows) {
  return {rows.Blocks(), kRowThreads, size_t{Op::kInputs} * rows.per_block * rows.n * sizeof(T)};
}

template <class T, int kSteps, bool kMasked, class Op>
cudaError_t RunPackedLines(const Unclustered<T, Op>& u) {
  const Shape& s = u.p.shape;
  const Rows rows = PlanPackedRows<kVecLength<T>>(s, LineSpan(s.n, kSteps), Op::kInputs * sizeof(T));
  return LaunchKernel(PackedLinesKernel<Op, T, kSteps, kMasked>, PackedGrid<Op, T>(rows), u.stream, rows,
                      FastDiv(s.inner), u.op, u.p.mask, u.in0, u.in1, u.out);
}

template <class T, bool kEdges, class Op>
cudaError_t RunSharedRows(const Unclustered<T, Op>& u) {
  constexpr int V = kHeld<Op>;
  const Shape& s = u.p.shape;
  const int shares = static_cast<int>(CeilDiv(s.n, V * kVecLength<T> * kShareThreads));
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, s.outer * shares, kShareThreads, u.stream, static_cast<int>(s.n), shares, 0u, u.op,
                        u.in0, u.in1, u.out, static_cast<typename Op::Stats*>(u.p.workspace));
  };
  const cudaError_t e = launch(SharedRowsKernel<Op, T, V, kEdges, false>);
  return e == cudaSuccess ? launch(SharedRowsKernel<Op, T, V, kEdges, true>) : e;
}

}  // namespace

template <class T, class Op>
cudaError_t Unclustered<T, Op>::VectorRows(int span, int64_t steps) const {
  if (steps == 1) return RunVectorRows<T, 1>(*this, span);
  if (steps == 2) return RunVectorRows<T, 2>(*this, span);
  return RunVectorRows<T, kRowVectors<Op, T>>(*this, span);
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::RowsOfVector() const {
  if (p.shape.n == 1) return RunRowsOfVector<T, 1>(*this);
  if (p.shape.n == 2) return RunRowsOfVector<T, 2>(*this);
  if constexpr (kVecLength<T> == 8)
    if (p.shape.n == 4) return RunRowsOfVector<T, 4>(*this);
  return cudaErrorInvalidValue;
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::PackedRows() const {
  return VisitPackedRow<T>(p.shape.n, [&](auto whole, int span) {
    const Rows rows = PlanPackedRows<kVecLength<T>>(p.shape, span, Op::kInputs * sizeof(T));
    return LaunchKernel(PackedRowsKernel<Op, T, whole>, PackedGrid<Op, T>(rows), stream, rows, op, in0, in1, out);
  });
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::MaskedLines() const {
  return RunPackedLines<T, kMaxPackedSteps, true>(*this);
}

// With the fewest steps that hold a thread's elements of a short column.
template <class T, class Op>
cudaError_t Unclustered<T, Op>::PackedColumns() const {
  if (p.shape.n <= 4) return RunPackedLines<T, 4, false>(*this);
  if (p.shape.n <= 8) return RunPackedLines<T, 8, false>(*this);
  return RunPackedLines<T, kMaxPackedSteps, false>(*this);
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::ShortColumns() const {
  constexpr int kFew = 8;
  const int64_t words = p.shape.inner * sizeof(T) / 4;
  const auto run = [&](auto kernel) {
    return LaunchKernel(kernel, CeilDiv(p.shape.outer * words, kColumnThreads), kColumnThreads, stream, p.shape,
                        FastDiv(words), uint32_t{0}, op, in0, in1, out);
  };
  if (p.shape.n <= kFew) return run(ShortColumnsKernel<Op, T, kFew>);
  return run(ShortColumnsKernel<Op, T, kShortColumn<Op>>);
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::SharedRows() const {
  if (p.shape.n % kVecLength<T> == 0) return RunSharedRows<T, false>(*this);
  return RunSharedRows<T, true>(*this);
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::SharedColumns(const HeldColumns& c) const {
  using Stats = typename Op::Stats;
  constexpr int V = kHeldColumns<Op>;
  auto* const stats = static_cast<Stats*>(p.workspace);
  const Grid grid = {c.shape.outer * c.tiles * c.cluster, c.threads, c.threads * kColumnVector<T> * sizeof(Stats)};
  const auto launch = [&](auto kernel) { return LaunchKernel(kernel, grid, stream, c, op, in0, in1, out, stats); };
  cudaError_t e = launch(SharedColumnsKernel<Op, T, V, false>);
  if (e == cudaSuccess)
    e = LaunchKernel(FoldKernel<Op>, c.shape.outer * c.shape.inner, kMaxTileThreads, stream, c.shape, c.cluster, stats);
  return e == cudaSuccess ? launch(SharedColumnsKernel<Op, T, V, true>) : e;
}

template struct Unclustered<float, ForwardOp<float, false>>;
template struct Unclustered<float, ForwardOp<float, true>>;
template struct Unclustered<float, BackwardOp<float, Map::kSoftmax>>;
template struct Unclustered<float, BackwardOp<float, Map::kLogSoftmaxVjp>>;
template struct Unclustered<__half, ForwardOp<__half, false>>;
template struct Unclustered<__half, ForwardOp<__half, true>>;
template struct Unclustered<__half, BackwardOp<__half, Map::kSoftmax>>;
template struct Unclustered<__half, BackwardOp<__half, Map::kLogSoftmaxVjp>>;
template struct Unclustered<__nv_bfloat16, ForwardOp<__nv_bfloat16, false>>;
template struct Unclustered<__nv_bfloat16, ForwardOp<__nv_bfloat16, true>>;
template struct Unclustered<__nv_bfloat16, BackwardOp<__nv_bfloat16, Map::kSoftmax>>;
template struct Unclustered<__nv_bfloat16, BackwardOp<__nv_bfloat16, Map::kLogSoftmaxVjp>>;

}  // namespace jaxdnn::softmax
