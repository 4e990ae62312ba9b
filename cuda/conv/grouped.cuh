// What a warp of the kernels of small groups works on: its pixels in shared memory, its filter in registers.
#pragma once

#include <algorithm>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/epilogue.cuh"

namespace jaxdnn::conv {

// How columns of the result lie over the operand: side by side, every second pixel, or (in the data gradient of stride
// 2) two to a pixel.
enum class Stride { kOne, kTwo, kHalf };

// Where in a slot of pixels of kChunks 16-byte chunks each chunk is. They are exchanged so that those of eight columns,
// kStep pixels apart, lie in different banks; of three chunks those of neighbours do as they are.
template <int kChunks, int kStep>
struct SlotPlaces {
  static constexpr int kPerRow = 8 / kChunks, kExchanges = kStep * kChunks;

  static __device__ int At(unsigned pixel, unsigned chunk) {
    return int(((pixel * kChunks + chunk) ^ (pixel / kPerRow % kExchanges)) * 16);
  }
  // In a slot, of tap s, the chunk that is 2 f further than the one at `place`.
  template <int kTaps>
  static __device__ uint32_t In(uint32_t slot, const int (&place)[kTaps], int s, int f) {
    return (slot + place[s]) ^ (32 * f);
  }
  // Of the pixel as many after that at `place` as k warps bring, a chunk each lane.
  static __device__ constexpr int Further(int place, int k) {
    constexpr int kApart = 32 / kChunks;
    static_assert(kApart / kPerRow == 4);
    return (place ^ (4 * k % kExchanges * 16)) + k * kApart * kChunks * 16;
  }
};

template <int kStep>
struct SlotPlaces<3, kStep> {
  static __device__ int At(unsigned pixel, unsigned chunk) { return int((pixel * 3 + chunk) * 16); }
  template <int kTaps>
  static __device__ uint32_t In(uint32_t slot, const int (&place)[kTaps], int s, int f) {
    return slot + place[0] + s * 48 + 32 * f;  // fewer registers
  }
  static __device__ constexpr int Further(int place, int k) { return place + k * (32 / 3) * 48; }
};

constexpr int kGroupedWarps = 4;

// A warp has 16 columns of the result, and kBytes of each pixel's channels. Groups are of kGroup channels, 16 or 24, or
// with 8, eight neighbouring channels are a product by themselves, whether they are one group or several. Of volumes,
// the window has three planes, and planes of the result are images.
template <class In_, int kGroup_, Stride kStride, int kPlanes_ = 1>
struct GroupedTile {
  using In = In_;
  static constexpr int kGroup = kGroup_;
  static constexpr bool kWide = kGroup > 8;
  static constexpr int kWarps = kGroupedWarps, kThreads = 32 * kWarps;
  static constexpr int kPlanes = kPlanes_, kWindow = 9 * kPlanes;
  static constexpr bool kVolumes = kPlanes > 1;

  // Columns are of as many results, and as many lines of them. They are kStep pixels of the operand apart, and meet
  // kTaps pixels and lines of it.
  static constexpr int kResults = kStride == Stride::kHalf ? 2 : 1;
  static constexpr int kStep = kStride == Stride::kTwo ? 2 : 1, kTaps = kStride == Stride::kHalf ? 2 : 3;
  static constexpr int kOverlap = kTaps - kStep;
  static constexpr int kSums = kStride == Stride::kOne ? 3 : 2;  // results of a column that are being added up
  // That share a multiprocessor: where sums are finished or stored as floats, and otherwise.
  static constexpr int kFinishing = kPlanes > 1 || kGroup == 24 ? 2 : 3;
  static constexpr int kBlocks = kPlanes > 1 || kGroup == 24 ? 2 : kWide && sizeof(In) == 4 ? 3 : 4;

  static constexpr int kBytes = kWide && sizeof(In) == 2 ? 2 * kGroup : 64;
  static constexpr int kChannels = kBytes / sizeof(In), kChunk = 16 / sizeof(In), kChunks = kBytes / 16;
  static constexpr int kFragments = CeilDiv(kChunks, 2);  // of 16 pixels by two chunks, the last one perhaps by one
  static constexpr bool kHasHalf = kChunks % 2 != 0;
  static constexpr int kTiles = kChannels / 8;                // of the product's columns
  static constexpr int kRunTiles = kTiles == 3 ? 4 : kTiles;  // among which lanes exchange what they store
  // Of a tile's filter, for a tap: words of a lane.
  static constexpr int kWords = kGroup / 8 * int(sizeof(In)) / 2;

