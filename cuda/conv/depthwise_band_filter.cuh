// Filter gradient of depthwise convolution as products of strips (depthwise_band.cuh). Of one channel, a line of x and
// one of y that it meets at line r of the window: 16 pixels of x times eight of y, summed over 16 runs of eight
// results. Those s apart are the terms of tap [r, s], diagonals of a sum of 16x8 that a warp keeps of each line of the
// window. The last lines of y stay in registers.
//
// A zero of y that stands for no pixel does not make up for an infinity or NaN: sums that are not finite are computed
// again, of existing terms alone.
#pragma once

#include "cuda/conv/depthwise_band.cuh"
#include "cuda/conv/depthwise_filter.cuh"

namespace jaxdnn::conv::depthwise {

template <int kLines_, int kColumns_>
struct BandTaps {
  static constexpr int kLines = kLines_, kColumns = kColumns_;
  static_assert(kColumns <= 9, "a run of eight results sees 16 values");
  static constexpr int kLineY = kBandStrips * BandChunk(kBandStrip) * 16;  // bytes of a line of y

  static bool Takes(const FilterParams& q, const Problem& p) {
    return q.at[0].window == 1 && q.at[1].window == kLines && q.at[2].window == kColumns && q.at[1].stride == 1 &&
           q.at[2].stride == 1 && q.at[1].pitch == 1 && q.at[2].pitch == 1 &&
           q.at[0].phases * q.at[1].phases * q.at[2].phases == 1 && p.features == 1 && q.x_pixel % 16 == 0;
  }

  // Sets how the work is shared out, and returns how many blocks there are.
  static int64_t Share(FilterParams& q, const Problem& p, const BandTile& t) {
    q.units = int(t.groups.divisor * t.tiles.divisor);
    const int64_t slabs = p.batch * t.slabs.divisor, places = std::max<int64_t>(2 * kMultiprocessors / slabs, 1);
    q.splits = int(std::min<int64_t>({places, q.units, q.splits}));
    return slabs * q.splits;
  }
  static constexpr int kSum = 16 * 8 + 4;  // floats of a sum
  static size_t SharedBytes(const BandTile& t) {
    return std::max(size_t(kBandStages) * (t.LineBytes() + kLineY),
                    size_t(kBandChannels) * kLines * kSum * sizeof(float));
  }
};

// A block's sum of a tap, term by term.
template <class T>
__device__ float TapOf(const FilterParams& p, const BandTile& t, const char* x, const char* y, int problem, int split,
                       int r, int s, int channel) {
  float sum = 0;
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    int tile;
    const int group = t.tiles.Div(id, &tile), column0 = tile * (kBandStrip << t.across_bits);
#pragma unroll 1
    for (int run = 0; run < t.beside; ++run) {
      const BandRun at(t, static_cast<int>(p.images.divisor), problem, group, run);
      if (at.there)
        AddTerms<T>(p, x, y, at.image, at.plane, at.line, at.line + t.lines, column0,
                    column0 + (kBandStrip << t.across_bits), r, s, channel, sum);
    }
  }
  return sum;
}

