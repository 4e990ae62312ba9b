// Filter gradient of depthwise convolution of floats with a window of 3x3x3 (of 16-bit floats: depthwise_band.cuh). A
// thread has the sums of all taps, and goes down lines of x in three planes and of y in one, the last of which stay in
// registers.
#pragma once

#include "cuda/conv/depthwise_filter.cuh"
#include "cuda/conv/depthwise_volume_tile.cuh"

namespace jaxdnn::conv::depthwise {

template <class T>
struct VolumeTaps {
  static bool Takes(const FilterParams& q, const VolumeTile& tile) {
    const auto is_plain = [](const PhasedAxis& at) {
      return at.window == VolumeTile::kTaps && at.stride == 1 && at.pitch == 1 && at.phases == 1;
    };
    return is_plain(q.at[0]) && is_plain(q.at[1]) && is_plain(q.at[2]) && tile.Fits() && CanShare(SharedBytes(tile));
  }

  // Sets how the work is shared out between blocks, and returns how many there are.
  static int64_t Share(FilterParams& q, const Problem& p, const VolumeTile& tile) {
    const int lines = std::max(q.at[1].out, 1);
    q.slabs.count = FastDiv(CeilDiv(q.channels, 2 * tile.width));
    q.planes = FastDiv(q.at[0].out);
    q.strips = FastDiv(CeilDiv(q.at[2].out, VolumeTile::kStrip * tile.strips));
    const int64_t columns = p.images * int64_t{q.planes.divisor} * q.strips.divisor, slabs = q.slabs.count.divisor;
    const int64_t places = std::clamp<int64_t>(tile.Places() / (p.batch * slabs), 1, q.splits);
    // Segments have lines of x in common, and it takes some lines' time to fill a ring.
    constexpr int kStart = VolumeTile::kTaps - 1 + 3;
    int64_t least = INT64_MAX;
    for (int count = 1; count <= lines; ++count) {
      const int segment = int(CeilDiv(lines, count));
      const int64_t steps = CeilDiv(columns * CeilDiv(lines, segment), places) * (segment + kStart);
      if (steps < least) q.segment = segment, least = steps;
    }
    q.segments = FastDiv(CeilDiv(lines, q.segment));
    q.units = int(columns * q.segments.divisor);
    q.splits = int(std::clamp<int64_t>(q.units, 1, places));
    return p.batch * slabs * q.splits;
  }

