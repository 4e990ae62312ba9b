// Depthwise convolution like depthwise_slide.cuh, but lines of the operand pass through a ring in shared memory
// (depthwise_line.cuh). For channels that are whole chunks of 16 bytes. Of a dilated window, a warp's lines and pixels
// are those of one phase. Where channels have several features, pairs are of y's channels (Pairing).
#pragma once

#include "cuda/conv/depthwise_data.cuh"
#include "cuda/conv/depthwise_line.cuh"

namespace jaxdnn::conv::depthwise {

// A window of kLines x kColumns taps, results kStride lines and columns apart, kStrip of them in a strip.
template <int kLines_, int kColumns_, int kStride_, int kStrip_, int kBlocks_>
struct Ring {
  static constexpr int kLines = kLines_, kColumns = kColumns_, kStride = kStride_, kStrip = kStrip_, kBlocks = kBlocks_;
  static constexpr int kSums = (kLines + kStride - 1) / kStride;    // lines of results that a line is part of
  static constexpr int kWidth = (kStrip - 1) * kStride + kColumns;  // of the operand's strip

  template <class L, bool kEdges>
  using Copy = LineCopy<L, kWidth, kEdges>;
  template <class L>
  static constexpr int kLineBytes = Copy<L, false>::kBytes;
  template <class L>
  static constexpr int kStages = RingStages(kLineBytes<L>);

  static bool Takes(const DataParams& q) {
    return IsClampAlone(q.epilogue) && q.at[0].MaxTaps() == 1 && q.at[1].MaxTaps() == kLines &&
           q.at[2].MaxTaps() == kColumns && q.at[1].stride == kStride && q.at[2].stride == kStride && q.AllTaps() &&
           q.at[1].LatticeAt(0, q.whole[1].origin).start > -kLines && q.in_pixel % 16 == 0;
  }

