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

  // Each row's are worked out by one thread, and handed over in `shared`, before copies go there.
  template <int kRows>
  __device__ GatheredRows(const DataParams& p, const DataBlock& block, const Row (&tile)[kRows], const In* in,
                          unsigned char* shared) {
    struct Entry {
      int64_t first;
      TapRange taps;
    };
    Entry* const entries = reinterpret_cast<Entry*>(shared);
    for (int i = threadIdx.x; i < kRows; i += blockDim.x) {
      const Row& row = tile[i];
      const int64_t line = int64_t{row.origin[0]} * p.axis[1].extent + row.origin[1];
      entries[i] = {row.image + (line * p.axis[2].extent + row.origin[2]) * p.pixel_size,
                    TapRange(row, p, block.phase)};
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const Entry& entry = entries[Mine::Line() + j * Mine::kLinesApart];
      first[j] = in + entry.first;
      taps[j] = entry.taps;
    }
  }
};

// The operand, in whole chunks or, unless kWhole, in runs of p.operand_run elements.
template <class T, bool kWhole, class In>
struct LoadOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const int place;
  Walk walk;
  const GatheredRows<Mine, In> rows;

  // `shared` is where copies go later.
  __device__ LoadOperand(const DataParams& p, const DataBlock& block, const Row (&tile)[T::kRows], const In* in,
                         unsigned char* shared)
      : p(p),
        block(block),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>),
        rows(p, block, tile, in, shared) {}

  __device__ void operator()(int step, uint32_t stage) {
    const uint32_t to = stage + place;
    if (kWhole || p.operand_run == kChunk<In>) {
      Copy<kChunk<In>>(to, walk);
      walk.template Advance<T::kDepth>(p, block.phase);
      return;
    }
    // The chunk's elements may belong to several taps.
    constexpr int kWord = 4 / sizeof(In);
    const bool words = p.operand_run >= kWord;
#pragma unroll 1
    for (int i = 0; i < kChunk<In>; i += words ? kWord : 1) {
      const Walk at(p, block.taps, step * T::kDepth + Mine::Chunk() * kChunk<In> + i);
      if (words) {
        Copy<kWord>(to + sizeof(In) * i, at);
      } else {
        Copy<1>(to + sizeof(In) * i, at);
      }
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

// Finishes and stores the block's sums, whose places are as FinishStaged has them.
template <class T, bool kForward, bool kWhole, class Address, class Bias>
__device__ __forceinline__ void StoreData(const DataParams& p, float* staged, const Address& address, const Bias& bias,
                                          int columns, void* out) {
  const bool whole_runs = kWhole || p.whole_runs;
  DType type = p.result_type;
  if (sizeof(typename T::In) == 1 && type == DType::kS32) {
    type = DType::kF32;
  } else if constexpr (kForward) {
    FinishStaged<T>(staged, type, p.epilogue, address, whole_runs, bias, columns);
  }
  StoreStaged<T>(staged, type, out, address, whole_runs);
}

// The same of a tile of one group, whose columns are neighbouring channels.
template <class T, bool kForward, bool kWhole = false, class Block>
__device__ __forceinline__ void StoreGroup(const DataParams& p, const Block& block, const Row (&rows)[T::kRows],
                                           unsigned char* ring, const typename T::Sums& sums, void* out) {
  const int first_column = block.column_tile * T::kColumns;
  const auto channel = [&](int column) { return block.group * int64_t{p.columns} + first_column + column; };
  const auto address = [&](int column) {
    const bool exists = first_column + column < p.columns;
    return [&rows, &p, exists, to = channel(column)](int row) -> int64_t {
      const int64_t pixel = rows[row].result;
      return pixel < 0 || !exists ? -1 : pixel * p.result_pixel + to;
    };
  };
  const auto bias = [&](int column) { return block.batch * p.result_pixel + channel(column); };
  StoreData<T, kForward, kWhole>(p, StageSums<T>(ring, sums), address, bias, p.columns - first_column, out);
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
    const auto copy = [&](int j, int k, const In* from) {
      CopyAsync<16>(stage + place + Mine::Step(j), from, k < depth && exists);
    };
    const int first = step * T::kDepth + Mine::Line();
    if (p.all_taps) {
#pragma unroll
      for (int j = 0; j < Mine::kCount; ++j)
        copy(j, first + j * Mine::kLinesApart, next + j * Mine::kLinesApart * p.filter_channel);
      next += T::kDepth * p.filter_channel;
      return;
    }
#pragma unroll 1
    for (int j = 0; j < Mine::kCount; ++j) {
      const int k = first + j * Mine::kLinesApart;
      const Walk at(p, block.taps, k);
      copy(j, k, filter + at.filter + at.channel * p.filter_channel);
    }
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
#pragma unroll
      for (int j = 0; j < Mine::kCount; ++j) Copy(step, stage, j, 0, kChunk<In>);
    } else {
      // Nothing copies two bytes.
      const int run = p.filter_run * sizeof(In) >= 4 ? p.filter_run : 1;
#pragma unroll 1
      for (int j = 0; j < Mine::kCount; ++j)
#pragma unroll 1
        for (int i = 0; i < kChunk<In>; i += run) Copy(step, stage, j, i, run);
    }
    walk.template Advance<T::kDepth>(p, block.phase);
  }

  // The step's term k, so many after the first one: most often a channel of the same tap.
  __device__ Walk Further(int terms, int k) const {
    Walk at = walk;
    at.channel += terms;
    return at.channel < p.channels ? at : Walk(p, block.taps, k);
  }

  // So many elements from element i of chunk j on.
  __device__ __forceinline__ void Copy(int step, uint32_t stage, int j, int i, int run) const {
    const int line = Mine::Line() + j * Mine::kLinesApart, element = Mine::Chunk() * kChunk<In> + i;
    const int k = step * T::kDepth + (kForward ? line : element);
    const Column& column = columns[Slot<T, kForward>(kForward ? element : line)];
    const Walk at = Further(kForward ? j * Mine::kLinesApart : i, k);
    const In* from = filter + column.filter + at.filter + at.channel * p.filter_channel;
    const uint32_t to = stage + place + Mine::Step(j) + sizeof(In) * i;
    const bool valid = k < depth && column.Meets(p, at);
    const int bytes = run * static_cast<int>(sizeof(In));
    if (bytes == 16) {
      CopyAsync<16>(to, from, valid);
    } else if (bytes == 8) {
      CopyAsync<8>(to, from, valid);
    } else if (bytes == 4) {
      CopyAsync<4>(to, from, valid);
    } else {
      CopyElements<1>(to, from, valid);
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
#pragma unroll 1
  for (int k = 0, depth = block.Depth(p); k < depth; ++k) {
    const Walk at(p, block.taps, k);
    if (!column.Meets(p, at)) continue;
    const float x = inside.Contains(at.packed) ? ToFloat(in[at.operand + at.channel], p.e5m2.a) : 0;
    sum += x * ToFloat(filter[at.filter + at.channel * p.filter_channel], p.e5m2.b);
  }
  return sum;
}

// Replaces the block's staged sums that are not finite. Rarely called, hence out of line; all that it takes by
// reference lives in memory.
template <class T, bool kForward, class In>
__device__ __noinline__ void RepairStaged(const DataParams& p, const DataBlock& block, const Row* rows,
                                          const Column* columns, const In* in, const In* filter, float* staged) {
#pragma unroll 1
  for (int i = threadIdx.x; i < T::kRows * T::kColumns; i += T::kThreads) {
    const int row = i / T::kColumns, column = i % T::kColumns;
    float& sum = staged[row * kPitch<T> + column];
    if (isfinite(sum) || rows[row].result < 0 || block.column_tile * T::kColumns + column >= p.columns) continue;
    sum = SumOf(p, block, rows[row], columns[Slot<T, kForward>(column)], in, filter);
  }
}

template <class T, bool kDense, bool kForward, class In>
using LoadFilter =
    std::conditional_t<!kDense, LoadFilterRuns<T, kForward, In>,
                       std::conditional_t<kForward, LoadFilterForward<T, In>, LoadFilterTransposed<T, In>>>;

template <class T, bool kDense, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataMmaKernel(const __grid_constant__ DataParams p, const In* in, const In* filter, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Row rows[T::kRows];
  __shared__ Column columns[kDense ? 1 : T::kColumns];
  __shared__ DataBlock in_memory;
  const DataBlock block(p);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);
  const int first_column = block.column_tile * T::kColumns;
  if constexpr (!kDense) {
    if (threadIdx.x < T::kColumns)
      columns[Slot<T, kForward>(threadIdx.x)] = Column(p, kForward, first_column + threadIdx.x);
    if (threadIdx.x == 0) in_memory = block;
  }

  typename T::Sums sums = {};
  const int depth = block.Depth(p), steps = (depth + T::kDepth - 1) / T::kDepth;
  LoadOperand<T, kDense, In> load_a(p, block, rows, in, ring);
  const auto multiply = [&](auto load_b) {
    MultiplyPipelined<In, T>(SharedAddress(ring), steps, load_a, load_b, sums, p.e5m2);
  };
  if constexpr (kDense) {
    multiply(LoadFilter<T, kDense, kForward, In>(p, block, filter, depth));
    StoreGroup<T, kForward, true>(p, block, rows, ring, sums, out);
  } else {
    multiply(LoadFilter<T, kDense, kForward, In>(p, block, columns, filter, depth));
    float* const staged = StageSums<T>(ring, sums);
    if constexpr (std::is_same_v<typename T::Sum, float>) {
      // Zeros of the filter do not make up for an infinity of a group or tap that is not the column's.
      float zero = 0;  // or NaN
#pragma unroll
      for (auto& block_of_rows : sums)
#pragma unroll
        for (auto& block_of_columns : block_of_rows)
#pragma unroll
          for (float sum : block_of_columns) zero = fmaf(sum, 0, zero);
      if (__syncthreads_or(zero != 0)) {
        RepairStaged<T, kForward>(p, in_memory, rows, columns, in, filter, staged);
        __syncthreads();
      }
    }
    const int64_t first = block.group * int64_t{p.columns};
    const auto entry = [&](int column) -> const Column& { return columns[Slot<T, kForward>(column)]; };
    const auto address = [&](int column) {
      const bool exists = first_column + column < p.columns;
      return [&p, exists, first, of = entry(column)](int row) -> int64_t {
        const Row& at = rows[row];
        return at.result >= 0 && exists && of.Exists(at) ? at.result * p.result_pixel + first + of.result : -1;
      };
    };
    const auto bias = [&](int column) { return block.batch * p.result_pixel + first + entry(column).channel; };
    StoreData<T, kForward, false>(p, staged, address, bias, p.columns - first_column, out);
  }
}

}  // namespace jaxdnn::conv
