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

#include "cuda/common/async_copy.cuh"
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

// A row of patches, or a part of it, from the rows of the input under it, for the last two dimensions.
struct Stage {
  // Tiles in a row of patches; rows in an example; elements in a patch, and in one row of a window.
  FastDiv tiles, rows, inner, window;
  int tile, patches;                  // Patches in a tile, and in a row.
  int channels, step, dilation, low;  // From a patch to the next, from a cell to the next, in elements.
  int pitch, width;                   // Elements of a row in shared memory, and of the input.
  int window_rows, in_rows, row_step, row_low, row_dilation;
};

// kChunk elements in an access to x: a row of it, which is whole chunks, begins at one in shared memory too.
template <int kBytes, int kChunk>
__global__ void __launch_bounds__(kThreads)
    StageKernel(const Stage s, const Bits<kBytes>* __restrict__ x, Bits<kBytes>* __restrict__ cols) {
  using B = Bits<kBytes>;
  using Chunk = Bits<kBytes * kChunk>;
  constexpr int kWord = kBytes < 4 ? 4 / kBytes : 1;  // Elements that are written at once.
  extern __shared__ __align__(16) char shared[];
  B* const rows = reinterpret_cast<B*>(shared);
  int* const offsets = reinterpret_cast<int*>(rows + s.window_rows * s.pitch);
  int tile, out_row;
  const int64_t example = s.rows.Div(s.tiles.Div(static_cast<int>(blockIdx.x), &tile), &out_row);
  const int inner = static_cast<int>(s.inner.divisor), first = tile * s.tile;
  const int begin = (first * s.step - s.low) & -kChunk, top = out_row * s.row_step - s.row_low;  // Of what is staged.

  // Where element i of a patch is, from the patch's beginning; and those of the next.
  for (int i = threadIdx.x; i < inner + kWord - 1; i += kThreads) {
    const int of_next = i >= inner;
    int in_row;
    const int row = s.window.Div(of_next ? i - inner : i, &in_row), cell = in_row / s.channels;
    offsets[i] = row * s.pitch + cell * s.dilation + in_row - cell * s.channels + of_next * s.step;
  }
  const int chunks = s.pitch / kChunk;
  const B* const image = x + example * s.in_rows * s.width;
  for (int row = threadIdx.x / 32; row < s.window_rows; row += kThreads / 32) {
    const int in_row = top + row * s.row_dilation;
    const bool inside = in_row >= 0 && in_row < s.in_rows;
    const B* const from = image + static_cast<int64_t>(in_row) * s.width + begin;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < chunks; i += 32) {
      Chunk* const to = reinterpret_cast<Chunk*>(rows + row * s.pitch) + i;
      if (inside && static_cast<unsigned>(begin + i * kChunk) < static_cast<unsigned>(s.width))
        CopyAsync(to, reinterpret_cast<const Chunk*>(from) + i);
      else
        *to = Chunk{};
    }
  }
  CommitAsync();
  WaitAsync<0>();
  __syncthreads();

  const int count = min(s.tile, s.patches - first) * inner;
  B* const to = cols + ((example * s.rows.divisor + out_row) * s.patches + first) * inner;
  const B* const patches = rows + (first * s.step - s.low - begin);
  const auto element = [&](int e) {
    int i;
    const int patch = s.inner.Div(e, &i);
    return patches[patch * s.step + offsets[i]];
  };
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) / kBytes % kWord);
#pragma unroll 4
  for (int e = threadIdx.x * kWord - shift; e < count; e += kThreads * kWord) {
    if (e >= 0 && e + kWord <= count) {
      int i;
      const int patch = s.inner.Div(e, &i);
      Vec<B, kWord> word;
#pragma unroll
      for (int j = 0; j < kWord; ++j) word.v[j] = patches[patch * s.step + offsets[i + j]];
      *reinterpret_cast<Vec<B, kWord>*>(to + e) = word;
    } else {
#pragma unroll 1
      for (int j = max(e, 0); j < min(e + kWord, count); ++j) to[j] = element(j);
    }
  }
}

// Cuts rows of patches into tiles; false where what is under one does not fit, or is little beside what it shares with
// the next.
inline bool CutTiles(int bytes, int chunk, Stage* s) {
  constexpr int64_t kRoom = 24 << 10;
  const int64_t row = kRoom / (s->window_rows * bytes), unit = 16 / bytes;
  const int64_t window = int64_t{s->dilation} * (s->window.divisor / s->channels - 1) + s->channels;
  const auto staged = [&](int64_t patches) {
    return CeilDiv((patches - 1) * s->step + window + chunk - 1, unit) * unit;
  };
  const int64_t most = staged(1) > row ? 0 : (row / unit * unit - window - chunk + 1) / s->step + 1;
  const int64_t tiles = most > 0 ? CeilDiv(s->patches, most) : 0;
  if (tiles == 0 || (tiles > 1 && most * s->step < 2 * window)) return false;
  s->tile = static_cast<int>(CeilDiv(s->patches, tiles));
  s->tiles = FastDiv(tiles);
  s->pitch = static_cast<int>(staged(s->tile));
  return s->tile * s->inner.divisor * bytes >= 4096 && s->inner.divisor * sizeof(int) <= kRoom / 2;
}

