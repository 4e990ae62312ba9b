// Patches of an image, cols[b, o, k, c] = x[b, o * stride - low + k * dilation, c], and the sum of patches, its
// adjoint.
//
// Both read and write `cols` once and `x` once; `cols` is the larger by up to the size of the window. Patches are rows
// of a strided view, where the last spatial dimension of the window and the channels are one run of the input unless
// the window is dilated there. The sum is gathered: a thread owns a few channels of one element of x and visits the
// patches over it in a fixed order, so that nothing needs atomics.
#include <algorithm>
#include <numeric>

#include "cuda/common/dtype.cuh"
#include "cuda/transform/rows.cuh"

namespace jaxdnn::transform {
namespace {

// Calls f(part) for parts of the problem whose extents in `over` (batch, then spatial) hold at most kMaxLaunch / inner
// elements, with the first index of each.
template <class F>
cudaError_t ForEachPart(int64_t batch, const int64_t (&over)[3], int64_t inner, F&& f) {
  int64_t first[4] = {0, 0, 0, 0}, extent[4] = {batch, over[0], over[1], over[2]};
  int64_t below[4] = {over[0] * over[1] * over[2] * inner, over[1] * over[2] * inner, over[2] * inner, inner};
  if (batch * below[0] == 0) return cudaSuccess;
  if (inner > kMaxLaunch) return cudaErrorInvalidValue;
  int d = 0;  // Split here; one index at a time in the dimensions before.
  while (d < 3 && below[d] > kMaxLaunch) ++d;
  const int64_t all[4] = {batch, over[0], over[1], over[2]}, step = kMaxLaunch / below[d];
  for (int i = 0; i < d; ++i) extent[i] = 1;
  for (;;) {
    for (first[d] = 0; first[d] < all[d]; first[d] += step) {
      extent[d] = std::min(step, all[d] - first[d]);
      if (const cudaError_t status = f(first, extent); status != cudaSuccess) return status;
    }
    int i = d - 1;
    while (i >= 0 && ++first[i] == all[i]) first[i--] = 0;
    if (i < 0) return cudaSuccess;
  }
}

// Rows of cols: the cells (k0, k1, k2) of every patch, with k2 part of the row if it is not dilated.
struct PatchView {
  FastDiv window[3], out[3];
  int in[3], stride[3], low[3], dilation[3];
  int channels, length;
  int64_t pitch[4];  // Of x: from one example, and from one index of a spatial
                     // dimension, to the next.

