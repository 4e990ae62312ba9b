// The frame's terms in the filter gradient, on the tensor cores: the products alone whose element of x is beyond an
// edge, for 16-bit floats and TF32, any alignment and group count, since sm_80.
//
// Rows, columns and slices are those of filter.cuh. The reduction runs over the frame's pixels, which all
// threads look up together, a few steps ahead.
#include "cuda/conv/frame.cuh"
#include "cuda/conv/mma_store.cuh"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {
namespace {

struct Pixel {
  int64_t x, y;  // its image in x, and itself in y, in elements; the latter -1 past the end
  int origin[kRank];
};

// Looked up for kSteps steps at a time, since that takes long.
template <class T>
struct PixelTable {
  static constexpr int kSteps = 4, kPixels = kSteps * T::kDepth;
  Pixel pixels[2][kPixels];

  __device__ void Fill(const FilterParams& p, const Frame& f, const FilterBlock& block, int64_t y_image, int group) {
    for (int i = threadIdx.x; i < kPixels; i += T::kThreads) {
      const int pixel = group * kPixels + i;
      Pixel& entry = pixels[group % 2][i];
      int which;
      const int image = p.image_pixels.Div(block.first_pixel + min(pixel, block.count), &which);
      const FramePixel at(p, f, which);
      entry.x = image * p.x_image;
      entry.y = pixel < block.count ? image * y_image + at.number * p.y_pixel : -1;
#pragma unroll
      for (int d = 0; d < kRank; ++d) entry.origin[d] = at.origin[d];
    }
  }

  __device__ const Pixel& At(int step, int line) const {
    return pixels[step / kSteps % 2][step % kSteps * T::kDepth + line];
  }
};

template <class T, class In>
struct LoadInput {
  using Tile = OperandTile<In, T::kRows, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const FilterParams& p;
  const Frame& f;
  const PixelTable<T>& table;
  const In* x;
  const bool chunks;  // whether channels are whole chunks, from aligned memory
  const int first_row, place;
  int tap[kRank], channel;  // of the thread's chunk

  __device__ LoadInput(const FilterParams& p, const Frame& f, const FilterBlock& block, const PixelTable<T>& table,
                       const In* x, bool chunks)
      : p(p),
        f(f),
        table(table),
        x(x),
        chunks(chunks),
        first_row(block.row_tile * T::kRows + Mine::Chunk() * kChunk<In>),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())) {
    SetRow(first_row, tap, &channel);
  }

  __device__ void SetRow(int row, int (&tap)[kRank], int* channel) const {
    p.taps_box.Split(p.channels.Div(row, channel), tap);
#pragma unroll
    for (int d = 0; d < kRank; ++d) tap[d] *= p.axis[d].tap_step;
  }

  __device__ void operator()(int step, uint32_t stage) const {
    if (chunks) {
      CopyAll<kChunk<In>>(step, stage + place, first_row, tap, channel);
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunk<In>; ++i) {
        int at[kRank], of;
        SetRow(first_row + i, at, &of);
        CopyAll<1>(step, stage + place + sizeof(In) * i, first_row + i, at, of);
      }
    }
  }

  template <int kN>
  __device__ void CopyAll(int step, uint32_t to, int row, const int (&tap)[kRank], int channel) const {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const Pixel& pixel = table.At(step, Mine::Line() + j * Mine::kLinesApart);
      const int at = FindBeyond(f, pixel.origin, tap);
      CopyElements<kN>(to + Mine::Step(j), x + pixel.x + max(at, 0) * p.x_pixel + channel,
                       at >= 0 && pixel.y >= 0 && row < p.rows);
    }
  }
};

template <class T, class In>
struct LoadCotangent {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const PixelTable<T>& table;
  const In* y;  // at this thread's columns
  const bool chunks;
  const int place, columns;

