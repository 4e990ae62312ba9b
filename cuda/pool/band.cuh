// The forward kernel where channels do not fill vectors and windows are any: channels-first, and odd numbers of
// channels.
//
// A block brings a band of input rows to shared memory in 16-byte copies, whatever the alignment of rows, and reduces
// its windows from there, element by element. A tile of outputs is `images` whole planes where these are small, else
// `rows` x `columns` of one plane. Copies are asynchronous: what a block has in flight needs no registers.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "cuda/common/launch.cuh"
#include "cuda/pool/windows.cuh"

namespace jaxdnn::pool {

struct Band {
  int images, rows, columns;  // outputs of a tile
  int strip;                  // rows that a thread walks down
  int depths;                 // input planes of a tile
  bool whole;                 // whether rows are copied from end to end, hence together
  // Between neighbouring depths and rows in shared memory. Modulo a vector they are those of the input, so that what is
  // aligned there is aligned here.
  int pitch0, pitch1;
  int shared;  // elements
  int64_t tiles;
  FastDiv by_segment, by_band, by_depth;  // tiles to a row, bands to a plane, output depths
  FastDiv by_column, by_channel, by_strip;

  // Of vectors of `e` elements, in shared memory for `capacity`. False if no tile fits.
  bool Plan(const Geometry& g, int channels_a_thread, int e, int64_t capacity) {
    const int64_t row = int64_t{g.in[2]} * g.channels, plane = row * g.in[1];
    const auto reach = [&](int d, int64_t outputs) {
      return std::min<int64_t>((outputs - 1) * g.stride[d] + int64_t{g.window[d] - 1} * g.dilation[d] + 1, g.in[d]);
    };
    const auto congruent = [&](int64_t least, int64_t to) { return least + ((to - least) % e + e) % e; };
    const bool flat = g.window[0] == 1 && g.stride[0] == 1 && g.low[0] == 0 && g.in[0] == 1 && g.out[0] == 1;
    depths = g.window[0];
    images = 1;
    int64_t p0 = 0, p1 = row;
    if (flat && plane <= capacity / 2) {
      constexpr int64_t kBlocksWanted = 132 * 8;
      images = static_cast<int>(std::clamp<int64_t>(g.batch / kBlocksWanted, 1, capacity / plane));
      rows = g.out[1], columns = g.out[2], whole = true;
      shared = static_cast<int>(images * plane + 2 * e);
    } else {
      bool fits = false;
      for (rows = std::min(g.out[1], 64); !fits; rows = (rows + 1) / 2) {
        const int64_t lines = depths * reach(1, rows) + 1;
        whole = lines * row + 2 * e <= capacity;
        columns = g.out[2];
        p1 = row;
        if (!whole) {
          const int64_t columns_in = (capacity / lines - 2 * e) / g.channels;
          const int64_t beyond = int64_t{g.window[2] - 1} * g.dilation[2] + 1;
          columns = static_cast<int>(std::clamp<int64_t>((columns_in - beyond) / g.stride[2] + 1, 0, g.out[2]));
          if (columns_in < beyond) columns = 0;
          p1 = congruent(reach(2, columns) * g.channels + e, row);
        }
        p0 = congruent(reach(1, rows) * p1 + e, plane * g.dilation[0]);
        // Whole rows are one copy; cutting them comes last.
        fits = whole || (rows <= 8 && columns >= std::min(g.out[2], 8)) || (rows == 1 && columns > 0);
        if (fits || rows == 1) break;
      }
      if (!fits) return false;
      shared = static_cast<int>(depths * p0 + p1 + 2 * e);  // walks may read a row more than they use
    }
    pitch0 = static_cast<int>(p0), pitch1 = static_cast<int>(p1);
    const int vectors = g.channels / channels_a_thread;
    // A thread's strips cost rounds of a block, with some rows' time for finding each strip.
    const int64_t across = int64_t{images} * columns * vectors;
    int64_t least = INT64_MAX;
    for (int s = 1; s <= std::min(rows, 32); ++s) {
      const int64_t cost = CeilDiv(CeilDiv(rows, s) * across, kThreads) * (s + 2);
      if (cost < least) least = cost, strip = s;
    }
    const int64_t segments = CeilDiv(g.out[2], columns), bands = CeilDiv(g.out[1], rows);
    tiles = CeilDiv(g.batch, images) * g.out[0] * bands * segments;
    by_segment = FastDiv(segments), by_band = FastDiv(bands), by_depth = FastDiv(g.out[0]);
    by_column = FastDiv(columns), by_channel = FastDiv(vectors), by_strip = FastDiv(CeilDiv(rows, strip));
    return tiles <= INT32_MAX;
  }
};

// Copies `length` elements that are aligned alike in both arrays, with every `step`-th vector from the `begin`-th.
template <class T>
__device__ void CopyRun(T* to, const T* from, int length, int begin, int step) {
  constexpr int E = kVecLength<T>;
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T));
  for (int i = begin * E - skew; i < length; i += step * E) {
    if (i >= 0 && i + E <= length) {
      __pipeline_memcpy_async(to + i, from + i, 16);
    } else {
      for (int j = max(i, 0); j < min(i + E, length); ++j) to[j] = from[j];
    }
  }
}

