// Divisive normalization with given means: each element walks over its own window.
//
// Every window is compared with the mean of its own centre, so that no two share a term; expanding the square would,
// but would lose the digits of a small deviation from a large mean. The parallelisation and the two passes of the
// cotangent are those of direct.cu; the first of them also leaves the cotangent of the means.
#include "cuda/lrn/direct.cuh"

namespace jaxdnn::lrn {
namespace {

enum class Pass { kForward, kTangent, kSeed, kCotangent };

template <class T>
struct Operands {
  const T *t, *tm;  // of x and of the means; t is the cotangent too
  const T *x, *m;
  T *out, *dm;
  Accumulator<T>* scratch;
};

template <Pass kPass, int N, class T>
__global__ void __launch_bounds__(kDirectThreads)
    DivisiveKernel(const __grid_constant__ Problem p, const __grid_constant__ Walk walk, Response<T> response,
                   Operands<T> in) {
  using A = Accumulator<T>;
  const int64_t flat = blockIdx.x * int64_t{kDirectThreads} + threadIdx.x;
  if (flat >= walk.total) return;
  int at[3];
  walk.At(p, flat, at);
  const int64_t here = flat * N;
  A* const saved = in.scratch + walk.total * N;  // D^-beta g; r is in front of it
  A x[N], m[N], t[N] = {}, tm[N] = {}, energy[N] = {}, sum[N] = {}, result[N];
  if constexpr (kPass == Pass::kCotangent) {
    A own[N];
    LoadWide(in.x + here, own);
    ForWindow(p, at, true, [&](int64_t offset) {
      A r[N];
      LoadWide(in.scratch + here + offset, r);
      LoadWide(in.m + here + offset, m);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += r[j] * (own[j] - m[j]);
    });
    LoadWide(saved + here, t);
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = t[j] - sum[j];
    StoreNarrow(in.out + here, result);
    return;
  }
  LoadWide(in.m + here, m);
  if constexpr (kPass == Pass::kTangent) LoadWide(in.tm + here, tm);
  ForWindow(p, at, false, [&](int64_t offset) {
    LoadWide(in.x + here + offset, x);
    if constexpr (kPass == Pass::kTangent) LoadWide(in.t + here + offset, t);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A deviation = x[j] - m[j];
      energy[j] += deviation * deviation;
      if constexpr (kPass == Pass::kTangent) sum[j] += deviation * (t[j] - tm[j]);
      if constexpr (kPass == Pass::kSeed) sum[j] += deviation;
    }
  });
  LoadWide(in.x + here, x);
  if constexpr (kPass != Pass::kForward) LoadWide(in.t + here, t);
  A r[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    A q;
    const A gain = response.Gain(response.Divisor(energy[j]), &q);
    result[j] = (kPass == Pass::kForward ? x[j] : t[j]) * gain;
    if constexpr (kPass == Pass::kTangent) result[j] -= q * x[j] * sum[j];
    if constexpr (kPass == Pass::kSeed) {
      r[j] = q * (x[j] * t[j]);
      sum[j] *= r[j];
    }
  }
  if constexpr (kPass == Pass::kSeed) {
    StoreNarrow(in.scratch + here, r);
    StoreNarrow(saved + here, result);
    StoreNarrow(in.dm + here, sum);
  } else {
    StoreNarrow(in.out + here, result);
  }
}

template <Pass kPass, class T>
cudaError_t Launch(const Problem& p, const Operands<T>& in, cudaStream_t stream) {
  return VisitDirectWidth<T>(
      p,
      [&](auto width) {
        const Walk walk(p, width);
        return LaunchKernel(DivisiveKernel<kPass, width(), T>, CeilDiv(walk.total, kDirectThreads), kDirectThreads,
                            stream, p, walk, Response<T>(p), in);
      },
      in.t, in.tm, in.x, in.m, in.out, in.dm, in.scratch);
}

}  // namespace

cudaError_t DivisiveForward(const Problem& p, DType dtype, const void* x, const void* m, void* y, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> in = {};
    in.x = static_cast<const T*>(x), in.m = static_cast<const T*>(m), in.out = static_cast<T*>(y);
    return Launch<Pass::kForward>(p, in, stream);
  });
}

cudaError_t DivisiveTangent(const Problem& p, DType dtype, const void* tx, const void* tm, const void* x, const void* m,
                            void* out, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> in = {};
    in.t = static_cast<const T*>(tx), in.tm = static_cast<const T*>(tm);
    in.x = static_cast<const T*>(x), in.m = static_cast<const T*>(m), in.out = static_cast<T*>(out);
    return Launch<Pass::kTangent>(p, in, stream);
  });
}

cudaError_t DivisiveCotangent(const Problem& p, DType dtype, const void* g, const void* x, const void* m, void* dx,
                              void* dm, Scratch scratch, cudaStream_t stream) {
  if (!Fits(p, dtype, scratch)) return cudaErrorInvalidValue;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> in = {};
    in.t = static_cast<const T*>(g), in.x = static_cast<const T*>(x), in.m = static_cast<const T*>(m);
    in.out = static_cast<T*>(dx), in.dm = static_cast<T*>(dm);
    in.scratch = static_cast<Accumulator<T>*>(scratch.data);
    const cudaError_t status = Launch<Pass::kSeed>(p, in, stream);
    return status != cudaSuccess ? status : Launch<Pass::kCotangent>(p, in, stream);
  });
}

}  // namespace jaxdnn::lrn
