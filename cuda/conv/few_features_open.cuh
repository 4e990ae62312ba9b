// What a block of Hopper's kernels of few features (few_features_wgmma.cu) works on: its pixels and its filter in
// shared memory, and the results it stores.
#pragma once

#include "cuda/activation/functions.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/few_features.cuh"
#include "cuda/conv/wgmma_store.cuh"

namespace jaxdnn::conv {

template <class In_, int kShape>
struct OpenTile {
  using In = In_;
  static constexpr int kEach = kFewOpenShapes[kShape].each, kColumns = kFewOpenShapes[kShape].Columns();
  // Of a multiprocessor, two blocks' of two warpgroups.
  static constexpr int kMostThreads = kColumns > kFewOpenMostColumns ? 2 * kWarpgroup + 32 : 4 * kWarpgroup + 64;
  using Sums = float[kColumns / 2];
  using Done = float[2 * kEach];  // of two pixels
};

constexpr int kFilterLine = 32;  // bytes, of a step's terms

struct OpenParams {
  CUtensorMap operand;
  FewFeaturesWork work;
  int multipliers;  // threads
  Epilogue epilogue;
  const void *from, *filter;
  float least;                                        // of results
  bool mirrored, wide, pairs;                         // as in FewFeaturesParams, and in FewOpenPlan
  int images;                                         // of a problem's result, planes of volumes each
  int height, result_height, result_width, features;  // the widths in elements
  int channels, window_planes, window_height, window_width, after;
  int stride_h, stride_w, reach_h, reach_w, first_cell_h, first_cell_w, before_h, before_w;  // before_w in elements
  int cell, cell_columns, cells;  // results of a cell, and of one of its lines; cells of a tile
  int line_bytes, steps, slices, line_stages, stage_pitch, stage_bytes, stages, filter_bytes, staged_line;
  int depth, width, pad_d;           // of the operand
  int dimensions, lower_w, lower_d;  // of its map
  uint32_t rows_high;                // of wgmma's description of pixels
  FastDiv places, planes, column_div, features_div, staged_div, steps_div, pixels_div, slices_div;
  int64_t filter_problem, out_problem;
};

// A block's shared memory: stages, the filter, finished sums and barriers.
struct OpenShared {
  uint32_t stages, filter, sums, barriers;

  __device__ OpenShared(const OpenParams& q, unsigned char* shared)
      : stages(SharedAddress(shared)),
        filter(stages + q.stages * q.stage_pitch),
        sums(filter + q.filter_bytes),
        barriers(sums + q.multipliers / 32 * q.stride_h * q.staged_line * 4) {}
  __device__ uint32_t Full(int stage) const { return barriers + 16 * stage; }
  __device__ uint32_t Empty(int stage) const { return barriers + 16 * stage + 8; }
};

// The operand's lines of a block's.
struct OpenBlock : FewFeaturesBlock {
  int first_line, end_line;

  __device__ OpenBlock(const OpenParams& q, int at, int end)
      : FewFeaturesBlock(q, at, end),
        first_line(max(first_cell - (q.reach_h - 1), 0)),
        end_line(min(end_cell, q.height)) {}
};

// Where the filter has a value of the window, of its plane, line, column and feature, for a channel; and from one
// channel to the next.
struct OpenValue {
  int at, step;

