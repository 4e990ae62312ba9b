// What a warp of the kernels of few features works on: its pixels in shared memory, and its block's filter there.
#pragma once

#include "cuda/conv/few_features_plan.h"
#include "cuda/conv/grouped.cuh"

namespace jaxdnn::conv {

// A warp has 32 columns of the result, and reads up to kChunks 16-byte chunks of a pixel's channels at once. Windows
// are kRows high, or (kAnyHeight) at most that.
template <class In_, int kRows_, bool kAnyHeight_, int kChunks_>
struct FewFeaturesTile {
  using In = In_;
  static constexpr int kRows = kRows_, kChunks = kChunks_;
  static constexpr bool kAnyHeight = kAnyHeight_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocks = kChunks == 8 ? 3 : 4;
  static constexpr int kColumns = 32, kParts = kColumns / 16;  // of the product's rows

  static constexpr int kChunk = 16 / sizeof(In), kChannels = kChunks * kChunk, kBytes = kChunks * 16;
  static constexpr int kSteps = kBytes / 32, kDepth = 32 / sizeof(In);  // and channels of a step

  // A ring of lines of a slice of the channels.
  static constexpr int kPixels = 40, kApart = 32 / kChunks, kCopies = kPixels / kApart;
  static constexpr int kSlotBytes = kPixels * kBytes, kSlots = kChunks == 8 ? 3 : 4;
  // A warp's results of a line, on their way to lanes that store neighbours; and where they go.
  static constexpr int kResults = kColumns * kFewMostFeatures, kResultBytes = kResults * 8;
  static constexpr int kWarpBytes = kSlots * kSlotBytes + kResultBytes;
  // What every device since sm_80 gives a block leaves so much for the filter.
  static constexpr int kMostFilterBytes = (99 << 10) - kWarps * kWarpBytes;
  static_assert(kChunks > 4 || kMostFilterBytes >= kFewMostFilterBytes);
  static_assert(kPixels >= kColumns + kFewMostWindow - 1);

  using Sums = float[kRows][kParts][4];

  using Places = SlotPlaces<kChunks, 1>;
};

struct FewFeaturesParams : GroupedParams {
  int features, window_height, window_width;
  int steps, slices;  // of the channels
  FastDiv features_div;
  bool finish, wide;  // whether there is an epilogue; whether the result is of floats
};

// The operand's lines on their way to shared memory, slice by slice.
template <class T>
struct FewFeaturesStrip {
  uint32_t from[T::kCopies];  // fours of channels
  unsigned inside = 0;        // bit k: copy k is of the operand
  int copies;                 // that bring a pixel which a column reads
  int line, slice = 0;

  __device__ FewFeaturesStrip(const FewFeaturesParams& q, const GroupedBlock& block, int problem)
      : line(block.first_line - q.pad_h) {
    const int lane = threadIdx.x % 32;
    const int first = Padded(q, block.first_column);
    const int end = Padded(q, block.first_column + block.Columns(q) - 1) + q.window_width;
    copies = (end - first + T::kApart - 1) / T::kApart;
#pragma unroll
    for (int k = 0; k < T::kCopies; ++k) {
      const int padded = first + lane / T::kChunks + k * T::kApart;
      int x;
      const int image = q.padded_width.Div(padded, &x);
      x -= q.pad_w;
      if (padded < end && static_cast<unsigned>(x) < static_cast<unsigned>(q.width)) inside |= 1u << k;
      from[k] = (uint32_t(problem * q.images + image) * q.height + line) * q.in_line + uint32_t(x) * (q.channels / 4u) +
                lane % T::kChunks * (T::kChunk / 4);
    }
  }

  // The first padded pixel that a column reads.
  static __device__ int Padded(const FewFeaturesParams& q, int column) {
    return column + q.image_columns.Div(column) * (q.window_width - 1);
  }

  // Begins to copy the next slice, if it is `needed`.
  __device__ void Copy(const FewFeaturesParams& q, const typename T::In* in, uint32_t slot, bool needed) {
    if (needed) {
      const int lane = threadIdx.x % 32, chunk = lane % T::kChunks, first = slice * T::kChannels;
      const int channel = first + chunk * T::kChunk;
      const unsigned there =
          channel < q.channels && static_cast<unsigned>(line) < static_cast<unsigned>(q.height) ? inside : 0;
      const int place = T::Places::At(lane / T::kChunks, chunk);
      in += first;
      // The last step may be half of zeros.
      if (channel < q.steps * T::kDepth) {
#pragma unroll
        for (int k = 0; k < T::kCopies; ++k)
          if (k * T::kApart < T::kColumns || k < copies)
            CopyAsync<16>(slot + T::Places::Further(place, k), in + uint64_t{from[k]} * 4, there >> k & 1);
      }
      if (++slice == q.slices) {
        slice = 0;
        ++line;
#pragma unroll
        for (int k = 0; k < T::kCopies; ++k) from[k] += q.in_line;
      }
    }
    CommitCopies();
  }
};

// The filter in the order of the products: by column of the window, step and row of it from the last on, each lane's
// two words.
template <class T>
__device__ void FillFilter(const FewFeaturesParams& q, const typename T::In* filter, uint2* to) {
  using In = typename T::In;
  using Bits = std::conditional_t<sizeof(In) == 2, unsigned short, unsigned>;
  constexpr int kPerWord = 4 / sizeof(In);
  const int taps = q.window_height * q.window_width, lane = threadIdx.x % 32, n = lane / 4;
  for (int i = threadIdx.x / 32; i < taps * q.steps; i += T::kWarps) {
    const int r = q.window_height - 1 - i % q.window_height, rest = i / q.window_height;
    const int step = rest % q.steps, tap = r * q.window_width + rest / q.steps;
    uint32_t words[4] = {};
#pragma unroll
    for (int k = 0; k < 2 * kPerWord; ++k) {
      const int channel = step * T::kDepth + (k / kPerWord * 4 + lane % 4) * kPerWord + k % kPerWord;
      const int at = q.mirrored ? ((taps - 1 - tap) * q.features + n) * q.channels + channel
                                : (tap * q.channels + channel) * q.features + n;
      const bool exists = channel < q.channels && n < q.features;
      const Bits bits = exists ? __ldg(reinterpret_cast<const Bits*>(filter) + at) : Bits(0);
      words[k / kPerWord] |= uint32_t{bits} << 16 * (k % kPerWord);
    }
    if constexpr (sizeof(In) == 4) RoundToTf32(words);
    to[i * 32 + lane] = make_uint2(words[0], words[1]);
  }
}

}  // namespace jaxdnn::conv
