// Operands whose lines are no whole chunks of 16 bytes, because of how many channels or features there are, or of where
// an array begins.
//
// A chunk of such a line begins at any element. A thread reads the two aligned chunks that it lies in to registers, a
// step ahead, and shifts them into one on their way to shared memory. Along the depth each tap's channels are filled up
// with zeros to whole chunks (DataParams' `channels`), so that a chunk is of one tap and found as an aligned one is.
#pragma once

#include "cuda/conv/data_mma.cuh"

namespace jaxdnn::conv {

// An array of which aligned chunks are read, and no byte outside.
template <class In>
struct Bounds {
  const In *begin, *end;

  __device__ bool Contain(const char* from, int bytes) const {
    return from >= reinterpret_cast<const char*>(begin) && from + bytes <= reinterpret_cast<const char*>(end);
  }
};

template <class In>
struct RaggedChunk {
  uint32_t words[8];
  int shift;  // bytes in front of the chunk's first element

  // Begins to read `count` elements. Where there are none, all are zero.
  __device__ __forceinline__ void Fetch(const In* from, int count, const Bounds<In>& array) {
#pragma unroll
    for (uint32_t& word : words) word = 0;
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    if (count <= 0) return;
    const char* aligned = reinterpret_cast<const char*>(from) - shift;
    const bool both = shift + count * static_cast<int>(sizeof(In)) > 16;
    if (array.Contain(aligned, both ? 32 : 16)) {
      Take(0, __ldg(reinterpret_cast<const uint4*>(aligned)));
      if (both) Take(4, __ldg(reinterpret_cast<const uint4*>(aligned) + 1));
      return;
    }
    // At the array's ends, one by one.
    shift = 0;
#pragma unroll
    for (int i = 0; i < kChunk<In>; ++i)
      if (i < count) words[i * sizeof(In) / 4] |= BitsOf(from[i]) << i * sizeof(In) % 4 * 8;
  }

  // Into shared memory, with zeros behind the first `count` elements.
  __device__ __forceinline__ void Put(uint32_t shared, int count) {
    const bool two = shift & 8, one = shift & 4;
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = two ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = one ? words[i + 1] : words[i];
    if constexpr (sizeof(In) == 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], shift % 4 * 8);
    if (count < kChunk<In>)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int elements = count - i * static_cast<int>(4 / sizeof(In));
        if (elements <= 0) words[i] = 0;
        if (sizeof(In) == 2 && elements == 1) words[i] &= 0xFFFF;
      }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }

 private:
  __device__ void Take(int at, const uint4& v) {
    words[at] = v.x, words[at + 1] = v.y, words[at + 2] = v.z, words[at + 3] = v.w;
  }
  static __device__ uint32_t BitsOf(In v) {
    if constexpr (sizeof(In) == 2)
      return *reinterpret_cast<const unsigned short*>(&v);
    else
      return __float_as_uint(v);
  }
};

// The three operands, step by step: Fetch() begins to read the next step's chunks, Put(stage) stores them.

template <class T, class In>
struct FetchOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Bounds<In> array;
  const GatheredRows<Mine, In> rows;
  const int place;
  Walk walk;
  int count;
  RaggedChunk<In> chunks[Mine::kCount];

  __device__ FetchOperand(const DataParams& p, const DataBlock& block, const Row (&tile)[T::kRows],
                          const Bounds<In>& array)
      : p(p),
        block(block),
        array(array),
        rows(p, block, tile, array.begin),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void Fetch() {
    count = p.group_size - walk.channel;
    const int64_t offset = walk.operand + walk.channel;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j)
      chunks[j].Fetch(rows.first[j] + offset, rows.taps[j].Contains(walk.packed) ? min(count, kChunk<In>) : 0, array);
    walk.template Advance<T::kDepth>(p, block.phase);
  }
  __device__ void Put(uint32_t stage) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) chunks[j].Put(stage + place + Mine::Step(j), count);
  }
};

