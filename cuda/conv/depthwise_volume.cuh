// Depthwise convolution with a window of 3x3x3. A block has two neighbouring planes of results and goes down their
// lines; the four lines of the operand of a step pass through a ring in shared memory, so that what planes and strips
// have in common comes once, and what is outside as zeros. Threads are as in depthwise_slide.cuh, but follow one
// another without gaps: over pairs of channels, strips and planes.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/conv/depthwise_data.cuh"

namespace jaxdnn::conv {

// How a block of the kernels of 3x3x3 shares out its threads and its shared memory.
struct VolumeTile {
#ifdef SEVEN
  static constexpr int kTaps = 3, kStrip = 7, kPlanes = 2, kInPlanes = kPlanes + kTaps - 1, kStages = 3;
  static constexpr int kMostThreads = 448, kMostPairs = 64, kCopies = 2, kChunkPairs = 2;
#else
  static constexpr int kTaps = 3, kStrip = 4, kPlanes = 1, kInPlanes = kPlanes + kTaps - 1, kStages = 4;
  static constexpr int kMostThreads = 384, kMostPairs = 64, kCopies = 3, kChunkPairs = 2;
#endif
  int width, strips, threads;  // pairs of channels, a whole number of chunks; strips side by side
  FastDiv pairs, strip, chunks;

  VolumeTile() = default;
  VolumeTile(int64_t channels, int64_t columns) {
    const int64_t all = CeilDiv(channels, 2), slabs = CeilDiv(all, kMostPairs);
    width = int(CeilDiv(CeilDiv(all, slabs), kChunkPairs)) * kChunkPairs;
    strips = int(std::min<int64_t>(kMostThreads / kPlanes / width, CeilDiv(columns, kStrip)));
    if (strips < 1) strips = 1;
    threads = int(CeilDiv(kPlanes * width * strips, 32)) * 32;
    pairs = FastDiv(width);
    strip = FastDiv(strips);
    chunks = FastDiv(width / kChunkPairs);
  }

  __host__ __device__ int Pixels() const { return strips * kStrip + kTaps - 1; }
};

// A block's copies of lines of the operand, in chunks of four channels.
template <class T>
struct VolumeCopy {
  static constexpr int kChunk = VolumeTile::kChunkPairs * sizeof(Pair<T>);
  int offset[VolumeTile::kCopies];
  int plane_bytes, count;
  unsigned there = 0;

  // Pixels from number `first` of a line of `extent` on; the block's channels begin at byte `at` of a pixel's bytes.
  __device__ VolumeCopy(const VolumeTile& tile, int first, int extent, int at, int pixel_bytes) {
    const int threads = tile.threads;
    count = tile.Pixels() * static_cast<int>(tile.chunks.divisor);
    plane_bytes = count * kChunk;
#pragma unroll
    for (int k = 0; k < VolumeTile::kCopies; ++k) {
      int chunk;
      const int pixel = tile.chunks.Div(static_cast<int>(threadIdx.x) + threads * k, &chunk);
      offset[k] = pixel * pixel_bytes + chunk * kChunk;
      if (static_cast<unsigned>(first + pixel) < static_cast<unsigned>(extent) && at + chunk * kChunk < pixel_bytes)
        there |= 1u << k;
    }
  }
  // Starts the copies of a line of each plane, those planes that are bits of `inside`, and zeros of the others.
  __device__ void Start(const VolumeTile& tile, uint32_t to, const char* from, int64_t plane_step,
                        unsigned inside) const {
#pragma unroll
    for (int k = 0; k < VolumeTile::kCopies; ++k) {
      const int at = threadIdx.x + tile.threads * k;
      if (at >= count) break;
      const char* chunk = from + offset[k];
      const unsigned valid = there >> k & 1 ? inside : 0;
#pragma unroll
      for (int d = 0; d < VolumeTile::kInPlanes; ++d) {
        CopyAsync<kChunk>(to + d * plane_bytes + at * kChunk, chunk, valid >> d & 1);
        chunk += plane_step;
      }
    }
  }
};

namespace depthwise {

struct Volume {
  static bool Takes(const DataParams& q, const VolumeTile& tile) {
    constexpr int kTaps = VolumeTile::kTaps;
    const auto is_plain = [](const PhasedAxis& at) {
      return at.MaxTaps() == kTaps && at.stride == 1 && at.pitch == 1 && at.phases == 1 && at.axis.step.divisor == 1;
    };
    return q.epilogue.residual == nullptr && q.epilogue.activation.kind == activation::Kind::kIdentity &&
           is_plain(q.at[0]) && is_plain(q.at[1]) && is_plain(q.at[2]) && tile.threads >= 64 &&
           tile.Pixels() * tile.width <= VolumeTile::kChunkPairs * VolumeTile::kCopies * tile.threads;
  }

