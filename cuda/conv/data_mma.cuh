// The mma.sync kernel of the forward convolution and the data gradient: the rows and the filter that a thread gathers,
// and how the sums leave. What loads the operand and stores sums serves data_ragged.cu too.
#pragma once

#include "cuda/conv/mma.h"
#include "cuda/conv/mma_store.cuh"
#include "cuda/conv/taps.cuh"

namespace jaxdnn::conv {

// The rows that a thread copies chunks of: where they read at the block's first tap, and which taps they have.
template <class Mine, class In>
struct GatheredRows {
  const In* first[Mine::kCount];
  TapRange taps[Mine::kCount];

  template <int kRows>
  __device__ GatheredRows(const DataParams& p, const DataBlock& block, const Row (&tile)[kRows], const In* in) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const Row& row = tile[Mine::Line() + j * Mine::kLinesApart];
      const int64_t line = int64_t{row.origin[0]} * p.axis[1].extent + row.origin[1];
      first[j] = in + row.image + (line * p.axis[2].extent + row.origin[2]) * p.pixel_size;
      taps[j] = TapRange(row, p, block.phase);
    }
  }
};

// The operand, in pieces of kVec elements.
template <class T, int kVec, class In>
struct LoadOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const int depth, place;
  Walk walk;
  const GatheredRows<Mine, In> rows;

  __device__ LoadOperand(const DataParams& p, const DataBlock& block, const Row (&tile)[T::kRows], const In* in,
                         int depth)
      : p(p),
        block(block),
        depth(depth),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>),
        rows(p, block, tile, in) {}

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
      CopyElements<kN>(to + Mine::Step(j), rows.first[j] + offset, rows.taps[j].Contains(at.packed));
  }
};

// Stores the block's sums, through the epilogue if there is one. address(row, column) says where to, or is -1;
// bias(column) is the place of a column's bias, `columns` of the tile's exist, and `wide` is whether floats come of
// shorter operands.
template <class T, bool kForward, class In, class Address, class Bias>
__device__ __forceinline__ void StoreData(const DataParams& p, unsigned char* ring, const typename T::Sums& sums,
                                          const Address& address, const Bias& bias, int columns, bool whole_runs,
                                          bool wide, void* out) {
  const auto store = [&](auto* result) {
    if constexpr (kForward)
      if (!IsNone(p.epilogue)) return StoreFinished<T>(ring, sums, result, address, whole_runs, p.epilogue, bias);
    StoreSums<T, kChunk<In>>(ring, sums, result, address, whole_runs);
  };
  if constexpr (sizeof(In) == 1) {
    StoreBytes<T>(ring, sums, p.result_type, out, address, whole_runs, p.epilogue, bias, columns);
  } else if (sizeof(In) == 4 || wide) {
    store(static_cast<float*>(out));
  } else {
    store(static_cast<In*>(out));
  }
}

// The same for a tile of one group, whose columns are neighbouring channels.
template <class T, bool kForward, class In, class Block>
__device__ __forceinline__ void StoreGroup(const DataParams& p, const Block& block, const Row (&rows)[T::kRows],
                                           unsigned char* ring, const typename T::Sums& sums, bool wide, void* out) {
  const int first_column = block.column_tile * T::kColumns;
  const auto channel = [&](int column) { return block.group * int64_t{p.columns} + first_column + column; };
  const auto address = [&](int row, int column) -> int64_t {
    const int64_t pixel = rows[row].result;
    return pixel < 0 || first_column + column >= p.columns ? -1 : pixel * p.result_pixel + channel(column);
  };
  const auto bias = [&](int column) { return block.batch * p.result_pixel + channel(column); };
  StoreData<T, kForward, In>(p, ring, sums, address, bias, p.columns - first_column, p.whole_runs, wide, out);
}

// The filter of a dense product forward: [tap, channel] lines of output channels.
template <class T, class In>
struct LoadFilterForward {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const In* filter;  // at the block's first tap and this thread's columns
  const In* next;    // this thread's first line of the next step, where every tap counts
  const int depth, place;
  const bool exists;