// Forward: [tap, channel] lines of output channels.
template <class T, class In>
struct FetchFilterForward {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Bounds<In> array;
  const In* const filter;  // at the block's first tap and this thread's columns
  const int place, count;
  int left;  // of the depth, from this thread's first line on
  Walk walk[Mine::kCount];
  RaggedChunk<In> chunks[Mine::kCount];

  __device__ FetchFilterForward(const DataParams& p, const DataBlock& block, const Bounds<In>& array)
      : p(p),
        block(block),
        array(array),
        filter(array.begin + block.FilterStart(p) + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        count(p.columns - block.column_tile * T::kColumns - Mine::Chunk() * kChunk<In>),
        left(block.Depth(p) - Mine::Line()) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) walk[j] = Walk(p, block.taps, Mine::Line() + j * Mine::kLinesApart);
  }

  __device__ void Fetch() {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const bool exists = j * Mine::kLinesApart < left && walk[j].channel < p.group_size;
      chunks[j].Fetch(filter + walk[j].filter + walk[j].channel * p.filter_channel, exists ? min(count, kChunk<In>) : 0,
                      array);
      walk[j].template Advance<T::kDepth>(p, block.phase);
    }
    left -= T::kDepth;
  }
  __device__ void Put(uint32_t stage) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) chunks[j].Put(stage + place + Mine::Step(j), count);
  }
};

// In the data gradient: for every column (an input channel) lines of (tap, output channel).
template <class T, class In>
struct FetchFilterTransposed {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Bounds<In> array;
  const In* const filter;  // at the block's first tap and this thread's first column
  const int place, columns;
  int left;  // of the depth, from this thread's chunk on
  Walk walk;
  int count;
  RaggedChunk<In> chunks[Mine::kCount];

  __device__ FetchFilterTransposed(const DataParams& p, const DataBlock& block, const Bounds<In>& array)
      : p(p),
        block(block),
        array(array),
        filter(array.begin + block.FilterStart(p) + (block.column_tile * T::kColumns + Mine::Line()) * p.filter_column),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Line()),
        left(block.Depth(p) - Mine::Chunk() * kChunk<In>),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void Fetch() {
    count = p.group_size - walk.channel;
    const In* from = filter + walk.filter + walk.channel;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      const bool exists = left > 0 && j * Mine::kLinesApart < columns;
      chunks[j].Fetch(from + j * Mine::kLinesApart * p.filter_column, exists ? min(count, kChunk<In>) : 0, array);
    }
    left -= T::kDepth;
    walk.template Advance<T::kDepth>(p, block.phase);
  }
  __device__ void Put(uint32_t stage) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) chunks[j].Put(stage + place + Mine::Step(j), count);
  }
};

constexpr int kRaggedStages = 2;

// sums += A B over `steps` stages, whose operands come through registers: a step's chunks are on their way while the
// one before is multiplied.
template <class In, class T, class FetchA, class FetchB>
__device__ void MultiplyFetched(uint32_t ring, int steps, FetchA& a, FetchB& b, typename T::Sums& sums) {
  using TileA = typename FetchA::Tile;
  using TileB = typename FetchB::Tile;
  constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  const Fragments<TileA, T::kWarpRows, T::kDepth, false> of_a(T::Row());
  const Fragments<TileB, T::kWarpColumns, T::kDepth, true> of_b(T::Column());
  if (steps > 0) a.Fetch(), b.Fetch();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint32_t stage = ring + step % kRaggedStages * kStageBytes;
    a.Put(stage);
    b.Put(stage + TileA::kBytes);
    // Every thread's chunks are here; and what is put next goes where all have done reading.
    __syncthreads();
    if (step + 1 < steps) a.Fetch(), b.Fetch();
    MultiplyStage<In, T>(stage, stage + TileA::kBytes, of_a, of_b, sums, [] {});
  }
  __syncthreads();
}

}  // namespace jaxdnn::conv
