// Forward and data gradient of depthwise convolution as products with band matrices (depthwise_band.cuh). Like
// depthwise_slide.cuh, a warp goes down the lines of its strips with the filter in registers, and adds each line of the
// operand to the sums of all lines of results that it is part of. Complete results meet in shared memory, where the
// block's warps have neighbouring channels, and are stored while the next line is multiplied.
//
// The zeros of a band do not make up for an infinity or NaN, which would spread to results that do not see it: a thread
// that stored such results computes them again at its end, of the taps that they have.
#pragma once

#include "cuda/conv/depthwise_band.cuh"
#include "cuda/conv/depthwise_data.cuh"

namespace jaxdnn::conv::depthwise {

template <int kLines_, int kColumns_>
struct Band {
  static constexpr int kLines = kLines_, kColumns = kColumns_;
  static_assert(kColumns <= 9, "eight results see 16 values");
  // Results that wait for their channels' neighbours, of a warp; those of four warps are in different banks.
  static constexpr int kStagedWarp = 2 * 32 * 16 + 32, kStaged = kBandWarps * kStagedWarp;

  static bool Takes(const DataParams& q) {
    return IsBiasAlone(q.epilogue) && !q.widened && q.at[2].out > kBandStrip / 2 && q.at[0].MaxTaps() == 1 &&
           q.at[1].MaxTaps() == kLines && q.at[2].MaxTaps() == kColumns && q.at[1].stride == 1 && q.at[2].stride == 1 &&
           q.at[1].pitch == 1 && q.at[2].pitch == 1 && q.AllTaps() && q.in_pixel % 16 == 0;
  }
  static size_t SharedBytes(const BandTile& t) { return size_t(kBandStages) * t.LineBytes() + 2 * kStaged; }
};

template <class B, class T>
__global__ void __launch_bounds__(kBandThreads, 2)
    BandKernel(const __grid_constant__ DataParams p, const __grid_constant__ BandTile t, const char* in,
               const char* filter, char* out) {
  constexpr int kLines = B::kLines, kColumns = B::kColumns, kOwn = 4;  // channels of a warp
  constexpr int kCopies = (kBandStrips * (kBandStrip + kBandHalo) * kBandChunks + kBandThreads - 1) / kBandThreads;
  constexpr int kStores = kBandStrips * kBandStrip * kBandChunks / kBandThreads;
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  extern __shared__ __align__(16) char shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  int slab, tile, group;
  const int problem = t.groups.Div(t.tiles.Div(t.slabs.Div(static_cast<int>(blockIdx.x), &slab), &tile), &group);
  const int images = static_cast<int>(p.images.divisor), column0 = tile * (kBandStrip << t.across_bits);
  const int chunk = thread % kBandChunks, chunk_channel = slab * kBandChannels + 8 * chunk;

  BandCopy<kCopies> copy;
#pragma unroll
  for (int k = 0; k < kCopies; ++k) {
    int pixel;
    const int run = t.run_pixels.Div((thread + k * kBandThreads) / kBandChunks, &pixel);
    const BandRun r(t, images, problem, group, run);
    const int column = p.whole[2].origin + column0 + pixel;
    const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * r.plane;
    const bool there = r.there && chunk_channel < p.channels &&
                       static_cast<unsigned>(in_plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
                       static_cast<unsigned>(column) < static_cast<unsigned>(p.at[2].axis.extent);
    copy.line[k] = there ? p.whole[1].origin + r.line : INT32_MIN;  // that is never inside
    copy.to[k] = run < t.beside ? (run * t.RunChunks() + BandChunk(pixel) + chunk) * 16 : ~0u;
    copy.from[k] = in + r.image * p.in_image + in_plane * p.in_line[0] +
                   (p.whole[1].origin + int64_t{r.line}) * p.in_line[1] + int64_t{column} * p.in_pixel +
                   chunk_channel * sizeof(T);
  }
  const int stage_bytes = t.LineBytes(), steps = t.lines + kLines - 1;
  const uint32_t ring = SharedAddress(shared);
  const auto copy_line = [&](int stage) {
    copy.Start(ring + stage, p.at[1].axis.extent, p.in_line[1]);
    CommitCopies();
  };
#pragma unroll 1
  for (int i = 0; i < kBandStages - 1; ++i) copy_line(i * stage_bytes);

  // Of the two pixels that a thread stores, eight channels each.
  char* to[kStores];
  int stored_lines[kStores];
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    const int pixel = (thread + i * kBandThreads) / kBandChunks, strip = pixel / kBandStrip;
    const BandRun r(t, images, problem, group, strip >> t.across_bits);
    const int column = column0 + (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
    const bool there = r.there && column < p.whole[2].count && chunk_channel < p.channels;
    stored_lines[i] = there ? min(t.lines, p.whole[1].count - r.line) : 0;
    to[i] = out + r.image * p.out_image + r.plane * p.out_line[0] + (int64_t{r.line} - kLines - 1) * p.out_line[1] +
            column * p.out_line[2] + chunk_channel * sizeof(T);
  }

  const int channel = min(slab * kBandChannels + kOwn * warp, p.channels - kOwn);
  uint32_t band[kOwn][kLines][2];
  {
    const char* const from = FirstTap<T>(p, p.whole, filter, problem, channel);
#pragma unroll
    for (int r = 0; r < kLines; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint2 taps[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int s = 2 * pair + 8 * half + e - row;
          taps[e] = {0, 0};
          if (s >= 0 && s < kColumns)
            taps[e] = __ldg(reinterpret_cast<const uint2*>(from + r * p.whole[1].tap_step * p.filter_tap[1] +
                                                           s * p.whole[2].tap_step * p.filter_tap[2]));
        }
#pragma unroll
        for (int c = 0; c < kOwn; ++c) band[c][r][half] = PairOf(taps[0], taps[1], c);
      }
  }
  float bias[kOwn];
#pragma unroll
  for (int c = 0; c < kOwn; c += 2) {
    const float2 two = BiasOf<T>(p.epilogue, int64_t{problem} * p.channels + channel + c, true, false);
    bias[c] = two.x;
    bias[c + 1] = two.y;
  }

  const char* const own = shared + (t.StripChunk(row) + BandChunk(2 * pair) + warp / 2) * 16 + warp % 2 * 8;
  char* const staged = shared + kBandStages * stage_bytes;
  char* const staged_own = staged + warp * B::kStagedWarp + lane * 16;
  const char* staged_from;  // of the first pixel that the thread stores; others are of other strips
  {
    const int pixel = thread / kBandChunks, in_strip = pixel % kBandStrip;
    staged_from = staged + 2 * chunk * B::kStagedWarp +
                  (in_strip / 8 * 32 + pixel / kBandStrip * 4 + in_strip % 8 / 2) * 16 + in_strip % 2 * 8;
  }
  Two odd = {};  // NaN once a result was not finite
  const auto store = [&](int line, int buffer) {
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const char* const from = staged_from + buffer + i * (kBandStrips / kStores * 4 * 16);
      const uint2 low = *reinterpret_cast<const uint2*>(from);
      const uint2 high = *reinterpret_cast<const uint2*>(from + B::kStagedWarp);
      to[i] += p.out_line[1];
      if (line < 0 || line >= stored_lines[i]) continue;
      const uint4 words = {low.x, low.y, high.x, high.y};
      *reinterpret_cast<uint4*>(to[i]) = words;
      const Two zero = {};
      odd = __hfma2(reinterpret_cast<const Two&>(words.x), zero, odd);
      odd = __hfma2(reinterpret_cast<const Two&>(words.y), zero, odd);
      odd = __hfma2(reinterpret_cast<const Two&>(words.z), zero, odd);
      odd = __hfma2(reinterpret_cast<const Two&>(words.w), zero, odd);
    }
  };

  float sums[kLines - 1][kOwn][4] = {};
  int stage = 0, before = (kBandStages - 1) * stage_bytes, buffer = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kBandStages - 2>();
    __syncthreads();
    uint2 x[3][2];  // of pixels 8 i + 2 pair + e of the strip
#pragma unroll
    for (int i = 0; i < 3; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) x[i][e] = *reinterpret_cast<const uint2*>(own + stage + BandChunk(8 * i + e) * 16);
    copy_line(before);
    before = stage;
    stage = stage == (kBandStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
    store(step - kLines, B::kStaged - buffer);

    float results[kOwn][4];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const uint32_t left = PairOf(x[0][0], x[0][1], c), middle = PairOf(x[1][0], x[1][1], c),
                     right = PairOf(x[2][0], x[2][1], c);
      const uint32_t a[4] = {left, middle, middle, right};
#pragma unroll
      for (int k = kLines - 1; k >= 0; --k) {
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = k > 0 ? sums[k - 1][c][i] : bias[c];
        Mma<T>(sum, a, band[c][k][0], band[c][k][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) (k == kLines - 1 ? results[c][i] : sums[k][c][i]) = sum[i];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = i % 2 * 2, e = 2 * half + i / 2;
        words[i] = NarrowPair<T>(results[c][e], results[c + 1][e]);
      }
      *reinterpret_cast<uint4*>(staged_own + buffer + half * 32 * 16) = {words[0], words[1], words[2], words[3]};
    }
    buffer = B::kStaged - buffer;
  }
  __syncthreads();
  store(steps - kLines, B::kStaged - buffer);

  const float2 met = WidenPair<T>(reinterpret_cast<const uint32_t&>(odd));
  if (met.x == met.x && met.y == met.y) return;
#pragma unroll 1
  for (int i = 0; i < kStores; ++i) {
    const int pixel = (thread + i * kBandThreads) / kBandChunks, strip = pixel / kBandStrip;
    const BandRun r(t, images, problem, group, strip >> t.across_bits);
    const int column = column0 + (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
    const int lines = column < p.whole[2].count && r.there && chunk_channel < p.channels
                          ? min(t.lines, p.whole[1].count - r.line)
                          : 0;
    T* at = reinterpret_cast<T*>(out + r.image * p.out_image + r.plane * p.out_line[0] + r.line * p.out_line[1] +
                                 column * p.out_line[2]) +
            chunk_channel;
#pragma unroll 1
    for (int line = 0; line < lines; ++line) {
#pragma unroll 1
      for (int c = 0; c < 8; ++c)
        if (!isfinite(static_cast<float>(at[c])))
          at[c] = static_cast<T>(
              ResultOf<T>(p, in, filter, problem, r.image, r.plane, r.line + line, column, chunk_channel + c));
      at = reinterpret_cast<T*>(reinterpret_cast<char*>(at) + p.out_line[1]);
    }
  }
}

}  // namespace jaxdnn::conv::depthwise
