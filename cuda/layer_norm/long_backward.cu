// The gradient of layer norm and RMS norm for rows that a cluster of blocks shares: those that backward.cuh's kernels
// hold in registers, and longer ones (long_rows.cuh); backward.cuh has the formulas. The sums of a thread's columns
// stay in its registers, and where those are left their scale does too.
#include "cuda/layer_norm/backward.cuh"
#include "cuda/layer_norm/held.cuh"
#include "cuda/layer_norm/long_rows.cuh"
#include "cuda/layer_norm/partial_rows.cuh"
#include "cuda/layer_norm/paths.h"

namespace jaxdnn::layer_norm {
namespace {

// Whether a thread's registers hold the scale of its columns.
template <int L, int V>
constexpr bool kKeepsScale = V * L <= 16;

template <class T, int V, int U>
__global__ void __launch_bounds__(kLongThreads) LongBackwardKernel(Backward b, Shape shape, Constants<float> constants,
                                                                   Spread spread, int stages, int ahead, int parts) {
  constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  using Four = Vec<float, 4>;
  extern __shared__ uint4 shared[];
  __shared__ Exchange<float, 2 * U, true> exchanges[kExchanges];
  __shared__ Arrivals arrivals;
  const Slice<T, V, U> slice(shape, spread, parts, shared, arrivals, stages, b.g_sum == nullptr ? 2 : 3);
  const int begin = slice.begin, steps = slice.Steps();
  const int64_t vectors = shape.n / L;
  OpenExchanges(exchanges);

  const void* const inputs[3] = {b.g, b.x, b.g_sum};
  for (int step = 0; step < stages; ++step) {
    if (step < steps) slice.Fetch(step, step, vectors, inputs);
  }
  StoredStatistics<float> next[U];
  const auto load_statistics = [&](int step) {
#pragma unroll
    for (int u = 0; u < U; ++u)
      next[u] = LoadStatistics<float>(b.mean, b.rstd, min(slice.row + int64_t{step} * U + u, slice.last));
  };
  load_statistics(0);

  // scale + offset of the thread's vectors, in its registers or [a fourth of a vector at a time][vector].
  constexpr bool kKeeps = kKeepsScale<L, V>;
  float own_scale[kKeeps ? V : 1][L], dscale[V][L] = {}, dbias[V][L] = {};
  Four* const shared_scale = reinterpret_cast<Four*>(&slice.Slot(stages, 0, 0, 0));
  slice.ForEach([&](int s, int k) {
    float (&scale)[L] = own_scale[kKeeps ? s : 0];
    LoadScale(scale, b.scale, constants.offset, slice.problem * vectors + begin + k);
    if constexpr (!kKeeps)
#pragma unroll
      for (int j = 0; j < L / 4; ++j)
        shared_scale[j * slice.size + k] = {{scale[4 * j], scale[4 * j + 1], scale[4 * j + 2], scale[4 * j + 3]}};
  });
  const auto scale_of = [&](float (&scale)[L], int s, int k) {
#pragma unroll
    for (int j = 0; j < L / 4; ++j) {
      Four four = {};
      if constexpr (!kKeeps) four = shared_scale[j * slice.size + k];
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[4 * j + i] = kKeeps ? own_scale[kKeeps ? s : 0][4 * j + i] : four.v[i];
    }
  };

  ClusterWait();
  // Of the steps whose sums are on their way.
  StoredStatistics<float> latest[U] = {}, before[U] = {};
  int sent = 0, done = 0, sent_stage = 0, sent_round = 0, stage = 0;
  while (done < steps) {
    if (sent < steps && sent - done <= ahead) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        before[u] = latest[u];
        latest[u] = next[u];
      }
      if (sent + 1 < steps) load_statistics(sent + 1);
      slice.Wait(sent_stage, sent_round);
      float sums[2 * U] = {};  // of q (x - mean), then of q
      slice.ForEachRow(sent, [&](int u, int64_t) {
        slice.ForEach([&](int s, int k) {
          const X stored_g = slice.Slot(sent_stage, 0, u, k), stored_x = slice.Slot(sent_stage, 1, u, k);
          float g[L], x[L], scale[L];
          Widen(g, stored_g);
          Widen(x, stored_x);
          scale_of(scale, s, k);
#pragma unroll
          for (int i = 0; i < L; ++i) {
            const float gd = g[i] * Centered<T>(x[i], latest[u]);
            dscale[s][i] = fma(gd, latest[u].rstd, dscale[s][i]);
            dbias[s][i] += g[i];
            sums[u] = fma(gd, scale[i], sums[u]);
            sums[U + u] = fma(g[i], scale[i], sums[U + u]);
          }
        });
      });
      SendSum(sums, slice.p, exchanges[sent % kExchanges]);
      ++sent;
      sent_stage = slice.After(sent_stage);
      sent_round += sent_stage == 0;
      continue;
    }
    const bool is_latest = done + 1 == sent;
    float means[2 * U];
    ReceiveSum(means, slice.p, exchanges[done % kExchanges], done / kExchanges);
    slice.ForEachRow(done, [&](int u, int64_t row) {
      const StoredStatistics<float> stats = is_latest ? latest[u] : before[u];
      const float along = means[u] * constants.inverse * stats.rstd * stats.rstd * stats.rstd;
      const float mean_q = constants.center ? means[U + u] * constants.inverse : 0.0f;
      X* const dx = static_cast<X*>(b.dx) + row * vectors + begin;
      slice.ForEach([&](int s, int k) {
        const X stored_g = slice.Slot(stage, 0, u, k), stored_x = slice.Slot(stage, 1, u, k);
        float g[L], x[L], extra[L] = {}, scale[L];
        Widen(g, stored_g);
        Widen(x, stored_x);
        if (b.g_sum != nullptr) {
          const X other = slice.Slot(stage, 2, u, k);
          Widen(extra, other);
        }
        scale_of(scale, s, k);
#pragma unroll
        for (int i = 0; i < L; ++i) {
          const float across = fma(stats.rstd, fma(g[i], scale[i], -mean_q), extra[i]);
          g[i] = fma(-along, Centered<T>(x[i], stats), across);
        }
        dx[k] = Narrow<T>(g);
      });
    });
    if (done + stages < steps) slice.Fetch(done + stages, stage, vectors, inputs);
    ++done;
    stage = slice.After(stage);
  }
  const int64_t out = int64_t{slice.p.block} * vectors + begin;
  slice.ForEach([&](int s, int k) {
    if (b.dscale != nullptr) StoreParameters(static_cast<float*>(b.dscale), out + k, dscale[s]);
    if (b.dbias != nullptr) StoreParameters(static_cast<float*>(b.dbias), out + k, dbias[s]);
  });
}

