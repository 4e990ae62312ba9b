// Windows along a dimension that is not contiguous.
//
// A thread owns N neighbouring columns and marches down their n elements with the last window of each in a ring of
// registers, so that every element is read once: the energy of element j is known when element j + H has come in, and,
// for the cotangent, the sum of r = q c g around element j when element j + 2 H has. A ring's slots are registers, so
// the loop over a whole window of steps is unrolled, and those steps' loads are in flight together. Where there are too
// few columns to fill the device, n is cut into chunks, which read what their windows overlap.
//
// Bound by memory: one read and one write, or two reads and one write.
#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/lrn/columns.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kEnoughThreads = 132 * 1024;
constexpr int kLeastChunk = 32;

struct Columns {
  int64_t threads, inner, vectors;  // columns, and vectors of them, of an outer index
  int n, chunk, chunks;
};

template <Map kMap, int H, int N, class T>
__global__ void __launch_bounds__(kThreads)
    ColumnsKernel(const __grid_constant__ Columns shape, Response<T> response, const T* __restrict__ t,
                  const T* __restrict__ x, T* __restrict__ out) {
  using A = Accumulator<T>;
  constexpr int W = 2 * H + 1;
  constexpr bool kCotangent = kMap == Map::kCotangent;
  constexpr int kLag = kCotangent ? 2 * H : H;  // from an element's arrival to its result
  const int64_t id = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (id >= shape.threads) return;
  const int64_t rest = id / shape.vectors, outer = rest / shape.chunks;
  const int first = static_cast<int>(rest - outer * shape.chunks) * shape.chunk;
  const int last = min(shape.n, first + shape.chunk);
  const int64_t base = outer * shape.n * shape.inner + (id - rest * shape.vectors) * N;
  const auto at = [&](int row) { return base + row * shape.inner; };
  const auto exists = [&](int row) { return row >= 0 && row < shape.n; };
  const auto load = [&](const T* p, int row) {
    return exists(row) ? *reinterpret_cast<const Vec<T, N>*>(p + at(row)) : Vec<T, N>{};
  };

  // Slot i holds what step i of a window brought: c and t as they come, r and D^-beta g when their energy is known.
  A c[W][N] = {}, w[W][N] = {}, r[W][N] = {}, u[W][N] = {};
  for (int begin = first - kLag; begin < last + kLag; begin += W) {
    Vec<T, N> in[W], with[W];
#pragma unroll
    for (int i = 0; i < W; ++i) {
      in[i] = load(x, begin + i);
      if constexpr (kMap == Map::kTangent) with[i] = load(t, begin + i);
      if constexpr (kCotangent) with[i] = load(t, begin + i - H);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const int now = (i + W - H) % W, done = (i + W - kLag) % W, row = begin + i - kLag;
      Vec<T, N> result;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        c[i][j] = static_cast<A>(in[i].v[j]);
        if constexpr (kMap != Map::kForward) w[i][j] = static_cast<A>(with[i].v[j]);
        A energy = 0, product = 0, q;
#pragma unroll
        for (int k = 0; k < W; ++k) energy += c[k][j] * c[k][j];
        const A gain = response.Gain(response.Divisor(energy), &q);
        if constexpr (kMap == Map::kForward) result.v[j] = static_cast<T>(c[now][j] * gain);
        if constexpr (kMap == Map::kTangent) {
#pragma unroll
          for (int k = 0; k < W; ++k) product += c[k][j] * w[k][j];
          result.v[j] = static_cast<T>(w[now][j] * gain - q * c[now][j] * product);
        }
        if constexpr (kCotangent) {
          u[i][j] = w[i][j] * gain;
          // Beyond the ends q may be infinite.
          r[i][j] = exists(begin + i - H) ? q * (c[now][j] * w[i][j]) : A(0);
#pragma unroll
          for (int k = 0; k < W; ++k) product += r[k][j];
          result.v[j] = static_cast<T>(u[now][j] - c[done][j] * product);
        }
      }
      if (row >= first && row < last) *reinterpret_cast<Vec<T, N>*>(out + at(row)) = result;
    }
  }
}

template <Map kMap, int H, int N, class T>
cudaError_t Launch(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  Columns shape = {};
  shape.n = p.extent[2];
  shape.inner = p.inner;
  shape.vectors = p.inner / N;
  const int64_t columns = p.outer * shape.vectors;
  const int64_t wanted = std::clamp<int64_t>(CeilDiv(kEnoughThreads, columns), 1, CeilDiv(shape.n, kLeastChunk));
  shape.chunk = static_cast<int>(CeilDiv(shape.n, wanted));
  shape.chunks = static_cast<int>(CeilDiv(shape.n, shape.chunk));
  shape.threads = columns * shape.chunks;
  return LaunchKernel(ColumnsKernel<kMap, H, N, T>, CeilDiv(shape.threads, kThreads), kThreads, stream, shape,
                      Response<T>(p), t, x, out);
}

template <Map kMap, class T>
cudaError_t LaunchMap(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  constexpr int kWide = sizeof(T) == 8 ? 2 : 4;
  const bool wide = p.inner % kWide == 0 && IsVectorAligned(t, x, out);
  const auto launch = [&](auto half) {
    constexpr int H = decltype(half)::value;
    if (wide) return Launch<kMap, H, kWide>(p, t, x, out, stream);
    return Launch<kMap, H, 1>(p, t, x, out, stream);
  };
  switch (p.after[2]) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case 2:
      return launch(std::integral_constant<int, 2>{});
    case 3:
      return launch(std::integral_constant<int, 3>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool IsColumns(const Problem& p) {
  return p.inner > 1 && p.extent[0] == 1 && p.extent[1] == 1 && p.before[2] == p.after[2] && p.after[2] >= 1 &&
         p.after[2] <= 3;
}

cudaError_t LaunchColumns(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                          cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *with = static_cast<const T*>(t), *in = static_cast<const T*>(x);
    T* result = static_cast<T*>(out);
    switch (map) {
      case Map::kForward:
        return LaunchMap<Map::kForward>(p, with, in, result, stream);
      case Map::kTangent:
        return LaunchMap<Map::kTangent>(p, with, in, result, stream);
      case Map::kCotangent:
        return LaunchMap<Map::kCotangent>(p, with, in, result, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxdnn::lrn
