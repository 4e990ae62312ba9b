// Filter gradient of float32 on the CUDA cores, where the filter has few terms to a feature: of few channels.
//
// A block goes over some tiles of pixels. Of each it brings the patch of x that the tile meets to shared memory as it
// lies, once, and the pixels of y; a thread multiplies eight terms of a pixel's patch with eight of its features. While
// the threads multiply, the next tile is on its way. Of small filters several groups of threads have different pixels
// of a tile, and their sums are added up at the end.
#include "cuda/conv/patch.cuh"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

struct FilterPatchParams {
  Patches patches;
  int down, groups, row_groups, across_groups, flush, split_tiles;
  int features, depth;
  int64_t images, result;  // of a problem; and numbers of the whole result
  bool whole;              // features, and all arrays, are in fours
  FastDiv by_split, by_column, by_four, by_down, by_row_group, by_along, by_lines;
};

template <int kAcross>
__global__ void __launch_bounds__(2 * kPatchThreads, 2)
    FilterPatchKernel(const __grid_constant__ FilterPatchParams q, const float* x, const float* y, float* out) {
  constexpr int kEach = kPatchEach, kColumns = kAcross * kEach;
  extern __shared__ __align__(16) float memory[];
  const Patches& p = q.patches;
  const int pixels = p.rows * p.width, threads = blockDim.x;
  float* const cotangents = memory;                                                  // [2][pixels][kColumns]
  Four* const totals = reinterpret_cast<Four*>(cotangents + 2 * pixels * kColumns);  // [fours of a thread][threads]
  float* const patches = reinterpret_cast<float*>(totals + kEach * kEach / 4 * threads);
  int split, column_tile;
  const int64_t problem = q.by_column.Div(q.by_split.Div(static_cast<int>(blockIdx.x), &split), &column_tile);
  const int first_column = column_tile * kColumns;
  const int begin = split * q.split_tiles, end = min(begin + q.split_tiles, p.tiles);

  const auto bring = [&](int tile) {
    if (tile < end) {
      const auto t = p.Of(tile, problem * q.images);
      p.Bring(x, t, patches + (tile & 1) * p.size);
      const float* const from = y + p.Pixel(t) * q.features + first_column;
      float* const to = cotangents + (tile & 1) * pixels * kColumns;
      for (int i = threadIdx.x; i < pixels * kColumns / 4; i += threads) {
        int column;
        const int four = i % (kColumns / 4) * 4, row = p.by_width.Div(i / (kColumns / 4), &column);
        const int left = q.features - first_column - four;
        const bool inside = t.row + row < p.out[1] && t.column + column < p.out[2] && left > 0;
        const float* const at = from + (int64_t{row} * p.out[2] + column) * q.features + four;
        if (q.whole) {
          CopyAsync<16>(SharedAddress(to + i * 4), at, inside);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) CopyAsync<4>(SharedAddress(to + i * 4 + j), at + j, inside && j < left);
        }
      }
    }
    CommitCopies();
  };
  bring(begin);

  // Neighbouring threads have neighbouring terms.
  int down, row_group;
  const int across = threadIdx.x % kAcross, group = q.by_down.Div(threadIdx.x / kAcross, &down);
  const int along = q.by_row_group.Div(group, &row_group);
  int base[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int at, line;
    const int plane = q.by_lines.Div(q.by_along.Div(min(i * q.down + down, q.depth - 1), &at), &line);
    base[i] = p.Line(plane, line) + at;
  }
  float sums[kEach][kEach] = {};
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    bring(tile + 1);
    WaitForCopies<1>();
    __syncthreads();
    const auto t = p.Of(tile, 0);
    const int rows = min(p.rows, p.out[1] - t.row), columns = min(p.width, p.out[2] - t.column);
    const int from = along * columns / q.across_groups, to = (along + 1) * columns / q.across_groups;