// Where patches are worth it, launches the kernel.
template <int kBytes>
bool IsStaged(const Patches& p, const int64_t (&first)[4], const int64_t (&extent)[4], const void* x, Stage* s,
              bool* chunks) {
  const int64_t width = p.in[2] * p.channels;
  *chunks = width * kBytes % 16 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  s->rows = FastDiv(extent[2]);
  s->inner = FastDiv(p.window[1] * p.window[2] * p.channels);
  s->window = FastDiv(p.window[2] * p.channels);
  s->patches = static_cast<int>(extent[3]);
  s->channels = static_cast<int>(p.channels);
  s->step = static_cast<int>(p.stride[2] * p.channels);
  s->dilation = static_cast<int>(p.dilation[2] * p.channels);
  s->low = static_cast<int>((p.low[2] - first[3] * p.stride[2]) * p.channels);
  s->width = static_cast<int>(width);
  s->window_rows = static_cast<int>(p.window[1]);
  s->in_rows = static_cast<int>(p.in[1]);
  s->row_step = static_cast<int>(p.stride[1]);
  s->row_low = static_cast<int>(p.low[1] - first[2] * p.stride[1]);
  s->row_dilation = static_cast<int>(p.dilation[1]);
  return CutTiles(kBytes, *chunks ? 16 / kBytes : 1, s);
}

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
        return LaunchKernel(chunks ? StageKernel<kBytes, 16 / kBytes> : StageKernel<kBytes, 1>,
                            Grid{blocks, kThreads, shared}, stream, stage, in, static_cast<B*>(cols) + offset * inner);
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
__global__ void __launch_bounds__(kThreads, kRank == 2 ? 6 : 3)
    SumKernel(const Sum<kRank> s, const T* __restrict__ cols, T* __restrict__ x, int total) {
  using A = Accumulator<T>;
  const int index = blockIdx.x * kThreads + threadIdx.x;
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

// Few channels: what is under two rows of x is taken to shared memory first, by runs of cells, which lie together.
struct StagedSum {
  Cells rows, columns;
  FastDiv pairs, run;  // Pairs of rows in an example; elements in a row of a window.
  FastDiv channels;
  int in_rows, width;        // Of x, in elements.
  int patches, most;         // In a row of them; and rows of them over one of x.
  int64_t out_row, example;  // Of cols, in elements.
};

constexpr int kPair = 2;
constexpr size_t kStagedSumBytes = 72 << 10, kLeastStagedBytes = 8 << 10;

template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    StagedSumKernel(const StagedSum s, const T* __restrict__ cols, T* __restrict__ x) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) char shared[];
  T* const staged = reinterpret_cast<T*>(shared);
  const int run = static_cast<int>(s.run.divisor), length = s.patches * run;
  const int inner = static_cast<int>(s.out_row / s.patches);
  int pair;
  const int64_t example = s.pairs.Div(static_cast<int>(blockIdx.x), &pair);
  int first[kPair], at[kPair];
#pragma unroll
  for (int r = 0; r < kPair; ++r) {
    s.rows.First(pair * kPair + r, &first[r], &at[r]);
    if (pair * kPair + r >= s.in_rows) at[r] = -1;
  }
  const auto has = [&](int r, int i) {
    return first[r] + i * static_cast<int>(s.rows.step.divisor) < s.rows.window && at[r] - i * s.rows.fall >= 0;
  };
  for (int i = 0; i < s.most; ++i)
#pragma unroll
    for (int r = 0; r < kPair; ++r)
      if (has(r, i)) {
        const int k = first[r] + i * static_cast<int>(s.rows.step.divisor), o = at[r] - i * s.rows.fall;
        const T* const from = cols + example * s.example + o * s.out_row + k * run;
        T* const to = staged + (r * s.most + i) * length;
#pragma unroll 4
        for (int e = threadIdx.x; e < length; e += kThreads) {
          int j;
          const int patch = s.run.Div(e, &j);
          to[e] = from[patch * inner + j];
        }
      }
  __syncthreads();
  const int channels = static_cast<int>(s.channels.divisor);
  for (int e = threadIdx.x; e < s.width; e += kThreads) {
    int c, column, patch;
    s.columns.First(s.channels.Div(e, &c), &column, &patch);
    A sum[kPair] = {};
#pragma unroll
    for (int r = 0; r < kPair; ++r)
      for (int i = 0; i < s.most && has(r, i); ++i) {
        const T* const from = staged + (r * s.most + i) * length + c;
        for (int k = column, o = patch; k < s.columns.window && o >= 0;
             k += s.columns.step.divisor, o -= s.columns.fall)
          sum[r] += static_cast<A>(from[o * run + k * channels]);
      }
#pragma unroll
    for (int r = 0; r < kPair; ++r)
      if (pair * kPair + r < s.in_rows)
        x[(example * s.in_rows + pair * kPair + r) * s.width + e] = static_cast<T>(sum[r]);
  }
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
    if constexpr (kRank == 2 && kN != kVecLength<T>) {
      const int64_t run = p.window[2] * p.channels, most = CeilDiv(p.window[1], s.cells[0].step.divisor);
      const size_t bytes = kPair * most * p.out[2] * run * sizeof(T);
      if (bytes <= kStagedSumBytes && bytes >= kLeastStagedBytes && extent[2] == p.in[1] && extent[3] == p.in[2]) {
        const int64_t pairs = CeilDiv(p.in[1], kPair), row = p.out[2] * p.window[1] * run;
        const StagedSum staged = {s.cells[0],
                                  s.cells[1],
                                  FastDiv(pairs),
                                  FastDiv(run),
                                  FastDiv(p.channels),
                                  static_cast<int>(p.in[1]),
                                  static_cast<int>(p.in[2] * p.channels),
                                  static_cast<int>(p.out[2]),
                                  static_cast<int>(most),
                                  row,
                                  p.out[1] * row};
        return LaunchKernel(StagedSumKernel<T>, Grid{extent[0] * pairs, kThreads, bytes}, stream, staged,
                            cols + first[0] * staged.example, x + offset * p.channels);
      }
    }
    return LaunchKernel(SumKernel<kRank, T, kN>, CeilDiv(total, kThreads), kThreads, stream, s,
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
