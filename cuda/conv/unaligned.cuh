// What the kernels of unaligned channels have in shared memory, and how it gets there.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/conv/edges.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/unaligned_pack.cuh"

namespace jaxdnn::conv {

// An array on 16 bytes, of which no byte outside is read.
template <class In>
struct AlignedArray {
  const In *begin, *end;
};

// Two warpgroups multiply, two bring strips.
template <class In_>
struct UnalignedTile {
  using In = In_;
  static constexpr int kColumns = UnalignedPlan::kColumns, kWarpgroup = 128;
  static constexpr int kWarpgroupRows = UnalignedPlan::kWarpgroupRows, kBlocks = kWarpgroupRows / 64;
  static constexpr int kConsumers = UnalignedPlan::kWarpgroups * kWarpgroup, kStripThreads = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kStripThreads;
  static constexpr int kDepth = UnalignedPlan::kStepBytes / sizeof(In);  // channels of a step
  using Sums = float[kBlocks][kColumns / 2];
};

struct UnalignedParams {
  Epilogue epilogue;
  bool finish, wide;   // whether there is an epilogue; whether the result is of floats
  int tiles, columns;  // and columns of a tile
  FastDiv column_tiles_div;
  int channels, features;  // of the operand and of the result
  int steps, slices;       // of a slice, and slices of the channels
  int taps, window_width, tap_lines;
  int line_step;             // pixels from line to line of the window
  int groups, plane_groups;  // of the window's lines: all, and those of a plane of it
  FastDiv line_div, lines_div, planes_div;
  FastDiv steps_div, column_pairs;              // steps of a slice; pairs of chunks of columns
  int planes;                                   // of the result, of all images
  Edges edges[kRank];                           // of the operand
  int pad[kRank], dilation[kRank], out[kRank];  // and the result's extents
  int pixels, strip_bytes, slab_bytes, slabs;
};

inline UnalignedParams RowParams(const Problem& problem, const UnalignedRows& rows) {
  const Problem p = AsForward(problem);
  UnalignedParams q = {};
  q.window_width = int(p.window[2]);
  q.line_step = int(p.rhs_dilation[1] * rows.line);
  q.line_div = FastDiv(rows.line);
  q.lines_div = FastDiv(rows.lines);
  q.planes_div = FastDiv(p.y[0]);
  q.planes = int(p.images * p.y[0]);
  for (int d = 0; d < kRank; ++d) {
    q.edges[d] = OperandEdges(problem, d);
    q.out[d] = int(p.y[d]);
    q.pad[d] = int(p.pad[d]);
    q.dilation[d] = int(p.rhs_dilation[d]);
  }
  return q;
}

// The parts of a block's shared memory, and its barriers.
template <class T>
struct UnalignedShared {
  uint32_t strips, slabs;
  int* pixels;
  uint32_t barriers;

  __device__ UnalignedShared(const UnalignedParams& q, unsigned char* shared)
      : strips(SharedAddress(shared)), slabs(strips + 2 * q.strip_bytes) {
    unsigned char* next = shared + 2 * q.strip_bytes + q.slabs * q.slab_bytes;
    barriers = SharedAddress(next);
    pixels = reinterpret_cast<int*>(next + (2 + UnalignedPlan::kMostSlabs) * 16);
  }
  __device__ uint32_t StripFull(int i) const { return barriers + 16 * i; }
  __device__ uint32_t StripEmpty(int i) const { return barriers + 16 * i + 8; }
  __device__ uint32_t SlabFull(int i) const { return StripFull(2 + i); }
  __device__ uint32_t SlabEmpty(int i) const { return StripEmpty(2 + i); }

