// Patches of an image, cols[b, o, k, c] = x[b, o * stride - low + k * dilation, c], and the sum of patches, its
// adjoint.
//
// Both read and write `cols` once and `x` once; `cols` is the larger by up to the size of the window. Patches are rows
// of a strided view, where the last spatial dimension of the window and the channels are one run of the input unless
// the window is dilated there. Where these runs are odd and short, as images of three channels make them, blocks take
// the rows of the input under a row of patches to shared memory first. The sum is gathered: a thread owns a few
// channels of one element of x and visits the patches over it in a fixed order, so that nothing needs atomics.
#include <algorithm>
#include <numeric>

#include "cuda/common/dtype.cuh"
#include "cuda/transform/rows.cuh"
#include "cuda/transform/stage.cuh"

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

// Rows of cols: the cells of every patch, with the last dimension's as part of the row if it is not dilated there.
// Dimensions are the last kRank.
template <int kRank>
struct PatchView {
  static constexpr bool kDense = true;

  FastDiv window[kRank], out[kRank];
  int in[kRank], stride[kRank], low[kRank], dilation[kRank];
  int channels, length, reach;    // `reach` cells of the last dimension are in a row.
  int64_t example, pitch[kRank];  // Of x.

  __device__ Row At(int row) const {
    int k[kRank] = {}, i[kRank];
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d)
      if (d < kRank - 1 || reach == 1) row = window[d].Div(row, &k[d]);
    bool inside = true;
    int64_t offset = 0;
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) {
      row = out[d].Div(row, &i[d]);
      i[d] = i[d] * stride[d] - low[d] + k[d] * dilation[d];
      offset += i[d] * pitch[d];
      if (d < kRank - 1) inside &= i[d] >= 0 && i[d] < in[d];
    }
    const int last = i[kRank - 1];
    const int begin = min(max(-last, 0), reach), end = inside ? max(min(in[kRank - 1] - last, reach), begin) : begin;
    return {row * example + offset, begin * channels, end * channels};
  }
};

template <int kRank, int kBytes>
cudaError_t LaunchIm2col(const Patches& p, const void* x, void* cols, cudaStream_t stream) {
  using B = Bits<kBytes>;
  const int64_t cells = p.window[0] * p.window[1] * p.window[2], inner = cells * p.channels;
  return ForEachPart(p.batch, p.out, inner, [&](const int64_t (&first)[4], const int64_t (&extent)[4]) {
    PatchView<kRank> view;
    const bool merged = p.dilation[2] == 1 && p.window[2] > 1;
    int64_t pitch = p.channels;
    for (int i = kRank - 1, d = 2; i >= 0; --i, --d) {
      view.window[i] = FastDiv(p.window[d]);
      view.out[i] = FastDiv(extent[d + 1]);
      view.in[i] = static_cast<int>(p.in[d]);
      view.stride[i] = static_cast<int>(p.stride[d]);
      view.low[i] = static_cast<int>(p.low[d] - first[d + 1] * p.stride[d]);
      view.dilation[i] = static_cast<int>(p.dilation[d]);
      view.pitch[i] = pitch;
      pitch *= p.in[d];
    }
    view.example = pitch;
    view.channels = static_cast<int>(p.channels);
    view.reach = merged ? static_cast<int>(p.window[2]) : 1;
    view.length = view.channels * view.reach;
    const int64_t rows = extent[0] * extent[1] * extent[2] * extent[3] * (inner / view.length);
    const auto* in = static_cast<const B*>(x) + first[0] * pitch;
    const int64_t offset = ((first[0] * p.out[0] + first[1]) * p.out[1] + first[2]) * p.out[2] + first[3];
    if constexpr (kRank == 2 && kBytes < 16) {
      Stage stage;
      bool chunks;
      if (IsStaged<kBytes>(p, first, extent, in, &stage, &chunks)) {
        const int64_t blocks = extent[0] * extent[2] * stage.tiles.divisor;
        const size_t shared =
            size_t{kBytes} * stage.window_rows * stage.pitch + sizeof(int) * (stage.inner.divisor + 4 / kBytes);
        const auto launch = [&](auto threads) {
          return LaunchKernel(chunks ? StageKernel<threads(), kBytes, 16 / kBytes> : StageKernel<threads(), kBytes, 1>,
                              Grid{blocks, threads(), shared}, stream, stage, in,
                              static_cast<B*>(cols) + offset * inner);
        };
        // Small tiles leave no work to many threads.
        if (stage.tile * inner * kBytes < 16384) return launch(std::integral_constant<int, kThreads / 2>{});
        return launch(std::integral_constant<int, kThreads>{});
      }
    }
    const Copy<kBytes> op = {static_cast<B*>(cols) + offset * inner, B{}, B{}, uint4{}};
    constexpr int kN = kBytes == 16 ? 1 : 0;
    return LaunchRows<kN>(view, rows, view.length, 1, op.Aligned(), op, in, stream);
  });
}

