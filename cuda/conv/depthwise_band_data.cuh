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

// Results that wait for their channels' neighbours: what a lane has of two pixels, and of a warp. Those of a block's
// warps are in different banks.
template <class B>
constexpr int kBandStaged = 4 * B::kOwn;
template <class B>
constexpr int kBandStagedWarp = 2 * 32 * kBandStaged<B> + 32;

template <class B>
size_t BandDataBytes(const BandTile<B>& t) {
  return size_t(kBandStages) * t.LineBytes() + 2 * B::kWarps * kBandStagedWarp<B>;
}

template <class B, class T>
__global__ void __launch_bounds__(B::kThreads, B::kBlocks)
    BandKernel(const __grid_constant__ DataParams p, const __grid_constant__ BandTile<B> t, const char* in,
               const char* filter, char* out) {
  constexpr int kLines = B::kLines, kSteps = B::kSteps, kOwn = B::kOwn, kThreads = B::kThreads;
  constexpr int kCopies = (B::kPixels * B::kChunks + kThreads - 1) / kThreads;
  constexpr int kStores = kBandStrips * kBandStrip * B::kChunks / kThreads;
  constexpr int kStaged = B::kWarps * kBandStagedWarp<B>;  // of a line
  using Own = typename B::Own;
  using Two = TwoOf<T>;
  extern __shared__ __align__(16) char shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  int slab, tile, group;
  const int problem = t.groups.Div(t.tiles.Div(t.slabs.Div(static_cast<int>(blockIdx.x), &slab), &tile), &group);
  const int images = static_cast<int>(p.images.divisor);
  const int chunk = thread % B::kChunks, chunk_channel = slab * B::kChannels + 8 * chunk;

  BandCopy<kCopies> copy;
#pragma unroll
  for (int k = 0; k < kCopies; ++k) {
    int pixel;
    const int run = t.run_pixels.Div((thread + k * kThreads) / B::kChunks, &pixel);
    const BandRun<B> r(t, images, problem, group, tile, run);
    const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * r.plane;
    const int line = p.whole[1].origin + r.line, column = p.whole[2].origin + r.column + pixel;
    const int still = B::kOneLine ? line : column, extent = p.at[B::kOneLine ? 1 : 2].axis.extent;
    const bool there = r.there && chunk_channel < p.channels &&
                       static_cast<unsigned>(in_plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
                       static_cast<unsigned>(still) < static_cast<unsigned>(extent);
    copy.next[k] = !there ? INT32_MIN : B::kOneLine ? column : line;  // the least is never inside
    copy.to[k] = run < t.beside ? t.ChunkAt(run, pixel, chunk) : ~0u;
    copy.from[k] = in + r.image * p.in_image + in_plane * p.in_line[0] + int64_t{line} * p.in_line[1] +
                   int64_t{column} * p.in_pixel + chunk_channel * sizeof(T);
  }
  const int stage_bytes = t.LineBytes(), steps = t.lines + kLines - 1;
  const int apart = B::kOneLine ? t.Columns() : 1;  // steps, in columns or lines
  const int64_t in_step = B::kOneLine ? int64_t{apart} * p.in_pixel : p.in_line[1],
                out_step = B::kOneLine ? apart * p.out_line[2] : p.out_line[1];
  const uint32_t ring = SharedAddress(shared);
  const auto copy_line = [&](int stage) {
    copy.Start(ring + stage, apart, p.at[B::kOneLine ? 2 : 1].axis.extent, in_step);
    CommitCopies();
  };
#pragma unroll 1
  for (int i = 0; i < kBandStages - 1; ++i) copy_line(i * stage_bytes);

  // Of the pixels that a thread stores, eight channels each.
  char* to[kStores];
  int stored_steps[kStores];
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    const int pixel = (thread + i * kThreads) / B::kChunks, strip = pixel / kBandStrip;
    const BandRun<B> r(t, images, problem, group, tile, strip >> t.across_bits);
    const int further = (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
    stored_steps[i] = chunk_channel < p.channels ? r.Steps(t, further, p.whole[1].count, p.whole[2].count) : 0;
    to[i] = out + r.image * p.out_image + r.plane * p.out_line[0] + r.line * p.out_line[1] +
            (int64_t{r.column} + further) * p.out_line[2] + chunk_channel * sizeof(T) - (kLines + 1) * out_step;
  }

  const int channel = min(slab * B::kChannels + kOwn * warp, p.channels - kOwn);
  uint32_t band[kOwn][kLines][2 * kSteps];
  {
    const char* const from = FirstTap<T>(p, p.whole, filter, problem, channel);
#pragma unroll
    for (int r = 0; r < kLines; ++r)
#pragma unroll
      for (int half = 0; half < 2 * kSteps; ++half) {
        Own taps[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int s = 2 * pair + 8 * half + e - row;
          taps[e] = {};
          if (r < p.whole[1].taps && s >= 0 && s < p.whole[2].taps)
            taps[e] = __ldg(reinterpret_cast<const Own*>(from + r * p.whole[1].tap_step * p.filter_tap[1] +
                                                         s * p.whole[2].tap_step * p.filter_tap[2]));
        }
#pragma unroll
        for (int c = 0; c < kOwn; ++c) band[c][r][half] = PairOf(taps[0], taps[1], c);
      }
  }
  float bias[kOwn];
#pragma unroll
  for (int c = 0; c < kOwn; c += 2) {
    const float2 two = BiasOf<T>(p.epilogue, int64_t{problem} * p.channels + channel + c, true);
    bias[c] = two.x;
    bias[c + 1] = two.y;
  }

  const char* const own = shared + t.StripAt(row) + B::PixelAt(2 * pair) + warp * sizeof(Own);
  char* const staged = shared + kBandStages * stage_bytes;
  char* const staged_own = staged + warp * kBandStagedWarp<B> + lane * kBandStaged<B>;
  constexpr int kParts = 8 / kOwn;  // warps that have a chunk's channels
  const char* staged_from;          // of the first pixel that the thread stores; others are of other strips
  {
    const int pixel = thread / B::kChunks, in_strip = pixel % kBandStrip;
    staged_from = staged + kParts * chunk * kBandStagedWarp<B> +
                  (in_strip / 8 * 32 + pixel / kBandStrip * 4 + in_strip % 8 / 2) * kBandStaged<B> +
                  in_strip % 2 * sizeof(Own);
  }
  Two odd = {};  // NaN once a result was not finite
  const auto store = [&](int step, int buffer) {
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const char* const from = staged_from + buffer + i * (kBandStrips / kStores * 4 * kBandStaged<B>);
      Vec<Own, kParts> words;
#pragma unroll
      for (int k = 0; k < kParts; ++k) words.v[k] = *reinterpret_cast<const Own*>(from + k * kBandStagedWarp<B>);
      to[i] += out_step;
      if (step < 0 || step >= stored_steps[i]) continue;
      *reinterpret_cast<Vec<Own, kParts>*>(to[i]) = words;
      const Two zero = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) odd = __hfma2(reinterpret_cast<const Two*>(&words)[k], zero, odd);
    }
  };

  float sums[B::kOneLine ? 1 : kLines - 1][kOwn][4] = {};
  int stage = 0, before = (kBandStages - 1) * stage_bytes, buffer = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kBandStages - 2>();
    __syncthreads();
    Own x[2 * kSteps + 1][2];  // of pixels 8 i + 2 pair + e of the strip
