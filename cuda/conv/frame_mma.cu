// The frame's results, forward and in the data gradient, as an implicit matrix product on the tensor cores, for 16-bit
// floats and TF32: any alignment and group count, since sm_80.
//
// Rows, columns and taps are those of data.cuh, of one box of the frame at a time. Where a row reads the operand is
// worked out once a tap. Elements that stand for further positions have the sums of all these positions added up before
// they are rounded.
#include "cuda/common/shared_bytes.cuh"
#include "cuda/conv/data_mma.cuh"
#include "cuda/conv/frame.cuh"

namespace jaxdnn::conv {
namespace {

template <class T, class In>
struct LoadOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const Frame& f;
  const FrameBlock& block;
  const Row* rows;
  const In* in;
  const bool chunks;  // whether channels are whole chunks, from aligned memory
  const int place;
  Walk walk;
  int64_t from[Mine::kCount];  // at the walk's tap, or -1

  __device__ LoadOperand(const DataParams& p, const Frame& f, const FrameBlock& block, const Row* rows, const In* in,
                         bool chunks)
      : p(p),
        f(f),
        block(block),
        rows(rows),
        in(in),
        chunks(chunks),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) {
    if (chunks) {
      // The walk has just come to this tap.
      if (walk.channel < T::kDepth) {
#pragma unroll
        for (int j = 0; j < Mine::kCount; ++j) from[j] = Locate(j, walk.tap);
      }
#pragma unroll
      for (int j = 0; j < Mine::kCount; ++j) Copy<kChunk<In>>(stage + place + Mine::Step(j), from[j], walk.channel);
      walk.template Advance<T::kDepth>(p, block.phase);
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunk<In>; ++i) {
        const Walk at(p, block.taps, step * T::kDepth + Mine::Chunk() * kChunk<In> + i);
#pragma unroll
        for (int j = 0; j < Mine::kCount; ++j)
          Copy<1>(stage + place + Mine::Step(j) + sizeof(In) * i, Locate(j, at.tap), at.channel);
      }
    }
  }

  __device__ int64_t Locate(int j, const int (&tap)[kRank]) const {
    return Find(p, f, rows[Mine::Line() + j * Mine::kLinesApart], tap, block.phase[0].taps);
  }

  template <int kN>
  __device__ void Copy(uint32_t to, int64_t pixel, int channel) const {
    CopyElements<kN>(to, in + max(pixel, int64_t{0}) + channel, pixel >= 0);
  }
};

template <class T, bool kForward, class In>
struct LoadFilter {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, !kForward>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const FrameBlock& block;
  const In* filter;
  const bool chunks;
  const int depth, place;
  Walk walk;  // of the thread's chunk, in the data gradient

  __device__ LoadFilter(const DataParams& p, const FrameBlock& block, const In* filter, bool chunks, int depth)
      : p(p),
        block(block),
        filter(filter + block.FilterStart(p)),
        chunks(chunks),
        depth(depth),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      if (chunks) {
        // Forward there are all taps, whose lines follow each other.
        const int64_t line = int64_t{step * T::kDepth + Mine::Line() + j * Mine::kLinesApart};
        Copy<kChunk<In>>(step, stage, j, 0, kForward ? line * p.filter_channel : walk.filter + walk.channel);
      } else {
#pragma unroll 1
        for (int i = 0; i < kChunk<In>; ++i) {
          const Walk at(p, block.taps, Depth(step, j, i));
          Copy<1>(step, stage, j, i, at.filter + at.channel * p.filter_channel);
        }
      }
    }
    if (!kForward) walk.template Advance<T::kDepth>(p, block.phase);
  }

  // Element i of the thread's chunk in its line j: which term it belongs to.
  static __device__ int Depth(int step, int j, int i) {
    return step * T::kDepth + (kForward ? Mine::Line() + j * Mine::kLinesApart : Mine::Chunk() * kChunk<In> + i);
  }

  template <int kN>
  __device__ void Copy(int step, uint32_t stage, int j, int i, int64_t offset) const {
    const int along = kForward ? Mine::Chunk() * kChunk<In> + i : Mine::Line() + j * Mine::kLinesApart;
    const int column = block.column_tile * T::kColumns + along;
    CopyElements<kN>(stage + place + Mine::Step(j) + sizeof(In) * i, filter + offset + column * p.filter_column,
                     Depth(step, j, i) < depth && column < p.columns);
  }
};