  __device__ LoadFilterForward(const DataParams& p, const DataBlock& block, const In* filter, int depth)
      : p(p),
        block(block),
        filter(filter + block.FilterStart(p) + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        next(this->filter + Mine::Line() * p.filter_channel),
        depth(depth),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        exists(block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In> < p.columns) {}

  __device__ void operator()(int step, uint32_t stage) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const int k = step * T::kDepth + Mine::Line() + j * Mine::kLinesApart;
      const In* from = next + j * Mine::kLinesApart * p.filter_channel;
      if (!p.all_taps) {
        const Walk at(p, block.taps, k);
        from = filter + at.filter + at.channel * p.filter_channel;
      }
      CopyAsync<16>(stage + place + Mine::Step(j), from, k < depth && exists);
    }
    next += T::kDepth * p.filter_channel;
  }
};

// The same in the data gradient: for every column (an input channel) lines of (tap, output channel).
template <class T, class In>
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
    const In* from = filter + walk.filter + walk.channel;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j)
      CopyAsync<16>(stage + place + Mine::Step(j), from + j * Mine::kLinesApart * p.filter_column,
                    k < depth && j * Mine::kLinesApart < columns);
    walk.template Advance<T::kDepth>(p, block.phase);
  }
};

// Where the table of columns has one. Forward, threads next to each other need columns a chunk apart, which would all
// lie in one bank.
template <class T, bool kForward>
__device__ int Slot(int column) {
  return kForward ? column % 8 * (T::kColumns / 8) + column / 8 : column;
}

// Any filter, in both directions: in runs of as many elements as belong together, and without those that a column does
// not meet.
template <class T, bool kForward, class In>
struct LoadFilterRuns {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, !kForward>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Column* columns;
  const In* filter;
  const int depth, place;
  Walk walk;  // the thread's first term of a step

  __device__ LoadFilterRuns(const DataParams& p, const DataBlock& block, const Column* columns, const In* filter,
                            int depth)
      : p(p),
        block(block),
        columns(columns),
        filter(filter + block.FilterStart(p)),
        depth(depth),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, kForward ? Mine::Line() : Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) {
    if (p.filter_run == kChunk<In>) {
      Load<kChunk<In>>(step, stage);
    } else if (p.filter_run * sizeof(In) == 8) {
      Load<8 / sizeof(In)>(step, stage);
    } else if (p.filter_run * sizeof(In) == 4) {
      Load<4 / sizeof(In)>(step, stage);
    } else {
      Load<1>(step, stage);
    }
    walk.template Advance<T::kDepth>(p, block.phase);
  }

  // The step's term k, so many after the first one: most often a channel of the same tap.
  __device__ Walk Further(int terms, int k) const {
    Walk at = walk;
    at.channel += terms;
    return at.channel < p.channels ? at : Walk(p, block.taps, k);
  }

  template <int kRun>
  __device__ void Load(int step, uint32_t stage) const {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const int line = Mine::Line() + j * Mine::kLinesApart;
#pragma unroll 2
      for (int i = 0; i < kChunk<In>; i += kRun) {
        const int element = Mine::Chunk() * kChunk<In> + i, k = step * T::kDepth + (kForward ? line : element);
        const Column& column = columns[Slot<T, kForward>(kForward ? element : line)];
        const Walk at = Further(kForward ? j * Mine::kLinesApart : i, k);
        CopyElements<kRun>(stage + place + Mine::Step(j) + sizeof(In) * i,
                           filter + column.filter + at.filter + at.channel * p.filter_channel,
                           k < depth && column.Meets(p, at));
      }
    }
  }
};

// One sum by itself, of the terms alone that its column meets.
template <class In>
__device__ float SumOf(const DataParams& p, const DataBlock& block, const Row& row, const Column& column, const In* in,
                       const In* filter) {
  in += row.image +
        ((int64_t{row.origin[0]} * p.axis[1].extent + row.origin[1]) * p.axis[2].extent + row.origin[2]) * p.pixel_size;
  filter += block.FilterStart(p) + column.filter;
  const TapRange inside(row, p, block.phase);
  float sum = 0;
  for (int k = 0, depth = block.Depth(p); k < depth; ++k) {
    const Walk at(p, block.taps, k);
    if (!column.Meets(p, at)) continue;
    const float x = inside.Contains(at.packed) ? ToFloat(in[at.operand + at.channel], p.e5m2.a) : 0;
    sum += x * ToFloat(filter[at.filter + at.channel * p.filter_channel], p.e5m2.b);
  }
  return sum;
}

