// Forward convolution and data gradient as an implicit matrix product on the tensor cores, for 16-bit floats: every
// shape, stride, dilation, padding, rank and group count, on every architecture since sm_80, with no workspace.
//
// data.cuh says what rows, columns and taps are. A thread copies chunks of 8 elements: of the operand always the same
// four rows, whose first address and valid taps it keeps in registers, and of each step the chunk at one depth.
#include "cuda/common/dtype.cuh"
#include "cuda/conv/data.cuh"
#include "cuda/conv/mma.h"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {
namespace {

// For which taps an index stays inside: an interval in each dimension. Three fields of 9 bits, each below a guard bit
// that takes the borrow of a subtraction, compare all dimensions at once.
struct TapRange {
  static constexpr uint32_t kGuards = 1u << 9 | 1u << 19 | 1u << 29;
  uint32_t low, high;

  TapRange() = default;
  static __device__ uint32_t Pack(const int (&tap)[kRank]) { return tap[0] | tap[1] << 10 | tap[2] << 20; }

  __device__ TapRange(const Row& row, const DataParams& p, const PhaseAxis (&phase)[kRank]) {
    int first[kRank], last[kRank];
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      const int distance = abs(p.tap_distance[d]), end = p.axis[d].extent - 1;
      // Counted from the side where the index of tap 0 is, towards which `before` cells are missing.
      const bool up = p.tap_distance[d] > 0;
      const int before = up ? -row.origin[d] : row.origin[d] - end, to_end = up ? end - row.origin[d] : row.origin[d];
      first[d] = before > 0 ? min((before + distance - 1) / distance, 511) : 0;
      last[d] = to_end < 0 ? -1 : min(to_end / distance, phase[d].taps - 1);
      if (first[d] > last[d]) first[d] = 511, last[d] = 0;
    }
    low = Pack(first);
    high = Pack(last) | kGuards;
  }

  __device__ bool Contains(uint32_t tap) const { return (((tap | kGuards) - low) & (high - tap) & kGuards) == kGuards; }
};

template <class T, int kVec, class In>
struct LoadOperand {
  using Tile = OperandTile<T::kRows, T::kDepth, true>;
  static constexpr int kCount = Tile::kLines * Tile::kChunks / T::kThreads;
  static constexpr int kLinesApart = T::kThreads / Tile::kChunks;
  const DataParams& p;
  const Box& box;
  const int depth, chunk, line;
  const In* rows[kCount];
  TapRange taps[kCount];

  __device__ LoadOperand(const DataParams& p, const DataBlock<T::kRows>& block, const In* in)
      : p(p),
        box(block.taps),
        depth(block.Depth(p)),
        chunk(threadIdx.x % Tile::kChunks),
        line(threadIdx.x / Tile::kChunks) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const Row& row = block.rows[line + j * kLinesApart];
      const int64_t line_of_row = int64_t{row.origin[0]} * p.axis[1].extent + row.origin[1];
      rows[j] = in + row.image + (line_of_row * p.axis[2].extent + row.origin[2]) * p.pixel_size;
      taps[j] = TapRange(row, p, block.phase);
    }
  }

  __device__ void operator()(int step, uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < 8; i += kVec) {
      const Where at(*this, step * T::kDepth + chunk * 8 + i);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        CopyElements<kVec>(stage + Tile::Offset(line + j * kLinesApart, chunk) + 2 * i, rows[j] + at.offset,
                           taps[j].Contains(at.tap));
    }
  }

  // The tap and channel at depth k: in every row the same distance from its first address.
  struct Where {
    uint32_t tap;
    int64_t offset;

    __device__ Where(const LoadOperand& load, int k) {
      const DataParams& p = load.p;
      int channel, t[kRank];
      load.box.Split(p.channel_div.Div(k, &channel), t);
      // Past the end no row has a tap.
      tap = k < load.depth ? TapRange::Pack(t) : 511 | 511 << 10 | 511 << 20;
      const int pixel = (t[0] * p.tap_distance[0] * p.axis[1].extent + t[1] * p.tap_distance[1]) * p.axis[2].extent +
                        t[2] * p.tap_distance[2];
      offset = pixel * p.pixel_size + channel;
    }
  };
};

// The filter forward: [tap, channel] lines of output channels.
template <class T, int kVec, class In>
struct LoadFilterForward {
  using Tile = OperandTile<T::kColumns, T::kDepth, false>;
  static constexpr int kCount = Tile::kLines * Tile::kChunks / T::kThreads;
  static constexpr int kLinesApart = T::kThreads / Tile::kChunks;
  const DataParams& p;
  const DataBlock<T::kRows>& block;
  const In* filter;  // at the block's first tap and this thread's columns
  const int depth, columns;

  __device__ LoadFilterForward(const DataParams& p, const DataBlock<T::kRows>& block, const In* filter, int depth)
      : p(p),
        block(block),
        filter(filter + block.FilterStart(p) + block.column_tile * T::kColumns + threadIdx.x % Tile::kChunks * 8),
        depth(depth),
        columns(p.columns - block.column_tile * T::kColumns - static_cast<int>(threadIdx.x % Tile::kChunks * 8)) {}

