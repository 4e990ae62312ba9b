// Layer and RMS norm, forward, of rows so few that all run at once, a block for each.
//
// Such a launch is bound by what a block does one after the other, not by bytes: its start, one wait for memory, the
// exchange between its threads, the stores. So all that it reads is asked for before anything is used, and there is
// nothing in a kernel but what its problem needs.
#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/paths.h"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kThreads = 512;  // of a block, at most
// Blocks of so many threads that a multiprocessor holds, where each has so many vectors: with a mean, of 16-bit floats,
// two vectors and their parameters take more than half of its registers.
constexpr int BlocksAtOnce(bool center, size_t element_bytes, int vectors) {
  return center && element_bytes == 2 && vectors == 2 ? 1 : 2;
}

// A thread has V vectors of L elements.
template <class T, int L, int V, bool kCenter, bool kResidual>
__global__ void __launch_bounds__(kThreads, BlocksAtOnce(kCenter, sizeof(T), V))
    FewRowsKernel(Forward f, int vectors, Constants<Accumulator<T>> constants) {
  using A = Accumulator<T>;
  using X = Vec<T, L>;
  __shared__ Exchange<A, 2, false> exchanges[2];
  const Place p({vectors, static_cast<int>(blockDim.x), 1, 1, V}, false);
  __builtin_assume(p.width > 32);
  constants.center = kCenter;
  const int64_t row = blockIdx.y * gridDim.x + blockIdx.x;
  const X* const in = static_cast<const X*>(f.x) + row * p.n;
  const X* const other = static_cast<const X*>(f.residual) + row * p.n;

  X x[1][V], residual[V];
  T first, first_residual;  // not converted before all is asked for: that would wait for them
  ForEachVector<V, false>(p, [&](int s, int k) { x[0][s] = in[k]; });
  if constexpr (kCenter) first = in->v[0];
  if constexpr (kResidual) {
    ForEachVector<V, false>(p, [&](int s, int k) { residual[s] = other[k]; });
    if constexpr (kCenter) first_residual = other->v[0];
  }
  A scale[V][L], bias[kCenter ? V : 1][L] = {};
  const int64_t parameters = int64_t{blockIdx.y} * p.n;
  ForEachVector<V, false>(p, [&](int s, int k) {
    LoadParameters(scale[s], static_cast<const A*>(f.scale), parameters + k);
    if constexpr (kCenter) LoadParameters(bias[s], static_cast<const A*>(f.bias), parameters + k);
  });
  if constexpr (kResidual)
    ForEachVector<V, false>(p, [&](int s, int k) {
      x[0][s] = AddRounded<T>(x[0][s], residual[s]);
      static_cast<X*>(f.sum)[row * p.n + k] = x[0][s];
    });

  A pivot[1] = {}, mean[1], rest[1], rstd[1];
  if constexpr (kCenter) pivot[0] = static_cast<A>(first);
  if constexpr (kCenter && kResidual) pivot[0] += static_cast<A>(first_residual);
  int turn = 0;
  RowMoments<T>(mean, rest, rstd, x, pivot, pivot, p, Columns<L, false>(p.n * L, 0, 0), constants, exchanges, turn);
  if (p.IsLeader()) StoreStatistics(f, row, mean[0], rest[0], rstd[0]);
#pragma unroll
  for (auto& each : x[0]) ForgetWide(each);
  if (constants.offset != 0)
#pragma unroll
    for (auto& each : scale) AddOffset(each, f.scale, constants.offset);
  const Statistics<T> stats({mean[0], rest[0], rstd[0]});
  ForEachVector<V, false>(p, [&](int s, int k) {
    static_cast<X*>(f.y)[row * p.n + k] = Apply<T>(x[0][s], stats, scale[s], bias[kCenter ? s : 0]);
  });
}

// The vectors that a thread has: one, where that leaves the threads of all rows room, or else two; 0 where neither
// does.
int VectorsOfThread(DType dtype, const Shape& shape, const Options& options, const Device& device) {
  const size_t bytes = SizeOf(dtype);
  const int64_t n = shape.n * static_cast<int64_t>(bytes) / 16, rows = shape.problems * shape.rows;
  for (const int each : {1, 2}) {
    const int64_t threads = 32 * CeilDiv(n, int64_t{32} * each);
    if (threads > 32 && threads <= kThreads &&
        rows <= device.multiprocessors * (BlocksAtOnce(options.center, bytes, each) * kThreads / threads))
      return each;
  }
  return 0;
}

template <class T>
cudaError_t Run(const Forward& f, const Shape& shape, const Options& options, const Device& device,
                cudaStream_t stream) {
  constexpr int L = kVecLength<T>;
  const int n = static_cast<int>(shape.n / L);
  return VisitSteps<2>(VectorsOfThread(kDType<T>, shape, options, device), [&](auto keep) {
    constexpr int V = decltype(keep)::value;
    const auto launch = [&](auto center, auto residual) {
      const Grid grid = {shape.rows, 32 * static_cast<int>(CeilDiv(n, 32 * V)), 0, 1, shape.problems};
      return LaunchKernel(FewRowsKernel<T, L, V, decltype(center)::value, decltype(residual)::value>, grid, stream, f,
                          n, Constants<Accumulator<T>>(options, shape.n));
    };
    const std::true_type with;
    const std::false_type without;
    if (options.center) return f.residual == nullptr ? launch(with, without) : launch(with, with);
    return f.residual == nullptr ? launch(without, without) : launch(without, with);
  });
}

}  // namespace

bool TakesFewRows(const Forward& f, DType dtype, const Shape& shape, const Options& options, const Device& device) {
  return f.scale != nullptr && (f.bias != nullptr) == options.center &&
         shape.n * static_cast<int64_t>(SizeOf(dtype)) % 16 == 0 && VectorsOfThread(dtype, shape, options, device) > 0;
}

cudaError_t RunFewRows(const Forward& f, DType dtype, const Shape& shape, const Options& options, const Device& device,
                       cudaStream_t stream) {
  return VisitSingleDType(
      dtype, [&](auto type) { return Run<typename decltype(type)::type>(f, shape, options, device, stream); });
}

}  // namespace jaxdnn::layer_norm