  // A ring of lines, each of as many pixels as a lane's few copies bring, in each of the planes.
  static constexpr int kApart = 32 / kChunks;
  static constexpr int kCopies = ((16 * kStep + 4 * kOverlap) + kApart - 1) / kApart;
  static constexpr int kPixels = kCopies * kApart, kPlaneBytes = kPixels * kBytes, kSlotBytes = kPlanes * kPlaneBytes;
  static constexpr int kSlots = kStep == 1 && kPlanes == 1 ? 6 : 4;
  static constexpr int kFilterBytes = kWindow * kGroup * kBytes;
  static constexpr int kSharedBytes = kWarps * kSlots * kSlotBytes + kFilterBytes;

  using Sums = float[kTiles][4];

  using Places = SlotPlaces<kChunks, kStep>;
};

struct GroupedParams {
  Epilogue epilogue;
  // Columns are those of all images side by side. In the operand, padded, an image's line is as wide as its columns
  // reach.
  FastDiv image_columns, image_lines, padded_width;
  FastDiv parts, workers;  // parts of the channels; warps of a part
  FastDiv sharers;         // of those, which share the lines of the same columns, or of all
  int images;
  FastDiv planes;                                         // of the result, which are images
  int depth, pad_d;                                       // of the operand
  int height, width, pad_h, pad_w;                        // likewise
  int result_height, result_width, outside_h, outside_w;  // of the result, of which so many lines are before the first
  int all_columns, columns;                               // columns, and those of a warp
  int all_lines, shared_lines;                            // of all columns, and of so many sharers
  int lines, more_lines;                                  // of a sharer, and sharers that have one more
  int channels, group_log;                                // all; and of a group, whose number is a power of two
  bool gradient, mirrored;     // the filter's channels are exchanged; its taps in reverse order
  DType type;                  // of the result
  int64_t filter_problem;      // elements
  uint32_t in_line, out_line;  // fours of channels
};

// The most columns of a warp, of `most`, whose pixels fit into a slot. Images' lines are `width` columns.
inline int ColumnsOfWarp(int64_t most, int step, int overlap, int pixels, int64_t images, int64_t width) {
  for (int64_t n = most;; --n) {
    const int64_t touched = std::min(images, 1 + CeilDiv(n - 1, width));
    if (n * step + touched * overlap <= pixels) return int(n);
  }
}

// Of lines whose columns fit into a slot of `pixels`. The filter gradient's operand is x, like that forward.
template <class T>
GroupedParams MakeGroupedParams(const Problem& p, int pixels) {
  const bool gradient = p.direction == Direction::kDataGradient;
  const int64_t *in = gradient ? p.y : p.x, *result = gradient ? p.x : p.y;
  GroupedParams q = {};
  q.type = p.out;
  q.images = int(p.images * result[0]);
  q.planes = FastDiv(result[0]);
  q.depth = int(in[0]);
  q.pad_d = int(gradient ? T::kPlanes - 1 - p.pad[0] : p.pad[0]);
  q.height = int(in[1]);
  q.width = int(in[2]);
  q.result_height = int(result[1]);
  q.result_width = int(result[2]);
  // A column's results of two begin where the padded line's pixels of two do.
  q.outside_h = T::kResults == 2 ? int(p.pad[1] & 1) : 0;
  q.outside_w = T::kResults == 2 ? int(p.pad[2] & 1) : 0;
  const auto pad = [&](int64_t low) { return int(!gradient ? low : T::kResults == 2 ? 1 - (low >> 1) : 2 - low); };
  q.pad_h = pad(p.pad[1]);
  q.pad_w = pad(p.pad[2]);
  const int64_t image_columns = CeilDiv(result[2] + q.outside_w, T::kResults), channels = p.groups * p.channels;
  q.image_lines = FastDiv(CeilDiv(result[1] + q.outside_h, T::kResults));
  q.image_columns = FastDiv(image_columns);
  q.padded_width = FastDiv(image_columns * T::kStep + T::kOverlap);
  q.all_columns = int(q.images * image_columns);
  q.columns = ColumnsOfWarp(16, T::kStep, T::kOverlap, pixels, q.images, image_columns);
  q.channels = int(channels);
  while (1 << q.group_log < p.channels) ++q.group_log;
  q.gradient = gradient;
  q.mirrored = gradient && T::kResults == 1;
  q.filter_problem = p.Taps() * p.channels * channels;
  q.in_line = uint32_t(in[2] * channels / 4);
  q.out_line = uint32_t(result[2] * channels / 4);
  q.parts = FastDiv(CeilDiv(channels, T::kChannels));
  return q;
}

// Shares all columns' lines out evenly, or, where there are `sharers`, those of each block of columns between so many.
inline void ShareLines(GroupedParams* q, int64_t workers, int64_t sharers = 0) {
  const int64_t image_lines = q->image_lines.divisor;
  q->all_lines = int(CeilDiv(q->all_columns, q->columns) * image_lines);
  q->workers = FastDiv(workers);
  q->sharers = FastDiv(sharers > 0 ? sharers : workers);
  q->shared_lines = sharers > 0 ? int(image_lines) : q->all_lines;
  q->lines = q->shared_lines / int(q->sharers.divisor);
  q->more_lines = q->shared_lines % int(q->sharers.divisor);
}

// What a warp works on: a part of a problem's channels, in some of all columns' lines, or in none.
struct GroupedWork {
  int problem, part, first_line, end_line;

