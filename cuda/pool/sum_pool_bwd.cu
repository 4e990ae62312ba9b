// The transpose of sums and averages of windows: every input element adds what the windows over it pass back.
//
// Bytes that must move: dy + dx. With a stride of one the transpose is a sum of windows itself, seen from the input,
// and the forward kernels compute it.
#include "cuda/pool/spread.cuh"

namespace jaxdnn::pool {
namespace {

// kCounted: whether every window has its own factor.
template <int N, class T, bool kCounted>
struct Shares {
  using A = Accumulator<T>;
  using Element = T;
  static constexpr int kWidth = N;
  static constexpr bool kShortcuts = sizeof(T) < 8, kSame = true, kWhole = kShortcuts && !kCounted;

  struct Share {
    Words<T, N> value;
    A factor;

    __device__ void Clear() {
      value = {};
      factor = A(0);
    }
    template <bool kDense = false>
    __device__ void Load(const Shares& task, int64_t offset, int o0, int o1, int o2) {
      value = LoadWords<N>(task.dy + offset);
      factor = kCounted ? FactorOf<A, kDense>(task.g, task.division, o0, o1, o2) : task.factor;
    }
    __device__ void LoadBin(const Shares& task, int64_t offset, int cells) {
      value = LoadWords<N>(task.dy + offset);
      factor = kCounted ? Reciprocal<A>(cells) : task.factor;
    }
    __device__ void Add(A (&sum)[N], int) const {
      const auto v = BitCast<Vec<T, N>>(value);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += factor * static_cast<A>(v.v[j]);
    }
  };

  Shape g;
  Walk walk;
  Pitch in, out;
  Cover cover;
  const T* __restrict__ dy;
  T* __restrict__ dx;
  Division division;
  A factor;

  __device__ Vec<T, N> Final(int64_t, const A (&sum)[N]) const { return Rounded<T>(sum); }
};

// The windows of dy over each input element, where windows are one apart.
Geometry Mirrored(const Geometry& g) {
  Geometry m = g;
  for (int d = 0; d < 3; ++d) {
    std::swap(m.in[d], m.out[d]);
    m.low[d] = (g.window[d] - 1) * g.dilation[d] - g.low[d];
  }
  return m;
}

}  // namespace

cudaError_t SumPoolBwd(const Geometry& g, DType dtype, const Division& division, const void* dy, void* dx,
                       cudaStream_t stream) {
  const bool unit_stride = g.stride[0] == 1 && g.stride[1] == 1 && g.stride[2] == 1;
  if (unit_stride && division.divisor != 0 && !WindowsAreApart(WithLoneWindowsApart(g)))
    return SumPool(Mirrored(g), dtype, division, dy, dx, {}, stream);
  const Geometry apart = WithLoneWindowsApart(g);
  // Where there is one window, its cells are counted here.
  const bool counted = division.divisor == 0 && !WindowIsWhole(g);
  const double cells = static_cast<double>(g.in[0]) * g.in[1] * g.in[2];
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    const T* in = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    const auto launch = [&](auto width, auto counted) {
      constexpr int N = decltype(width)::value;
      const A factor = static_cast<A>(1 / (division.divisor == 0 ? cells : division.divisor));
      const Shares<N, T, counted()> task = {Shape(apart),
                                            Walk(0, g.in, g.channels, N),
                                            Pitch(g.in, g.channels),
                                            Pitch(g.out, g.channels),
                                            Cover(apart),
                                            in,
                                            out,
                                            division,
                                            factor};
      const auto spread = [&] { return LaunchSpread(task, stream); };
      if constexpr (kIsTuned<T>) return LaunchTiles(task, stream, spread);
      return spread();
    };
    return VisitWidth<T>(
        g.channels,
        [&](auto width) { return counted ? launch(width, std::true_type{}) : launch(width, std::false_type{}); }, in,
        out);
  });
}

}  // namespace jaxdnn::pool