// The sums that the convolution with zeros has left in `out`.
template <class T>
__device__ void TakeSums(const DataParams& p, const FrameBlock& block, const Row (&rows)[T::kRows], const float* out,
                         typename T::Sums& sums) {
  const int first_column = block.column_tile * T::kColumns;
  out += block.group * int64_t{p.columns} + first_column;
#pragma unroll
  for (int i = 0; i < T::kWarpRows / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t pixel = rows[T::Row() + 16 * i + threadIdx.x % 32 / 4 + 8 * half].result;
#pragma unroll
      for (int j = 0; j < T::kWarpColumns / 8; ++j)
#pragma unroll
        for (int k = 2 * half; k < 2 * half + 2; ++k)
          if (pixel >= 0 && first_column + T::Column(j, k) < p.columns)
            sums[i][j][k] = out[pixel * p.result_pixel + T::Column(j, k)];
    }
}

// Where sums are `continued`, which are floats, those of the results' own positions are there.
template <class T, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FrameMmaKernel(const __grid_constant__ DataParams p, const __grid_constant__ Frame f, const In* in,
                   const In* filter, bool operand_chunks, bool filter_chunks, bool continued, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Row rows[T::kRows];
  FrameBlock block(p, f);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  typename T::Sums sums = {};
  block.SetRows(p, f, rows);
  // Boxes in the corners have few rows and many readings. Of two blocks the other multiplies meanwhile anyway.
  const bool has_rows = T::kBlocks > 1 || block.first_row + T::Row() < block.row_count;
#pragma unroll 1
  for (int begin = !kForward && continued, which = begin, count = block.Readings(); which < count; ++which) {
    block.SetReading(p, f, which, rows);
    block.taps = kForward ? p.window_box : block.Taps();
    __syncthreads();
    if (!kForward && continued && which == begin) TakeSums<T>(p, block, rows, static_cast<const float*>(out), sums);
    const int depth = block.Depth(p);
    LoadOperand<T, In> load_a(p, f, block, rows, in, operand_chunks);
    LoadFilter<T, kForward, In> load_b(p, block, filter, filter_chunks, depth);
    MultiplyPipelined<In, T>(SharedAddress(ring), (depth + T::kDepth - 1) / T::kDepth, load_a, load_b, sums, {},
                             has_rows);
  }

  StoreGroup<T, kForward>(p, block, rows, ring, sums, out);
}

template <class T, Direction kDirection>
cudaError_t LaunchTile(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  using In = typename T::In;
  constexpr bool kForward = kDirection == Direction::kForward;
  DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
  q.whole_runs = IsChunk(AlignedRun(GemmOf(p).columns, p.out, {out, epilogue.bias, epilogue.residual}), p.out);
  const Frame f = MakeFrame(p, p.images, T::kRows);
  const Grid grid = {FrameBlocks(p, q, f), T::kThreads,
                     kSharedBytes<T, LoadOperand<T, In>, LoadFilter<T, kForward, In>>};
  return LaunchKernel(FrameMmaKernel<T, kForward, In>, grid, stream, q, f, static_cast<const In*>(operand),
                      static_cast<const In*>(filter), IsChunk(AlignedRun(p.DepthChannels(), p.in, {operand}), p.in),
                      IsChunk(AlignedRun(p.features, p.in, {filter}), p.in), p.out == DType::kF32 && FrameShare(p) < 1,
                      out);
}

template <Direction kDirection, class In, int kProducts>
cudaError_t LaunchType(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  // Whole lines of memory: there are few blocks, and what lasts is the number of their steps.
  constexpr int kDepth = 128 / sizeof(In);
  if constexpr (kDirection == Direction::kDataGradient && kProducts == 1) {
    using Large = MmaTile<In, kDirection, 128, 128, 4, 2, 1, 1, kDepth>;
    constexpr int kShared = kSharedBytes<Large, LoadOperand<Large, In>, LoadFilter<Large, false, In>> +
                            Large::kRows * (sizeof(Row) + sizeof(int[kRank]));
    // Where there are enough of such tiles to fill the device, and it has the memory.
    const Gemm g = GemmOf(p);
    if (CanShare(kShared) && g.columns % Large::kColumns == 0 &&
        FrameShare(p) * g.rows * g.columns >= 100 * Large::kRows * Large::kColumns)
      return LaunchTile<Large, kDirection>(p, operand, filter, out, epilogue, stream);
  }
  using T = MmaTile<In, kDirection, 128, 64, 4, 2, kProducts == 1 ? 2 : 1, kProducts, kDepth>;
  return LaunchTile<T, kDirection>(p, operand, filter, out, epilogue, stream);
}

}  // namespace

int LaunchFrameMma(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                   cudaStream_t stream) {
  return VisitDataDirection(p, [&](auto direction) {
    return VisitMmaType(p, [&](auto in, auto products) {
      return LaunchType<direction(), typename decltype(in)::type, products()>(p, operand, filter, out, epilogue,
                                                                              stream);
    });
  });
}

}  // namespace jaxdnn::conv
