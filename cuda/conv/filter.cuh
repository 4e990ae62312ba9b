// What the kernels of the filter gradient share: where a block works, and the sum over slices.
//
// Rows are (tap, channel) pairs, columns the output channels of a group, and the reduction runs over all pixels of y.
// The result is small and the reduction long, so the pixels are cut into slices, one block each; a second kernel adds
// the slices' partial sums in order, which makes the result the same in every run.
#pragma once

#include <algorithm>

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/axis.cuh"

namespace jaxdnn::conv {

struct FilterParams {
  int64_t pixels;  // of y, per problem
  int64_t slice;   // of them in a block, a multiple of the tile's depth
  int rows, columns, groups;
  int64_t filter_rows;  // of a problem in the result: `rows`, but for groups that are computed together
  int row_tiles, column_tiles, splits;
  Axis axis[kRank];
  Box pixels_box, taps_box;
  FastDiv image_pixels, channels;             // of y per image; of x per group that is computed
  FastDiv group_channels, group_columns;      // of one of the groups that are computed together (Dense)
  int64_t images, x_image, x_pixel, y_pixel;  // strides in elements
  int64_t result_size;                        // elements of the whole result
};

inline FilterParams MakeFilterParams(const Problem& p, int64_t splits, int tile_rows, int tile_columns, int tile_depth,
                                     int64_t merged = 1) {
  const Gemm g = GemmOf(p);
  FilterParams q = {};
  q.pixels = g.depth;
  q.slice = std::max<int64_t>(1, CeilDiv(CeilDiv(g.depth, splits), tile_depth)) * tile_depth;
  q.rows = int(g.rows * merged);
  q.columns = int(g.columns * merged);
  q.filter_rows = g.rows;
  q.groups = int(p.groups / merged);
  q.row_tiles = int(CeilDiv(q.rows, tile_rows));
  q.column_tiles = int(CeilDiv(q.columns, tile_columns));
  q.splits = int(splits);
  for (int d = 0; d < kRank; ++d) q.axis[d] = InputAxis(p, d);
  q.pixels_box = Box(p.y);
  q.taps_box = Box(p.window);
  q.image_pixels = FastDiv(p.YPixels());
  q.channels = FastDiv(p.channels * merged);
  q.group_channels = FastDiv(p.channels);
  q.group_columns = FastDiv(p.features);
  q.images = p.images;
  q.x_pixel = p.groups * p.channels;
  q.x_image = q.x_pixel * p.XPixels();
  q.y_pixel = p.groups * p.features;
  q.result_size = p.FilterSize();
  return q;
}

inline int64_t FilterBlocks(const Problem& p, const FilterParams& q) {
  return p.batch * q.groups * q.row_tiles * q.column_tiles * q.splits;
}

// What a block of the grid does.
struct FilterBlock {
  int column_tile, row_tile, group, split;
  int64_t batch;
  int count, first_pixel;      // of the slice: its pixels, and the first one's number in its image
  int64_t x_offset, y_offset;  // of its first image, and of its first pixel, at the group

  FilterBlock() = default;
  __device__ explicit FilterBlock(const FilterParams& p) {
    int block = blockIdx.x;
    column_tile = block % p.column_tiles;
    block /= p.column_tiles;
    row_tile = block % p.row_tiles;
    block /= p.row_tiles;
    group = block % p.groups;
    block /= p.groups;
    split = block % p.splits;
    batch = block / p.splits;
    const int64_t begin = min(split * p.slice, p.pixels);
    count = static_cast<int>(min(p.slice, p.pixels - begin));
    const int64_t first_image = begin / p.image_pixels.divisor;
    first_pixel = static_cast<int>(begin - first_image * p.image_pixels.divisor);
    x_offset = (batch * p.images + first_image) * p.x_image + group * int64_t{p.channels.divisor};
    y_offset = (batch * p.pixels + begin) * p.y_pixel + group * int64_t{p.columns};
  }

  // Of the first column of the group, in the partial sums of this slice.
  __device__ int64_t ResultOffset(const FilterParams& p, int row) const {
    return split * p.result_size + (batch * p.filter_rows + row) * p.y_pixel + group * int64_t{p.columns};
  }
};

template <class Out>
struct StoreInOrder {
  static constexpr bool kInOrder = true;
  Out* out;

