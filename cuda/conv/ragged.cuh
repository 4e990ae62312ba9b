// The kernel of operands whose lines are no whole chunks of 16 bytes, because of how many channels or features there
// are, or of where an array begins.
//
// A chunk of such a line begins at any element. A thread reads the two aligned chunks that it lies in to registers, and
// when the next step is loaded shifts them into one on their way to shared memory. Along the depth each tap's channels
// are filled up with zeros to whole chunks (DataParams' `channels`), so that a chunk is of one tap and found as an
// aligned one is.
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
  bool at_end;

  // Begins to read `count` elements, without a branch, so that a thread's chunks are all on their way at once. Where
  // there are none, all are zero; and where an aligned chunk is partly outside the array, it is left to FetchOneByOne.
  __device__ __forceinline__ void Fetch(const In* from, int count, const Bounds<In>& array) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const char* aligned = reinterpret_cast<const char*>(from) - shift;
    const bool both = shift + count * static_cast<int>(sizeof(In)) > 16,
               inside = array.Contain(aligned, both ? 32 : 16);
    at_end = count > 0 && !inside;
    uint4 low = {}, high = {};
    if (count > 0 && inside) low = __ldg(reinterpret_cast<const uint4*>(aligned));
    if (count > 0 && inside && both) high = __ldg(reinterpret_cast<const uint4*>(aligned) + 1);
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
  }
  __device__ __forceinline__ void FetchOneByOne(const In* from, int count) {
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
    if constexpr (sizeof(In) < 4)
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], shift % 4 * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bytes = (count - i * static_cast<int>(4 / sizeof(In))) * static_cast<int>(sizeof(In));
      if (bytes <= 0) words[i] = 0;
      if (sizeof(In) == 2 && bytes == 2) words[i] &= 0xFFFF;
      if (sizeof(In) == 1 && bytes > 0 && bytes < 4) words[i] &= (1u << 8 * bytes) - 1;
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }

 private:
  static __device__ uint32_t BitsOf(In v) {
    if constexpr (sizeof(In) == 1)
      return *reinterpret_cast<const unsigned char*>(&v);
    else if constexpr (sizeof(In) == 2)
      return *reinterpret_cast<const unsigned short*>(&v);
    else
      return __float_as_uint(v);
  }
};

// A thread's chunks of a step. `count` of each one's elements exist where exists(j), and begin at from(j).
template <class Mine, class In>
struct RaggedShare {
  int count;
  RaggedChunk<In> chunks[Mine::kCount];

  template <class Exists, class From>
  __device__ __forceinline__ void Fetch(int elements, const Bounds<In>& array, const Exists& exists, const From& from) {
    count = min(elements, kChunk<In>);
    bool at_end = false;
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) {
      chunks[j].Fetch(from(j), exists(j) ? count : 0, array);
      at_end |= chunks[j].at_end;
    }
    if (at_end)
#pragma unroll
      for (int j = 0; j < Mine::kCount; ++j)
        if (chunks[j].at_end) chunks[j].FetchOneByOne(from(j), count);
  }
  __device__ __forceinline__ void Put(uint32_t to) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) chunks[j].Put(to + Mine::Step(j), count);
  }
};

// The loaders (of MultiplyPipelined): each puts the chunks of the step that is to be loaded, which it has fetched, and
// fetches those of the next. In front of the first step it fetches that one, in a loop that is not unrolled, since
// fetching is most of the kernels' code.
template <class Put, class Fetch>
__device__ __forceinline__ void PutAndFetch(int step, const Put& put, const Fetch& fetch) {
#pragma unroll 1
  for (int fetched = step > 0; fetched < 2; ++fetched) {
    if (fetched == 1) put();
    fetch();
  }
}

template <class T, class In>
struct LoadRaggedOperand {
  using Tile = OperandTile<In, T::kRows, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Bounds<In>& array;
  const GatheredRows<Mine, In> rows;
  const int place;
  Walk walk;
  RaggedShare<Mine, In> share;

  __device__ LoadRaggedOperand(const DataParams& p, const DataBlock& block, const Row (&tile)[T::kRows],
                               const Bounds<In>& array, unsigned char* shared)
      : p(p),
        block(block),
        array(array),
        rows(p, block, tile, array.begin, shared),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) {
    const auto put = [&] {
      share.Put(stage + place);
      walk.template Advance<T::kDepth>(p, block.phase);
    };
    PutAndFetch(step, put, [&] { Fetch(); });
  }

 private:
  __device__ __forceinline__ void Fetch() {
    const int64_t offset = walk.operand + walk.channel;
    share.Fetch(
        static_cast<int>(p.group_size) - walk.channel, array, [&](int j) { return rows.taps[j].Contains(walk.packed); },
        [&](int j) { return rows.first[j] + offset; });
  }
};

// Forward: [tap, channel] lines of output channels.
template <class T, class In>
struct LoadRaggedFilterForward {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, false>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Bounds<In>& array;
  const In* const filter;  // at the block's first tap and this thread's columns
  const int place, columns;
  int left;  // of the depth, from this thread's first line on
  Walk walk[Mine::kCount];
  RaggedShare<Mine, In> share;