// The cells k of one spatial dimension that put input position i under a patch: k = first, first + step, ..., with o =
// (i + low - k * dilation) / stride falling by `fall` from one to the next.
struct Cells {
  FastDiv gcd, stride;
  WideDiv step;
  int window, out, low, dilation, fall, inverse;

  Cells(const Patches& p, int d, int64_t first) {
    const int64_t g = std::gcd(p.stride[d], p.dilation[d]), s = p.stride[d] / g, e = p.dilation[d] / g;
    gcd = FastDiv(g);
    step = WideDiv(s);
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
    if (inverse > 1) step.Div(int64_t{m} * inverse, &m);
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

// N elements, in one access where they are 16 bytes.
template <class T, int N>
struct Group {
  T v[N];
};

template <int N, class T>
__device__ Group<T, N> LoadGroup(const T* p) {
  Group<T, N> group;
  if constexpr (N == kVecLength<T>) {
    const auto v = *reinterpret_cast<const Vec<T, N>*>(p);
#pragma unroll
    for (int j = 0; j < N; ++j) group.v[j] = v.v[j];
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) group.v[j] = p[j];
  }
  return group;
}

template <int N, class T>
__device__ void StoreGroup(const Group<T, N>& group, T* p) {
  if constexpr (N == kVecLength<T>) {
    Vec<T, N> v;
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = group.v[j];
    *reinterpret_cast<Vec<T, N>*>(p) = v;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) p[j] = group.v[j];
  }
}

template <int kRank>
struct Sum {
  Cells cells[kRank];
  FastDiv vectors, in[kRank];
  int64_t example, o_pitch[kRank], k_pitch[kRank];  // Of cols, in vectors.
};

// kN channels of an element, for the last kRank dimensions.
template <int kRank, class T, int kN>
__global__ void __launch_bounds__(kRowThreads, kRank == 2 ? 6 : 3)
    SumKernel(const Sum<kRank> s, const T* __restrict__ cols, T* __restrict__ x, int total) {
  using A = Accumulator<T>;
  const int index = blockIdx.x * kRowThreads + threadIdx.x;
  if (index >= total) return;
  int c, first[kRank], at[kRank];
  int b = s.vectors.Div(index, &c);
#pragma unroll
  for (int d = kRank - 1; d >= 0; --d) {
    int i;
    b = s.in[d].Div(b, &i);
    s.cells[d].First(i, &first[d], &at[d]);
  }
  A sum[kN] = {};
  const T* from = cols + (b * s.example + c) * kN;
  const auto add = [&](int64_t offset) {
    const auto v = LoadGroup<kN>(from + offset * kN);
#pragma unroll
    for (int j = 0; j < kN; ++j) sum[j] += static_cast<A>(v.v[j]);
  };
  // The innermost dimension's cells, for offsets of the others.
  const auto along_last = [&](int64_t offset) {
    const Cells& cells = s.cells[kRank - 1];
    const int64_t next = cells.step.divisor * s.k_pitch[kRank - 1] - cells.fall * s.o_pitch[kRank - 1];
    offset += at[kRank - 1] * s.o_pitch[kRank - 1] + first[kRank - 1] * s.k_pitch[kRank - 1];
#pragma unroll 4
    for (int k = first[kRank - 1], o = at[kRank - 1]; k < cells.window && o >= 0;
         k += cells.step.divisor, o -= cells.fall, offset += next)
      add(offset);
  };
  const auto along = [&](int d, int64_t offset, auto&& inner) {
    const Cells& cells = s.cells[d];
    for (int k = first[d], o = at[d]; k < cells.window && o >= 0; k += cells.step.divisor, o -= cells.fall)
      inner(offset + o * s.o_pitch[d] + k * s.k_pitch[d]);
  };
  if constexpr (kRank == 2) {
    along(0, 0, along_last);
  } else {
    along(0, 0, [&](int64_t offset) { along(1, offset, along_last); });
  }
  Group<T, kN> result;
#pragma unroll
  for (int j = 0; j < kN; ++j) result.v[j] = static_cast<T>(sum[j]);
  StoreGroup(result, x + static_cast<int64_t>(index) * kN);
}