  template <class Sum>
  __device__ Out Value(int64_t, Sum sum) const {
    return static_cast<Out>(sum);
  }
  template <class Sum>
  __device__ void operator()(int64_t i, Sum sum) const {
    out[i] = Value(i, sum);
  }
};

// Of the exchanged problem's sums, for the filter of the other one.
template <class In, class Out>
struct StoreExchanged {
  static constexpr bool kInOrder = false;
  FilterParams q;
  const In *x, *y;
  Out* out;

  template <class Sum>
  __device__ void operator()(int64_t i, Sum sum) const {
    const int channels = q.channels.divisor, taps = q.rows / channels;
    int row = int(i / q.y_pixel);
    const int column = int(i - row * q.y_pixel), batch = row / q.rows;
    row -= batch * q.rows;
    const int tap = row / channels, channel = row - tap * channels;
    const int group = column / q.columns, feature = column - group * q.columns;
    // A zero around x may have met an infinity of y. But the other problem has its zeros around y.
    if (isnan(sum)) sum = SumOfExisting<Sum>(batch, group, tap, channel, feature);
    out[(int64_t{batch + 1} * taps - 1 - tap) * q.columns * q.x_pixel + feature * q.x_pixel + group * channels +
        channel] = static_cast<Out>(sum);
  }

  // The sum of the terms alone whose element of x exists. Rarely called.
  template <class Sum>
  __device__ __noinline__ Sum SumOfExisting(int batch, int group, int tap, int channel, int feature) const {
    int taps[kRank];
    q.taps_box.Split(tap, taps);
    Sum sum = 0;
    for (int64_t pixel = 0; pixel < q.pixels && !isnan(sum); ++pixel) {
      const int64_t image = batch * q.images + pixel / q.image_pixels.divisor;
      int to[kRank], at[kRank];
      q.pixels_box.Split(int(pixel % q.image_pixels.divisor), to);
      bool inside = true;
      for (int d = 0; d < kRank; ++d)
        inside &= q.axis[d].Find(q.axis[d].Origin(to[d]) + taps[d] * q.axis[d].tap_step, &at[d]);
      if (!inside) continue;
      const int in_pixel = (at[0] * q.axis[1].extent + at[1]) * q.axis[2].extent + at[2];
      const In of_x = x[image * q.x_image + in_pixel * q.x_pixel + group * int64_t{q.channels.divisor} + channel];
      const In of_y = y[(batch * q.pixels + pixel) * q.y_pixel + group * int64_t{q.columns} + feature];
      sum += static_cast<Sum>(of_x) * static_cast<Sum>(of_y);
    }
    return sum;
  }
};

// Of sums in which a zero that stands for no pixel of y may have met an infinity of x.
template <class In, class Out>
struct StoreChecked {
  static constexpr bool kInOrder = true;
  FilterParams q;
  const In *x, *y;
  Out* out;

  template <class Sum>
  __device__ Out Value(int64_t i, Sum sum) const {
    if (isnan(sum)) sum = SumOfPixels<Sum>(i);
    return static_cast<Out>(sum);
  }
  template <class Sum>
  __device__ void operator()(int64_t i, Sum sum) const {
    out[i] = Value(i, sum);
  }

