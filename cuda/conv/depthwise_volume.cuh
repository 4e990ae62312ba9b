// Depthwise convolution of 16-bit floats with a window of 3x3x3, its sums as in depthwise_slide.cuh. For float32 that
// kernel is as fast: twice the bytes pass through shared memory. What bounds it is how many instructions are issued, so
// that a block has two planes of results: what it loads and converts of four planes of the operand serves both.
#pragma once

#include "cuda/conv/depthwise_data.cuh"
#include "cuda/conv/depthwise_volume_tile.cuh"

namespace jaxdnn::conv::depthwise {

template <class T>
struct Volume {
  static constexpr int kPlanes = 2, kSeen = kPlanes + VolumeTile::kTaps - 1;  // of results, and of the operand

  static bool Takes(const DataParams& q, const VolumeTile& tile) {
    const auto is_plain = [](const PhasedAxis& at) {
      return at.MaxTaps() == VolumeTile::kTaps && at.stride == 1 && at.pitch == 1 && at.phases == 1 &&
             at.axis.step.divisor == 1;
    };
    return IsBiasAlone(q.epilogue) && is_plain(q.at[0]) && is_plain(q.at[1]) && is_plain(q.at[2]) && tile.Fits() &&
           CanShare(SharedBytes(tile));
  }

  // Sets how the work is shared out between blocks, and returns how many there are.
  static int64_t Share(DataParams& q, const Problem& p, const VolumeTile& tile) {
    const int lines = std::max(q.at[1].MaxCount(), 1);
    q.slabs.count = FastDiv(CeilDiv(q.channels, 2 * tile.width));
    q.planes = FastDiv(CeilDiv(q.at[0].MaxCount(), kPlanes));
    q.strips = FastDiv(CeilDiv(q.at[2].MaxCount(), VolumeTile::kStrip * tile.strips));
    const int64_t columns = p.batch * p.images * int64_t{q.slabs.count.divisor} * q.planes.divisor * q.strips.divisor;
    // Segments have lines in common, and it takes some lines' time to fill a ring.
    constexpr int kStart = VolumeTile::kTaps - 1 + 3;
    int64_t least = INT64_MAX;
    for (int count = 1; count <= lines; ++count) {
      const int segment = int(CeilDiv(lines, count));
      const int64_t steps = CeilDiv(columns * CeilDiv(lines, segment), tile.Places()) * (segment + kStart);
      if (steps < least) q.segment = segment, least = steps;
    }
    q.segments = FastDiv(CeilDiv(lines, q.segment));
    if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return 0;
    return columns * q.segments.divisor;
  }

  static size_t SharedBytes(const VolumeTile& tile) {
    return size_t{VolumeTile::kStages * kSeen} * tile.Pixels() * tile.width * sizeof(Pair<T>);
  }
};

template <class T>
__global__ void __launch_bounds__(VolumeTile::kMostThreads, 1)
    VolumeKernel(const __grid_constant__ DataParams p, const __grid_constant__ VolumeTile tile, const char* in,
                 const char* filter, char* out) {
  constexpr int kTaps = VolumeTile::kTaps, kStrip = VolumeTile::kStrip, kStages = VolumeTile::kStages,
                kWidth = kStrip + kTaps - 1, kPlanes = Volume<T>::kPlanes, kSeen = Volume<T>::kSeen;
  extern __shared__ __align__(16) char shared[];
  int slab, lane;
  const auto [strips, segment, planes, image] = Locate(p, p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab));
  const int64_t problem = p.images.Div(image);
  const int within = tile.pairs.Div(static_cast<int>(threadIdx.x), &lane), pair = slab * tile.width + lane;
  const int tile0 = strips * tile.strips * kStrip, column0 = tile0 + within * kStrip;
  const bool there = within < tile.strips && 2 * pair < p.channels;
  const int columns = there ? p.whole[2].count - column0 : 0, channel = there ? 2 * pair : 0;
  const int line0 = segment * p.segment, lines = min(p.segment, p.whole[1].count - line0);

