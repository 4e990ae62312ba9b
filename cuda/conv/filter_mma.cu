// Filter gradient as an implicit matrix product on the tensor cores, for 16-bit floats and TF32: every shape, stride,
// dilation, padding, rank and group count, on every architecture since sm_80.
//
// Rows are (tap, channel) pairs, columns the output channels of a group, and the reduction runs over all pixels of y,
// in slices as in filter_simt.cu. Both operands lie in memory as lines of rows or columns, a pixel each. A thread
// copies always the same chunk of rows, hence the same tap; where the pixels of a step are is worked out by one warp, a
// step ahead, for all.
#include "cuda/common/launch.cuh"
#include "cuda/conv/filter.cuh"
#include "cuda/conv/mma.h"
#include "cuda/conv/mma_store.cuh"

namespace jaxdnn::conv {
namespace {

struct Pixel {
  int64_t image;  // its image in x, in elements
  int origin[kRank];
};

template <class T>
struct PixelTable {
  Pixel pixels[2][T::kDepth];

  __device__ void Fill(const FilterParams& p, const FilterBlock& block, int step) {
    if (threadIdx.x >= T::kDepth) return;
    const int pixel = step * T::kDepth + threadIdx.x;
    Pixel& entry = pixels[step % 2][threadIdx.x];
    int in_image, out[kRank];
    entry.image = p.image_pixels.Div(block.first_pixel + min(pixel, block.count), &in_image) * p.x_image;
    p.pixels_box.Split(in_image, out);
#pragma unroll
    for (int d = 0; d < kRank; ++d) entry.origin[d] = p.axis[d].Origin(out[d]);
    // A pixel past the end meets nothing.
    if (pixel >= block.count) entry.origin[0] = INT32_MIN / 2;
  }
};

// Copies chunks into the stage, kRun elements at a time: locate(j, i, &from) says where those from element i of chunk j
// on begin, and whether they are not zeros instead; then `from` is not read. Single elements of 16 bits, for which
// there is no asynchronous copy, come through registers, those of two chunks before the first of them is stored.
template <class In, int kRun, int kCount, class Locate, class Place>
__device__ __forceinline__ void CopyRuns(const Locate& locate, const Place& place) {
  if constexpr (kRun * sizeof(In) > 2) {
    // Whole chunks in a loop that is unrolled as far as that pays.
    constexpr int kUnroll = kRun == kChunk<In> ? 4 : 1;
#pragma unroll kUnroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int i = 0; i < kChunk<In>; i += kRun) {
        const In* from;
        const bool valid = locate(j, i, &from);
        CopyAsync<kRun * sizeof(In)>(place(j) + sizeof(In) * i, from, valid);
      }
    }
  } else {
    constexpr int kAtOnce = kCount < 2 ? kCount : 2;
#pragma unroll 1
    for (int first = 0; first < kCount; first += kAtOnce) {
      unsigned short bits[kAtOnce][8];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const In* from;
          const bool valid = locate(first + j, i, &from);
          bits[j][i] = valid ? *reinterpret_cast<const unsigned short*>(from) : 0;
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = bits[j][2 * i] | uint32_t{bits[j][2 * i + 1]} << 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(first + j)), "r"(pairs[0]), "r"(pairs[1]),
                     "r"(pairs[2]), "r"(pairs[3])
                     : "memory");
      }
    }
  }
}

template <class T, int kVec, class In>
struct LoadInput {
  using Tile = OperandTile<In, T::kRows, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const FilterParams& p;
  const FilterBlock& block;
  PixelTable<T>& table;
  const In* x;
  const int place;
  const bool undilated;
  int tap[kChunk<In> / kVec][kRank],
      channel[kChunk<In> / kVec];  // of the chunk's elements; past the end a tap that meets nothing

  __device__ LoadInput(const FilterParams& p, const FilterBlock& block, PixelTable<T>& table, const In* x)
      : p(p),
        block(block),
        table(table),
        x(x + block.x_offset),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        undilated(p.axis[0].step.divisor * p.axis[1].step.divisor * p.axis[2].step.divisor == 1) {
#pragma unroll
    for (int i = 0; i < kChunk<In> / kVec; ++i) {
      const int row = block.row_tile * T::kRows + Mine::Chunk() * kChunk<In> + i * kVec;
      p.taps_box.Split(p.channels.Div(row, &channel[i]), tap[i]);
#pragma unroll
      for (int d = 0; d < kRank; ++d) tap[i][d] *= p.axis[d].tap_step;
      if (row >= p.rows) tap[i][0] = INT32_MIN / 2;
    }
  }

  __device__ void operator()(int step, uint32_t stage) const {
    if (undilated) {
      Copy<false>(step, stage + place);
    } else {
      Copy<true>(step, stage + place);
    }
    // Read after the next barrier.
    table.Fill(p, block, step + 1);
  }

  template <bool kDilated>
  __device__ void Copy(int step, uint32_t to) const {
    CopyRuns<In, kVec, Mine::kCount>(
        [&](int j, int i, const In** from) {
          const Pixel& pixel = table.pixels[step % 2][Mine::Line() + j * Mine::kLinesApart];
          int at[kRank];
          bool inside = true;
#pragma unroll
          for (int d = 0; d < kRank; ++d) {
            at[d] = pixel.origin[d] + tap[i / kVec][d];
            if constexpr (kDilated) {
              inside &= p.axis[d].Find(at[d], &at[d]);
            } else {
              inside &= static_cast<unsigned>(at[d]) < static_cast<unsigned>(p.axis[d].extent);
            }
          }
          const int in_pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
          *from = x + pixel.image + in_pixel * p.x_pixel + channel[i / kVec];
          return inside;
        },
        [&](int j) { return to + Mine::Step(j); });
  }
};

