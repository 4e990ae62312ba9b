// The gradient of layer norm and RMS norm: which of the kernels of backward.cuh a problem takes, and those that need no
// cluster of blocks.
#include "cuda/layer_norm/backward.cuh"
#include "cuda/layer_norm/paths.h"

namespace jaxdnn::layer_norm {
namespace {

// Rows as vectors of 16 bytes, of L elements. Short ones get threads with more columns, so that a group is a warp at
// most.
template <class T, int L>
cudaError_t RunAligned(const Backward& b, const Shape& shape, const Options& options, const Device& device,
                       void* workspace, cudaStream_t stream, bool* done) {
  constexpr int kKeep = 16 / L, kMore = 24 / L, kMost = 32 / L;
  constexpr int kRows = 4 / kKeep > 1 ? 4 / kKeep : 1;
  constexpr bool kMany = !std::is_same_v<T, __half>;  // kernels for many kinds of rows: f16 does with the plainest
  const int64_t n = shape.n / L;
  if constexpr (kMany) {
    if (n > 32 * kKeep && n <= 32 * kMore)
      return Launch<T, L, kMore, 1, false, false, false, true>(b, shape, options, SpreadRows(n, kMore, 128, 0, 0),
                                                               workspace, stream);
    if (n > 32 * kMore && n <= 32 * kMost)
      return Launch<T, L, kMost, 1, false, false>(b, shape, options, SpreadRows(n, kMost, 128, 0, 0), workspace,
                                                  stream);
  }
  if constexpr (kHasPairs<T>)
    if (n > 32 * kMost && n <= 32 * 5)
      return Launch<T, L, kMore, 1, false, false, false, true>(b, shape, options, SpreadRows(n, kMore, 128, 128, 1),
                                                               workspace, stream);
  // Vectors of bf16 are long enough for fewer rows at once. Two to a lane, where one would leave lanes without.
  if constexpr (kHasPairs<T>) {
    if (n > 16 && n <= 28 && !AreFew(shape, n, device))
      return Launch<T, L, kKeep, kRows, false, false, false, true>(b, shape, options, SpreadShortRows(n, kKeep, 256),
                                                                   workspace, stream);
    if (n <= 32 && !AreFew(shape, n, device))
      return Launch<T, L, 1, 2, true, false>(b, shape, options, SpreadRows(n, 1, 256, 0, 0), workspace, stream);
  }
  if (n <= 32 || AreFew(shape, n, device)) {
    const int most = device.Threads(512, RingBytes(b, 1, 4, sizeof(Vec<T, L>)));
    const Spread thin = SpreadRows(n, 1, 256, most, device.max_cluster);
    if (thin.cluster == 1) return Launch<T, L, 1, 4, true, false>(b, shape, options, thin, workspace, stream);
    if constexpr (kMany)
      if (thin.steps > 0) return RunClusterBackward(b, kDType<T>, shape, options, thin, false, workspace, stream);
  }
  // Of 16-bit floats a larger block saves the cluster, if it is about full; of others two small ones are as good.
  const bool takes_large = device.max_cluster == 1 || (sizeof(T) == 2 && (n <= 256 * kKeep || n > 320 * kKeep));
  const int most = takes_large ? device.Threads(512, RingBytes(b, kKeep, kRows, sizeof(Vec<T, L>))) : 256;
  if (const Spread spread = SpreadRows(n, kKeep, 256, most, 1); spread.steps > 0) {
    if constexpr (kMany)
      if (spread.width == 32)
        return Launch<T, L, kKeep, kRows, false, false, false, true>(b, shape, options, spread, workspace, stream);
    return Launch<T, L, kKeep, kRows, false, false>(b, shape, options, spread, workspace, stream);
  }
  return RunLongBackward(b, kDType<T>, shape, options, device, workspace, stream, done);
}

// Rows that start anywhere in a vector.
template <class T>
cudaError_t RunShifted(const Backward& b, const Shape& shape, const Options& options, const Device& device,
                       void* workspace, cudaStream_t stream, bool* done) {
  constexpr int L = kVecLength<T>, kKeep = 16 / L, kMore = 24 / L, kMost = 32 / L, kRows = 4 / kKeep;
  // A warp for each, rather than two warps that have half of what they can take.
  if (const int64_t n = shape.n / L; n > 32 * kKeep && n <= 32 * kMost) {
    const Spread spread = SpreadRows(n, n <= 32 * kMore ? kMore : kMost, 128, 0, 0);
    return n <= 32 * kMore
               ? Launch<T, L, kMore, 1, false, false, true, true>(b, shape, options, spread, workspace, stream)
               : Launch<T, L, kMost, 1, false, false, true>(b, shape, options, spread, workspace, stream);
  }
  // Two blocks of a multiprocessor hide each other's waits. Where its registers would be left for two and two thirds of
  // them, there are three with more columns for each thread.
  Spread spread = SpreadShifted(shape.n, L, kKeep, 256, device.max_cluster);
  if (spread.width == 192 && (kHasPairs<T> || spread.cluster > 2)) {
    spread = SpreadShifted(shape.n, L, kMore, 128, device.max_cluster);
    return spread.cluster == 1
               ? Launch<T, L, kMore, 1, false, false, true>(b, shape, options, spread, workspace, stream)
               : RunClusterBackward(b, kDType<T>, shape, options, spread, true, workspace, stream);
  }
  const int most = device.Threads(512, RingBytes(b, kKeep, kRows, sizeof(Vec<T, L>)));
  if (spread.steps == 0) spread = SpreadShifted(shape.n, L, kKeep, most, device.max_cluster);
  *done = spread.steps > 0;
  if (!*done) return cudaSuccess;
  return spread.cluster == 1
             ? Launch<T, L, kKeep, kRows, false, false, true>(b, shape, options, spread, workspace, stream)
             : RunClusterBackward(b, kDType<T>, shape, options, spread, true, workspace, stream);
}

// Rows element by element: of doubles, of f16 that are not aligned to 16 bytes, and where buffers are not. Those that a
// block does not hold are not `done`.
template <class T>
cudaError_t RunNarrow(const Backward& b, const Shape& shape, const Options& options, const Device& device,
                      void* workspace, cudaStream_t stream, bool* done) {
  constexpr int L = 1, kKeep = 8;
  const int most = device.Threads(512, RingBytes(b, kKeep, 1, sizeof(T)));
  const Spread spread = SpreadRows(shape.n, kKeep, 256, most, 1);
  *done = spread.steps > 0;
  if (!*done) return cudaSuccess;
  return Launch<T, L, kKeep, 1, false, false>(b, shape, options, spread, workspace, stream);
}

}  // namespace

cudaError_t RunBackward(const Backward& b, DType dtype, Shape shape, Options options, void* workspace,
                        cudaStream_t stream) {
  if (shape.problems == 0 || shape.rows == 0 || shape.n == 0) return cudaSuccess;
  Device device;
  if (const cudaError_t e = Query(&device); e != cudaSuccess) return e;
  bool done = true;
  const cudaError_t e = VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool aligned =
        IsVectorAligned(b.g, b.g_sum, b.x, b.scale, b.mean, b.rstd, b.dx, b.dscale, b.dbias, workspace);
    if constexpr (sizeof(T) < 8) {
      if (aligned && TakesPacked(dtype, shape)) return RunPackedBackward(b, dtype, shape, options, workspace, stream);
      if (aligned && shape.n % kVecLength<T> == 0) {
        if (IsSmall(shape, dtype)) return RunSmallBackward(b, dtype, shape, options, device, stream, &done);
        if (GoesDownColumns(shape, dtype)) return RunWideBackward(b, dtype, shape, options, workspace, stream);
        return RunAligned<T, kVecLength<T>>(b, shape, options, device, workspace, stream, &done);
      }
      if constexpr (kHasPairs<T>)
        if (aligned && shape.n == 4)
          return Launch<T, 4, 1, 2, true, false>(b, shape, options, SpreadRows(1, 1, 256, 0, 0), workspace, stream);
      if (aligned && TakesSlabs(dtype, shape))
        return RunSlabBackward(b, dtype, shape, options, device, workspace, stream);
      if constexpr (!std::is_same_v<T, __half>)
        if (aligned) {
          if (HasFewRows(shape, sizeof(T))) return RunWideBackward(b, dtype, shape, options, workspace, stream);
          return RunShifted<T>(b, shape, options, device, workspace, stream, &done);
        }
    }
    return RunNarrow<T>(b, shape, options, device, workspace, stream, &done);
  });
  return done || e != cudaSuccess ? e : RunWideBackward(b, dtype, shape, options, workspace, stream);
}

}  // namespace jaxdnn::layer_norm