  // The warps of a block have the same part of the same problem.
  __device__ GroupedWork(const GroupedParams& q, int block) {
    int worker, sharer;
    problem = q.workers.Div(q.parts.Div(block, &part) * kGroupedWarps + threadIdx.x / 32, &worker);
    const int share = q.sharers.Div(worker, &sharer);
    first_line = share * q.shared_lines + sharer * q.lines + min(sharer, q.more_lines);
    end_line = min(first_line + q.lines + (sharer < q.more_lines), q.all_lines);
  }
};

// Lines of some columns.
struct GroupedBlock {
  int first_column, first_line, lines;

  // From line `at` of all columns' lines on, up to `end`.
  __device__ GroupedBlock(const GroupedParams& q, int at, int end) {
    first_column = q.image_lines.Div(at, &first_line) * q.columns;
    lines = max(min(end - at, int(q.image_lines.divisor) - first_line), 0);
  }
  // Of the operand.
  template <class T>
  __device__ int LinesRead() const {
    return lines > 0 ? (lines - 1) * T::kStep + T::kTaps : 0;
  }
  __device__ int Columns(const GroupedParams& q) const { return min(q.columns, q.all_columns - first_column); }
};

// The operand's lines on their way to shared memory.
template <class T>
struct GroupedStrip {
  uint32_t from[T::kCopies];                   // fours of channels, in the first plane
  unsigned read = 0, inside[T::kPlanes] = {};  // bit k: copy k is of what columns read, and of the operand
  int line;

  // Of the window's planes from `first_plane` on.
  __device__ GroupedStrip(const GroupedParams& q, const GroupedBlock& block, int problem, int part, int first_plane = 0)
      : line(block.first_line * T::kStep - q.pad_h) {
    const int lane = threadIdx.x % 32, channel = part * T::kChannels + lane % T::kChunks * T::kChunk;
    const int first = Padded(q, block.first_column),
              end = Padded(q, block.first_column + block.Columns(q) - 1) + T::kTaps;
#pragma unroll
    for (int k = 0; k < T::kCopies; ++k) {
      const int padded = first + lane / T::kChunks + k * T::kApart;
      const bool has_chunk = 32 % T::kChunks == 0 || lane / T::kChunks < T::kApart;
      int x;
      int image = problem * q.images + q.padded_width.Div(padded, &x), plane = 0;
      x -= q.pad_w;
      if constexpr (T::kVolumes) {
        image = q.planes.Div(image, &plane);
        plane += first_plane - q.pad_d;
        image = image * q.depth + plane;
      }
      if (padded < end && has_chunk) read |= 1u << k;
#pragma unroll
      for (int d = 0; d < T::kPlanes; ++d)
        if (static_cast<unsigned>(x) < static_cast<unsigned>(q.width) && channel < q.channels &&
            (!T::kVolumes || static_cast<unsigned>(plane + d) < static_cast<unsigned>(q.depth)))
          inside[d] |= 1u << k;
      from[k] = (uint32_t(image) * q.height + line) * q.in_line + uint32_t(x) * (q.channels / 4u) + channel / 4u;
    }
  }

  // The first padded pixel that a column reads.
  static __device__ int Padded(const GroupedParams& q, int column) {
    return column * T::kStep + q.image_columns.Div(column) * T::kOverlap;
  }