  __device__ LoadRaggedFilterForward(const DataParams& p, const DataBlock& block, const Bounds<In>& array)
      : p(p),
        block(block),
        array(array),
        filter(array.begin + block.FilterStart(p) + block.column_tile * T::kColumns + Mine::Chunk() * kChunk<In>),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Chunk() * kChunk<In>),
        left(block.Depth(p) - Mine::Line()) {
#pragma unroll
    for (int j = 0; j < Mine::kCount; ++j) walk[j] = Walk(p, block.taps, Mine::Line() + j * Mine::kLinesApart);
  }

  __device__ void operator()(int step, uint32_t stage) {
    const auto put = [&] {
      share.Put(stage + place);
      left -= T::kDepth;
#pragma unroll
      for (int j = 0; j < Mine::kCount; ++j) walk[j].template Advance<T::kDepth>(p, block.phase);
    };
    PutAndFetch(step, put, [&] { Fetch(); });
  }

 private:
  __device__ __forceinline__ void Fetch() {
    share.Fetch(
        columns, array, [&](int j) { return j * Mine::kLinesApart < left && walk[j].channel < p.group_size; },
        [&](int j) { return filter + walk[j].filter + walk[j].channel * p.filter_channel; });
  }
};

// In the data gradient: for every column (an input channel) lines of (tap, output channel).
template <class T, class In>
struct LoadRaggedFilterTransposed {
  using Tile = OperandTile<In, T::kColumns, T::kDepth, true>;
  using Mine = Share<Tile, T::kThreads>;
  const DataParams& p;
  const DataBlock& block;
  const Bounds<In>& array;
  const In* const filter;  // at the block's first tap and this thread's first column
  const int place, columns;
  int left;  // of the depth, from this thread's chunk on
  Walk walk;
  RaggedShare<Mine, In> share;

  __device__ LoadRaggedFilterTransposed(const DataParams& p, const DataBlock& block, const Bounds<In>& array)
      : p(p),
        block(block),
        array(array),
        filter(array.begin + block.FilterStart(p) + (block.column_tile * T::kColumns + Mine::Line()) * p.filter_column),
        place(Tile::Offset(Mine::Line(), Mine::Chunk())),
        columns(p.columns - block.column_tile * T::kColumns - Mine::Line()),
        left(block.Depth(p) - Mine::Chunk() * kChunk<In>),
        walk(p, block.taps, Mine::Chunk() * kChunk<In>) {}

  __device__ void operator()(int step, uint32_t stage) {
    const auto put = [&] {
      share.Put(stage + place);
      left -= T::kDepth;
      walk.template Advance<T::kDepth>(p, block.phase);
    };
    PutAndFetch(step, put, [&] { Fetch(); });
  }

 private:
  __device__ __forceinline__ void Fetch() {
    const In* from = filter + walk.filter + walk.channel;
    share.Fetch(
        static_cast<int>(p.group_size) - walk.channel, array,
        [&](int j) { return left > 0 && j * Mine::kLinesApart < columns; },
        [&](int j) { return from + j * Mine::kLinesApart * p.filter_column; });
  }
};

template <class T, bool kForward, class In>
using LoadRaggedFilter =
    std::conditional_t<kForward, LoadRaggedFilterForward<T, In>, LoadRaggedFilterTransposed<T, In>>;

// kAligned: the operand's lines are whole chunks, only the filter's are not.
template <class T, bool kAligned, bool kForward, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    DataRaggedKernel(const __grid_constant__ DataParams p, Bounds<In> in, Bounds<In> filter, void* out) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Row rows[T::kRows];
  const DataBlock block(p);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  block.SetRows(p, rows);

  typename T::Sums sums = {};
  const int depth = block.Depth(p), steps = (depth + T::kDepth - 1) / T::kDepth;
  LoadRaggedFilter<T, kForward, In> load_b(p, block, filter);
  const auto multiply = [&](auto load_a) {
    MultiplyPipelined<In, T>(SharedAddress(ring), steps, load_a, load_b, sums, p.e5m2);
  };
  if constexpr (kAligned) {
    multiply(LoadOperand<T, true, In>(p, block, rows, in.begin, ring));
  } else {
    multiply(LoadRaggedOperand<T, In>(p, block, rows, in, ring));
  }

  StoreGroup<T, kForward>(p, block, rows, ring, sums, out);
}

// Launches the kernel with parameters that MakeDataParams has made of lines as they are.
template <class T, bool kAligned, bool kForward, class In>
cudaError_t LaunchRagged(const Problem& p, DataParams q, const void* operand, const void* filter, void* out,
                         cudaStream_t stream) {
  q.channels = int(CeilDiv(q.channels, kChunk<In>)) * kChunk<In>;
  q.channel_div = FastDiv(q.channels);
  const auto bounds = [](const void* array, int64_t size) {
    return Bounds<In>{static_cast<const In*>(array), static_cast<const In*>(array) + size};
  };
  const Grid grid = {DataBlocks(p, q), T::kThreads,
                     kSharedBytes<T, LoadRaggedOperand<T, In>, LoadRaggedFilter<T, kForward, In>>};
  return LaunchKernel(DataRaggedKernel<T, kAligned, kForward, In>, grid, stream, q,
                      bounds(operand, p.batch * p.images * q.image_size), bounds(filter, p.FilterSize()), out);
}

}  // namespace jaxdnn::conv
