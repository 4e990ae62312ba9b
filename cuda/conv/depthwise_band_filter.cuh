// Filter gradient of depthwise convolution as products of strips (depthwise_band.cuh). Of one channel, a line of x and
// one of y that it meets at line r of the window: 16 pixels of x times eight of y, summed over 16 runs of eight
// results. Those s apart are the terms of tap [r, s], diagonals of a sum of 16x8 that a warp keeps of each line of the
// window. The last lines of y stay in registers. Of a volume, a line of y meets lines of three planes of x.
//
// A zero of y that stands for no pixel does not make up for an infinity or NaN: sums that are not finite are computed
// again, of existing terms alone.
#pragma once

#include "cuda/conv/depthwise_band_volume.cuh"

namespace jaxdnn::conv::depthwise {

// Bytes of a line of y, and floats of a line's sums of a channel.
template <class B>
constexpr int kBandLineY = kBandStrips * B::PixelAt(kBandStrip);
template <class B>
constexpr int kBandSum = 16 * B::kSteps * 8 + 4;

// Sets how the work is shared out.
template <class B>
Grid BandFilterGrid(FilterParams& q, const Problem& p, const BandTile<B>& t) {
  q.units = int(t.groups.divisor * t.tiles.divisor);
  const int64_t slabs = p.batch * t.slabs.divisor, places = std::max<int64_t>(B::kBlocks * kMultiprocessors / slabs, 1);
  q.splits = int(std::min<int64_t>({places, q.units, q.splits}));
  const size_t sums = size_t(B::kChannels) * B::kPlanes * B::kLines * kBandSum<B> * sizeof(float);
  return {slabs * q.splits, B::kThreads, std::max(size_t{kBandStages} * (t.LineBytes() + kBandLineY<B>), sums)};
}

// A block's sum of a tap, term by term.
template <class B, class T>
__device__ float TapOf(const FilterParams& p, const BandTile<B>& t, const char* x, const char* y, int problem,
                       int split, int d, int r, int s, int channel) {
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
        AddTerms<T>(p, x, y, at.image, at.plane, at.line, at.line + lines, at.column, at.column + columns, d, r, s,
                    channel, sum);
    }
  }
  return sum;
}

// What a thread copies of x and y in the steps of a unit.
template <class B, class T>
struct BandFilterCopies {
  static constexpr int kCopiesX = (B::kPixels * B::kChunks + B::kThreads - 1) / B::kThreads;
  static constexpr int kCopiesY = kBandStrips * kBandStrip * B::kChunks / B::kThreads;
  const FilterParams& p;
  const BandTile<B>& t;
  BandCopy<kCopiesX> of_x;
  BandCopy<kCopiesY> of_y;