template <class T, bool kDense, class In>
struct LoadCotangent {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const FilterParams& p;
  const In* y;  // at this thread's line and columns
  const int run, place, count, columns;

  __device__ LoadCotangent(const FilterParams& p, const FilterBlock& block, const In* y, int run)
      : p(p),
        y(y + block.y_offset + Mine::Line() * p.y_pixel + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        run(run),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        count(block.count - Mine::Line()),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) const {
    if (kDense || run == kChunk<In>) {
      Copy<kChunk<In>>(step, stage);
    } else if (run * sizeof(In) >= 4) {
      Copy<4 / sizeof(In)>(step, stage);
    } else {
      Copy<1>(step, stage);
    }
  }

  template <int kRun>
  __device__ void Copy(int step, uint32_t stage) const {
    CopyRuns<In, kRun, Mine::kCount>(
        [&](int j, int i, const In** from) {
          const int pixel = step * T::kDepth + j * Mine::kLinesApart;
          *from = y + pixel * p.y_pixel + i;
          return pixel < count && i < columns;
        },
        [&](int j) { return stage + place + Mine::Step(j); });
  }
};

// Of floats that are not dense there is room for three small blocks, if the compiler is told.
template <class T, bool kDense>
constexpr int kFilterBlocks =
    !kDense && sizeof(typename T::In) == 4 && T::kProducts == 1 && T::kThreads == 128 ? 3 : T::kBlocks;

template <class T, int kVec, bool kDense, class In>
__global__ void __launch_bounds__(T::kThreads, (kFilterBlocks<T, kDense>))
    FilterMmaKernel(const __grid_constant__ FilterParams p, const In* x, const In* y, int y_run, bool whole_runs,
                    DType type, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ PixelTable<T> table;
  const FilterBlock block(p);
  table.Fill(p, block, 0);
  __syncthreads();

  typename T::Sums sums = {};
  LoadInput<T, kVec, In> load_x(p, block, table, x);
  LoadCotangent<T, kDense, In> load_y(p, block, y, y_run);
  MultiplyPipelined<In, T>(SharedAddress(ring), (block.count + T::kDepth - 1) / T::kDepth, load_x, load_y, sums);

  const int first_row = block.row_tile * T::kRows, first_column = block.column_tile * T::kColumns;
  const auto address = [&](int of_tile) {
    const int column = first_column + of_tile;
    const int rows = column < p.columns ? p.rows : 0, group_of_column = kDense ? 0 : p.group_columns.Div(column);
    return [&p, first_row, rows, group_of_column, to = block.ResultOffset(p, 0) + column](int tile_row) -> int64_t {
      int row = first_row + tile_row;
      if (row >= rows) return -1;
      if constexpr (!kDense) {
        // A row is a channel of all groups that are computed together, each of which has its own part of the columns.
        int channel, in_group;
        const int tap = p.channels.Div(row, &channel);
        if (p.group_channels.Div(channel, &in_group) != group_of_column) return -1;
        row = tap * p.group_channels.divisor + in_group;
      }
      return to + row * p.y_pixel;
    };
  };
  StoreStaged<T>(StageSums<T>(ring, sums), type, out, address, kDense || whole_runs);
}

}  // namespace

cudaError_t LaunchFilterMma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                            void* workspace, cudaStream_t stream) {
  const int64_t merged = DenseOf(p).groups;
  const int x_run = AlignedRun(p.channels * merged, p.in, {x}), y_run = AlignedRun(p.features * merged, p.in, {y});
  const bool partial = UsesWorkspace(p, config.splits),
             whole_runs = IsChunk(AlignedRun(p.features, p.out, {out}), p.out);
  const bool whole = whole_runs && IsChunk(y_run, p.in);
  const auto launch = [&](auto tile, auto dense, auto in) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    constexpr bool kDense = decltype(dense)::value;
    const FilterParams q = MakeFilterParams(p, config.splits, T::kRows, T::kColumns, T::kDepth, merged);
    const auto with_run = [&](auto run) {
      constexpr int kVec = decltype(run)::value;
      constexpr int kShared = kSharedBytes<T, LoadInput<T, kVec, In>, LoadCotangent<T, kDense, In>>;
      return LaunchKernel(FilterMmaKernel<T, kVec, kDense, In>, Grid{FilterBlocks(p, q), T::kThreads, kShared}, stream,
                          q, static_cast<const In*>(x), static_cast<const In*>(y), y_run, whole_runs,
                          partial ? DType::kF32 : p.out, partial ? workspace : out);
    };
    if constexpr (!kDense && T::kColumns == 64)
      if (!IsChunk(x_run, p.in))
        return sizeof(In) == 2 && x_run > 1 ? with_run(std::integral_constant<int, 4 / sizeof(In)>())
                                            : with_run(std::integral_constant<int, 1>());
    return with_run(std::integral_constant<int, kChunk<In>>());
  };
  const cudaError_t status = VisitMmaKernel<Direction::kFilterGradient>(p, config, IsChunk(x_run, p.in), whole, launch);
  if (!partial || status != cudaSuccess) return status;
  return SumSlices(p, workspace, config.splits, false, x, y, out, stream);
}

}  // namespace jaxdnn::conv