  // Sets how the work is shared out between warps, and returns how many there are. As for SlideKernel, short segments
  // are work for more warps but have lines in common; and it takes some lines' time to fill a ring.
  static int64_t Share(DataParams& q, const Problem& p) {
    constexpr int kStart = 4;
    const int pairs = PairsOfWarp(p.groups * p.features, CeilDiv(q.at[2].MaxCount(), kStrip)), strips = 32 / pairs;
    q.slabs.width = pairs;
    const int lines = std::max(q.at[1].MaxCount(), 1), planes = q.at[0].MaxCount();
    q.slabs.count = FastDiv(CeilDiv(p.groups * p.features, 2 * pairs));
    q.planes = FastDiv(planes);
    q.strips = FastDiv(CeilDiv(q.at[2].MaxCount(), kStrip * strips));
    const int64_t columns = p.batch * p.images * planes * int64_t{q.strips.divisor} * q.phases.divisor,
                  places = kMultiprocessors * kBlocks * kDepthwiseWarps;
    int64_t least = INT64_MAX;
    for (int count = 1; count == 1 || count * kLines <= lines; ++count) {
      const int segment = int(CeilDiv(lines, count));
      const int64_t rounds = CeilDiv(columns * q.slabs.count.divisor * CeilDiv(lines, segment), places);
      const int64_t steps = rounds * (segment + kLines - 1 + kStart);
      if (steps < least) q.segment = segment, least = steps;
    }
    // Where memory bounds, further turns of short segments are faster: blocks then follow the order of memory. With a
    // stride, whole columns are, if they are work for all multiprocessors.
    const int64_t most = 28 / SizeOf(p.in);
    constexpr int kFewest = 7;
    if (kLines <= 3 && kStride > 1)
      q.segment = columns * q.slabs.count.divisor >= 6 * kMultiprocessors
                      ? lines
                      : std::max(q.segment, std::min(lines, kFewest));
    else if (kLines <= 3 && q.segment > most)
      q.segment = int(CeilDiv(lines, CeilDiv(lines, most)));
    q.segments = FastDiv(CeilDiv(lines, q.segment));
    q.units = int(columns * q.segments.divisor);
    if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return 0;
    return int64_t{q.units} * q.slabs.count.divisor;
  }
};

// Adds up so many channels of each pixel: pairs, into their first values, and lanes side by side.
template <int kStrip>
__device__ void AddChannels(float2 (&sums)[kStrip], int channels) {
#pragma unroll
  for (int j = 0; j < kStrip; ++j) sums[j].x += sums[j].y;
#pragma unroll 1
  for (int lanes = channels / 4; lanes > 0; lanes /= 2)
#pragma unroll
    for (int j = 0; j < kStrip; ++j) sums[j].x += __shfl_xor_sync(~0u, sums[j].x, lanes);
}

// kEdges: with what is beyond edges, where that is not zeros. kPhased: of one phase of several.
template <class R, class T, class L, bool kEdges, bool kPhased>
__global__ void __launch_bounds__(kDepthwiseThreads, R::kBlocks)
    RingKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  using Copy = typename R::template Copy<L, kEdges>;
  constexpr int kLines = R::kLines, kColumns = R::kColumns, kStride = R::kStride, kStrip = R::kStrip, kSums = R::kSums,
                kStages = R::template kStages<L>, kStage = Copy::kBytes;
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = p.slabs.width, within = lane / width;
  int slab, strips, segment, plane, phase = 0, column_phase = 0;
  int image = p.slabs.count.Div(static_cast<int>(blockIdx.x) * kDepthwiseWarps + warp, &slab);
  if (image >= p.units) return;
  image = p.planes.Div(image, &plane);
  if constexpr (kPhased) {
    image = p.phases.Div(image, &phase);
    phase = p.column_phases.Div(phase, &column_phase);
  }
  image = p.strips.Div(image, &strips);
  image = p.segments.Div(image, &segment);
  const int64_t problem = p.images.Div(image);
  constexpr bool kSummed = L::kPairing == Pairing::kSummed;
  const int features = static_cast<int>(p.features.divisor), channels = p.channels * (kSummed ? features : 1);
  const int pair = slab * width + lane % width, channel = min(2 * pair, channels - 2);
  const int tile0 = strips * (32 / width) * kStrip, column0 = tile0 + within * kStrip;
  const auto lattice = [&](int d, int phase) {
    return kPhased ? p.at[d].LatticeAt(phase, p.whole[d].origin) : p.at[d].Undilated(p.whole[d].origin);
  };
  const Lattice down = lattice(1, phase), across = lattice(2, column_phase);
  // Of the pairs of a sum, the first stores it.
  const bool stores = 2 * pair < channels && (!kSummed || 2 * pair % features == 0);
  const int columns = stores ? across.count - column0 : 0;
  const int line0 = segment * p.segment, lines = min(p.segment, down.count - line0);
  if (lines <= 0) return;

  // Steps are lines of results, and begin with those that are other segments'. Lines of the operand that are zeros
  // add nothing: the first steps that have only such are left out, and the last have no products.
  const int in_line = down.start + kStride * line0, steps = lines + kSums - 1;
  const bool all = kEdges && p.edges[1].mapped;
  const int begin = all ? 0 : min(max(-in_line / kStride, 0), kSums - 1);
  const int end = all ? steps : max(min((down.extent - in_line + kStride - 1) / kStride, steps), begin);
  const int end_line = min(in_line + kStride * end, down.extent);
  const int in_column = across.start + kStride * tile0, chunk0 = L::FirstChunk(slab, width, p.features);
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const Copy copy(in_column, width, kStride * kStrip, kEdges ? p.edges[2] : Edges{across.extent}, chunk0, p.in_pixel,
                  p.in_step[2]);
  const bool plane_inside = in_plane >= 0 && in_plane < p.at[0].axis.extent;
  int ahead = in_line + kStride * begin;
  const char* const first = in + image * p.in_image + in_plane * p.in_line[0] + down.element * p.in_line[1] +
                            int64_t{across.element} * p.in_pixel + chunk0 + copy.Offset();
  const char* from = first + ahead * p.in_step[1];
  char* const ring = shared + warp * kStages * kStage;
  const uint32_t to_ring = SharedAddress(ring);
  const auto copy_line = [&](int stage) {
    if constexpr (kEdges) {
      int line = ahead;
      const bool inside = p.edges[1].FindAny(&line) && ahead < in_line + kStride * end && plane_inside;
      copy.Start(to_ring + stage, first + line * p.in_step[1], inside);
    } else {
      copy.Start(to_ring + stage, from, plane_inside && ahead >= 0 && ahead < end_line);
      from += p.in_step[1];
    }
    CommitCopies();
    ++ahead;
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) copy_line(i * kStage);

