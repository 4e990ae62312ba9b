// What a block of the kernels of few features works on: its pixels and its filter in shared memory.
#pragma once

#include "cuda/conv/few_features_plan.h"
#include "cuda/conv/grouped.cuh"

namespace jaxdnn::conv {

// Windows are at most kLines high. A warp has kFewPixels pixels, times a part of their windows' lines.
template <class In_, int kLines_>
struct FewFeaturesTile {
  using In = In_;
  static constexpr int kLines = kLines_;
  // Of a multiprocessor, for the registers that sums take.
  static constexpr int kMostThreads =
      sizeof(In) == 2 ? (kLines == kFewFewLines ? 512 : 384) : (kLines == kFewFewLines ? 384 : 256);

  static constexpr int kChunk = 16 / sizeof(In), kChunks = kFewSlotBytes / 16;  // of a slot's pixel
  static constexpr int kDepth = 32 / sizeof(In), kSteps = kFewSlotBytes / 32;   // channels of a step, steps of a slot
  static constexpr int kBlocks = kFewPixels / 16;                               // of the product's rows

  // Of each line of the window.
  using Sums = float[kLines][kBlocks][4];

  using Places = SlotPlaces<kChunks, 1>;
};

// How a problem's workers share the lines of cells of all tiles.
struct FewFeaturesWork {
  // Workers of a problem; those that have a share of all tiles' lines, of as many; theirs, and how many have one more.
  FastDiv workers, pieces;
  int share, lines, more_lines;
  FastDiv cell_lines;

  FewFeaturesWork() = default;
  FewFeaturesWork(const FewFeaturesPieces& of, int64_t lines_of_tile)
      : workers(of.workers),
        pieces(of.pieces),
        share(int(of.share)),
        lines(int(of.share / of.pieces)),
        more_lines(int(of.share % of.pieces)),
        cell_lines(lines_of_tile) {}

  // The block's problem, and its lines.
  __device__ int Of(int block, int* first, int* end) const {
    int worker, piece;
    const int problem = workers.Div(block, &worker), of_share = pieces.Div(worker, &piece);
    *first = of_share * share + piece * lines + min(piece, more_lines);
    *end = *first + lines + (piece < more_lines);
    return problem;
  }
};

struct FewFeaturesParams {
  FewFeaturesWork work;
  Epilogue epilogue;
  int height, width, channels;                         // of the operand
  int result_height, result_width, features;           // the width in elements
  int images, window_height, steps, slices;            // slices of a plane of the window
  int depth, window_depth, pad_d;                      // planes of the operand, and of the window
  int run, parts, pixels, elements;                    // as in FewFeaturesPlan
  int reach_h, reach_w, stride_h, cell_elements;       // cell_elements of a line of a cell
  int first_cell_h, first_cell_w, before_h, before_w;  // the last in elements
  int row_bytes, back_bytes, value_log;  // between pixels' values; from one to the next that is added; of a column
  int cells;                             // of the columns that a block has
  FastDiv cell_div, features_div, places, channels_div;
  FastDiv planes;                                   // of the result, which are images
  int pixel_chunks, line_chunks;                    // 16 bytes of the operand
  int64_t in_problem, filter_problem, out_problem;  // elements
  bool mirrored, finish, wide;  // whether the filter is a data gradient's; whether there is an epilogue; results floats
};

// Lines of cells of some columns, of one tile.
struct FewFeaturesBlock {
  int first_place, first_cell, end_cell;

