// Layer and RMS norm, forward, of rows so few that all of them run at once.
//
// Such a launch is bound by what a block does one after the other, not by bytes: its start, one wait for memory, the
// exchange between its threads, the stores. So all that it reads is asked for before anything is used, and there is
// nothing in a kernel but what its problem needs. Of long rows a multiprocessor would still wait for the parameters,
// which are up to four times a row's bytes: several blocks make the moments of the same row, each of all of it, and of
// the result a share.
#include "cuda/layer_norm/group_sum.cuh"
#include "cuda/layer_norm/paths.h"

namespace jaxdnn::layer_norm {
namespace {

constexpr int kMostThreads = 1024;  // of a block

// v[i] = the sum of v[i] over the block, in each of its threads, in a fixed order. After the warps' own, each of four
// lanes adds up those of eight warps.
template <int W>
__device__ void SumOfBlock(float (&v)[W], float (&partial)[W][kMostThreads / 32]) {
  using Eight = Vec<float, 8>;
  const int warps = static_cast<int>(blockDim.x) / 32, thread = static_cast<int>(threadIdx.x);
  LaneSum<true>(v, 32);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (thread % 32 == 0) partial[i][thread / 32] = v[i];
    if (thread >= warps && thread < 32) partial[i][thread] = 0;  // of warps that the block lacks
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < W; ++i) v[i] = SumOf(reinterpret_cast<const Eight*>(partial[i])[thread % 4].v);
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (int i = 0; i < W; ++i) v[i] += ShuffleXor(v[i], mask);
}

// Nothing is made of x before this, among what else is volatile: the compiler would wait for x there.
template <class X>
__device__ void NotBefore(X& x) {
  uint4 words = BitCast<uint4>(x);
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  x = BitCast<X>(words);
}

// v, or 0; in no case behind a branch, for which the compiler would make twice what v is made of.
__device__ inline float IfSo(bool condition, float v) {
  asm volatile("" : "+f"(v));
  return condition ? v : 0.0f;
}

// A thread has V vectors of its row for the moments. It makes the result of the same ones; or of one, in its block's
// share of the row, where several blocks have that.
template <class T, int V, bool kShared, bool kCenter, bool kResidual>
__global__ void __launch_bounds__(kMostThreads) FewRowsKernel(Forward f, int n, int share, Constants<float> constants) {
  constexpr int L = kVecLength<T>, Q = L / 4, W = kShared ? 1 : V;
  using X = Vec<T, L>;
  using Four = Vec<float, 4>;
  extern __shared__ uint4 shared[];  // [scale, bias, x, residual][vector of a thread][thread]
  __shared__ alignas(32) float partial[2][kCenter ? 2 : 1][kMostThreads / 32];
  // So few rows have no more vectors than an int counts.
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int row = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y), begin = row * n;
  const X* const in = static_cast<const X*>(f.x) + begin;
  const X* const other = static_cast<const X*>(f.residual) + begin;
  // Calls make(s, k) for the vectors k of which the thread makes the result.
  const int own = kShared ? static_cast<int>(blockIdx.x) * share + thread : thread;
  const auto for_each_own = [&](auto&& make) {
#pragma unroll
    for (int s = 0; s < W; ++s)
      if (const int k = own + s * threads; (!kShared || thread < share) && k < n) make(s, k);
  };

