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

// Bytes of a line of y, and floats of a line's sums of a channel.
template <class B>
constexpr int kBandLineY = kBandStrips * B::Chunk(kBandStrip) * 16;
template <class B>
constexpr int kBandSum = 16 * B::kSteps * 8 + 4;

// Sets how the work is shared out.
template <class B>
Grid BandFilterGrid(FilterParams& q, const Problem& p, const BandTile<B>& t) {
  q.units = int(t.groups.divisor * t.tiles.divisor);
  const int64_t slabs = p.batch * t.slabs.divisor, places = std::max<int64_t>(B::kBlocks * kMultiprocessors / slabs, 1);
  q.splits = int(std::min<int64_t>({places, q.units, q.splits}));
  const size_t sums = size_t(B::kChannels) * B::kLines * kBandSum<B> * sizeof(float);
  return {slabs * q.splits, B::kThreads, std::max(size_t(kBandStages) * (t.LineBytes() + kBandLineY<B>), sums)};
}

// A block's sum of a tap, term by term.
template <class B, class T>
__device__ float TapOf(const FilterParams& p, const BandTile<B>& t, const char* x, const char* y, int problem,
                       int split, int r, int s, int channel) {
  float sum = 0;
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    int tile;
    const int group = t.tiles.Div(id, &tile);
#pragma unroll 1
    for (int run = 0; run < t.beside; ++run) {
      const BandRun<B> at(t, static_cast<int>(p.images.divisor), problem, group, tile, run);
      const int lines = B::kOneLine ? 1 : t.lines, columns = (B::kOneLine ? t.lines : 1) * t.Columns();
      if (at.there)
        AddTerms<T>(p, x, y, at.image, at.plane, at.line, at.line + lines, at.column, at.column + columns, r, s,
                    channel, sum);
    }
  }
  return sum;
}