  const int plane = planes * kPlanes, in_plane = p.whole[0].origin + plane, in_column = p.whole[2].origin + tile0;
  const int chunk0 = slab * tile.width * static_cast<int>(sizeof(Pair<T>)), in_lines = p.at[1].axis.extent;
  const VolumeCopy<T> copy(tile, tile.Pixels(), in_column, p.at[2].axis.extent, chunk0, p.in_pixel);
  const int stage_bytes = kSeen * copy.bytes;
  int ahead = p.whole[1].origin + line0;
  const int end_line = min(ahead + lines + kTaps - 1, in_lines);
  const char* from = in + image * p.in_image + in_plane * p.in_line[0] + ahead * p.in_line[1] +
                     int64_t{in_column} * p.in_pixel + chunk0;
  const uint32_t ring = SharedAddress(shared);
  const unsigned planes_inside = PlanesInside<kSeen>(in_plane, p.at[0].axis.extent);
  const auto copy_lines = [&](int stage) {
    const bool inside = ahead >= 0 && ahead < end_line;
    copy.template Start<kSeen>(ring + stage, from, p.in_line[0], inside ? planes_inside : 0);
    CommitCopies();
    from += p.in_line[1];
    ++ahead;
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) copy_lines(i * stage_bytes);

  float2 w[kTaps][kTaps][kTaps];
  {
    const char* const tap = FirstTap<T>(p, p.whole, filter, problem, channel);
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
  const float2 bias = BiasOf<T>(p, problem * p.channels + channel, true);
  float2 sums[kPlanes][kTaps][kStrip] = {};

  const int pitch = tile.width * static_cast<int>(sizeof(Pair<T>)), out_column = static_cast<int>(p.out_line[2]);
  const char* const own = shared + (there ? within * kStrip * pitch + lane * static_cast<int>(sizeof(Pair<T>)) : 0);
  char* to = out + image * p.out_image + plane * p.out_line[0] + int64_t{line0 - (kTaps - 1)} * p.out_line[1] +
             int64_t{column0} * p.out_line[2] + channel * (p.widened ? sizeof(float) : sizeof(T));
  int stage = 0, before = (kStages - 1) * stage_bytes;
#pragma unroll 1
  for (int step = 0; step < lines + kTaps - 1; ++step) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    copy_lines(before);
#pragma unroll
    for (int seen = 0; seen < kSeen; ++seen) {
      float2 x[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        x[i] = ToFloats<T>(*reinterpret_cast<const Pair<T>*>(own + stage + seen * copy.bytes + i * pitch));
#pragma unroll
      for (int o = 0; o < kPlanes; ++o) {
        const int d = seen - o;
        if (d < 0 || d >= kTaps) continue;
        auto& of = sums[o];
#pragma unroll
        for (int k = kTaps - 1; k >= 0; --k) {
#pragma unroll
          for (int j = 0; d == 0 && j < kStrip; ++j) of[k][j] = k > 0 ? of[k - 1][j] : bias;
#pragma unroll
          for (int s = 0; s < kTaps; ++s)
#pragma unroll
            for (int j = 0; j < kStrip; ++j) MultiplyAdd(of[k][j], w[d][k][s], x[j + s]);
        }
      }
    }
    if (step >= kTaps - 1) {
      WithOut<T>(p.widened, [&](auto type) {
#pragma unroll
        for (int o = 0; o < kPlanes; ++o)
          StoreStrip<typename decltype(type)::type, true>(
              to + o * p.out_line[0], out_column, plane + o < p.whole[0].count ? columns : 0, sums[o][kTaps - 1], true);
      });
    }
    to += p.out_line[1];
    before = stage;
    stage = stage == (kStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
  }
}

}  // namespace jaxdnn::conv::depthwise
