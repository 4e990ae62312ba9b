// Divisive normalization with given means: each element walks over its own window.
//
// Every window is compared with the mean of its own centre, so that no two share a term; expanding the square would,
// but would lose the digits of a small deviation from a large mean. A thread has N neighbours of the inner dimension,
// of each of C neighbouring rows, whose windows share loads. The two passes of the cotangent are those of direct.cu;
// the first of them also leaves the cotangent of the means. Square boxes of up to seven cells have march.cuh.
#include "cuda/lrn/direct.cuh"
#include "cuda/lrn/march.cuh"

namespace jaxdnn::lrn {
namespace {

// The windows of C neighbours in the second dimension, from `at` on: calls f(offset, live) for every element of any of
// them, where bit c of `live` says whether it is in the c-th.
template <int C, class F>
__device__ void ForWindows(const Problem& p, const int (&at)[3], bool mirrored, F&& f) {
  int before[3], after[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    before[d] = mirrored ? p.after[d] : p.before[d];
    after[d] = mirrored ? p.before[d] : p.after[d];
  }
  const int last0 = min(after[0], p.extent[0] - 1 - at[0]), last1 = min(C - 1 + after[1], p.extent[1] - 1 - at[1]);
  const int first2 = -min(before[2], at[2]), last2 = min(after[2], p.extent[2] - 1 - at[2]);
  for (int i0 = -min(before[0], at[0]); i0 <= last0; ++i0)
    for (int i1 = -min(before[1], at[1]); i1 <= last1; ++i1) {
      const int64_t row = (int64_t{i0} * p.extent[1] + i1) * p.extent[2];
      unsigned live = 0;
#pragma unroll
      for (int c = 0; c < C; ++c) live |= static_cast<unsigned>(i1 - c >= -before[1] && i1 - c <= after[1]) << c;
#pragma unroll(C > 4 ? 1 : 5)
      for (int i2 = first2; i2 <= last2; ++i2) f((row + i2) * p.inner, live);
    }
}

enum class Pass { kForward, kTangent, kSeed, kCotangent };

template <class T>
struct Operands {
  const T *t, *tm;  // of x and of the means; t is the cotangent too
  const T *x, *m;
  T *out, *dm;
  Accumulator<T>*scratch, *saved;  // r and D^-beta g
};

template <Pass kPass, int N, int C, class T>
__global__ void __launch_bounds__(kDirectThreads, 2)
    DivisiveKernel(const __grid_constant__ Problem p, const __grid_constant__ Walk walk, Response<T> response,
                   Operands<T> in) {
  using A = Accumulator<T>;
  const int64_t flat = blockIdx.x * int64_t{kDirectThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  int at[3];
  int64_t vector;
  const int64_t plane = walk.At(flat, at, &vector);
  at[1] *= C;
  const int64_t step = p.extent[2] * p.inner;  // between a thread's outputs
  const int count = min(C, p.extent[1] - at[1]);
  const int64_t here = (plane * p.extent[1] + at[1]) * step + at[2] * p.inner + vector * N;
  A* const saved = in.saved;
  A m[C][N] = {}, sum[C][N] = {};
  if constexpr (kPass == Pass::kCotangent) {
    A(&own)[C][N] = m;
#pragma unroll
    for (int c = 0; c < C; ++c)
      if (c < count) LoadWide(in.x + here + c * step, own[c]);
    ForWindows<C>(p, at, true, [&](int64_t offset, unsigned live) {
      A r[N], mean[N];
      LoadWide(in.scratch + here + offset, r);
      LoadWide(in.m + here + offset, mean);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        if (!(live >> c & 1)) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) sum[c][j] += r[j] * (own[c][j] - mean[j]);
      }
    });
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (c >= count) continue;
      A u[N];
      LoadWide(saved + here + c * step, u);
#pragma unroll
      for (int j = 0; j < N; ++j) u[j] -= sum[c][j];
      StoreNarrow(in.out + here + c * step, u);
    }
    return;
  }
  A tm[C][N] = {}, energy[C][N] = {};
#pragma unroll
  for (int c = 0; c < C; ++c) {
    if (c >= count) continue;
    LoadWide(in.m + here + c * step, m[c]);
    if constexpr (kPass == Pass::kTangent) LoadWide(in.tm + here + c * step, tm[c]);
  }
  ForWindows<C>(p, at, false, [&](int64_t offset, unsigned live) {
    A x[N], t[N] = {};
    LoadWide(in.x + here + offset, x);
    if constexpr (kPass == Pass::kTangent) LoadWide(in.t + here + offset, t);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (!(live >> c & 1)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A deviation = x[j] - m[c][j];
        energy[c][j] += deviation * deviation;
        if constexpr (kPass == Pass::kTangent) sum[c][j] += deviation * (t[j] - tm[c][j]);
        if constexpr (kPass == Pass::kSeed) sum[c][j] += deviation;
      }
    }
  });
