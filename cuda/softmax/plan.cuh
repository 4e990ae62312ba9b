// Which kernel takes a problem, and how it is cut.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/softmax/columns.cuh"
#include "cuda/softmax/held.cuh"
#include "cuda/softmax/rows.cuh"
#include "cuda/softmax/shares.cuh"
#include "cuda/softmax/tile.cuh"
#include "cuda/softmax/unclustered.cuh"

namespace jaxdnn::softmax {

// What a tile may take of a multiprocessor's shared memory, so that others overlap its phases; and what it may take
// where rows are so long that it has to.
constexpr int64_t kTileBytes = 64 << 10;
constexpr int64_t kLongTileBytes = 200 << 10;
// The width of a tile of columns, at least. Less wastes what memory transfers at once.
constexpr int64_t kNarrowBytes = 64;
// Blocks that share a tile through the workspace: each has half of kTileBytes, of one input.
inline int64_t WorkspaceShares(const Shape& s, int element_bytes) {
  return CeilDiv(s.n, kTileBytes / 2 / (s.inner == 1 ? element_bytes : kNarrowBytes));
}

// Cuts rows of vectors, or columns, into tiles of a block or a cluster; kReduce where no cluster holds a row, or too
// few clusters would have work.
template <int L>
Tiling PlanTile(const Shape& shape, int inputs, int element_bytes, const Device& device) {
  const int64_t bytes = int64_t{inputs} * L * element_bytes;  // of a vector of each input
  // A row's vectors are one more where it starts inside of one.
  const int64_t vectors = L > 1 ? CeilDiv(shape.n - 1, L) + 1 : shape.n, pitch = shape.inner;
  const int widest = std::min(CeilLog2(pitch), CeilLog2(512 / (L * element_bytes)));
  const int narrowest = std::min(widest, CeilLog2(kNarrowBytes / (L * element_bytes)));
  int stride = widest;
  const auto too_large = [&] { return vectors * bytes << stride > kTileBytes / 2; };
  const auto too_few = [&] { return shape.outer * CeilDiv(pitch, 1 << stride) < 4 * device.multiprocessors; };
  while (stride > narrowest && (too_large() || too_few())) --stride;
  const int64_t tiles = CeilDiv(pitch, 1 << stride);

  int64_t shares = 1;
  const auto tile_bytes = [&] { return CeilDiv(vectors, shares) * bytes << stride; };
  const auto idle = [&](int64_t blocks) { return shape.outer * tiles * shares < blocks; };
  while (shares < device.max_cluster && tile_bytes() > kTileBytes) shares *= 2;
  while (shares < device.max_cluster && idle(device.multiprocessors) && tile_bytes() > kTileBytes / 8) shares *= 2;
  const bool fits = tile_bytes() <= std::min(kLongTileBytes, device.shared_bytes - (24 << 10));
  Phase phase = Phase::kWhole;
  const int64_t most = WorkspaceShares(shape, element_bytes);
  if (most > 1 && (!fits || (idle(device.multiprocessors / 4) && tile_bytes() > kTileBytes / 2))) {
    phase = Phase::kReduce;
    shares = most;
    stride = narrowest;
  }
  const int share = static_cast<int>(CeilDiv(vectors, shares));
  // Eight vectors a thread.
  const int span = std::clamp(CeilLog2(std::max(share << stride, 1)) - 3, std::max(6, stride), kMaxTileSpan);
  return {shape, CeilDiv(pitch, 1 << stride), static_cast<int>(shares), share, {stride, span}, phase};
}

template <class T, int L, class Op>
cudaError_t RunTiles(const Op& op, const Problem& p, const T* in0, const T* in1, T* out, cudaStream_t stream) {
  Device device;
  if (const cudaError_t e = CurrentDevice(&device); e != cudaSuccess) return e;
  Tiling t = PlanTile<L>(p.shape, Op::kInputs, sizeof(T), device);
  auto* workspace = static_cast<typename Op::Stats*>(p.workspace);
  const auto launch = [&] {
    const Grid grid = {t.Blocks(), t.Threads(), TileBytes<Op, T, L>(t), t.phase == Phase::kWhole ? t.shares : 1};
    return LaunchKernel(TileKernel<Op, T, L>, grid, stream, t, op, p.mask, workspace, in0, in1, out);
  };
  cudaError_t e = launch();
  if (e != cudaSuccess || t.phase == Phase::kWhole) return e;
  e = FoldShares<typename Op::Folds>(p.shape, t.shares, workspace, stream);
  t.phase = Phase::kApply;
  return e == cudaSuccess ? launch() : e;
}

// Rows that no warp of rows.cuh takes.
template <class T, class Op>
cudaError_t RunLongRows(const Op& op, const Problem& p, const T* in0, const T* in1, T* out, cudaStream_t stream) {
  constexpr int L = kVecLength<T>, kMost = kHeld<Op>;
  Device device;
  if (const cudaError_t e = CurrentDevice(&device); e != cudaSuccess) return e;
  const int64_t vectors = p.shape.n / L;
  // Few to a thread where a warp holds the row so, or where there would be few threads.
  const bool few = p.shape.outer * vectors < int64_t{1024 * kMost} * device.multiprocessors;
  const int steps = vectors <= 32 * 4 || (few && vectors <= kHeldThreads * 4) ? 4 : kMost;
  const HeldRows rows = PlanHeldRows(p.shape.outer, p.shape.n, vectors, device, steps);
  if (rows.shares == 0) return Unclustered<T, Op>{op, p, in0, in1, out, stream}.SharedRows();
  const auto run = [&](auto held) {
    constexpr int V = decltype(held)::value;
    return RunHeldRows<T, V>(op, rows, in0, in1, out, stream);
  };
  if constexpr (kMost > 4)
    if (steps == 4) return run(std::integral_constant<int, 4>{});
  return run(std::integral_constant<int, kMost>{});
}

// Buffers that begin on a vector.
template <class T, class Op>
cudaError_t RunTuned(const Op& op, const Problem& p, const T* in0, const T* in1, T* out, cudaStream_t stream) {
  constexpr int L = kVecLength<T>, kVectors = kRowVectors<Op, T>, kInputs = Op::kInputs;
  const Shape& s = p.shape;
  const bool masked = p.mask.data != nullptr;
  const Unclustered<T, Op> unclustered = {op, p, in0, in1, out, stream};
  if (s.inner > 1) {
    if (!masked) {
      Device device;
      if (const cudaError_t e = CurrentDevice(&device); e != cudaSuccess) return e;
      if (s.n <= kShortColumn<Op> && IsShortColumns<T>(s)) return unclustered.ShortColumns();
      // Of one input, narrower tiles are better than the largest clusters.
      const int max_cluster = std::min(kInputs == 1 ? 8 : 16, device.max_cluster);
      const auto plan = [&](int cluster, int columns) {
        return PlanHeldColumns(s, kColumnVector<T>, kHeldColumns<Op>, cluster, columns, device);
      };
      HeldColumns c = plan(max_cluster, kTileColumns);
      if (c.threads == 0) c = plan(device.max_cluster, kLongTileColumns);
      if (c.threads > 0) return RunHeldColumns(op, c, in0, in1, out, stream);
      if (device.max_cluster > 1) c = plan(kMaxColumnShares, kTileColumns);
      if (c.threads > 0) return unclustered.SharedColumns(c);
      if (s.n <= kMaxPackedLine && PlanPackedRows<L>(s, LineSpan(s.n), kInputs * sizeof(T)).per_block > 0)
        return unclustered.PackedLines();
    }
    return RunTiles<T, 1>(op, p, in0, in1, out, stream);
  }
  const int64_t vectors = s.n / L;
  if (s.n % L == 0 && vectors <= 32 * kVectors && !masked) {
    // Eight threads a row where it has as many vectors, then as many vectors a thread as it holds, then more threads.
    const int span = std::clamp(CeilLog2(CeilDiv(vectors, kVectors)), std::min(3, CeilLog2(vectors)), 5);
    return unclustered.VectorRows(span, CeilDiv(vectors, 1 << span));
  }
  if (s.outer * s.n % L == 0 && !masked && (s.n <= 2 || (s.n == 4 && L == 8))) return unclustered.RowsOfVector();
  if (s.n <= kMaxPackedLine && masked) return unclustered.PackedLines();
  if (s.n <= kMaxPackedRow<T> && !masked) return unclustered.PackedRows();
  if (masked || s.n > kMaxHeldRow) return RunTiles<T, L>(op, p, in0, in1, out, stream);
  return RunLongRows(op, p, in0, in1, out, stream);
}

template <class T, class Op>
cudaError_t Run(const Op& op, const Problem& p, const T* in0, const T* in1, T* out, cudaStream_t stream) {
  const Shape& s = p.shape;
  if (s.outer == 0 || s.n == 0 || s.inner == 0) return cudaSuccess;
  if constexpr (sizeof(T) < 8)
    if (op.IsTuned() && IsVectorAligned(in0, in1, out)) return RunTuned(op, p, in0, in1, out, stream);
  return RunTiles<T, 1>(op, p, in0, in1, out, stream);
}

}  // namespace jaxdnn::softmax