  // Sets how the work is shared out between blocks, and returns how many there are.
  static int64_t Share(DataParams& q, const Problem& p, const VolumeTile& tile) {
    const int lines = std::max(q.at[1].MaxCount(), 1);
    q.slabs.count = FastDiv(CeilDiv(q.channels, 2 * tile.width));
    q.planes = FastDiv(CeilDiv(q.at[0].MaxCount(), VolumeTile::kPlanes));
    q.strips = FastDiv(CeilDiv(q.at[2].MaxCount(), VolumeTile::kStrip * tile.strips));
    const int64_t columns =
        p.batch * p.images * int64_t{q.slabs.count.divisor} * q.planes.divisor * q.strips.divisor;
    // Segments have lines in common, which are copied twice, and it takes some lines' time to fill a ring.
    constexpr int kStart = 3;
    const int64_t places = 132 * (VolumeTile::kMostThreads / tile.threads);
    int64_t least = INT64_MAX;
    for (int count = 1; count <= lines; ++count) {
      const int segment = int(CeilDiv(lines, count));
      const int64_t steps = CeilDiv(columns * CeilDiv(lines, segment), places) * (segment + kStart);
#ifdef TUNE
      if (getenv("VS")) { q.segment = int(CeilDiv(lines, atoi(getenv("VS")))); break; }
#endif
      if (steps < least) q.segment = segment, least = steps;
    }
    q.segments = FastDiv(CeilDiv(lines, q.segment));
    if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return 0;
    return columns * q.segments.divisor;
  }
};

template <class T>
__global__ void __launch_bounds__(VolumeTile::kMostThreads, 1)
    VolumeKernel(const __grid_constant__ DataParams p, const __grid_constant__ VolumeTile tile, const char* in,
                 const char* filter, char* out) {
  constexpr int kTaps = VolumeTile::kTaps, kStrip = VolumeTile::kStrip, kPlanes = VolumeTile::kPlanes,
                kStages = VolumeTile::kStages, kWidth = kStrip + kTaps - 1;
  extern __shared__ __align__(16) char shared[];
  int slab, strips, segment, planes, lane, within;
  int image = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
  image = p.strips.Div(image, &strips);
  image = p.segments.Div(image, &segment);
  image = p.planes.Div(image, &planes);
  const int64_t problem = p.images.Div(image);
  const int half = tile.strip.Div(tile.pairs.Div(static_cast<int>(threadIdx.x), &lane), &within);
  const int pair = slab * tile.width + lane, plane = kPlanes * planes + half;
  const int tile0 = strips * tile.strips * kStrip, column0 = tile0 + within * kStrip;
  const bool there = half < kPlanes && plane < p.whole[0].count && 2 * pair < p.channels;
  const int columns = there ? p.whole[2].count - column0 : 0, channel = there ? 2 * pair : 0;
  const int line0 = segment * p.segment, lines = min(p.segment, p.whole[1].count - line0);

  const int in_plane = p.whole[0].origin + kPlanes * planes, in_column = p.whole[2].origin + tile0;
  const int chunk0 = slab * tile.width * static_cast<int>(sizeof(Pair<T>)), in_lines = p.at[1].axis.extent;
  const VolumeCopy<T> copy(tile, in_column, p.at[2].axis.extent, chunk0, p.in_pixel);
  const int stage_bytes = copy.plane_bytes * VolumeTile::kInPlanes;
  int ahead = p.whole[1].origin + line0;
  const int end_line = min(ahead + lines + kTaps - 1, in_lines);
  const char* from = in + image * p.in_image + in_plane * p.in_line[0] + ahead * p.in_line[1] +
                     int64_t{in_column} * p.in_pixel + chunk0;
  const uint32_t ring = SharedAddress(shared);
  unsigned planes_there = 0;
#pragma unroll
  for (int d = 0; d < VolumeTile::kInPlanes; ++d)
    if (static_cast<unsigned>(in_plane + d) < static_cast<unsigned>(p.at[0].axis.extent)) planes_there |= 1u << d;
  const auto copy_lines = [&](int stage) {
    copy.Start(tile, ring + stage, from, p.in_line[0], ahead >= 0 && ahead < end_line ? planes_there : 0);
    CommitCopies();
    from += p.in_line[1];
    ++ahead;
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) copy_lines(i * stage_bytes);

  float2 w[kTaps][kTaps][kTaps];
  {
    const char* tap = filter + problem * p.filter_batch + channel * sizeof(T);
#pragma unroll
    for (int d = 0; d < kRank; ++d) tap += p.whole[d].first_tap * p.filter_tap[d];
#pragma unroll
    for (int d = 0; d < kTaps; ++d)
#pragma unroll
      for (int r = 0; r < kTaps; ++r)
#pragma unroll
        for (int s = 0; s < kTaps; ++s) {
          w[d][r][s] = ToFloats<T>(LoadPair<T, true>(tap + d * p.whole[0].tap_step * p.filter_tap[0] +
                                                         r * p.whole[1].tap_step * p.filter_tap[1] +
                                                         s * p.whole[2].tap_step * p.filter_tap[2],
                                                     1));
          Keep(w[d][r][s]);
        }
  }
  const float2 bias = BiasOf<T>(p.epilogue, problem * p.channels + channel, true, p.widened);
  float2 sums[kTaps][kStrip];
#pragma unroll
  for (int k = 0; k < kTaps; ++k)
#pragma unroll
    for (int j = 0; j < kStrip; ++j) sums[k][j] = bias;

  const int pitch = tile.width * static_cast<int>(sizeof(Pair<T>)), out_column = static_cast<int>(p.out_line[2]);
  const char* const own =
      shared + (there ? half * copy.plane_bytes + within * kStrip * pitch + lane * static_cast<int>(sizeof(Pair<T>)) : 0);
  char* to = out + image * p.out_image + plane * p.out_line[0] + int64_t{line0 - (kTaps - 1)} * p.out_line[1] +
             int64_t{column0} * p.out_line[2] + channel * (p.widened ? sizeof(float) : sizeof(T));
  int stage = 0, before = (kStages - 1) * stage_bytes;
#pragma unroll 1
  for (int step = 0; step < lines + kTaps - 1; ++step) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    copy_lines(before);
#pragma unroll
    for (int d = 0; d < kTaps; ++d) {
      float2 x[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        x[i] = ToFloats<T>(*reinterpret_cast<const Pair<T>*>(own + stage + d * copy.plane_bytes + i * pitch));
      // Lines of results that are other segments' are left out. The others move up with the first product.
#pragma unroll
      for (int k = kTaps - 1; k >= 0; --k) {
#ifdef SKIP
        if (step < k || step - k >= lines) continue;
#endif
#pragma unroll
        for (int j = 0; d == 0 && j < kStrip; ++j) sums[k][j] = k > 0 ? sums[k - 1][j] : bias;
#pragma unroll
        for (int s = 0; s < kTaps; ++s)
#pragma unroll
          for (int j = 0; j < kStrip; ++j) MultiplyAdd(sums[k][j], w[d][k][s], x[j + s]);
      }
    }
    if (step >= kTaps - 1) {
      WithOut<T>(p.widened, [&](auto type) {
        StoreStrip<typename decltype(type)::type, true>(to, out_column, columns, sums[kTaps - 1], true);
      });
    }
    to += p.out_line[1];
    before = stage;
    stage = stage == (kStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
  }
}

}  // namespace depthwise
}  // namespace jaxdnn::conv