#pragma unroll
    for (int i = 0; i < 2 * kSteps + 1; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) x[i][e] = *reinterpret_cast<const Own*>(own + stage + B::PixelAt(8 * i + e));
    copy_line(before);
    before = stage;
    stage = stage == (kBandStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
    store(step - kLines, kStaged - buffer);

    float results[kOwn][4];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      uint32_t pairs[2 * kSteps + 1];
#pragma unroll
      for (int i = 0; i < 2 * kSteps + 1; ++i) pairs[i] = PairOf(x[i][0], x[i][1], c);
#pragma unroll
      for (int k = kLines - 1; k >= 0; --k) {
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = k > 0 ? sums[k - 1][c][i] : bias[c];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint32_t a[4] = {pairs[2 * i], pairs[2 * i + 1], pairs[2 * i + 1], pairs[2 * i + 2]};
          Mma<T>(sum, a, band[c][k][2 * i], band[c][k][2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) (k == kLines - 1 ? results[c][i] : sums[k][c][i]) = sum[i];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vec<uint32_t, kOwn> words;  // of a pixel and its neighbour
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int c = i % (kOwn / 2) * 2, e = 2 * half + i / (kOwn / 2);
        words.v[i] = NarrowPair<T>(results[c][e], results[c + 1][e]);
      }
      *reinterpret_cast<Vec<uint32_t, kOwn>*>(staged_own + buffer + half * 32 * kBandStaged<B>) = words;
    }
    buffer = kStaged - buffer;
  }
  __syncthreads();
  store(steps - kLines, kStaged - buffer);

  const float2 met = WidenPair<T>(reinterpret_cast<const uint32_t&>(odd));
  if (met.x == met.x && met.y == met.y) return;
#pragma unroll 1
  for (int i = 0; i < kStores; ++i) {
    const int pixel = (thread + i * kThreads) / B::kChunks, strip = pixel / kBandStrip;
    const BandRun<B> r(t, images, problem, group, tile, strip >> t.across_bits);
    const int further = (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
    const int count = chunk_channel < p.channels ? r.Steps(t, further, p.whole[1].count, p.whole[2].count) : 0;
    int line = r.line, column = r.column + further;
    char* at = out + r.image * p.out_image + r.plane * p.out_line[0] + line * p.out_line[1] + column * p.out_line[2] +
               chunk_channel * sizeof(T);
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
#pragma unroll 1
      for (int c = 0; c < 8; ++c) {
        T& result = reinterpret_cast<T*>(at)[c];
        if (!isfinite(static_cast<float>(result)))
          result =
              static_cast<T>(ResultOf<T>(p, in, filter, problem, r.image, r.plane, line, column, chunk_channel + c));
      }
      at += out_step;
      (B::kOneLine ? column : line) += apart;
    }
  }
}

}  // namespace jaxdnn::conv::depthwise