  __device__ OpenValue(const OpenParams& q, int plane, int line, int column, int feature, int channel) {
    const int of_plane = q.window_height * q.window_width, tap = line * q.window_width + column;
    if (q.mirrored) {
      at = (((q.window_planes - 1 - plane) * of_plane + tap) * q.features + feature) * q.channels + channel;
      step = 1;
    } else {
      at = ((plane * of_plane + of_plane - 1 - tap) * q.channels + channel) * q.features + feature;
      step = q.features;
    }
  }
};

// The filter, by all who multiply: for each plane, slice, neighbour of a pixel and step the product's columns. A thread
// has a half of a column's terms in some of the steps.
template <class T>
__device__ __forceinline__ void FillColumns(const OpenParams& q, const typename T::In* filter, uint32_t to) {
  using In = typename T::In;
  constexpr int kAtOnce = 4, kHalves = 2, kChunk = 8, kOfStep = kHalves * T::kColumns;
  static_assert(kFilterLine == 2 * kChunk * kHalves);
  const int n = threadIdx.x % kOfStep / kHalves, half = threadIdx.x % kHalves, group = threadIdx.x / kOfStep;
  const int groups = q.multipliers / kOfStep;
  // Lane n / 2 % 4 has neighbouring results of all lines of cells.
  const int place = n / 8 * 2 + n % 2, of_cell = n / 2 % 4 * T::kEach + place % T::kEach;
  int first_column, feature;
  const int line = place / T::kEach * q.stride_h + q.column_div.Div(of_cell, &first_column);
  first_column = (q.reach_w - 1) * q.stride_w + q.features_div.Div(first_column, &feature) - q.after;
  const bool of_window = of_cell < q.cell && line < q.window_height;
  const int steps = group < groups ? q.filter_bytes / (kFilterLine * T::kColumns) : 0;
  to += threadIdx.x % kOfStep * 16;
#pragma unroll 1
  for (int base = group; base < steps; base += kAtOnce * groups) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      int step, pixel, slice;
      const int at = q.pixels_div.Div(q.steps_div.Div(base + k * groups, &step), &pixel);
      const int plane = q.slices_div.Div(at, &slice), column = first_column - pixel * q.stride_w;
      const int channel = slice * (q.line_bytes / 2) + (step * kHalves + half) * kChunk;
      v[k] = {};
      if (!of_window || base + k * groups >= steps || channel >= q.channels ||
          static_cast<unsigned>(column) >= static_cast<unsigned>(q.window_width))
        continue;
      const OpenValue value(q, plane, line, column, feature, channel);
      if (q.mirrored) {
        v[k] = __ldg(reinterpret_cast<const uint4*>(filter + value.at));
      } else {
        Vec<In, kChunk> channels;
#pragma unroll
        for (int c = 0; c < kChunk; ++c) channels.v[c] = filter[value.at + c * value.step];
        memcpy(&v[k], &channels, sizeof(channels));
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint32_t address = to + (base + k * groups) * (kFilterLine * T::kColumns);
      if (base + k * groups < steps)
        hopper::StoreWords(hopper::Swizzled(address, kFilterLine), {v[k].x, v[k].y, v[k].z, v[k].w});
    }
  }
}

// A result of a tile's cells: the element of one of their lines.
struct OpenResult {
  int image, x;  // the latter in elements
  bool exists;

  __device__ OpenResult(const OpenParams& q, int first_place, int element) {
    int column, place;
    const int cell = q.column_div.Div(element, &column);
    image = q.places.Div(first_place + cell, &place);
    x = (place + q.first_cell_w) * q.cell_columns + column - q.before_w;
    exists = image < q.images && place + q.reach_w - 1 < static_cast<int>(q.places.divisor) &&
             static_cast<unsigned>(x) < static_cast<unsigned>(q.result_width);
  }
};

__device__ __forceinline__ void LoadStaged(uint32_t from, float& v) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
}
__device__ __forceinline__ void LoadStaged(uint32_t from, float2& v) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
}

// What a thread stores of its warp's 16 cells. Finished sums lie in shared memory in the order of the lines' elements,
// and lanes take one after another, or pairs.
template <class T>
struct OpenCells {
  using In = typename T::In;
  static constexpr int kMost = 2 * T::kEach, kNone = INT32_MIN / 2;
  uint32_t staged, to[kMost], from[kMost];  // of the thread's sums, and of what it stores
  int place[kMost], line[kMost];            // counted from the result's first, and the first line; or kNone
  float bias[T::kEach];                     // of the sums
  float not_finite = 0;                     // or NaN

  __device__ __forceinline__ OpenCells(const OpenParams& q, const OpenShared& shared, int problem) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    staged = shared.sums + warp * q.stride_h * q.staged_line * 4;
#pragma unroll
    for (int k = 0; k < T::kEach; ++k) {
      int column;
      const int of_cell = lane % 4 * T::kEach + k, i = q.column_div.Div(of_cell, &column);
      to[k] = of_cell < q.cell ? staged + (i * q.staged_line + lane / 4 * q.cell_columns + column) * 4 : 0;
      to[T::kEach + k] = to[k] + 8 * q.cell_columns * 4;
      int feature;
      q.features_div.Div(of_cell, &feature);
      float v[] = {0};
      AddEither<In>(v, q.epilogue.bias, int64_t{problem} * q.features + feature, q.wide);
      bias[k] = v[0];
    }
  }

  // Of the tile that begins there.
  __device__ __forceinline__ void Place(const OpenParams& q, int first_place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k == T::kEach && q.pairs) break;
      int element;
      line[k] = q.staged_div.Div(lane + 32 * k, &element);
      if (q.pairs) element *= 2;
      from[k] = staged + (line[k] < q.stride_h ? line[k] * q.staged_line + element : 0) * 4;
      const OpenResult result(q, first_place + 16 * warp, element);
      place[k] = (result.image * q.result_height + line[k]) * q.result_width + result.x;
      if (!result.exists || line[k] >= q.stride_h) line[k] = kNone;
    }
  }

  // Calls store(place, value) for so many finished values that exist, of cells whose first line is `first`.
  template <int kCount, class V, class Store>
  __device__ __forceinline__ void ForEach(const OpenParams& q, int first, const Store& store) {
    const int offset = first * q.result_width;
    V v[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) LoadStaged(from[k], v[k]);
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      if (static_cast<unsigned>(first + line[k]) < static_cast<unsigned>(q.result_height))
        store(place[k] + offset, v[k]);
  }

  __device__ __forceinline__ void Store(const OpenParams& q, const typename T::Done& done, int first, void* out) {
    __syncwarp();  // nobody reads the sums before any more
#pragma unroll
    for (int k = 0; k < T::kEach; ++k)
      if (to[k] != 0)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(to[half * T::kEach + k]),
                       "f"(done[half * T::kEach + k] + bias[k])
                       : "memory");
    __syncwarp();
    if (q.pairs)
      return ForEach<T::kEach, float2>(q, first, [&](int at, float2 v) {
        not_finite = fmaf(v.x, 0, fmaf(v.y, 0, not_finite));
        *reinterpret_cast<uint32_t*>(static_cast<In*>(out) + at) = Pack<In>(v.x, v.y);
      });
    ForEach<kMost, float>(q, first, [&](int at, float v) {
      not_finite = fmaf(v, 0, not_finite);
      v = activation::MaxOrNan(v, q.least);
      if (q.wide) {
        static_cast<float*>(out)[at] = v;
      } else {
        static_cast<In*>(out)[at] = static_cast<In>(v);
      }
    });
  }
};

