// Forward convolution and data gradient as an implicit matrix product on the tensor cores, for 16-bit floats and TF32:
// every shape, stride, dilation, padding, rank and group count, on every architecture since sm_80, with no workspace.
//
// data.cuh says what rows, columns and taps are. A thread copies chunks of 16 bytes: of the operand always the same
// few rows, whose first address and valid taps it keeps in registers, and of each step the chunk at one depth. It walks
// along the depth, channels within taps, so that the main loop divides nothing.
#include "cuda/conv/data.cuh"
#include "cuda/conv/mma.h"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {
namespace {

// For which taps an index stays inside: an interval in each dimension. Three fields of 9 bits, each below a guard bit
// that takes the borrow of a subtraction, compare all dimensions at once.
struct TapRange {
  static constexpr uint32_t kGuards = 1u << 9 | 1u << 19 | 1u << 29;
  static constexpr int kNever = 511;
  uint32_t low, high;

  static __device__ uint32_t Pack(const int (&tap)[kRank]) { return tap[0] | tap[1] << 10 | tap[2] << 20; }

  TapRange() = default;
  __device__ TapRange(const Row& row, const DataParams& p, const PhaseAxis (&phase)[kRank]) {
    int first[kRank], last[kRank];
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      const int distance = abs(p.tap_distance[d]), end = p.axis[d].extent - 1;
      // How far the index at tap 0 is before the first valid one, and before the last, in the direction of the taps.
      const bool up = p.tap_distance[d] > 0;
      const int before = up ? -row.origin[d] : row.origin[d] - end, to_end = up ? end - row.origin[d] : row.origin[d];
      first[d] = before > 0 ? min((before + distance - 1) / distance, kNever) : 0;
      last[d] = to_end < 0 ? -1 : min(to_end / distance, phase[d].taps - 1);
      if (first[d] > last[d] || row.result < 0) first[d] = kNever, last[d] = 0;
    }
    low = Pack(first);
    high = Pack(last) | kGuards;
  }

  __device__ bool Contains(uint32_t tap) const { return (((tap | kGuards) - low) & (high - tap) & kGuards) == kGuards; }
};

// A place along the depth: a channel of a tap.
struct Walk {
  int channel, tap[kRank];
  uint32_t packed;
  int64_t operand, filter;  // offsets of the tap, from its first

  __device__ Walk(const DataParams& p, const Box& taps, int k) {
    taps.Split(p.channel_div.Div(k, &channel), tap);
    SetTap(p);
  }

  // On by kDepth terms.
  template <int kDepth>
  __device__ void Advance(const DataParams& p, const PhaseAxis (&phase)[kRank]) {
    channel += kDepth;
    if (channel < p.channels) return;
    do {
      channel -= p.channels;
      if (++tap[2] == phase[2].taps) {
        tap[2] = 0;
        if (++tap[1] == phase[1].taps) tap[1] = 0, ++tap[0];
      }
    } while (channel >= p.channels);
    SetTap(p);
  }

  __device__ void SetTap(const DataParams& p) {
    // Past the last tap, where tap[0] is its count, no row has one.
    packed = TapRange::Pack(tap);
    const int pixel = (tap[0] * p.tap_distance[0] * p.axis[1].extent + tap[1] * p.tap_distance[1]) * p.axis[2].extent +
                      tap[2] * p.tap_distance[2];
    operand = pixel * p.pixel_size;
    filter = tap[0] * p.filter_tap[0] + tap[1] * p.filter_tap[1] + tap[2] * p.filter_tap[2];
  }
};

template <class T, int kVec, class In>
struct LoadOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const int depth, place;
  Walk walk;
  const In* rows[Mine::kCount];
  TapRange taps[Mine::kCount];

  __device__ LoadOperand(const DataParams& p, const DataBlock& block, const Row (&tile)[T::kRows], const In* in,
                         int depth)
      : p(p),
        block(block),
        depth(depth),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const Row& row = tile[Mine::Line() + j * Mine::kLinesApart];
      const int64_t line = int64_t{row.origin[0]} * p.axis[1].extent + row.origin[1];
      rows[j] = in + row.image + (line * p.axis[2].extent + row.origin[2]) * p.pixel_size;
      taps[j] = TapRange(row, p, block.phase);
    }
  }

  __device__ void operator()(int step, uint32_t stage) {
    if constexpr (kVec == kChunk<In>) {
      Copy<kVec>(stage + place, walk);
      walk.template Advance<T::kDepth>(p, block.phase);
    } else {
      // The chunk's elements may belong to several taps.
#pragma unroll 1
      for (int i = 0; i < kChunk<In>; i += kVec)
        Copy<kVec>(stage + place + sizeof(In) * i,
                   Walk(p, block.taps, step * T::kDepth + Mine::Chunk() * kChunk<In> + i));
    }
  }

  template <int kN>
  __device__ void Copy(uint32_t to, const Walk& at) const {
    const int64_t offset = at.operand + at.channel;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j)
      CopyElements<kN>(to + Mine::Step(j), rows[j] + offset, taps[j].Contains(at.packed));
  }
};

// The filter forward: [tap, channel] lines of output channels.
template <class T, int kVec, class In>
struct LoadFilterForward {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const In* filter;  // at the block's first tap and this thread's columns
  const In* next;    // this thread's first line of the next step, where every tap counts
  const int depth, columns, place;