  // Past the end there is the last vector again, and no branch: what is behind one is asked for later.
  X x[V], residual[V];
  T first, first_residual;
  const auto load = [&](X(&to)[V], T& first, const X* from) {
#pragma unroll
    for (int s = 0; s < V; ++s) to[s] = from[min(thread + s * threads, n - 1)];
    if constexpr (kCenter) first = from->v[0];
  };
  load(x, first, in);
  if constexpr (kResidual) load(residual, first_residual, other);
  // The compiler would ask for x after all that is copied, were it not for a barrier. The sum with a residual it would
  // make before the barrier, one vector after the other.
  if constexpr (kCenter && !kResidual) __syncwarp();
  // What is not used before the moments are there goes to shared memory: a load to registers, the compiler would move
  // to where those are used.
  constexpr int kBias = Q, kX = kCenter ? 2 * Q : Q;
  const auto held = [&](int unit, int s) -> uint4& { return shared[(unit * W + s) * share + thread]; };
  for_each_own([&](int s, int k) {
    const auto copy = [&](int unit, const void* from, int at) {
      CopyAsyncCached(&held(unit, s), static_cast<const uint4*>(from) + at);
    };
    const int at = (static_cast<int>(blockIdx.z) * n + k) * Q;
#pragma unroll
    for (int j = 0; j < Q; ++j) {
      copy(j, f.scale, at + j);
      if constexpr (kCenter) copy(kBias + j, f.bias, at + j);
    }
    if constexpr (kShared) copy(kX, in, k);
    if constexpr (kShared && kResidual) copy(kX + 1, other, k);
  });
  CommitAsync();
#pragma unroll
  for (X& each : x) NotBefore(each);
  float pivot = 0;
  if constexpr (kCenter) pivot = static_cast<float>(first);
  if constexpr (kResidual) {
#pragma unroll
    for (int s = 0; s < V; ++s) {
      NotBefore(residual[s]);
      x[s] = AddRounded<T>(x[s], residual[s]);
    }
    if constexpr (kCenter) pivot += static_cast<float>(first_residual);
  }

  // The result, by the statistics.
  const auto finish = [&](float mean, float rest, float rstd) {
    if (own == 0) StoreStatistics(f, row, mean, rest, rstd);
    WaitAsync<0>();
    const Statistics<T> stats({mean, rest, rstd});
    for_each_own([&](int s, int k) {
      X mine = x[s];
      if constexpr (kShared) mine = BitCast<X>(held(kX, s));
      if constexpr (kShared && kResidual) mine = AddRounded<T>(mine, BitCast<X>(held(kX + 1, s)));
      if constexpr (kResidual) static_cast<X*>(f.sum)[begin + k] = mine;
      float wide[L];
      Widen(wide, mine);
#pragma unroll
      for (int j = 0; j < Q; ++j) {
        const Four scale = BitCast<Four>(held(j, s));
        Four bias = {};
        if constexpr (kCenter) bias = BitCast<Four>(held(kBias + j, s));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wide[4 * j + i] = fma(stats.Normalize(wide[4 * j + i]), scale.v[i] + constants.offset, bias.v[i]);
      }
      static_cast<X*>(f.y)[begin + k] = Narrow<T>(wide);
    });
  };
  if constexpr (!kCenter) {
    float squares[1] = {};
#pragma unroll
    for (int s = 0; s < V; ++s) {
      float wide[L], square = 0;
      Widen(wide, x[s]);
#pragma unroll
      for (const float each : wide) square = fma(each, each, square);
      squares[0] += IfSo(thread + s * threads < n, square);
    }
    SumOfBlock(squares, partial[0]);
    finish(0, 0, InverseRoot(squares[0] * constants.inverse + constants.epsilon));
  } else {
    // About the row's first element, and rarely once more about the mean.
    const auto find = [&](int round) {
      float sums[2] = {};  // of the differences, and of their squares
#pragma unroll
      for (int s = 0; s < V; ++s) {
        float wide[L], square = 0;
        Widen(wide, x[s]);
#pragma unroll
        for (float& each : wide) {
          each -= pivot;
          square = fma(each, each, square);
        }
        const bool exists = thread + s * threads < n;
        sums[0] += IfSo(exists, SumOf(wide));
        sums[1] += IfSo(exists, square);
      }
      SumOfBlock(sums, partial[round % 2]);
      return Central<float>(pivot, sums[0], sums[1], constants.inverse);
    };
    // What is rare is a jump back: instructions that a jump leaves out would be fetched too.
#pragma unroll 1
    for (int round = 0;; ++round) {
      const Central<float> c = find(round);
      if (__builtin_expect(!c.far || round == 3, true))
        return finish(c.mean, kWideMean<T> ? c.rest : 0.0f, InverseRoot(c.variance + constants.epsilon));
      pivot = c.mean;
    }
  }
}