#pragma unroll 1
    for (int row = row_group; row < rows; row += q.row_groups) {
      const float* const patch = patches + (tile & 1) * p.size + p.Number(row, from);
      const float* d = cotangents + ((tile & 1) * pixels + row * p.width + from) * kColumns + across * 4;
      const float* terms[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) terms[i] = patch + base[i];
      const int step = p.step[2] * p.channels;
      const auto pixel = [&] {
        float of_pixel[kEach];
#pragma unroll
        for (int four = 0; four < kEach / 4; ++four) {
          const Four read = *reinterpret_cast<const Four*>(d + four * 4 * kAcross);
#pragma unroll
          for (int j = 0; j < 4; ++j) of_pixel[four * 4 + j] = read.v[j];
        }
        // To and fro, so that from one product to the next only one operand changes.
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float term = *terms[i];
          terms[i] += step;
#pragma unroll
          for (int n = 0; n < kEach; ++n) {
            const int j = i % 2 == 0 ? n : kEach - 1 - n;
            sums[i][j] += term * of_pixel[j];
          }
        }
        d += kColumns;
      };
      int column = from;
#pragma unroll 1
      for (; column + 4 <= to; column += 4) pixel(), pixel(), pixel(), pixel();
#pragma unroll 1
      for (; column < to; ++column) pixel();
    }
    __syncthreads();  // what this tile has in shared memory may be overwritten

    if ((tile - begin) % q.flush < q.flush - 1 && tile + 1 < end) continue;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int four = 0; four < kEach / 4; ++four) {
        Four& total = totals[(i * (kEach / 4) + four) * threads + threadIdx.x];
        Four more = tile - begin < q.flush ? Four{} : total;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          more.v[j] += sums[i][four * 4 + j];
          sums[i][four * 4 + j] = 0;
        }
        total = more;
      }
  }
  __syncthreads();

  const int group_threads = kAcross * q.down;
  for (int item = threadIdx.x; item < kEach * kEach / 4 * group_threads; item += threads) {
    int thread;
    const int of_thread = q.by_four.Div(item, &thread);
    Four sum = {};
    if (begin < end)
      for (int g = 0; g < q.groups; ++g) {
        const Four& more = totals[of_thread * threads + g * group_threads + thread];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] += more.v[j];
      }
    const int term = of_thread / (kEach / 4) * q.down + thread / kAcross;
    const int column = first_column + (of_thread % (kEach / 4) * kAcross + thread % kAcross) * 4;
    if (term >= q.depth || column >= q.features) continue;
    float* const to = out + split * q.result + (problem * q.depth + term) * q.features + column;
    if (q.whole) {
      *reinterpret_cast<Four*>(to) = sum;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (column + j < q.features) to[j] = sum.v[j];
    }
  }
}

}  // namespace

cudaError_t LaunchFilterPatch(const Problem& p, int64_t splits, const void* x, const void* y, float* out,
                              cudaStream_t stream) {
  const FilterPatchShape s = FilterPatchShapeOf(p);
  FilterPatchParams q = {Patches(p, true, s.tile)};
  q.down = s.down, q.groups = s.groups, q.row_groups = s.row_groups, q.across_groups = s.groups / s.row_groups;
  q.flush = s.flush, q.split_tiles = int(CeilDiv(s.tile.tiles, splits));
  q.features = int(p.features), q.depth = int(s.depth);
  q.images = p.images, q.result = p.FilterSize();
  q.whole = q.features % 4 == 0 && IsVectorAligned(y, out);
  q.by_split = FastDiv(splits), q.by_column = FastDiv(CeilDiv(q.features, s.features));
  q.by_four = FastDiv(s.across * s.down), q.by_down = FastDiv(s.down), q.by_row_group = FastDiv(s.row_groups);
  q.by_along = FastDiv(q.patches.length), q.by_lines = FastDiv(p.window[1]);
  const Grid grid = {p.batch * q.by_column.divisor * splits, s.threads, size_t(s.shared_bytes)};
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, grid, stream, q, static_cast<const float*>(x), static_cast<const float*>(y), out);
  };
  if (s.across == 1) return launch(FilterPatchKernel<1>);
  if (s.across == 4) return launch(FilterPatchKernel<4>);
  return launch(FilterPatchKernel<8>);
}

}  // namespace jaxdnn::conv