  __device__ LoadFilterForward(const DataParams& p, const DataBlock& block, const In* filter, int depth)
      : p(p),
        block(block),
        filter(filter + block.FilterStart(p) + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        next(this->filter + Mine::Line() * p.filter_channel),
        depth(depth),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Chunk() * kChunk<In>),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())) {}

  __device__ void operator()(int step, uint32_t stage) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const int k = step * T::kDepth + Mine::Line() + j * Mine::kLinesApart;
      const In* from = next + j * Mine::kLinesApart * p.filter_channel;
      if (!p.all_taps) {
        const Walk at(p, block.taps, k);
        from = filter + at.filter + at.channel * p.filter_channel;
      }
#pragma unroll
      for (int i = 0; i < kChunk<In>; i += kVec)
        CopyElements<kVec>(stage + place + Mine::Step(j) + sizeof(In) * i, from + i, k < depth && i < columns);
    }
    next += T::kDepth * p.filter_channel;
  }
};

// The filter in the data gradient: for every column (an input channel) lines of (tap, output channel).
template <class T, int kVec, class In>
struct LoadFilterTransposed {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const In* filter;  // at the block's first tap and this thread's first column
  const int depth, columns, place;
  Walk walk;

  __device__ LoadFilterTransposed(const DataParams& p, const DataBlock& block, const In* filter, int depth)
      : p(p),
        block(block),
        filter(filter + block.FilterStart(p) + (block.column_tile * T::kColumns + Mine::Line()) * p.filter_column),
        depth(depth),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Line()),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) {
    const int k = step * T::kDepth + Mine::Chunk() * kChunk<In>;
    if constexpr (kVec == kChunk<In>) {
      Copy<kVec>(stage + place, walk, k);
      walk.template Advance<T::kDepth>(p, block.phase);
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunk<In>; i += kVec)
        Copy<kVec>(stage + place + sizeof(In) * i, Walk(p, block.taps, k + i), k + i);
    }
  }

  template <int kN>
  __device__ void Copy(uint32_t to, const Walk& at, int k) const {
    const In* from = filter + at.filter + at.channel;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j)
      CopyElements<kN>(to + Mine::Step(j), from + j * Mine::kLinesApart * p.filter_column,
                       k < depth && j * Mine::kLinesApart < columns);
  }
};

template <class T, int kVec, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataMmaKernel(const __grid_constant__ DataParams p, const In* in, const In* filter, bool wide, void* out) {
  using LoadB = std::conditional_t<kForward, LoadFilterForward<T, kVec, In>, LoadFilterTransposed<T, kVec, In>>;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Row rows[T::kRows];
  const DataBlock block(p);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);
  __syncthreads();

  typename T::Sums sums = {};
  const int depth = block.Depth(p);
  LoadOperand<T, kVec, In> load_a(p, block, rows, in, depth);
  LoadB load_b(p, block, filter, depth);
  MultiplyPipelined<In, T>(SharedAddress(ring), (depth + T::kDepth - 1) / T::kDepth, load_a, load_b, sums);

  const int first_column = block.column_tile * T::kColumns;
  const auto store = [&](auto* result) {
    const int64_t first = block.group * int64_t{p.columns} + first_column;
    const auto address = [&](int row) { return rows[row].result < 0 ? -1 : rows[row].result * p.result_pixel; };
    if constexpr (kForward) {
      if (!IsNone(p.epilogue))
        return StoreFinished<T, kVec>(ring, sums, result, first, p.columns - first_column, address, p.epilogue,
                                      block.batch * p.result_pixel);
    }
    StoreSums<T, kVec>(ring, sums, result + first, p.columns - first_column, address);
  };
  if (wide) {
    store(static_cast<float*>(out));
  } else {
    store(static_cast<In*>(out));
  }
}

template <Direction kDirection>
cudaError_t LaunchDirection(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            const Epilogue& epilogue, cudaStream_t stream) {
  return VisitMmaKernel<kDirection>(
      p, config, {operand, filter, out, epilogue.bias, epilogue.residual}, [&](auto tile, auto vec, auto in) {
        using T = typename decltype(tile)::type;
        using In = typename decltype(in)::type;
        constexpr int kVec = decltype(vec)::value;
        constexpr bool kForward = kDirection == Direction::kForward;
        using LoadB = std::conditional_t<kForward, LoadFilterForward<T, kVec, In>, LoadFilterTransposed<T, kVec, In>>;
        const DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
        const Grid grid = {DataBlocks(p, q), T::kThreads, kSharedBytes<T, LoadOperand<T, kVec, In>, LoadB>};
        return LaunchKernel(DataMmaKernel<T, kVec, kForward, In>, grid, stream, q, static_cast<const In*>(operand),
                            static_cast<const In*>(filter), p.out != p.in, out);
      });
}

}  // namespace

cudaError_t LaunchDataMma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream) {
  return p.direction == Direction::kForward
             ? LaunchDirection<Direction::kForward>(p, config, operand, filter, out, epilogue, stream)
             : LaunchDirection<Direction::kDataGradient>(p, config, operand, filter, out, epilogue, stream);
}

}  // namespace jaxdnn::conv