struct Plan {
  int vectors = 0, threads, shares;  // of a thread, of a block, and blocks to a row; no vectors: there is no such plan
};

Plan PlanFewRows(DType dtype, const Shape& shape, const Options& options, const Device& device) {
  const int64_t bytes = static_cast<int64_t>(SizeOf(dtype)), n = shape.n * bytes / 16;
  const int64_t rows = shape.problems * shape.rows;
  if (n <= 32 || n > (options.center ? 2048 : 4096)) return {};
  Plan plan;
  // Whether all blocks run at once, with `most` threads to a multiprocessor.
  const auto fits = [&](int vectors, int shares, int most) {
    plan = {vectors, 32 * static_cast<int>(CeilDiv(n, int64_t{32} * vectors)), shares};
    return rows * shares * plan.threads <= int64_t{device.multiprocessors} * most;
  };
  if (n <= 256) {
    if (fits(1, 1, options.center ? 1280 : 2048)) return plan;
  } else {
    // More than half of the multiprocessors get in each other's way.
    int shares = 2;
    while (shares < 16 && rows * shares * 4 <= device.multiprocessors) shares *= 2;
    const int vectors = n > 2048 || (n >= 1024 && rows * 4 <= device.multiprocessors) ? 4 : 2;
    if (fits(vectors, std::max(vectors, shares), n > 1024 && !options.center ? 2048 : 1280)) return plan;
  }
  // Of 16-bit floats with a mean, other kernels are as fast.
  if (n <= 1024 && (bytes > 2 || !options.center) && fits(2, 1, 1024)) return plan;
  return {};
}

template <class T, int V, bool kShared, bool kCenter>
cudaError_t Run(const Forward& f, const Shape& shape, const Options& options, const Plan& plan, cudaStream_t stream) {
  constexpr int L = kVecLength<T>;
  const int n = static_cast<int>(shape.n / L);
  const int share = kShared ? static_cast<int>(CeilDiv(n, plan.shares)) : plan.threads;
  const int held = (kCenter ? 2 : 1) * (L / 4) + (!kShared ? 0 : f.residual == nullptr ? 1 : 2);
  const Grid grid = {plan.shares, plan.threads, size_t{16} * held * (kShared ? 1 : V) * share,
                     1,           shape.rows,   shape.problems};
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, grid, stream, f, n, share, Constants<float>(options, shape.n));
  };
  return f.residual == nullptr ? launch(FewRowsKernel<T, V, kShared, kCenter, false>)
                               : launch(FewRowsKernel<T, V, kShared, kCenter, true>);
}

template <class T, bool kCenter>
cudaError_t RunPlan(const Forward& f, const Shape& shape, const Options& options, const Plan& plan,
                    cudaStream_t stream) {
  if (plan.vectors == 4) return Run<T, 4, true, kCenter>(f, shape, options, plan, stream);
  if (plan.shares > 1) return Run<T, 2, true, kCenter>(f, shape, options, plan, stream);
  if (plan.vectors == 1) return Run<T, 1, false, kCenter>(f, shape, options, plan, stream);
  if constexpr (sizeof(T) > 2 || !kCenter) return Run<T, 2, false, kCenter>(f, shape, options, plan, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

bool TakesFewRows(const Forward& f, DType dtype, const Shape& shape, const Options& options, const Device& device) {
  return f.scale != nullptr && (f.bias != nullptr) == options.center && dtype != DType::kF64 &&
         shape.n * static_cast<int64_t>(SizeOf(dtype)) % 16 == 0 &&
         PlanFewRows(dtype, shape, options, device).vectors > 0;
}

cudaError_t RunFewRows(const Forward& f, DType dtype, const Shape& shape, const Options& options, const Device& device,
                       cudaStream_t stream) {
  const Plan plan = PlanFewRows(dtype, shape, options, device);
  return VisitSingleDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return options.center ? RunPlan<T, true>(f, shape, options, plan, stream)
                          : RunPlan<T, false>(f, shape, options, plan, stream);
  });
}

}  // namespace jaxdnn::layer_norm