  // All threads of the block, once.
  __device__ void Init() const {
    if (threadIdx.x == 0) {
      constexpr int kTakers = T::kConsumers / 32;
      for (int i = 0; i < 2; ++i) {
        hopper::InitBarrier(StripFull(i), T::kStripThreads);
        hopper::InitBarrier(StripEmpty(i), kTakers);
      }
      for (int i = 0; i < UnalignedPlan::kMostSlabs; ++i) {
        hopper::InitBarrier(SlabFull(i), 1);
        hopper::InitBarrier(SlabEmpty(i), kTakers);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

// To those who wait for this, of whose warps each arrives once: for threads that multiplied, which is to say read. Each
// that wrote or read by itself arrives by itself.
__device__ inline void ArriveWarp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) hopper::Arrive(barrier);
}

__device__ inline void StoreChunk(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Ones for the bytes of so many words that exist.
template <int kWords>
__device__ __forceinline__ void MaskWords(int bytes, uint32_t (&mask)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) mask[i] = bytes >= 4 * i + 4 ? ~0u : bytes <= 4 * i ? 0u : 0xFFFFu;
}

// Adds elements from memory, one by one, to the first kWords words, which are zero.
template <int kWords, class In, int kAll>
__device__ __forceinline__ void FetchElements(const In* from, int bytes, uint32_t (&words)[kAll]) {
  using Bits = std::conditional_t<sizeof(In) == 2, unsigned short, unsigned>;
  constexpr int kPerWord = 4 / sizeof(In);
#pragma unroll
  for (int i = 0; i < kWords * kPerWord; ++i)
    if (i * static_cast<int>(sizeof(In)) < bytes)
      words[i / kPerWord] |= uint32_t{__ldg(reinterpret_cast<const Bits*>(from) + i)} << i % kPerWord * 16;
}

// Two chunks of elements that begin anywhere, in a row, and the three aligned ones they lie in. Of their bytes so many
// exist, the others are zeros.
template <class In>
struct ChunkPair {
  uint32_t words[12];
  int shift;  // bytes in front of the first element

  // Begins to read them. What does not end before `end`, the array's last multiple of 16 bytes, is left to FetchSlowly.
  __device__ __forceinline__ bool Fetch(const In* from, int bytes, bool exists, const char* end) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const char* const first = reinterpret_cast<const char*>(from);
    const bool inside = exists && first + bytes <= end;
    const uint4* const aligned = reinterpret_cast<const uint4*>(first - shift);
    uint4 chunks[3] = {};
    if (inside) chunks[0] = __ldg(aligned);
    if (inside && shift + bytes > 16) chunks[1] = __ldg(aligned + 1);
    if (inside && shift + bytes > 32) chunks[2] = __ldg(aligned + 2);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      words[4 * i] = chunks[i].x, words[4 * i + 1] = chunks[i].y;
      words[4 * i + 2] = chunks[i].z, words[4 * i + 3] = chunks[i].w;
    }
    return exists && !inside;
  }
  __device__ __forceinline__ void FetchSlowly(const In* from, int bytes) {
    shift = 0;
    FetchElements<8>(from, bytes, words);
  }

  // To the first eight words.
  __device__ __forceinline__ void Shift(const uint32_t (&mask)[8]) {
    const bool two = shift & 8, one = shift & 4;
#pragma unroll
    for (int i = 0; i < 10; ++i) words[i] = two ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 9; ++i) words[i] = one ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (sizeof(In) == 2) words[i] = __funnelshift_r(words[i], words[i + 1], shift % 4 * 8);
      words[i] &= mask[i];
    }
    if constexpr (sizeof(In) == 4) {
      RoundToTf32(reinterpret_cast<uint32_t (&)[4]>(words[0]));
      RoundToTf32(reinterpret_cast<uint32_t (&)[4]>(words[4]));
    }
  }
};

// Copies `elements` of each of some lines, and zeros behind them, to a line's `chunks`, which are so many bytes apart.
// pairs.divisor is half of those: a thread always copies the same two of a line, of kAtOnce lines at once. from(line,
// &at) says whether there is such a line, and where; to(line), where its first chunk goes.
template <int kAtOnce, class In, class From, class To>
__device__ __forceinline__ void CopyLines(int thread, int threads, const FastDiv& pairs, int lines, int chunks,
                                          int elements, int chunks_apart, const In* end, const From& from,
                                          const To& to) {
  int mine;
  const int first = pairs.Div(thread, &mine), apart = pairs.Div(threads), element = mine * 2 * kVecLength<In>;
  if (first >= apart) return;
  const int bytes = max(0, min(elements - element, 2 * kVecLength<In>)) * static_cast<int>(sizeof(In));
  const char* const last = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(end) / 16 * 16);
  uint32_t mask[8];
  MaskWords(bytes, mask);