  __device__ void operator()(int step, uint32_t stage) const {
    const int chunk = threadIdx.x % Tile::kChunks, line = threadIdx.x / Tile::kChunks;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int k = step * T::kDepth + line + j * kLinesApart;
      int channel, t[kRank];
      block.taps.Split(p.channel_div.Div(k, &channel), t);
      const In* from = filter + channel * p.filter_channel;
#pragma unroll
      for (int d = 0; d < kRank; ++d) from += t[d] * p.filter_tap[d];
      const uint32_t to = stage + Tile::Offset(line + j * kLinesApart, chunk);
#pragma unroll
      for (int i = 0; i < 8; i += kVec) CopyElements<kVec>(to + 2 * i, from + i, k < depth && i < columns);
    }
  }
};

// The filter in the data gradient: for every column (an input channel) lines of (tap, output channel).
template <class T, int kVec, class In>
struct LoadFilterTransposed {
  using Tile = OperandTile<T::kColumns, T::kDepth, true>;
  static constexpr int kCount = Tile::kLines * Tile::kChunks / T::kThreads;
  static constexpr int kLinesApart = T::kThreads / Tile::kChunks;
  const DataParams& p;
  const DataBlock<T::kRows>& block;
  const In* filter;  // at the block's first tap and this thread's first column
  const int depth, columns;

  __device__ LoadFilterTransposed(const DataParams& p, const DataBlock<T::kRows>& block, const In* filter, int depth)
      : p(p),
        block(block),
        filter(filter + block.FilterStart(p) +
               (block.column_tile * T::kColumns + threadIdx.x / Tile::kChunks) * p.filter_column),
        depth(depth),
        columns(p.columns - block.column_tile * T::kColumns - static_cast<int>(threadIdx.x / Tile::kChunks)) {}

  __device__ void operator()(int step, uint32_t stage) const {
    const int chunk = threadIdx.x % Tile::kChunks, line = threadIdx.x / Tile::kChunks;
#pragma unroll
    for (int i = 0; i < 8; i += kVec) {
      const int k = step * T::kDepth + chunk * 8 + i;
      int channel, t[kRank];
      block.taps.Split(p.channel_div.Div(k, &channel), t);
      int64_t offset = channel;
#pragma unroll
      for (int d = 0; d < kRank; ++d) offset += t[d] * p.filter_tap[d];
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        CopyElements<kVec>(stage + Tile::Offset(line + j * kLinesApart, chunk) + 2 * i,
                           filter + offset + j * kLinesApart * p.filter_column, k < depth && j * kLinesApart < columns);
    }
  }
};

template <class T, int kVec, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataMmaKernel(const __grid_constant__ DataParams p, const In* in, const In* filter, bool wide, void* out) {
  using LoadA = LoadOperand<T, kVec, In>;
  using LoadB = std::conditional_t<kForward, LoadFilterForward<T, kVec, In>, LoadFilterTransposed<T, kVec, In>>;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ DataBlock<T::kRows> block;
  if (!block.Set(p)) return;

  typename T::Sums sums = {};
  const int depth = block.Depth(p);
  const LoadA load_a(p, block, in);
  const LoadB load_b(p, block, filter, depth);
  MultiplyPipelined<In, T>(SharedAddress(ring), (depth + T::kDepth - 1) / T::kDepth, load_a, load_b, sums);

  const int first_column = block.column_tile * T::kColumns;
  const int64_t first = block.group * int64_t{p.columns} + first_column;
  ForEachRun<T>(reinterpret_cast<float*>(ring), sums, [&](int row, int column, const float (&values)[8]) {
    if (block.first_row + row >= block.row_count) return;
    StoreRun<kVec, In>(out, wide, first + block.rows[row].result * p.result_pixel + column, values,
                       p.columns - first_column - column);
  });
}

}  // namespace

cudaError_t LaunchDataMma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                          cudaStream_t stream) {
  return VisitMmaKernel(p, config, {operand, filter, out}, [&](auto tile, auto vec, auto in) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    constexpr int kVec = decltype(vec)::value;
    const DataParams q = MakeDataParams(p, T::kRows, T::kColumns);
    const auto launch = [&](auto kernel, size_t shared_bytes) {
      return LaunchKernel(kernel, Grid{DataBlocks(p, q), T::kThreads, shared_bytes}, stream, q,
                          static_cast<const In*>(operand), static_cast<const In*>(filter), p.out != p.in, out);
    };
    if (p.direction == Direction::kForward)
      return launch(DataMmaKernel<T, kVec, true, In>,
                    kSharedBytes<T, LoadOperand<T, kVec, In>, LoadFilterForward<T, kVec, In>>);
    return launch(DataMmaKernel<T, kVec, false, In>,
                  kSharedBytes<T, LoadOperand<T, kVec, In>, LoadFilterTransposed<T, kVec, In>>);
  });
}

}  // namespace jaxdnn::conv