template <class T, int V, int U>
cudaError_t TryLong(const Backward& b, const Shape& shape, const Options& options, const Device& device,
                    void* workspace, cudaStream_t stream, bool* done) {
  constexpr int L = kVecLength<T>;
  const LongPlan plan = PlanLong(shape.n / L, V, (b.g_sum == nullptr ? 2 : 3) * U,
                                 kKeepsScale<L, V> ? 0 : L * int{sizeof(float)}, device);
  *done = plan.stages >= 2;
  if (!*done) return cudaSuccess;
  const auto kernel = LongBackwardKernel<T, V, U>;
  Grid grid = {1, plan.spread.Threads(), plan.bytes, plan.spread.cluster};
  int64_t resident = 0;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  const int64_t wanted = resident / grid.cluster / shape.problems, partial = PartialRows(shape, kDType<T>);
  const int64_t parts = std::max<int64_t>(1, std::min({CeilDiv(shape.rows, int64_t{U}), wanted, partial}));
  grid.blocks = shape.problems * parts * grid.cluster;
  const int ahead = plan.stages > 2 ? 1 : 0;
  return WithPartialRows<float>(b, shape, parts, workspace, stream, [&](const Backward& partial) {
    return LaunchKernel(kernel, grid, stream, partial, shape, Constants<float>(options, shape.n), plan.spread,
                        plan.stages, ahead, static_cast<int>(parts));
  });
}

}  // namespace

cudaError_t RunClusterBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                               const Spread& spread, bool shifted, void* workspace, cudaStream_t stream) {
  return VisitSingleDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, __half>) {
      return cudaErrorInvalidValue;
    } else {
      constexpr int L = kVecLength<T>, kKeep = 16 / L, kMore = 24 / L;
      if (!shifted) return Launch<T, L, 1, 4, true, true>(b, shape, options, spread, workspace, stream);
      if (spread.steps <= kKeep)
        return Launch<T, L, kKeep, 1, false, true, true>(b, shape, options, spread, workspace, stream);
      return Launch<T, L, kMore, 1, false, true, true>(b, shape, options, spread, workspace, stream);
    }
  });
}

cudaError_t RunLongBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                            const Device& device, void* workspace, cudaStream_t stream, bool* done) {
  return VisitSingleDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 4) {
      return TryLong<T, 4, 1>(b, shape, options, device, workspace, stream, done);
    } else {
      const cudaError_t e = TryLong<T, 2, 2>(b, shape, options, device, workspace, stream, done);
      return *done ? e : TryLong<T, 4, 1>(b, shape, options, device, workspace, stream, done);
    }
  });
}

}  // namespace jaxdnn::layer_norm