#pragma unroll 1
  for (int begin = first; begin < lines; begin += kAtOnce * apart) {
    ChunkPair<In> pair[kAtOnce];
    bool slow = false;
    const auto each = [&](int j, const auto& f) {
      const int line = begin + j * apart;
      const In* at;
      const bool exists = from(min(line, lines - 1), &at) && line < lines && bytes > 0;
      return f(at + element, exists);
    };
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      slow |= each(j, [&](const In* at, bool exists) { return pair[j].Fetch(at, bytes, exists, last); });
    if (slow) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        each(j, [&](const In* at, bool exists) {
          if (exists && reinterpret_cast<const char*>(at) + bytes > last) pair[j].FetchSlowly(at, bytes);
        });
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      pair[j].Shift(mask);
      const int line = begin + j * apart;
      const uint32_t* const words = pair[j].words;
      if (line < lines) {
        const uint32_t place = to(line) + 2 * mine * chunks_apart;
        StoreChunk(place, words[0], words[1], words[2], words[3]);
        if (2 * mine + 1 < chunks) StoreChunk(place + chunks_apart, words[4], words[5], words[6], words[7]);
      }
    }
  }
}

// The operand's pixel at a row, which a plane of the window moves, or -1 for zeros; and whether the row is that pixel's
// own, and not beyond an edge.
__device__ __forceinline__ int OperandPixel(const UnalignedParams& q, int row, int plane_tap, bool* own) {
  int at[kRank];
  const int line = q.line_div.Div(row, &at[2]), plane = q.lines_div.Div(line, &at[1]);
  int pixel = q.planes_div.Div(plane, &at[0]);
  at[0] += plane_tap * q.dilation[0];
  bool inside = plane < q.planes;
  *own = inside;
#pragma unroll
  for (int d = 0; d < kRank; ++d) {
    at[d] -= q.pad[d];
    *own &= static_cast<unsigned>(at[d]) < static_cast<unsigned>(q.edges[d].extent);
    inside &= q.edges[d].FindAny(&at[d]);
    pixel = pixel * q.edges[d].extent + at[d];
  }
  return inside ? pixel : -1;
}

__device__ __forceinline__ int OperandPixel(const UnalignedParams& q, int row, int plane_tap) {
  bool own;
  return OperandPixel(q, row, plane_tap, &own);
}

// The result's pixel at a row, or -1.
__device__ __forceinline__ int ResultPixel(const UnalignedParams& q, int row) {
  int x, y;
  const int line = q.line_div.Div(row, &x), plane = q.lines_div.Div(line, &y);
  const bool exists = x < q.out[2] && y < q.out[1] && plane < q.planes;
  return exists ? (plane * q.out[1] + y) * q.out[2] + x : -1;
}

// Those of a strip from row `first` on.
__device__ __forceinline__ void FindPixels(const UnalignedParams& q, int thread, int threads, int first, int plane_tap,
                                           int* pixels) {
  for (int i = thread; i < q.pixels; i += threads) pixels[i] = OperandPixel(q, first + i, plane_tap);
}

// Some pixels' channels from `channel` up to `end`, of `all`: chunk after chunk of them, each of `pitch` pixels. Whole
// chunks come asynchronously, and must still be waited for; floats, which have to be rounded, never do.
template <class In>
__device__ __forceinline__ void FillStrip(int thread, int threads, const FastDiv& pairs, int count, const int* pixels,
                                          int all, int channel, int end, int chunks, int pitch,
                                          const AlignedArray<In>& in, uint32_t strip) {
  if (sizeof(In) == 2 && all % kVecLength<In> == 0 && channel % kVecLength<In> == 0) {
    int mine;
    const int first = pairs.Div(thread, &mine), apart = pairs.Div(threads),
              element = channel + 2 * mine * kVecLength<In>;
    if (first >= apart) return;
#pragma unroll 4
    for (int i = first; i < count; i += apart) {
      const int pixel = pixels[i];
      const In* const from = in.begin + (int64_t{max(pixel, 0)} * all + element);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (2 * mine + k < chunks)
          CopyAsync<16>(strip + ((2 * mine + k) * pitch + i) * 16, from + k * kVecLength<In>,
                        pixel >= 0 && element + k * kVecLength<In> < end);
    }
    return;
  }
  CopyLines<2>(
      thread, threads, pairs, count, chunks, end - channel, pitch * 16, in.end,
      [&](int i, const In** at) {
        const int pixel = pixels[i];
        *at = in.begin + (int64_t{pixel} * all + channel);
        return pixel >= 0;
      },
      [&](int i) { return strip + i * 16; });
}

}  // namespace jaxdnn::conv