  static size_t SharedBytes(const VolumeTile& tile) {
    constexpr int kTaps = VolumeTile::kTaps, kStages = VolumeTile::kStages;
    const size_t pixels = kTaps * tile.Pixels() + tile.strips * VolumeTile::kStrip;
    return std::max(kStages * pixels * tile.width * sizeof(Pair<T>), kTaps * kTaps * tile.threads * sizeof(float2));
  }
};

template <class T>
__global__ void __launch_bounds__(VolumeTile::kMostThreads, 1)
    VolumeFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ VolumeTile tile, const char* x,
                       const char* y, float* partial, char* out) {
  constexpr int kTaps = VolumeTile::kTaps, kStrip = VolumeTile::kStrip, kStages = VolumeTile::kStages,
                kWidth = kStrip + kTaps - 1;
  extern __shared__ __align__(16) char shared[];
  int slab, lane, rest = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
  const int split = rest % p.splits, problem = rest / p.splits;
  const int within = tile.pairs.Div(static_cast<int>(threadIdx.x), &lane), pair = slab * tile.width + lane;
  const bool there = within < tile.strips && 2 * pair < p.channels;
  const int pitch = tile.width * static_cast<int>(sizeof(Pair<T>)), chunk0 = slab * pitch;
  const int x_lines = p.at[1].axis.extent, x_first = p.at[1].axis.offset;
  const uint32_t ring = SharedAddress(shared);
  const char* const own = shared + (there ? within * kStrip * pitch + lane * static_cast<int>(sizeof(Pair<T>)) : 0);

  float2 sums[kTaps][kTaps][kTaps] = {};
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    const auto [strips, segment, plane, image] = Locate(p, id);
    const int column0 = strips * tile.strips * kStrip,
              columns = there ? p.at[2].out - column0 - within * kStrip : kStrip;
    const int line0 = segment * p.segment, lines = min(p.segment, p.at[1].out - line0);
    const int x_plane = p.at[0].axis.offset + plane, x_column = p.at[2].axis.offset + column0;
    const VolumeCopy<T> copy_x(tile, tile.Pixels(), x_column, p.at[2].axis.extent, chunk0, p.x_pixel);
    const VolumeCopy<T> copy_y(tile, tile.strips * kStrip, column0, p.at[2].out, chunk0, p.y_pixel);
    const int stage_bytes = kTaps * copy_x.bytes + copy_y.bytes;
    const unsigned planes_inside = PlanesInside<kTaps>(x_plane, p.at[0].axis.extent);
    const int64_t whole_image = problem * int64_t{p.images.divisor} + image;
    const char* x_at = x + whole_image * p.x_image + x_plane * p.x_line[0] + (x_first + line0) * p.x_line[1] +
                       int64_t{x_column} * p.x_pixel + chunk0;
    const char* y_at =
        y + whole_image * p.y_image + plane * p.y_line[0] + line0 * p.y_line[1] + int64_t{column0} * p.y_pixel + chunk0;
    int ahead = 0;  // the step to copy for next
    const auto copy_step = [&](int stage) {
      const int line = x_first + line0 + ahead;
      const bool inside = ahead < lines + kTaps - 1 && line >= 0 && line < x_lines;
      copy_x.template Start<kTaps>(ring + stage, x_at, p.x_line[0], inside ? planes_inside : 0);
      copy_y.template Start<1>(ring + stage + kTaps * copy_x.bytes, y_at, 0, ahead < lines);
      CommitCopies();
      x_at += p.x_line[1];
      y_at += p.y_line[1];
      ++ahead;
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy_step(i * stage_bytes);

    float2 held[kTaps][kStrip] = {};  // lines of y that a line of x meets
    int stage = 0, before = (kStages - 1) * stage_bytes;
#pragma unroll 1
    for (int step = 0; step < lines + kTaps - 1; ++step) {
      WaitForCopies<kStages - 2>();
      __syncthreads();
      copy_step(before);
#pragma unroll
      for (int j = 0; j < kStrip; ++j) {
#pragma unroll
        for (int h = kTaps - 1; h > 0; --h) held[h][j] = held[h - 1][j];
        held[0][j] = ToFloats<T>(*reinterpret_cast<const Pair<T>*>(own + stage + kTaps * copy_x.bytes + j * pitch));
      }
      // Results that there are not meet no inputs, which may not be finite.
      const bool whole = step >= kTaps - 1 && step < lines && columns >= kStrip;
#pragma unroll
      for (int d = 0; d < kTaps; ++d) {
        float2 wide[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          wide[i] = ToFloats<T>(*reinterpret_cast<const Pair<T>*>(own + stage + d * copy_x.bytes + i * pitch));
        if (whole) {
#pragma unroll
          for (int h = 0; h < kTaps; ++h)
#pragma unroll
            for (int j = 0; j < kStrip; ++j)
#pragma unroll
              for (int s = 0; s < kTaps; ++s) MultiplyAdd(sums[d][h][s], wide[j + s], held[h][j]);
        } else {
#pragma unroll
          for (int h = 0; h < kTaps; ++h) {
            if (step < h || step - h >= lines) continue;
#pragma unroll
            for (int j = 0; j < kStrip; ++j) {
              if (j >= columns) continue;
#pragma unroll
              for (int s = 0; s < kTaps; ++s) MultiplyAdd(sums[d][h][s], wide[j + s], held[h][j]);
            }
          }
        }
      }
      before = stage;
      stage = stage == (kStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
    }
    // The ring is filled anew.
    WaitForCopies<0>();
    __syncthreads();
  }

  // The sums of the strips, tap by tap of a plane.
  float2* const scratch = reinterpret_cast<float2*>(shared);
#pragma unroll
  for (int d = 0; d < kTaps; ++d) {
    __syncthreads();
#pragma unroll
    for (int tap = 0; tap < kTaps * kTaps; ++tap)
      scratch[tap * tile.threads + threadIdx.x] = sums[d][tap / kTaps][tap % kTaps];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kTaps * kTaps * tile.width; i += tile.threads) {
      int of;
      const int tap = tile.pairs.Div(i, &of), channel = 2 * (slab * tile.width + of);
      if (channel >= p.channels) continue;
      float2 sum = {0, 0};
#pragma unroll 4
      for (int u = 0; u < tile.strips; ++u) {
        const float2 term = scratch[tap * tile.threads + u * tile.width + of];
        sum.x += term.x;
        sum.y += term.y;
      }
      StoreSum<T>(p, sum, split, (int64_t{problem} * kTaps + d) * kTaps * kTaps + tap, channel, partial, out);
    }
  }
}

}  // namespace jaxdnn::conv::depthwise