template <int kRank, class T, int kN>
cudaError_t LaunchSum(const Patches& p, const T* cols, T* x, cudaStream_t stream) {
  const int64_t vectors = p.channels / kN;
  return ForEachPart(p.batch, p.in, vectors, [&](const int64_t (&first)[4], const int64_t (&extent)[4]) {
    Sum<kRank> s;
    s.vectors = FastDiv(vectors);
    int64_t pitch = vectors;
    for (int i = kRank - 1, d = 2; i >= 0; --i, --d) {
      s.k_pitch[i] = pitch;
      pitch *= p.window[d];
    }
    for (int i = kRank - 1, d = 2; i >= 0; --i, --d) {
      s.o_pitch[i] = pitch;
      pitch *= p.out[d];
      s.cells[i] = Cells(p, d, first[d + 1]);
      s.in[i] = FastDiv(extent[d + 1]);
    }
    s.example = pitch;
    const int64_t offset = ((first[0] * p.in[0] + first[1]) * p.in[1] + first[2]) * p.in[2] + first[3];
    const int64_t total = extent[0] * extent[1] * extent[2] * extent[3] * vectors;
    return LaunchKernel(SumKernel<kRank, T, kN>, CeilDiv(total, kRowThreads), kRowThreads, stream, s,
                        cols + first[0] * s.example * kN, x + offset * p.channels, static_cast<int>(total));
  });
}

// f(2) where the first of three spatial dimensions is a single cell, else f(3), as constants.
template <class F>
cudaError_t VisitRank(const Patches& p, F&& f) {
  const bool flat = p.in[0] == 1 && p.out[0] == 1 && p.window[0] == 1 && p.low[0] == 0;
  return flat ? f(std::integral_constant<int, 2>{}) : f(std::integral_constant<int, 3>{});
}

}  // namespace

cudaError_t Im2col(const Patches& problem, int bytes, const void* x, void* cols, cudaStream_t stream) {
  Patches p = problem;
  const auto aligned = [&](int to) {
    return (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(cols)) % to == 0;
  };
  for (; bytes < 16 && p.channels % 2 == 0 && aligned(2 * bytes); bytes *= 2) p.channels /= 2;
  return VisitRank(p, [&](auto rank) {
    switch (bytes) {
      case 1:
        return LaunchIm2col<rank, 1>(p, x, cols, stream);
      case 2:
        return LaunchIm2col<rank, 2>(p, x, cols, stream);
      case 4:
        return LaunchIm2col<rank, 4>(p, x, cols, stream);
      case 8:
        return LaunchIm2col<rank, 8>(p, x, cols, stream);
      default:
        return LaunchIm2col<rank, 16>(p, x, cols, stream);
    }
  });
}

cudaError_t Col2im(const Patches& p, DType dtype, const void* cols, void* x, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto* from = static_cast<const T*>(cols);
    auto* to = static_cast<T*>(x);
    constexpr int kN = kVecLength<T>;
    if constexpr (std::is_same_v<T, double>) {
      return LaunchSum<3, T, 1>(p, from, to, stream);
    } else {
      return VisitRank(p, [&](auto rank) {
        if (p.channels % kN == 0 && IsVectorAligned(from, to)) return LaunchSum<rank, T, kN>(p, from, to, stream);
        if (p.channels % 3 == 0) return LaunchSum<rank, T, 3>(p, from, to, stream);
        return LaunchSum<rank, T, 1>(p, from, to, stream);
      });
    }
  });
}

}  // namespace jaxdnn::transform
