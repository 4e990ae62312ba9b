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
#include "cuda/conv/mma_tile.cuh"

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
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const Pixel pixel = table.pixels[step % 2][Mine::Line() + j * Mine::kLinesApart];
#pragma unroll
      for (int i = 0; i < kChunk<In> / kVec; ++i) {
        int at[kRank];
        bool inside = true;
#pragma unroll
        for (int d = 0; d < kRank; ++d) {
          at[d] = pixel.origin[d] + tap[i][d];
          if constexpr (kDilated) {
            inside &= p.axis[d].Find(at[d], &at[d]);
          } else {
            inside &= static_cast<unsigned>(at[d]) < static_cast<unsigned>(p.axis[d].extent);
          }
        }
        const int in_pixel = (at[0] * p.axis[1].extent + at[1]) * p.axis[2].extent + at[2];
        CopyElements<kVec>(to + Mine::Step(j) + sizeof(In) * kVec * i,
                           x + pixel.image + in_pixel * p.x_pixel + channel[i], inside);
      }
    }
  }
};

template <class T, int kVec, class In>
struct LoadCotangent {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const FilterParams& p;
  const In* y;  // at this thread's line and columns
  const int place, count, columns;

  __device__ LoadCotangent(const FilterParams& p, const FilterBlock& block, const In* y)
      : p(p),
        y(y + block.y_offset + Mine::Line() * p.y_pixel + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        count(block.count - Mine::Line()),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) const {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const int pixel = step * T::kDepth + j * Mine::kLinesApart;
#pragma unroll
      for (int i = 0; i < kChunk<In>; i += kVec)
        CopyElements<kVec>(stage + place + Mine::Step(j) + sizeof(In) * i, y + pixel * p.y_pixel + i,
                           pixel < count && i < columns);
    }
  }
};

template <class T, int kVec, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FilterMmaKernel(const __grid_constant__ FilterParams p, const In* x, const In* y, bool wide, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ PixelTable<T> table;
  const FilterBlock block(p);
  table.Fill(p, block, 0);
  __syncthreads();

  typename T::Sums sums = {};
  LoadInput<T, kVec, In> load_x(p, block, table, x);
  LoadCotangent<T, kVec, In> load_y(p, block, y);
  MultiplyPipelined<In, T>(SharedAddress(ring), (block.count + T::kDepth - 1) / T::kDepth, load_x, load_y, sums);

  const int first_row = block.row_tile * T::kRows, first_column = block.column_tile * T::kColumns;
  const auto store = [&](auto* result) {
    StoreSums<T, kVec>(ring, sums, result + first_column, p.columns - first_column,
                       [&](int row) { return first_row + row < p.rows ? block.ResultOffset(p, first_row + row) : -1; });
  };
  if (wide) {
    store(static_cast<float*>(out));
  } else {
    store(static_cast<In*>(out));
  }
}

}  // namespace

cudaError_t LaunchFilterMma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                            void* workspace, cudaStream_t stream) {
  return VisitMmaKernel<Direction::kFilterGradient>(p, config, {x, y, out}, [&](auto tile, auto vec, auto in) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    constexpr int kVec = decltype(vec)::value;
    const FilterParams q = MakeFilterParams(p, config, T::kRows, T::kColumns, T::kDepth);
    const bool split = config.splits > 1;
    const cudaError_t status = LaunchKernel(
        FilterMmaKernel<T, kVec, In>,
        Grid{FilterBlocks(p, q), T::kThreads, kSharedBytes<T, LoadInput<T, kVec, In>, LoadCotangent<T, kVec, In>>},
        stream, q, static_cast<const In*>(x), static_cast<const In*>(y), split || p.out != p.in,
        split ? workspace : out);
    if (!split || status != cudaSuccess) return status;
    const float* partial = static_cast<const float*>(workspace);
    return p.out == p.in ? SumSlices(partial, static_cast<In*>(out), q.result_size, q.splits, stream)
                         : SumSlices(partial, static_cast<float*>(out), q.result_size, q.splits, stream);
  });
}

}  // namespace jaxdnn::conv