template <class B, class T>
__global__ void __launch_bounds__(kBandThreads, 2)
    BandFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ BandTile t, const char* x,
                     const char* y, float* partial, char* out) {
  constexpr int kLines = B::kLines, kColumns = B::kColumns, kOwn = 4;  // channels of a warp
  constexpr int kCopiesX = (kBandStrips * (kBandStrip + kBandHalo) * kBandChunks + kBandThreads - 1) / kBandThreads;
  constexpr int kCopiesY = kBandStrips * kBandStrip * kBandChunks / kBandThreads;
  extern __shared__ __align__(16) char shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  int slab;
  const int rest = t.slabs.Div(static_cast<int>(blockIdx.x), &slab), split = rest % p.splits, problem = rest / p.splits;
  const int chunk = thread % kBandChunks, chunk_channel = slab * kBandChannels + 8 * chunk;
  const int line_x = t.LineBytes(), stage_bytes = line_x + B::kLineY, steps = t.lines + kLines - 1;
  const uint32_t ring = SharedAddress(shared);
  const char* own_x[2];  // of strips 2 pair + i
  const char* own_y;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    own_x[i] = shared + (t.StripChunk(2 * pair + i) + BandChunk(row) + warp / 2) * 16 + warp % 2 * 8;
  own_y = shared + line_x + (2 * pair * BandChunk(kBandStrip) + BandChunk(row) + warp / 2) * 16 + warp % 2 * 8;

  float sums[kLines][kOwn][4] = {};
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    int tile;
    const int group = t.tiles.Div(id, &tile), column0 = tile * (kBandStrip << t.across_bits);
    BandCopy<kCopiesX> copy_x;
    BandCopy<kCopiesY> copy_y;
#pragma unroll
    for (int k = 0; k < kCopiesX; ++k) {
      int pixel;
      const int run = t.run_pixels.Div((thread + k * kBandThreads) / kBandChunks, &pixel);
      const BandRun r(t, static_cast<int>(p.images.divisor), problem, group, run);
      const int column = p.at[2].axis.offset + column0 + pixel, x_plane = p.at[0].axis.Origin(r.plane),
                line = p.at[1].axis.offset + r.line;
      const bool there = r.there && chunk_channel < p.channels &&
                         static_cast<unsigned>(x_plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
                         static_cast<unsigned>(column) < static_cast<unsigned>(p.at[2].axis.extent);
      copy_x.line[k] = there ? line : INT32_MIN;  // that is never inside
      copy_x.to[k] = run < t.beside ? (run * t.RunChunks() + BandChunk(pixel) + chunk) * 16 : ~0u;
      copy_x.from[k] = x + r.image * p.x_image + x_plane * p.x_line[0] + line * p.x_line[1] +
                       int64_t{column} * p.x_pixel + chunk_channel * sizeof(T);
    }
    // Lines of y count from the part's first. What follows its last is another part's.
#pragma unroll
    for (int k = 0; k < kCopiesY; ++k) {
      const int pixel = (thread + k * kBandThreads) / kBandChunks, strip = pixel / kBandStrip;
      const BandRun r(t, static_cast<int>(p.images.divisor), problem, group, strip >> t.across_bits);
      const int column = column0 + (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
      const bool there = r.there && column < p.at[2].out && chunk_channel < p.channels;
      // Lines that are there end with a number that all parts have in common.
      copy_y.line[k] = there ? max(t.lines - (p.at[1].out - r.line), 0) : INT32_MIN;
      copy_y.to[k] = (BandChunk(pixel) + chunk) * 16;
      copy_y.from[k] = y + r.image * p.y_image + r.plane * p.y_line[0] + r.line * p.y_line[1] +
                       int64_t{column} * p.y_pixel + chunk_channel * sizeof(T);
    }
    const auto copy_step = [&](int stage) {
      copy_x.Start(ring + stage, p.at[1].axis.extent, p.x_line[1]);
      copy_y.Start(ring + stage + line_x, t.lines, p.y_line[1]);
      CommitCopies();
    };
#pragma unroll 1
    for (int i = 0; i < kBandStages - 1; ++i) copy_step(i * stage_bytes);

    uint32_t held[kLines][kOwn][2] = {};
    int stage = 0, before = (kBandStages - 1) * stage_bytes;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<kBandStages - 2>();
      __syncthreads();
      uint2 wide_x[2][3], wide_y[2][2];  // of pixels 8 k + row of the strips
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
          wide_y[i][k] = *reinterpret_cast<const uint2*>(own_y + stage + BandChunk(kBandStrip * i + 8 * k) * 16);
#pragma unroll
        for (int k = 0; k < 3; ++k)
          wide_x[i][k] = *reinterpret_cast<const uint2*>(own_x[i] + stage + BandChunk(8 * k) * 16);
      }
      copy_step(before);
      before = stage;
      stage = stage == (kBandStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int h = kLines - 1; h > 0; --h) held[h][c][i] = held[h - 1][c][i];
          held[0][c][i] = PairOf(wide_y[i][0], wide_y[i][1], c);
        }
        const uint32_t a[4] = {PairOf(wide_x[0][0], wide_x[0][1], c), PairOf(wide_x[0][1], wide_x[0][2], c),
                               PairOf(wide_x[1][0], wide_x[1][1], c), PairOf(wide_x[1][1], wide_x[1][2], c)};
#pragma unroll
        for (int r = 0; r < kLines; ++r) Mma<T>(sums[r][c], a, held[r][c][0], held[r][c][1]);
      }
    }
    // The ring is filled anew.
    WaitForCopies<0>();
    __syncthreads();
  }

  // A warp's sums side by side.
  constexpr int kSum = B::kSum;
  float* const own = reinterpret_cast<float*>(shared) + warp * kLines * kOwn * kSum;
#pragma unroll
  for (int r = 0; r < kLines; ++r)
#pragma unroll
    for (int c = 0; c < kOwn; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) own[(r * kOwn + c) * kSum + (row + i / 2 * 8) * 8 + 2 * pair + i % 2] = sums[r][c][i];
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < kLines * kColumns * kOwn / 2; i += 32) {
    const int tap = i / (kOwn / 2), r = tap / kColumns, s = tap % kColumns, of = i % (kOwn / 2) * 2;
    const int channel = slab * kBandChannels + kOwn * warp + of;
    if (channel >= p.channels) continue;
    float two[2];
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      const float* const diagonal = own + (r * kOwn + of + c) * kSum + s * 8;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) sum += diagonal[n * 9];
      if (!isfinite(sum)) sum = TapOf<T>(p, t, x, y, problem, split, r, s, channel + c);
      (c == 0 ? two[0] : two[1]) = sum;
    }
    StoreSum<T>(p, {two[0], two[1]}, split, int64_t{problem} * kLines * kColumns + tap, channel, partial, out);
  }
}

}  // namespace jaxdnn::conv::depthwise