template <class Task>
__global__ void __launch_bounds__(kThreads, 4)
    BandKernel(const __grid_constant__ Task task, const __grid_constant__ Band band,
               const __grid_constant__ CellTable table) {
  using T = typename Task::Element;
  constexpr int N = Task::kWidth;
  extern __shared__ __align__(16) unsigned char memory[];
  T* shared = reinterpret_cast<T*>(memory);
  const Shape& g = task.g;

  int segment, band_number, o0;
  const int group = band.by_depth.Div(
      band.by_band.Div(band.by_segment.Div(static_cast<int>(blockIdx.x), &segment), &band_number), &o0);
  const int64_t image = int64_t{group} * band.images;
  const int images = static_cast<int>(min(int64_t{band.images}, g.batch - image));
  const int top = band_number * band.rows, bottom = min(top + band.rows, g.out[1]);
  const int left = segment * band.columns, right = min(left + band.columns, g.out[2]);

  // The input rectangle of the tile.
  const auto start = [&](int d, int o) { return o * g.stride[d] - g.low[d]; };
  const auto reach = [&](int d) { return (g.window[d] - 1) * g.dilation[d] + 1; };
  int r0 = max(0, start(1, top)), r1 = min(g.in[1], start(1, bottom - 1) + reach(1));
  int c0 = max(0, start(2, left)), c1 = min(g.in[2], start(2, right - 1) + reach(2));
  if (band.whole) c0 = 0, c1 = g.in[2];
  if (band.images > 1) r0 = 0, r1 = g.in[1];
  const Cells d0 = CellsOf(g, 0, o0);
  const int64_t row = task.in.dim[1];
  const T* from = task.x + image * task.in.batch + d0.first * task.in.dim[0] + r0 * row + c0 * g.channels;
  T* tile = shared + reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T);
  if (r0 < r1 && c0 < c1) {
    for (int k0 = 0; k0 < d0.count; ++k0) {
      const T* plane = from + k0 * g.dilation[0] * task.in.dim[0];
      if (band.whole) {
        const int length = static_cast<int>((images - 1) * task.in.batch + (r1 - r0) * row);
        CopyRun(tile + k0 * band.pitch0, plane, length, threadIdx.x, kThreads);
      } else {
        constexpr int kLanes = 32;
        for (int r = threadIdx.x / kLanes; r < r1 - r0; r += kThreads / kLanes)
          CopyRun(tile + k0 * band.pitch0 + r * band.pitch1, plane + r * row, (c1 - c0) * g.channels,
                  threadIdx.x % kLanes, kLanes);
      }
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();

  const int vectors = g.channels / N, strips = static_cast<int>(band.by_strip.divisor);
  const int items = images * strips * band.columns * vectors;
  const T* origin = tile - r0 * band.pitch1 - c0 * g.channels;
  for (int item = threadIdx.x; item < items; item += kThreads) {
    int channel, column, strip;
    const int n = band.by_strip.Div(band.by_column.Div(band.by_channel.Div(item, &channel), &column), &strip);
    const int o2 = left + column, begin = top + strip * band.strip, end = min(begin + band.strip, bottom);
    if (o2 >= right || begin >= end) continue;
    channel *= N;
    const T* plane = origin + n * static_cast<int>(task.in.batch) + channel;
    int64_t to = ((((image + n) * g.out[0] + o0) * g.out[1] + begin) * g.out[2] + o2) * g.channels + channel;
    const auto reduce = [&](int o1) {
      if (table.count == 0 || !IsInside(g, o0, o1, o2))
        return ReduceWindow(task, plane, band.pitch0, band.pitch1, g.channels, o0, o1, o2);
      const int row = o1 * g.stride[1] - g.low[1], first = o2 * g.stride[2] - g.low[2];
      return ReduceInside(task, table, plane + row * band.pitch1 + first * g.channels);
    };
    for (int o1 = begin; o1 < end; ++o1, to += int64_t{g.out[2]} * g.channels) task.Finish(reduce(o1), to, o0, o1, o2);
  }
}

template <class Task, class General>
cudaError_t LaunchBands(const Task& task, cudaStream_t stream, General&& general) {
  constexpr int E = kVecLength<typename Task::Element>;
  constexpr int64_t kSharedBytes = 36 << 10;
  const Shape& g = task.g;
  Band band;
  const bool binned = g.stride[2] == 0;
  // Of far windows, bands would bring mostly what lies between.
  const bool far = g.stride[1] > 2 * ((g.window[1] - 1) * g.dilation[1] + 1);
  if (binned || far || !band.Plan(g, Task::kWidth, E, kSharedBytes / sizeof(typename Task::Element))) return general();
  // Positions are 32-bit there.
  const int64_t row = int64_t{g.in[2]} * g.channels, rows = int64_t{g.in[1]} * band.pitch1;
  if (std::max(row, rows) > INT32_MAX / 2) return general();
  const Grid grid = {band.tiles, kThreads, band.shared * sizeof(typename Task::Element)};
  return LaunchKernel(BandKernel<Task>, grid, stream, task, band, CellTable(g, band.pitch0, band.pitch1, g.channels));
}

}  // namespace jaxdnn::pool