  __device__ BandFilterCopies(const FilterParams& p, const BandTile<B>& t, const char* x, const char* y, int problem,
                              int slab, int id)
      : p(p), t(t) {
    const int thread = threadIdx.x, chunk = thread % B::kChunks, channel = slab * B::kChannels + B::kChunk * chunk;
    int tile;
    const int group = t.tiles.Div(id, &tile), images = static_cast<int>(p.images.divisor);
#pragma unroll
    for (int k = 0; k < kCopiesX; ++k) {
      int pixel;
      const int run = t.run_pixels.Div((thread + k * B::kThreads) / B::kChunks, &pixel);
      const BandRun<B> r(t, images, problem, group, tile, run);
      const int x_plane = p.at[0].axis.Origin(r.plane), line = p.at[1].axis.offset + r.line,
                column = p.at[2].axis.offset + r.column + pixel;
      const int still = B::kOneLine ? line : column, extent = p.at[B::kOneLine ? 1 : 2].axis.extent;
      const bool there = r.there && channel < p.channels &&
                         static_cast<unsigned>(x_plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
                         static_cast<unsigned>(still) < static_cast<unsigned>(extent);
      of_x.next[k] = !there ? INT32_MIN : B::kOneLine ? column : line;  // the least is never inside
      of_x.to[k] = run < t.beside ? t.ChunkAt(run, pixel, chunk) : ~0u;
      of_x.from[k] = x + r.image * p.x_image + x_plane * p.x_line[0] + int64_t{line} * p.x_line[1] +
                     int64_t{column} * p.x_pixel + channel * sizeof(T);
    }
    // Steps of y count from the part's first. What follows its last is another part's.
#pragma unroll
    for (int k = 0; k < kCopiesY; ++k) {
      const int pixel = (thread + k * B::kThreads) / B::kChunks, strip = pixel / kBandStrip;
      const BandRun<B> r(t, images, problem, group, tile, strip >> t.across_bits);
      const int further = (strip & (t.Across() - 1)) * kBandStrip + pixel % kBandStrip;
      // Steps that are there end with a number that all parts have in common.
      const int count = r.Steps(t, further, p.at[1].out, p.at[2].out);
      of_y.next[k] = channel < p.channels ? t.lines - count : INT32_MIN;
      of_y.to[k] = t.ChunkAt(0, pixel, chunk);
      of_y.from[k] = y + r.image * p.y_image + r.plane * p.y_line[0] + r.line * p.y_line[1] +
                     (int64_t{r.column} + further) * p.y_pixel + channel * sizeof(T);
    }
  }

  __device__ void Start(uint32_t stage) {
    const int apart = B::kOneLine ? t.Columns() : 1;  // steps, in columns or lines
    of_x.Start(stage, apart, p.at[B::kOneLine ? 2 : 1].axis.extent,
               B::kOneLine ? int64_t{apart} * p.x_pixel : p.x_line[1]);
    of_y.Start(stage + t.LineBytes(), 1, t.lines, B::kOneLine ? int64_t{apart} * p.y_pixel : p.y_line[1]);
    CommitCopies();
  }
};

template <class B, class T>
__global__ void __launch_bounds__(B::kThreads, B::kBlocks)
    BandFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ BandTile<B> t, const char* x,
                     const char* y, float* partial, char* out) {
  constexpr int kLines = B::kLines, kSteps = B::kSteps, kPlanes = B::kPlanes, kOwn = B::kOwn;
  using Copies = std::conditional_t<B::kVolume, VolumeFilterCopies<B, T>, BandFilterCopies<B, T>>;
  using Own = typename B::Own;
  extern __shared__ __align__(16) char shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  int slab;
  const int rest = t.slabs.Div(static_cast<int>(blockIdx.x), &slab), split = rest % p.splits, problem = rest / p.splits;
  const int line_x = t.LineBytes(), stage_bytes = line_x + kBandLineY<B>, steps = t.lines + kLines - 1;
  const int run_bytes = t.RunBytes();
  const uint32_t ring = SharedAddress(shared);
  const int odd_strip = t.StripAt(1);
  const char* const own_x = shared + t.StripAt(2 * pair) + B::PixelAt(row) + warp * sizeof(Own);
  const char* const own_y = shared + line_x + 2 * pair * B::PixelAt(kBandStrip) + B::PixelAt(row) + warp * sizeof(Own);

  float sums[kPlanes * kLines][kSteps][kOwn][4] = {};
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    Copies copies(p, t, x, y, problem, slab, id);
#pragma unroll 1
    for (int i = 0; i < kBandStages - 1; ++i) copies.Start(ring + i * stage_bytes);

    uint32_t held[kLines][kOwn][2] = {};
    int stage = 0, before = (kBandStages - 1) * stage_bytes;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<kBandStages - 2>();
      __syncthreads();
      Own wide_x[2][2 * kSteps + 1], wide_y[2][2];  // of pixels 8 k + row of the strips
      const auto load_x = [&](int d) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int k = 0; k < 2 * kSteps + 1; ++k)
            wide_x[i][k] =
                *reinterpret_cast<const Own*>(own_x + i * odd_strip + stage + d * run_bytes + B::PixelAt(8 * k));
      };
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          wide_y[i][k] = *reinterpret_cast<const Own*>(own_y + stage + B::PixelAt(kBandStrip * i + 8 * k));
      load_x(0);
      copies.Start(ring + before);
      before = stage;
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int h = kLines - 1; h > 0; --h) held[h][c][i] = held[h - 1][c][i];
          held[0][c][i] = PairOf(wide_y[i][0], wide_y[i][1], c);
        }
#pragma unroll
      for (int d = 0; d < kPlanes; ++d) {
        if (d > 0) load_x(d);
#pragma unroll
        for (int c = 0; c < kOwn; ++c)
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              a[i] = PairOf(wide_x[i / 2][2 * k + i % 2], wide_x[i / 2][2 * k + i % 2 + 1], c);
#pragma unroll
            for (int r = 0; r < kLines; ++r) Mma<T>(sums[d * kLines + r][k][c], a, held[r][c][0], held[r][c][1]);
          }
      }
      stage = stage == (kBandStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
    }
    // The ring is filled anew.
    WaitForCopies<0>();
    __syncthreads();
  }

  // A warp's sums side by side.
  constexpr int kSum = kBandSum<B>;
  float* const own = reinterpret_cast<float*>(shared) + warp * kPlanes * kLines * kOwn * kSum;
#pragma unroll
  for (int r = 0; r < kPlanes * kLines; ++r)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          own[(r * kOwn + c) * kSum + (16 * k + row + i / 2 * 8) * 8 + 2 * pair + i % 2] = sums[r][k][c][i];
  __syncwarp();
  const int columns = p.at[2].window, lines = p.at[1].window, taps = p.at[0].window * lines * columns;
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
      if (!isfinite(sum)) sum = TapOf<B, T>(p, t, x, y, problem, split, r / lines, r % lines, s, channel + c);
      (c == 0 ? two[0] : two[1]) = sum;
    }
    StoreSum<T>(p, {two[0], two[1]}, split, int64_t{problem} * taps + tap, channel, partial, out);
  }
}

}  // namespace jaxdnn::conv::depthwise
