// Patches whose runs are odd and short, by way of shared memory: a block takes the rows of the input under a row of
// patches, or a part of it, in the input's vectors, and writes the patches in order.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/transform/rows.cuh"

namespace jaxdnn::transform {

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
template <int kStageThreads, int kBytes, int kChunk>
__global__ void __launch_bounds__(kStageThreads)
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
  for (int i = threadIdx.x; i < inner + kWord - 1; i += kStageThreads) {
    const int of_next = i >= inner;
    int in_row;
    const int row = s.window.Div(of_next ? i - inner : i, &in_row), cell = in_row / s.channels;
    offsets[i] = row * s.pitch + cell * s.dilation + in_row - cell * s.channels + of_next * s.step;
  }
  const int chunks = s.pitch / kChunk;
  const B* const image = x + example * s.in_rows * s.width;
  for (int row = threadIdx.x / 32; row < s.window_rows; row += kStageThreads / 32) {
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
  for (int e = threadIdx.x * kWord - shift; e < count; e += kStageThreads * kWord) {
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
// the next, and of patches that share nothing: they lie in memory as they are.
inline bool CutTiles(int bytes, int chunk, Stage* s) {
  constexpr int64_t kRoom = 24 << 10;
  const int64_t row = kRoom / (s->window_rows * bytes), unit = 16 / bytes;
  const int64_t window = int64_t{s->dilation} * (s->window.divisor / s->channels - 1) + s->channels;
  const auto staged = [&](int64_t patches) {
    return CeilDiv((patches - 1) * s->step + window + chunk - 1, unit) * unit;
  };
  const int64_t most = staged(1) > row ? 0 : (row / unit * unit - window - chunk + 1) / s->step + 1;
  const int64_t tiles = most > 0 ? CeilDiv(s->patches, most) : 0;
  if (tiles == 0 || (tiles > 1 && most * s->step < 2 * window) || s->step >= window) return false;
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
  // Places in a row and its padding are 32-bit.
  const int64_t reach = (p.out[2] - 1) * p.stride[2] + (p.window[2] - 1) * p.dilation[2] + 1;
  if (std::max(p.in[2], reach) + std::abs(p.low[2]) > INT32_MAX / p.channels) return false;
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

}  // namespace jaxdnn::transform