// A result's sum of terms of its own alone: it is in this line, in a pixel that is the window's `column` after the
// first of the operand's pixel 0.
template <class In>
__device__ __forceinline__ float SumAgain(const OpenParams& q, const In* filter, int volume, int plane, int y,
                                          int column, int feature) {
  float sum = 0;
  for (int value = 0; value < q.window_planes * q.window_height * q.window_width && !isnan(sum); ++value) {
    const int w = value % q.window_width, h = value / q.window_width % q.window_height;
    const int d = value / q.window_width / q.window_height, z = plane - q.pad_d + d;
    const int down = y + q.before_h - h, across = column - w, line = down / q.stride_h, pixel = across / q.stride_w;
    if (down < 0 || down % q.stride_h != 0 || line >= q.height || across < 0 || across % q.stride_w != 0 ||
        pixel >= q.width || z < 0 || z >= q.depth)
      continue;
    const int64_t at = ((int64_t{volume} * q.depth + z) * q.height + line) * q.width + pixel;
    const In* const from = static_cast<const In*>(q.from) + at * q.channels;
    const OpenValue tap(q, d, h, w, feature, 0);
    for (int c = 0; c < q.channels; ++c)
      sum = fmaf(static_cast<float>(from[c]), static_cast<float>(filter[tap.at + c * tap.step]), sum);
  }
  return sum;
}

// Computes those of a warp's results again that are NaN: zeros beside the window may have met infinities. Rarely
// called, hence out of line.
template <class In>
__device__ __noinline__ void RepairCells(const OpenParams& q, int problem, int first_place, int first_cell,
                                         int end_cell, void* out) {
  const In* const filter = static_cast<const In*>(q.filter) + problem * q.filter_problem;
  __syncwarp();  // after every lane's stores
  for (int y = first_cell * q.stride_h - q.before_h; y < end_cell * q.stride_h - q.before_h; ++y) {
    if (static_cast<unsigned>(y) >= static_cast<unsigned>(q.result_height)) continue;
    for (int i = threadIdx.x % 32; i < 16 * q.cell_columns; i += 32) {
      const OpenResult result(q, first_place, i);
      const int64_t at = problem * q.out_problem + (result.image * q.result_height + y) * q.result_width + result.x;
      if (!result.exists ||
          !isnan(q.wide ? static_cast<const float*>(out)[at] : static_cast<float>(static_cast<const In*>(out)[at])))
        continue;
      int feature, plane;
      const int column = q.features_div.Div(result.x, &feature) + q.before_w / q.features - q.after;
      const int volumes = q.images / static_cast<int>(q.planes.divisor);
      const int volume = q.planes.Div(result.image, &plane) + problem * volumes;
      float v[] = {SumAgain(q, filter, volume, plane, y, column, feature)};
      AddEither<In>(v, q.epilogue.bias, int64_t{problem} * q.features + feature, q.wide);
      v[0] = activation::MaxOrNan(v[0], q.least);
      if (q.wide)
        static_cast<float*>(out)[at] = v[0];
      else
        static_cast<In*>(out)[at] = static_cast<In>(v[0]);
    }
  }
}

}  // namespace jaxdnn::conv