  // Begins to copy the next line, if it is `needed`.
  __device__ void Copy(const GroupedParams& q, const typename T::In* in, uint32_t slot, bool needed) {
    if (needed) {
      const int lane = threadIdx.x % 32, place = T::Places::At(lane / T::kChunks, lane % T::kChunks);
      const bool exists = static_cast<unsigned>(line) < static_cast<unsigned>(q.height);
#pragma unroll
      for (int d = 0; d < T::kPlanes; ++d) {
        const unsigned valid = exists ? inside[d] : 0;
        const uint32_t plane = d == 0 ? 0 : uint32_t(d * q.height) * q.in_line;
#pragma unroll
        for (int k = 0; k < T::kCopies; ++k)
          if (read >> k & 1)
            CopyAsync<16>(slot + d * T::kPlaneBytes + T::Places::Further(place, k), in + uint64_t{from[k] + plane} * 4,
                          valid >> k & 1);
      }
#pragma unroll
      for (uint32_t& each : from) each += q.in_line;
      ++line;
    }
    CommitCopies();
  }
};

// As the products want it, with zeros between channels of different groups. It passes through shared memory, in 16-byte
// chunks: one by one its elements would take longer than some lines of pixels. There its taps are as lines meet them.
template <class T>
struct GroupedFilter {
  using Places = SlotPlaces<T::kChunks, 1>;
  static constexpr int kMatrices = T::kTiles * T::kWords;
  uint32_t words[T::kWindow][kMatrices];

  // Of a tap: the channels of a group.
  static __device__ int Rows(const GroupedParams& q) { return T::kWide ? T::kGroup : 1 << q.group_log; }

  // Begins to copy a block's part of a problem's filter to `shared`, T::kFilterBytes of it.
  static __device__ void Copy(const GroupedParams& q, const typename T::In* filter, int part, uint32_t shared) {
    const int chunk = threadIdx.x % T::kChunks, channel = part * T::kChannels + chunk * T::kChunk, rows = Rows(q);
    constexpr int kApart = T::kThreads / T::kChunks;
    int row = threadIdx.x / T::kChunks;
    if (row >= kApart) row = T::kWindow * rows;  // of three chunks to a row threads are left
    for (; row < T::kWindow * rows; row += kApart) {
      const int tap = T::kWide ? row / T::kGroup : row >> q.group_log;
      const int from = q.mirrored ? row + (T::kWindow - 1 - 2 * tap) * rows : row;
      CopyAsync<16>(shared + Places::At(row, chunk), filter + from * q.channels + channel, channel < q.channels);
    }
    CommitCopies();
  }

  // The copies of all threads are there.
  __device__ GroupedFilter(const GroupedParams& q, uint32_t shared) {
    const int lane = threadIdx.x % 32, n = lane / 4, rows = Rows(q), in_group = rows - 1;
    // Where, from a tap's first row on, a lane's row of a matrix is: a word of a tile.
    const auto place = [&](int first, int matrix) {
      const int tile = matrix / T::kWords, word = matrix % T::kWords, row = 8 * (q.gradient ? tile : word) + lane % 8;
      return shared + Places::At(first + (T::kWide ? row : row & in_group), T::kWide && q.gradient ? word : tile);
    };
#pragma unroll
    for (int tap = 0; tap < T::kWindow; ++tap) {
      const int first = tap * rows;
      if constexpr (sizeof(typename T::In) == 2) {
        const bool meet = T::kWide || 2 * (lane % 4) >> q.group_log == n >> q.group_log;
#pragma unroll
        for (int i = 0; i < kMatrices; i += 4) {
          uint32_t four[4];
          const uint32_t from = place(first, min(i + lane / 8, kMatrices - 1));
          if (q.gradient) {
            LoadMatrices<false>(four, from);
          } else {
            LoadMatrices<true>(four, from);
          }
#pragma unroll
          for (int j = 0; j < 4 && i + j < kMatrices; ++j) words[tap][i + j] = meet ? four[j] : 0;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kMatrices; ++i) {
          const int tile = i / T::kWords, k = 4 * (i % T::kWords) + lane % 4, down = q.gradient ? n : k;
          const int row = q.gradient && T::kWide ? 8 * tile + n : down & in_group;
          const int channel = !q.gradient ? 8 * tile + n : T::kWide ? k : 8 * tile + k;
          const uint32_t from = shared + Places::At(first + row, channel / 4) + channel % 4 * 4;
          const bool meet = T::kWide || k >> q.group_log == n >> q.group_log;
          words[tap][i] = meet ? LoadWord(from) : 0;
        }
#pragma unroll
        for (int i = 0; i < kMatrices; i += 4) RoundToTf32(reinterpret_cast<uint32_t (&)[4]>(words[tap][i]));
      }
    }
  }
};

}  // namespace jaxdnn::conv
