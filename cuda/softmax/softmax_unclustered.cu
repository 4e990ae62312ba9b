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
  // One kernel for all cases would take more registers than some of them.
  return u.op.Writing([&](const auto& known) {
    return LaunchKernel(VectorRowsKernel<std::decay_t<decltype(known)>, T, kSteps>, rows.Blocks(), kRowThreads,
                        u.stream, rows, known, u.in0, u.in1, u.out);
  });
}

template <class T, int kN, class Op>
cudaError_t RunRowsOfVector(const Unclustered<T, Op>& u) {
  const int64_t vectors = u.p.shape.outer * u.p.shape.n / kVecLength<T>;
  return LaunchKernel(RowsOfVectorKernel<Op, T, kN>, CeilDiv(vectors, kRowThreads), kRowThreads, u.stream, vectors,
                      u.op, u.in0, u.in1, u.out);
}

template <class Op, class T>
Grid PackedGrid(const Rows& rows) {
  return {rows.Blocks(), kRowThreads, size_t{Op::kInputs} * rows.per_block * rows.n * sizeof(T)};
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
  const PackedSpan shares = SpanOf<T>(p.shape.n);
  const Rows rows = PlanPackedRows<kVecLength<T>>(p.shape, shares.span, Op::kInputs * sizeof(T));
  return VisitPackedWords(shares.whole, [&](auto whole) {
    return LaunchKernel(PackedRowsKernel<Op, T, whole>, PackedGrid<Op, T>(rows), stream, rows, op, in0, in1, out);
  });
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::PackedLines() const {
  const Shape& s = p.shape;
  const Rows rows = PlanPackedRows<kVecLength<T>>(s, LineSpan(s.n), Op::kInputs * sizeof(T));
  return LaunchKernel(PackedLinesKernel<Op, T>, PackedGrid<Op, T>(rows), stream, rows, FastDiv(s.inner), op, p.mask,
                      in0, in1, out);
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
  constexpr int V = kHeld<Op>;
  const Shape& s = p.shape;
  const int shares = static_cast<int>(CeilDiv(s.n, V * kVecLength<T> * kShareThreads));
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, s.outer * shares, kShareThreads, stream, static_cast<int>(s.n), shares, 0u, op, in0,
                        in1, out, static_cast<typename Op::Stats*>(p.workspace));
  };
  const cudaError_t e = launch(SharedRowsKernel<Op, T, V, false>);
  return e == cudaSuccess ? launch(SharedRowsKernel<Op, T, V, true>) : e;
}

template <class T, class Op>
cudaError_t Unclustered<T, Op>::SharedColumns(const HeldColumns& c) const {
  using Stats = typename Op::Stats;
  constexpr int V = kHeldColumns<Op>;
  auto* const stats = static_cast<Stats*>(p.workspace);
  const Grid grid = {c.shape.outer * c.tiles * c.cluster, c.threads, c.threads * kColumnVector<T> * sizeof(Stats)};
  const auto launch = [&](auto kernel) { return LaunchKernel(kernel, grid, stream, c, op, in0, in1, out, stats); };
  cudaError_t e = launch(SharedColumnsKernel<Op, T, V, false>);
  if (e == cudaSuccess) e = FoldShares<typename Op::Folds>(c.shape, c.cluster, stats, stream);
  return e == cudaSuccess ? launch(SharedColumnsKernel<Op, T, V, true>) : e;
}

template <class Op>
cudaError_t FoldShares(const Shape& shape, int shares, typename Op::Stats* workspace, cudaStream_t stream) {
  return LaunchKernel(FoldKernel<Op>, shape.outer * shape.inner, kMaxTileThreads, stream, shape, shares, workspace);
}

template struct Unclustered<float, ForwardOp<float>>;
template struct Unclustered<float, BackwardOp<float>>;
template struct Unclustered<__half, ForwardOp<__half>>;
template struct Unclustered<__half, BackwardOp<__half>>;
template struct Unclustered<__nv_bfloat16, ForwardOp<__nv_bfloat16>>;
template struct Unclustered<__nv_bfloat16, BackwardOp<__nv_bfloat16>>;
template cudaError_t FoldShares<ForwardOp<float>>(const Shape&, int, MaxSum<float>*, cudaStream_t);
template cudaError_t FoldShares<BackwardOp<float>>(const Shape&, int, float*, cudaStream_t);
template cudaError_t FoldShares<ForwardOp<double>>(const Shape&, int, MaxSum<double>*, cudaStream_t);
template cudaError_t FoldShares<BackwardOp<double>>(const Shape&, int, double*, cudaStream_t);

}  // namespace jaxdnn::softmax