  // The sum over the pixels of y that exist. Rarely called.
  template <class Sum>
  __device__ __noinline__ Sum SumOfPixels(int64_t i) const {
    const int feature = static_cast<int>(i % q.y_pixel), group = feature / q.columns, channels = q.channels.divisor;
    int64_t row = i / q.y_pixel;
    const int64_t batch = row / q.rows;
    row -= batch * q.rows;
    int taps[kRank];
    q.taps_box.Split(static_cast<int>(row / channels), taps);
    Sum sum = 0;
    for (int64_t pixel = 0; pixel < q.pixels && !isnan(sum); ++pixel) {
      const int64_t image = batch * q.images + pixel / q.image_pixels.divisor;
      int to[kRank], at[kRank];
      q.pixels_box.Split(static_cast<int>(pixel % q.image_pixels.divisor), to);
      bool inside = true;
      for (int d = 0; d < kRank; ++d)
        inside &= q.axis[d].Find(q.axis[d].Origin(to[d]) + taps[d] * q.axis[d].tap_step, &at[d]);
      const int in_pixel = (at[0] * q.axis[1].extent + at[1]) * q.axis[2].extent + at[2];
      const int channel = group * channels + static_cast<int>(row % channels);
      const Sum of_x = inside ? static_cast<Sum>(x[image * q.x_image + in_pixel * q.x_pixel + channel]) : Sum(0);
      sum += of_x * static_cast<Sum>(y[(batch * q.pixels + pixel) * q.y_pixel + feature]);
    }
    return sum;
  }
};

// Stores partial[0][i] + partial[1][i] + ..., of four neighbours by as many threads of a block as there are `parts`:
// each has every parts-th slice, kAtOnce of them on their way.
constexpr int kNeighbours = 4, kSumThreads = 256, kAtOnce = 8;
template <class Sum, class Store>
__global__ void SumSlicesKernel(const Sum* partial, int64_t size, int splits, int parts,
                                const __grid_constant__ Store store) {
  using Four = Vec<Sum, kNeighbours>;
  __shared__ Four of_parts[kSumThreads];
  const int fours = kSumThreads / parts, four = threadIdx.x % fours, part = threadIdx.x / fours;
  const int64_t first = (blockIdx.x * int64_t{fours} + four) * kNeighbours;
  Four sum = {};
  const auto add = [&](const Four& more) {
#pragma unroll
    for (int k = 0; k < kNeighbours; ++k) sum.v[k] += more.v[k];
  };
  if (first >= size) {
  } else if (size % kNeighbours == 0) {
    for (int s = part; s < splits; s += kAtOnce * parts) {
      Four slices[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (s + i * parts < splits)
          slices[i] = *reinterpret_cast<const Four*>(partial + (s + i * parts) * size + first);
#pragma unroll
      for (const Four& slice : slices) add(slice);
    }
  } else {
    for (int s = part; s < splits; s += parts)
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k)
        if (first + k < size) sum.v[k] += partial[s * size + first + k];
  }
  if (parts > 1) {
    of_parts[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0) return;
    for (int other = 1; other < parts; ++other) add(of_parts[other * fours + four]);
  }
  if (first >= size) return;
  if constexpr (Store::kInOrder) {
    Vec<decltype(store.Value(0, sum.v[0])), kNeighbours> out;
    if (size % kNeighbours == 0 && reinterpret_cast<uintptr_t>(store.out) % sizeof(out) == 0) {
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k) out.v[k] = store.Value(first + k, sum.v[k]);
      *reinterpret_cast<decltype(out)*>(store.out + first) = out;
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kNeighbours; ++k)
    if (first + k < size) store(first + k, sum.v[k]);
}

template <class Sum, class Store>
cudaError_t LaunchSumSlices(const Sum* partial, int64_t size, int64_t splits, const Store& store, cudaStream_t stream) {
  // Threads beyond which more of them do not help.
  constexpr int64_t kEnough = int64_t{1} << 17, kMostParts = 32;
  const int64_t fours = CeilDiv(size, kNeighbours);
  int64_t parts = 1;
  while (parts < kMostParts && parts * kAtOnce < splits && parts * fours < kEnough) parts *= 2;
  return LaunchKernel(SumSlicesKernel<Sum, Store>, CeilDiv(fours * parts, kSumThreads), kSumThreads, stream, partial,
                      size, int(splits), int(parts), store);
}

// The result, from the workspace's `splits` slices of sums of In, which may have to be checked.
template <class In, bool kChecked = false>
cudaError_t SumSlices(const Problem& p, const Accumulator<In>* partial, int64_t splits, const void* x, const void* y,
                      void* out, cudaStream_t stream) {
  const int64_t size = p.FilterSize();
  const auto sum = [&](auto store) { return LaunchSumSlices(partial, size, splits, store, stream); };
  const auto to = [&](auto* result) {
    using Out = std::remove_pointer_t<decltype(result)>;
    if constexpr (kChecked) {
      return sum(StoreChecked<In, Out>{MakeFilterParams(p, splits, 1, 1, 1), static_cast<const In*>(x),
                                       static_cast<const In*>(y), result});
    } else {
      if (!p.exchanged) return sum(StoreInOrder<Out>{result});
      return sum(StoreExchanged<In, Out>{MakeFilterParams(p, splits, 1, 1, 1), static_cast<const In*>(x),
                                         static_cast<const In*>(y), result});
    }
  };
  if constexpr (sizeof(In) == 2)
    if (p.out != p.in) return to(static_cast<float*>(out));
  return to(static_cast<In*>(out));
}

}  // namespace jaxdnn::conv