  __device__ Row At(int row) const {
    int k[3], o[3];
#pragma unroll
    for (int d = 2; d >= 0; --d) row = window[d].Div(row, &k[d]);
#pragma unroll
    for (int d = 2; d >= 0; --d) row = out[d].Div(row, &o[d]);
    int i[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) i[d] = o[d] * stride[d] - low[d] + k[d] * dilation[d];
    const bool inside = i[0] >= 0 && i[0] < in[0] && i[1] >= 0 && i[1] < in[1];
    const int64_t end = min(int64_t{in[2] - i[2]} * channels, int64_t{length});
    const int64_t begin = min(max(-int64_t{i[2]} * channels, int64_t{0}), int64_t{length});
    return {row * pitch[0] + i[0] * pitch[1] + i[1] * pitch[2] + i[2] * pitch[3], static_cast<int>(begin),
            static_cast<int>(inside ? max(begin, end) : begin)};
  }
};

template <int kBytes>
cudaError_t LaunchIm2col(const Patches& p, const void* x, void* cols, cudaStream_t stream) {
  using B = Bits<kBytes>;
  const int64_t cells = p.window[0] * p.window[1] * p.window[2], inner = cells * p.channels;
  return ForEachPart(p.batch, p.out, inner, [&](const int64_t (&first)[4], const int64_t (&extent)[4]) {
    PatchView view;
    const bool merged = p.dilation[2] == 1;
    for (int d = 0; d < 3; ++d) {
      view.window[d] = FastDiv(merged && d == 2 ? 1 : p.window[d]);
      view.out[d] = FastDiv(extent[d + 1]);
      view.in[d] = static_cast<int>(p.in[d]);
      view.stride[d] = static_cast<int>(p.stride[d]);
      view.low[d] = static_cast<int>(p.low[d] - first[d + 1] * p.stride[d]);
      view.dilation[d] = static_cast<int>(p.dilation[d]);
    }
    view.channels = static_cast<int>(p.channels);
    view.length = static_cast<int>(p.channels * (merged ? p.window[2] : 1));
    view.pitch[3] = p.channels;
    for (int d = 2; d >= 0; --d) view.pitch[d] = view.pitch[d + 1] * p.in[d];
    const int64_t rows = extent[0] * extent[1] * extent[2] * extent[3] * inner / view.length;
    const auto* in = static_cast<const B*>(x) + first[0] * view.pitch[0];
    const int64_t offset = ((first[0] * p.out[0] + first[1]) * p.out[1] + first[2]) * p.out[2] + first[3];
    const Copy<kBytes> op = {static_cast<B*>(cols) + offset * inner, B{}, B{}, uint4{}};
    constexpr int kN = kBytes == 16 ? 1 : 0;
    return LaunchRows<kN>(view, rows, view.length, 1, op.Aligned(), op, in, stream);
  });
}

// The cells k of one spatial dimension that put input position i under a patch: k = first, first + step, ..., with o =
// (i + low - k * dilation) / stride falling by `fall` from one to the next.
struct Cells {
  FastDiv gcd, step, stride;
  int window, out, low, dilation, fall, inverse;

  Cells(const Patches& p, int d, int64_t first) {
    const int64_t g = std::gcd(p.stride[d], p.dilation[d]), s = p.stride[d] / g, e = p.dilation[d] / g;
    gcd = FastDiv(g);
    step = FastDiv(s);
    stride = FastDiv(p.stride[d]);
    window = static_cast<int>(p.window[d]);
    out = static_cast<int>(p.out[d]);
    low = static_cast<int>(p.low[d] + first);
    dilation = static_cast<int>(p.dilation[d]);
    fall = static_cast<int>(e);
    inverse = 0;  // Of e modulo s.
    while (s > 1 && inverse * e % s != 1) ++inverse;
  }
  Cells() = default;