template <class B, class T>
__global__ void __launch_bounds__(B::kThreads, B::kBlocks)
    BandFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ BandTile<B> t, const char* x,
                     const char* y, float* partial, char* out) {
  constexpr int kLines = B::kLines, kSteps = B::kSteps, kOwn = B::kOwn, kThreads = B::kThreads;
  constexpr int kCopiesX = (B::kPixels * B::kChunks + kThreads - 1) / kThreads;
  constexpr int kCopiesY = kBandStrips * kBandStrip * B::kChunks / kThreads;
  using Own = typename B::Own;
  extern __shared__ __align__(16) char shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  int slab;
  const int rest = t.slabs.Div(static_cast<int>(blockIdx.x), &slab), split = rest % p.splits, problem = rest / p.splits;
  const int chunk = thread % B::kChunks, chunk_channel = slab * B::kChannels + 8 * chunk;
  const int line_x = t.LineBytes(), stage_bytes = line_x + kBandLineY<B>, steps = t.lines + kLines - 1;
  const int apart = B::kOneLine ? t.Columns() : 1;  // steps, in columns or lines
  const uint32_t ring = SharedAddress(shared);
  const char* own_x[2];  // of strips 2 pair + i
  const char* own_y;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    own_x[i] = shared + (t.StripChunk(2 * pair + i) + B::Chunk(row)) * 16 + warp * sizeof(Own);
  own_y = shared + line_x + (2 * pair * B::Chunk(kBandStrip) + B::Chunk(row)) * 16 + warp * sizeof(Own);

  float sums[kLines][kSteps][kOwn][4] = {};
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    int tile;
    const int group = t.tiles.Div(id, &tile), images = static_cast<int>(p.images.divisor);
    BandCopy<kCopiesX> copy_x;
    BandCopy<kCopiesY> copy_y;
#pragma unroll
    for (int k = 0; k < kCopiesX; ++k) {
      int pixel;
      const int run = t.run_pixels.Div((thread + k * kThreads) / B::kChunks, &pixel);
      const BandRun<B> r(t, images, problem, group, tile, run);
      const int x_plane = p.at[0].axis.Origin(r.plane), line = p.at[1].axis.offset + r.line,
                column = p.at[2].axis.offset + r.column + pixel;
      const int still = B::kOneLine ? line : column, extent = p.at[B::kOneLine ? 1 : 2].axis.extent;
      const bool there = r.there && chunk_channel < p.channels &&
                         static_cast<unsigned>(x_plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
                         static_cast<unsigned>(still) < static_cast<unsigned>(extent);
      copy_x.next[k] = !there ? INT32_MIN : B::kOneLine ? column : line;  // the least is never inside
      copy_x.to[k] = run < t.beside ? (run * t.RunChunks() + B::Chunk(pixel) + chunk) * 16 : ~0u;
      copy_x.from[k] = x + r.image * p.x_image + x_plane * p.x_line[0] + int64_t{line} * p.x_line[1] +
                       int64_t{column} * p.x_pixel + chunk_channel * sizeof(T);
    }
    // Steps of y count from the part's first. What follows its last is another part's.
#pragma unroll
    for (int k = 0; k < kCopiesY; ++k) {
      const int pixel = (thread + k * kThreads) / B::kChunks, strip = pixel / kBandStrip;
      const BandRun<B> r(t, images, problem, group, tile, strip >> t.across_bits);
      const int further = (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
      // Steps that are there end with a number that all parts have in common.
      const int count = r.Steps(t, further, p.at[1].out, p.at[2].out);
      copy_y.next[k] = chunk_channel < p.channels ? t.lines - count : INT32_MIN;
      copy_y.to[k] = (B::Chunk(pixel) + chunk) * 16;
      copy_y.from[k] = y + r.image * p.y_image + r.plane * p.y_line[0] + r.line * p.y_line[1] +
                       (int64_t{r.column} + further) * p.y_pixel + chunk_channel * sizeof(T);
    }
    const auto copy_step = [&](int stage) {
      copy_x.Start(ring + stage, apart, p.at[B::kOneLine ? 2 : 1].axis.extent,
                   B::kOneLine ? int64_t{apart} * p.x_pixel : p.x_line[1]);
      copy_y.Start(ring + stage + line_x, 1, t.lines, B::kOneLine ? int64_t{apart} * p.y_pixel : p.y_line[1]);
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
      Own wide_x[2][2 * kSteps + 1], wide_y[2][2];  // of pixels 8 k + row of the strips
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
          wide_y[i][k] = *reinterpret_cast<const Own*>(own_y + stage + B::Chunk(kBandStrip * i + 8 * k) * 16);
#pragma unroll
        for (int k = 0; k < 2 * kSteps + 1; ++k)
          wide_x[i][k] = *reinterpret_cast<const Own*>(own_x[i] + stage + B::Chunk(8 * k) * 16);
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
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = PairOf(wide_x[i / 2][2 * k + i % 2], wide_x[i / 2][2 * k + i % 2 + 1], c);
#pragma unroll
          for (int r = 0; r < kLines; ++r) Mma<T>(sums[r][k][c], a, held[r][c][0], held[r][c][1]);
        }
      }
    }
    // The ring is filled anew.
    WaitForCopies<0>();
    __syncthreads();
  }

  // A warp's sums side by side.
  constexpr int kSum = kBandSum<B>;
  float* const own = reinterpret_cast<float*>(shared) + warp * kLines * kOwn * kSum;
#pragma unroll
  for (int r = 0; r < kLines; ++r)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          own[(r * kOwn + c) * kSum + (16 * k + row + i / 2 * 8) * 8 + 2 * pair + i % 2] = sums[r][k][c][i];
  __syncwarp();
  const int columns = p.at[2].window, taps = p.at[1].window * columns;
#pragma unroll 1
  for (int i = lane; i < taps * kOwn / 2; i += 32) {
    const int tap = i / (kOwn / 2), r = tap / columns, s = tap % columns, of = i % (kOwn / 2) * 2;
    const int channel = slab * B::kChannels + kOwn * warp + of;
    if (channel >= p.channels) continue;
    float two[2];
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      const float* const diagonal = own + (r * kOwn + of + c) * kSum + s * 8;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) sum += diagonal[n * 9];
      if (!isfinite(sum)) sum = TapOf<B, T>(p, t, x, y, problem, split, r, s, channel + c);
      (c == 0 ? two[0] : two[1]) = sum;
    }
    StoreSum<T>(p, {two[0], two[1]}, split, int64_t{problem} * taps + tap, channel, partial, out);
  }
}

}  // namespace jaxdnn::conv::depthwise