// Replaces the block's staged sums that are not finite. Rarely called, hence out of line; and what such a call takes by
// reference lives in memory all along, which the sums must not, nor the kernel's own block.
template <class T, bool kForward, class In>
__device__ __noinline__ void RepairStaged(const DataParams& p, const Row* rows, const Column* columns, const In* in,
                                          const In* filter, float* scratch) {
  const DataBlock block(p);
  for (int i = threadIdx.x; i < T::kRows * T::kColumns; i += T::kThreads) {
    const int row = i / T::kColumns, column = i % T::kColumns;
    float& sum = scratch[row * kPitch<T, float> + column];
    if (isfinite(sum) || rows[row].result < 0 || block.column_tile * T::kColumns + column >= p.columns) continue;
    sum = SumOf(p, block, rows[row], columns[Slot<T, kForward>(column)], in, filter);
  }
}

template <class T, bool kDense, bool kForward, class In>
using LoadFilter =
    std::conditional_t<!kDense, LoadFilterRuns<T, kForward, In>,
                       std::conditional_t<kForward, LoadFilterForward<T, In>, LoadFilterTransposed<T, In>>>;

template <class T, int kVec, bool kDense, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataMmaKernel(const __grid_constant__ DataParams p, const In* in, const In* filter, bool wide, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Row rows[T::kRows];
  __shared__ Column columns[kDense ? 1 : T::kColumns];
  const DataBlock block(p);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);
  const int first_column = block.column_tile * T::kColumns;
  if constexpr (!kDense)
    for (int i = threadIdx.x; i < T::kColumns; i += T::kThreads)
      columns[Slot<T, kForward>(i)] = Column(p, kForward, first_column + i);
  __syncthreads();

  typename T::Sums sums = {};
  const int depth = block.Depth(p), steps = (depth + T::kDepth - 1) / T::kDepth;
  LoadOperand<T, kVec, In> load_a(p, block, rows, in, depth);
  const auto multiply = [&](auto load_b) {
    MultiplyPipelined<In, T>(SharedAddress(ring), steps, load_a, load_b, sums, p.e5m2);
  };
  if constexpr (kDense) {
    multiply(LoadFilter<T, kDense, kForward, In>(p, block, filter, depth));
  } else {
    multiply(LoadFilter<T, kDense, kForward, In>(p, block, columns, filter, depth));
  }

  const int64_t first = block.group * int64_t{p.columns};
  const auto entry = [&](int column) -> const Column& { return columns[Slot<T, kForward>(column)]; };
  const auto channel = [&](int column) { return first + (kDense ? first_column + column : entry(column).channel); };
  const auto address = [&](int row, int column) -> int64_t {
    const Row& at = rows[row];
    if (at.result < 0 || first_column + column >= p.columns) return -1;
    if constexpr (kDense) {
      return at.result * p.result_pixel + channel(column);
    } else {
      return entry(column).Exists(p, at) ? at.result * p.result_pixel + first + entry(column).result : -1;
    }
  };
  if constexpr (!kDense && std::is_same_v<typename T::Sum, float>) {
    // Zeros of the filter do not make up for an infinity of a group or tap that is not the column's.
    bool finite = true;
#pragma unroll
    for (auto& block_of_rows : sums)
#pragma unroll
      for (auto& block_of_columns : block_of_rows)
#pragma unroll
        for (float sum : block_of_columns) finite &= isfinite(sum);
    if (__syncthreads_or(!finite)) {
      float* scratch = StageSums<T, float>(ring, sums);
      RepairStaged<T, kForward>(p, rows, columns, in, filter, scratch);
      TakeStaged<T>(scratch, sums);
    }
  }
  StoreData<T, kForward, In>(
      p, ring, sums, address, [&](int column) { return block.batch * p.result_pixel + channel(column); },
      p.columns - first_column, kDense || p.whole_runs, wide, out);
}

}  // namespace jaxdnn::conv