  // The first cell and its o; a cell of `window` where there is none.
  __device__ void First(int i, int* k, int* o) const {
    const int t = i + low;
    int rest, m;
    *k = window;
    *o = -1;
    if (t < 0) return;
    const int quotient = gcd.Div(t, &rest);
    if (rest != 0) return;
    step.Div(quotient, &m);
    if (inverse > 1) m = static_cast<int>(static_cast<int64_t>(m) * inverse % step.divisor);
    const int at = t - m * dilation;
    if (at < 0) return;
    *k = m;
    *o = stride.Div(at);
    // Patches past the last.
    if (*o >= out) {
      const int skip = (*o - out) / fall + 1;
      *k += skip * static_cast<int>(step.divisor);
      *o -= skip * fall;
    }
  }
};

struct Sum {
  Cells cells[3];
  FastDiv vectors, in[3];
  int64_t example, o_pitch[3], k_pitch[3];  // Of cols, in vectors.
};

template <class T, int kN>
__global__ void __launch_bounds__(kThreads)
    SumKernel(const Sum s, const T* __restrict__ cols, T* __restrict__ x, int total) {
  using A = Accumulator<T>;
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= total) return;
  int c, i[3];
  int b = s.vectors.Div(index, &c);
#pragma unroll
  for (int d = 2; d >= 0; --d) b = s.in[d].Div(b, &i[d]);
  int first[3], at[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) s.cells[d].First(i[d], &first[d], &at[d]);
  A sum[kN] = {};
  const auto* from = reinterpret_cast<const Vec<T, kN>*>(cols) + b * s.example + c;
  for (int k0 = first[0], o0 = at[0]; k0 < s.cells[0].window && o0 >= 0;
       k0 += s.cells[0].step.divisor, o0 -= s.cells[0].fall) {
    const auto* p0 = from + o0 * s.o_pitch[0] + k0 * s.k_pitch[0];
    for (int k1 = first[1], o1 = at[1]; k1 < s.cells[1].window && o1 >= 0;
         k1 += s.cells[1].step.divisor, o1 -= s.cells[1].fall) {
      const auto* p = p0 + o1 * s.o_pitch[1] + k1 * s.k_pitch[1] + at[2] * s.o_pitch[2] + first[2] * s.k_pitch[2];
      const int64_t next = s.cells[2].step.divisor * s.k_pitch[2] - s.cells[2].fall * s.o_pitch[2];
#pragma unroll 4
      for (int k2 = first[2], o2 = at[2]; k2 < s.cells[2].window && o2 >= 0;
           k2 += s.cells[2].step.divisor, o2 -= s.cells[2].fall, p += next) {
        const Vec<T, kN> v = *p;
#pragma unroll
        for (int j = 0; j < kN; ++j) sum[j] += static_cast<A>(v.v[j]);
      }
    }
  }
  Vec<T, kN> result;
#pragma unroll
  for (int j = 0; j < kN; ++j) result.v[j] = static_cast<T>(sum[j]);
  reinterpret_cast<Vec<T, kN>*>(x)[index] = result;
}

template <class T, int kN>
cudaError_t LaunchSum(const Patches& p, const T* cols, T* x, cudaStream_t stream) {
  const int64_t vectors = p.channels / kN;
  return ForEachPart(p.batch, p.in, vectors, [&](const int64_t (&first)[4], const int64_t (&extent)[4]) {
    Sum s;
    s.vectors = FastDiv(vectors);
    int64_t pitch = vectors;
    for (int d = 2; d >= 0; --d) {
      s.k_pitch[d] = pitch;
      pitch *= p.window[d];
    }
    for (int d = 2; d >= 0; --d) {
      s.o_pitch[d] = pitch;
      pitch *= p.out[d];
      s.cells[d] = Cells(p, d, first[d + 1]);
      s.in[d] = FastDiv(extent[d + 1]);
    }
    s.example = pitch;
    const int64_t offset = ((first[0] * p.in[0] + first[1]) * p.in[1] + first[2]) * p.in[2] + first[3];
    const int64_t total = extent[0] * extent[1] * extent[2] * extent[3] * vectors;
    return LaunchKernel(SumKernel<T, kN>, CeilDiv(total, kThreads), kThreads, stream, s,
                        cols + first[0] * s.example * kN, x + offset * p.channels, static_cast<int>(total));
  });
}

}  // namespace

cudaError_t Im2col(const Patches& problem, int bytes, const void* x, void* cols, cudaStream_t stream) {
  Patches p = problem;
  const auto aligned = [&](int to) {
    return (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(cols)) % to == 0;
  };
  for (; bytes < 16 && p.channels % 2 == 0 && aligned(2 * bytes); bytes *= 2) p.channels /= 2;
  switch (bytes) {
    case 1:
      return LaunchIm2col<1>(p, x, cols, stream);
    case 2:
      return LaunchIm2col<2>(p, x, cols, stream);
    case 4:
      return LaunchIm2col<4>(p, x, cols, stream);
    case 8:
      return LaunchIm2col<8>(p, x, cols, stream);
    default:
      return LaunchIm2col<16>(p, x, cols, stream);
  }
}

cudaError_t Col2im(const Patches& p, DType dtype, const void* cols, void* x, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto* from = static_cast<const T*>(cols);
    auto* to = static_cast<T*>(x);
    constexpr int kN = kVecLength<T>;
    if (p.channels % kN == 0 && IsVectorAligned(from, to)) return LaunchSum<T, kN>(p, from, to, stream);
    return LaunchSum<T, 1>(p, from, to, stream);
  });
}

}  // namespace jaxdnn::transform