#pragma unroll
  for (int c = 0; c < C; ++c) {
    if (c >= count) continue;
    const int64_t to = here + c * step;
    A x[N], t[N] = {}, r[N], result[N];
    LoadWide(in.x + to, x);
    if constexpr (kPass != Pass::kForward) LoadWide(in.t + to, t);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A q;
      const A gain = response.Gain(response.Divisor(energy[c][j]), &q);
      result[j] = (kPass == Pass::kForward ? x[j] : t[j]) * gain;
      if constexpr (kPass == Pass::kTangent) result[j] -= q * x[j] * sum[c][j];
      if constexpr (kPass == Pass::kSeed) {
        r[j] = q * (x[j] * t[j]);
        sum[c][j] *= r[j];
      }
    }
    if constexpr (kPass == Pass::kSeed) {
      StoreNarrow(in.scratch + to, r);
      StoreNarrow(saved + to, result);
      StoreNarrow(in.dm + to, sum[c]);
    } else {
      StoreNarrow(in.out + to, result);
    }
  }
}

// Whether windows extend along the last dimension alone.
inline bool IsLone(const Problem& p) { return p.before[0] + p.after[0] + p.before[1] + p.after[1] == 0; }

// The same problem with that dimension as the second one, along which a thread's outputs are neighbours.
inline Problem WithLoneDimensionSecond(Problem p) {
  p.outer *= p.extent[0] * p.extent[1];
  p.extent[0] = 1;
  p.extent[1] = p.extent[2], p.before[1] = p.before[2], p.after[1] = p.after[2];
  p.extent[2] = 1, p.before[2] = p.after[2] = 0;
  return p;
}

template <Pass kPass, class T>
cudaError_t LaunchGeneral(const Problem& problem, const Operands<T>& in, cudaStream_t stream) {
  return VisitDirectWidth<T>(
      problem,
      [&](auto width) {
        const auto launch = [&](const Problem& p, auto outputs) {
          constexpr int C = decltype(outputs)::value;
          Problem tiles = p;
          tiles.extent[1] = static_cast<int>(CeilDiv(p.extent[1], C));
          const Walk walk(tiles, width);
          return LaunchKernel(DivisiveKernel<kPass, width(), C, T>, CeilDiv(walk.total, kDirectThreads), kDirectThreads,
                              stream, p, walk, Response<T>(p), in);
        };
        // Of channels that fill no line of memory, neighbours along a dimension belong to neighbouring threads.
        if constexpr (width() == 1)
          if (IsLone(problem) && problem.inner * sizeof(T) < 128)
            return launch(problem, std::integral_constant<int, 1>());
        constexpr int kOutputs = sizeof(T) == 8 ? 1 : width() == 1 ? 8 : 4;
        return launch(IsLone(problem) ? WithLoneDimensionSecond(problem) : problem,
                      std::integral_constant<int, kOutputs>());
      },
      in.t, in.tm, in.x, in.m, in.out, in.dm, in.scratch);
}

// The square boxes that march.cuh has, forward and cotangent; or else f().
template <Map kMap, class T, class F>
cudaError_t LaunchSquare(const Problem& p, DType dtype, const Operands<T>& in, cudaStream_t stream, F&& otherwise) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
    if (IsBoxes(p, dtype) && p.Elements() > 0)
      return LaunchBoxes<kMap, true>(p, MarchArrays<T>{in.x, in.m, in.t, in.out, in.dm}, stream);
  }
  return otherwise();
}

}  // namespace

cudaError_t DivisiveForward(const Problem& p, DType dtype, const void* x, const void* m, void* y, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> in = {};
    in.x = static_cast<const T*>(x), in.m = static_cast<const T*>(m), in.out = static_cast<T*>(y);
    return LaunchSquare<Map::kForward>(p, dtype, in, stream,
                                       [&] { return LaunchGeneral<Pass::kForward>(p, in, stream); });
  });
}

cudaError_t DivisiveTangent(const Problem& p, DType dtype, const void* tx, const void* tm, const void* x, const void* m,
                            void* out, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> in = {};
    in.t = static_cast<const T*>(tx), in.tm = static_cast<const T*>(tm);
    in.x = static_cast<const T*>(x), in.m = static_cast<const T*>(m), in.out = static_cast<T*>(out);
    return LaunchGeneral<Pass::kTangent>(p, in, stream);
  });
}

cudaError_t DivisiveCotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* m, void* dx,
                              void* dm, Scratch scratch, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> in = {};
    in.t = static_cast<const T*>(g), in.x = static_cast<const T*>(x), in.m = static_cast<const T*>(m);
    in.out = static_cast<T*>(dx), in.dm = static_cast<T*>(dm);
    in.scratch = static_cast<Accumulator<T>*>(scratch.data);
    in.saved = in.scratch + p.Elements();
    return LaunchSquare<Map::kCotangent>(p, dtype, in, stream, [&] {
      if (!Fits(p, dtype, scratch)) return cudaErrorInvalidValue;
      const cudaError_t status = LaunchGeneral<Pass::kSeed>(p, in, stream);
      return status != cudaSuccess ? status : LaunchGeneral<Pass::kCotangent>(p, in, stream);
    });
  });
}

}  // namespace jaxdnn::lrn