  __device__ LoadCotangent(const FilterParams& p, const FilterBlock& block, const PixelTable<T>& table, const In* y,
                           bool chunks)
      : table(table),
        y(y + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        chunks(chunks),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) const {
    if (chunks) {
      CopyAll<kChunk<In>>(step, stage + place, 0);
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunk<In>; ++i) CopyAll<1>(step, stage + place + sizeof(In) * i, i);
    }
  }

  template <int kN>
  __device__ void CopyAll(int step, uint32_t to, int i) const {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const int64_t pixel = table.At(step, Mine::Line() + j * Mine::kLinesApart).y;
      CopyElements<kN>(to + Mine::Step(j), y + max(pixel, int64_t{0}) + i, pixel >= 0 && i < columns);
    }
  }
};

// Fills the table for what comes after the steps that are loaded now: the last of the two loaders, hence of the step's.
template <int kSteps, class Load, class Fill>
struct WithNext {
  using Tile = typename Load::Tile;
  const Load load;
  const Fill fill;

  __device__ void operator()(int step, uint32_t stage) const {
    load(step, stage);
    if (step % kSteps == 0) fill(step / kSteps + 1);  // read after a barrier
  }
};

template <class T, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FrameFilterMmaKernel(const __grid_constant__ FilterParams p, const __grid_constant__ Frame f, const In* x,
                         const In* y, bool x_chunks, bool y_chunks, bool whole_runs, float* partial) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ PixelTable<T> table;
  const FilterBlock block(p);
  const int64_t y_image = int64_t{f.extent[0]} * f.extent[1] * f.extent[2] * p.y_pixel;
  const int64_t frame_pixels = f.first_tile[f.boxes];
  const int64_t first_image = block.batch * p.images + block.split * p.slice / frame_pixels;
  const auto fill = [&](int group) { table.Fill(p, f, block, y_image, group); };
  fill(0);
  __syncthreads();

  typename T::Sums sums = {};
  const LoadInput<T, In> load_x(p, f, block, table, x + block.x_offset, x_chunks);
  using LoadY = LoadCotangent<T, In>;
  const WithNext<PixelTable<T>::kSteps, LoadY, decltype(fill)> load_y{
      LoadY(p, block, table, y + first_image * y_image + block.group * p.columns, y_chunks), fill};
  MultiplyPipelined<In, T>(SharedAddress(ring), (block.count + T::kDepth - 1) / T::kDepth, load_x, load_y, sums);

  const int first_row = block.row_tile * T::kRows, first_column = block.column_tile * T::kColumns;
  const auto address = [&](int of_tile) {
    return [&, column = first_column + of_tile](int row) -> int64_t {
      return first_row + row < p.rows && column < p.columns ? block.ResultOffset(p, first_row + row) + column : -1;
    };
  };
  StoreStaged<T>(StageSums<T>(ring, sums), DType::kF32, partial, address, whole_runs);
}

template <class In, int kProducts>
cudaError_t LaunchType(const Problem& p, int64_t slices, const void* x, const void* y, void* partial,
                       cudaStream_t stream) {
  using T = MmaTile<In, Direction::kFilterGradient, 128, 64, 4, 2, kProducts == 1 ? 2 : 1, kProducts>;
  const Frame f = MakeFrame(p, 1, 1);
  const FilterParams q = MakeFrameFilterParams(p, f, slices, T::kRows, T::kColumns, T::kDepth);
  using LoadY = LoadCotangent<T, In>;
  const Grid grid = {FilterBlocks(p, q), T::kThreads, kSharedBytes<T, LoadInput<T, In>, LoadY>};
  return LaunchKernel(FrameFilterMmaKernel<T, In>, grid, stream, q, f, static_cast<const In*>(x),
                      static_cast<const In*>(y), IsChunk(AlignedRun(p.channels, p.in, {x}), p.in),
                      IsChunk(AlignedRun(p.features, p.in, {y}), p.in),
                      AlignedRun(p.features, DType::kF32, {partial}) == 4, static_cast<float*>(partial));
}

}  // namespace

int LaunchFrameFilterMma(const Problem& p, int64_t slices, const void* x, const void* y, void* partial,
                         cudaStream_t stream) {
  return VisitMmaType(p, [&](auto in, auto products) {
    return LaunchType<typename decltype(in)::type, products()>(p, slices, x, y, partial, stream);
  });
}

}  // namespace jaxdnn::conv