  template <class Params>
  __device__ FewFeaturesBlock(const Params& q, int at, int end) {
    int line;
    first_place = q.work.cell_lines.Div(at, &line) * q.cells;
    first_cell = line + q.first_cell_h;
    end_cell = first_cell + min(end - at, int(q.work.cell_lines.divisor) - line);
  }
};

// Where the block's pixels are in line 0 of the operand's planes that the window's meet, in 16 bytes, or -1.
__device__ __forceinline__ void FillPlaces(const FewFeaturesParams& q, const FewFeaturesBlock& block, int* from) {
  for (int i = threadIdx.x; i < q.pixels; i += blockDim.x) {
    int place;
    const int image = q.places.Div(block.first_place + i, &place), x = place + q.first_cell_w - (q.reach_w - 1);
    const bool exists = image < q.images && static_cast<unsigned>(x) < static_cast<unsigned>(q.width);
    int of_result;
    const int volume = q.planes.Div(image, &of_result);
    for (int k = 0; k < q.window_depth; ++k) {
      const int plane = of_result - q.pad_d + k;
      from[k * q.pixels + i] = exists && static_cast<unsigned>(plane) < static_cast<unsigned>(q.depth)
                                   ? (volume * q.depth + plane) * q.height * q.line_chunks + x * q.pixel_chunks
                                   : -1;
    }
  }
}

// The elements of the block's lines of the result: where each goes, counted from the first of the result's first line,
// or -1 if there is none; and where the first value is that it is the sum of, in bytes.
__device__ __forceinline__ void FillElements(const FewFeaturesParams& q, const FewFeaturesBlock& block,
                                             int2* elements) {
  const int before = q.reach_w - 1;  // a cell's results are of so many pixels more
  for (int i = threadIdx.x; i < q.elements; i += blockDim.x) {
    int column, place;
    const int pixel = q.cell_div.Div(i, &column) + before;
    const int image = q.places.Div(block.first_place + pixel, &place);
    const int x = (place - before + q.first_cell_w) * q.cell_elements + column - q.before_w;
    const bool exists =
        image < q.images && place >= before && static_cast<unsigned>(x) < static_cast<unsigned>(q.result_width);
    elements[i] = make_int2(exists ? image * q.result_height * q.result_width + x : -1,
                            pixel * q.row_bytes + (column << q.value_log));
  }
}

// Begins to copy the block's pixels of a line, a slice of their channels. A thread has two chunks of some.
template <class T>
__device__ __forceinline__ void CopySlice(const FewFeaturesParams& q, const typename T::In* in, const int* from,
                                          int line, int slice, uint32_t slot) {
  constexpr int kAtOnce = T::kLines > 4 ? 3 : 4, kHalf = T::kChunks / 2;
  const int chunk = slice * T::kChunks + threadIdx.x % kHalf, apart = blockDim.x / kHalf;
  static_assert(32 / kHalf % 8 == 0, "pixels whose chunks are exchanged alike");
  const bool first = chunk < q.pixel_chunks, second = chunk + kHalf < q.pixel_chunks;
  const bool both = slice * T::kChunks + kHalf < 2 * q.steps;  // the last step may be half of zeros
  in += int64_t{line * q.line_chunks + chunk} * T::kChunk;
  uint32_t to = slot + T::Places::At(threadIdx.x / kHalf, threadIdx.x % kHalf);
#pragma unroll 1
  for (int base = threadIdx.x / kHalf; base < q.pixels; base += kAtOnce * apart) {
    int places[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) places[k] = from[min(base + k * apart, q.pixels - 1)];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k, to += apart * kFewSlotBytes) {
      if (base + k * apart >= q.pixels) continue;
      const typename T::In* const pixel = in + int64_t{places[k]} * T::kChunk;
      CopyAsync<16>(to, pixel, first && places[k] >= 0);
      if (both) CopyAsync<16>(to ^ 16 * kHalf, pixel + kHalf * T::kChunk, second && places[k] >= 0);
    }
  }
}

// A plane of the filter, slice by slice: for each value of the window a line of channels, the values in the order of
// the result's elements. The data gradient's lies so in memory.
template <class T>
__device__ __forceinline__ void FillFilter(const FewFeaturesParams& q, const typename T::In* filter,
                                           unsigned char* to) {
  const int values = q.window_height * q.run, lines = (q.window_height - 1) * q.run + 8 * q.parts;
  const int slice_bytes = lines * kFewSlotBytes;
  if (q.mirrored) {
    for (int chunk = threadIdx.x % T::kChunks; chunk < 2 * q.steps; chunk += T::kChunks, to += slice_bytes)
      for (int line = threadIdx.x / T::kChunks; line < values; line += blockDim.x / T::kChunks)
        CopyAsync<16>(SharedAddress(to) + T::Places::At(line, chunk % T::kChunks),
                      filter + (line * q.pixel_chunks + chunk) * T::kChunk, chunk < q.pixel_chunks);
    return;
  }
  // Otherwise a tap's are, channel by channel, those of all features.
  using Bits = std::conditional_t<sizeof(typename T::In) == 2, unsigned short, unsigned>;
  const auto place = [&](int line, int channel) -> Bits& {
    const int chunk = channel / T::kChunk;
    unsigned char* const slice = to + chunk / T::kChunks * slice_bytes;
    return reinterpret_cast<Bits*>(slice + T::Places::At(line, chunk % T::kChunks))[channel % T::kChunk];
  };
  constexpr int kAtOnce = 4;
  const int all = values * q.pixel_chunks;
#pragma unroll 1
  for (int base = threadIdx.x; base < all; base += kAtOnce * blockDim.x) {
    Vec<Bits, T::kChunk> chunks[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      chunks[k] = LoadConstant(reinterpret_cast<const Vec<Bits, T::kChunk>*>(filter) +
                               min(base + k * int(blockDim.x), all - 1));
#pragma unroll 1
    for (int k = 0; k < kAtOnce; ++k, Rotate<1>(chunks)) {
      const int i = base + k * blockDim.x;
      if (i >= all) break;
      int feature, channel;
      const int tap = q.channels_div.Div(q.features_div.Div(i * T::kChunk, &feature), &channel);
      int line = values - (tap + 1) * q.features + feature;
#pragma unroll
      for (int j = 0; j < T::kChunk; ++j) {
        place(line, channel) = chunks[0].v[j];
        ++line;
        if (++feature == q.features) {
          feature = 0;
          line -= q.features;
          if (++channel == q.channels) {
            channel = 0;
            line -= q.features;
          }
        }
      }
    }
  }
  if (q.channels % T::kDepth != 0)
    for (int i = threadIdx.x; i < values * T::kChunk; i += blockDim.x)
      place(i / T::kChunk, q.channels + i % T::kChunk) = 0;
}

}  // namespace jaxdnn::conv