  // After the copies, which are on their way meanwhile.
  float2 w[kLines][kColumns];
  {
    Pair<T> taps[kLines][kColumns];
    LoadTaps<T, false>(p, p.whole, FirstTap<T>(p, p.whole, filter, problem, channel), 1, true, taps);
    WidenTaps<T>(p, reinterpret_cast<const Pair<T>(&)[kLines * kColumns]>(taps),
                 reinterpret_cast<float2(&)[kLines * kColumns]>(w));
  }

  const float2 bias = kSummed ? float2{} : BiasOf<T>(p, problem * p.channels + channel, true);
  float2 sums[kSums][kStrip];
#pragma unroll
  for (int k = 0; k < kSums; ++k)
#pragma unroll
    for (int j = 0; j < kStrip; ++j) sums[k][j] = bias;
  const auto up = [&](int k) {
#pragma unroll
    for (int j = 0; j < kStrip; ++j) sums[k][j] = k > 0 ? sums[k - 1][j] : bias;
  };
  const char* to = out + image * p.out_image + plane * p.out_line[0] + down.first * p.out_line[1] +
                   across.first * p.out_line[2] + int64_t{line0 - (kSums - 1) + begin} * p.out_step[1] +
                   int64_t{column0} * p.out_step[2] +
                   (kSummed ? p.features.Div(channel) : channel) * (p.widened ? sizeof(float) : sizeof(T));
  const auto store = [&](int step) {
    if (step >= kSums - 1) {
      if (kSummed) AddChannels(sums[kSums - 1], features);
      ClampAll(p, sums[kSums - 1]);
      WithOut<T>(p.widened, [&](auto type) {
        const char* at = to;
#pragma unroll
        for (int j = 0; j < kStrip; ++j) {
          if (j < columns)
            StorePair<typename decltype(type)::type, !kSummed>(const_cast<char*>(at), sums[kSums - 1][j], !kSummed);
          at += static_cast<int>(p.out_step[2]);
          Keep(at);
        }
      });
    }
    to += p.out_step[1];
  };

  const char* const own = ring + L::Within(slab, width, lane, p.features);
  int stage = 0, before = (kStages - 1) * kStage;
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
#pragma unroll
    for (int a = 0; a < kStride; ++a) {
      WaitForCopies<kStages - 2>();
      __syncwarp();
      float2 x[R::kWidth];
#pragma unroll
      for (int i = 0; i < R::kWidth; ++i) x[i] = L::Read(own + stage + i * L::kPixelBytes);
      copy_line(before);
      before = stage;
      stage = stage == (kStages - 1) * kStage ? 0 : stage + kStage;
      // Tap a + kStride k of the results `k` lines up.
#pragma unroll
      for (int k = kSums - 1; k >= 0; --k) {
        const int r = a + kStride * k;
        if (a == 0) up(k);
        if (r >= kLines) continue;
#pragma unroll
        for (int s = 0; s < kColumns; ++s)
#pragma unroll
          for (int j = 0; j < kStrip; ++j) MultiplyAdd(sums[k][j], w[r][s], x[j * kStride + s]);
      }
    }
    store(step);
  }
#pragma unroll 1
  for (int step = end; step < steps; ++step) {
#pragma unroll
    for (int k = kSums - 1; k >= 0; --k) up(k);
    store(step);
  }
}

}  // namespace jaxdnn::conv::depthwise
