// Layer norm and RMS norm of rows of whole vectors that are too long for the registers of a cluster of blocks, which
// shares each (long_rows.cuh). The parameters of a thread's columns stay in its registers.
#include "cuda/layer_norm/long_rows.cuh"
#include "cuda/layer_norm/paths.h"

namespace jaxdnn::layer_norm {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kLongThreads)
    LongestForwardKernel(Forward f, Shape shape, Constants<float> constants, Spread spread, int stages, int parts) {
  constexpr int L = kVecLength<T>;
  using X = Vec<T, L>;
  extern __shared__ uint4 shared[];
  __shared__ Exchange<float, 2, true> exchanges[kExchanges], again[2];
  __shared__ Arrivals arrivals;
  const Slice<T, V, 1> slice(shape, spread, parts, shared, arrivals, stages, f.residual == nullptr ? 1 : 2);
  const int begin = slice.begin, rows = slice.Steps();
  const int64_t vectors = shape.n / L;
  if (threadIdx.x == 0)
    for (auto& each : again) each.Open();
  OpenExchanges(exchanges);

  const void* const inputs[2] = {f.x, f.residual};
  for (int row = 0; row < stages; ++row) {
    if (row < rows) slice.Fetch(row, row, vectors, inputs);
  }
  // The first elements of a row to come: not converted before they are used, which would wait for them.
  struct First {
    T x, residual;
  };
  const auto load_first = [&](int row) {
    const int64_t at = (slice.row + row) * shape.n;
    return First{static_cast<const T*>(f.x)[at], f.residual == nullptr ? T() : static_cast<const T*>(f.residual)[at]};
  };
  First next = load_first(0);
  float scale[V][L], bias[V][L];
  slice.ForEach([&](int s, int k) {
    const int64_t at = slice.problem * vectors + begin + k;
    LoadScale(scale[s], f.scale, constants.offset, at);
    LoadBias(bias[s], f.bias, at);
  });
  const auto add_up = [&](float (&sums)[2], int stage, float pivot) {
    sums[0] = sums[1] = 0;
    slice.ForEach([&](int, int k) {
      const X x = slice.Slot(stage, 0, 0, k);
      float v[L];
      Widen(v, x);
#pragma unroll
      for (float& each : v) {
        each -= pivot;
        sums[1] = fma(each, each, sums[1]);
      }
      sums[0] += SumOf(v);
    });
  };

  ClusterWait();
  // What the sums that are on their way are about.
  float latest = 0, before = 0;
  int sent = 0, done = 0, repeats = 0, sent_stage = 0, sent_round = 0, stage = 0;
  while (done < rows) {
    if (sent < rows && sent - done <= 1) {
      before = latest;
      latest = 0;
      if (constants.center) {
        latest = static_cast<float>(next.x);
        if (f.residual != nullptr) latest += static_cast<float>(next.residual);
      }
      if (sent + 1 < rows) next = load_first(sent + 1);
      slice.Wait(sent_stage, sent_round);
      if (f.residual != nullptr) {
        X* const out = static_cast<X*>(f.sum) + (slice.row + sent) * vectors + begin;
        slice.ForEach([&](int, int k) {
          const X x = slice.Slot(sent_stage, 0, 0, k), residual = slice.Slot(sent_stage, 1, 0, k);
          out[k] = slice.Slot(sent_stage, 0, 0, k) = AddRounded<T>(x, residual);
        });
      }
      float sums[2];
      add_up(sums, sent_stage, latest);
      SendSum(sums, slice.p, exchanges[sent % kExchanges]);
      ++sent;
      sent_stage = slice.After(sent_stage);
      sent_round += sent_stage == 0;
      continue;
    }
    float sums[2];
    ReceiveSum(sums, slice.p, exchanges[done % kExchanges], done / kExchanges);
    Central<float> moments(done + 1 == sent ? latest : before, constants.center ? sums[0] : 0.0f, sums[1],
                           constants.inverse);
    // Rarely, and once more where the mean of equal numbers was rounded.
    for (int round = 1; moments.far && round < 4; ++round) {
      add_up(sums, stage, moments.mean);
      GroupSum(sums, slice.p, again, repeats++);
      moments = Central<float>(moments.mean, constants.center ? sums[0] : 0.0f, sums[1], constants.inverse);
    }
    const float rest = kWideMean<T> ? moments.rest : 0.0f, rstd = InverseRoot(moments.variance + constants.epsilon);
    const int64_t row = slice.row + done;
    if (slice.p.IsLeader()) StoreStatistics(f, row, moments.mean, rest, rstd);
    const Statistics<T> stats({moments.mean, rest, rstd});
    X* const y = static_cast<X*>(f.y) + row * vectors + begin;
    slice.ForEach([&](int s, int k) {
      const X x = slice.Slot(stage, 0, 0, k);
      y[k] = Apply<T>(x, stats, scale[s], bias[s]);
    });
    if (done + stages < rows) slice.Fetch(done + stages, stage, vectors, inputs);
    ++done;
    stage = slice.After(stage);
  }
}

}  // namespace

cudaError_t RunLongestForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                              const Device& device, cudaStream_t stream, bool* done) {
  return VisitSingleDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int L = kVecLength<T>, V = 32 / L;
    const LongPlan plan = PlanLong(shape.n / L, V, f.residual == nullptr ? 1 : 2, 0, device);
    *done = plan.stages >= 2;
    if (!*done) return cudaSuccess;
    const auto kernel = LongestForwardKernel<T, V>;
    Grid grid = {1, plan.spread.Threads(), plan.bytes, plan.spread.cluster};
    int64_t resident = 0;
    if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
    const int64_t parts = std::clamp<int64_t>(resident / grid.cluster / shape.problems, 1, shape.rows);
    grid.blocks = shape.problems * parts * grid.cluster;
    return LaunchKernel(kernel, grid, stream, f, shape, Constants<float>(options, shape.n), plan.spread, plan.stages,
                        static_cast<int>(parts));
  });
}

}  // namespace jaxdnn::layer_norm
