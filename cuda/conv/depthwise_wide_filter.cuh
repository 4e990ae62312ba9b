// Filter gradient of depthwise convolution in large windows without stride, of 16-bit floats, as products of strips:
// depthwise_band_filter.cuh says of what, and depthwise_wide.cuh how they lie in shared memory.
//
// A warp has one channel, and of some lines of the window all sums: rows of 16 kSteps pixels of x times eight of y. It
// goes through sets of strips, x and y together; the last sets of y stay in registers, each of which meets the set of x
// at a line of the window. The block's sums of each tap come together in shared memory.
#pragma once

#include "cuda/conv/depthwise_filter.cuh"
#include "cuda/conv/depthwise_wide.cuh"

namespace jaxdnn::conv::depthwise {

// Windows of up to 16 kSteps - 7 columns.
template <int kSteps_>
struct WideTaps {
  static constexpr int kSteps = kSteps_, kColumns = 16 * kSteps - 7;
  static constexpr int kWarps = WideTile::kChannels, kThreads = 32 * kWarps, kHeld = 8;  // lines of the window at once
  static constexpr int kSumPitch = 9, kSum = 16 * kSteps * kSumPitch;                    // floats of a line's sums
  static_assert(2 * kSteps + 1 <= 8, "as many matrices as a warp loads twice");

  static WideTile Tile(const FilterParams& q) {
    const WideTile whole(q.at, q.channels, kSteps, WideTile::kSets);
    const int64_t sets = std::max<int64_t>(CeilDiv(q.at[1].out, whole.beside), 1);
    // Blocks that are equally high.
    return WideTile(q.at, q.channels, kSteps, int(CeilDiv(sets, CeilDiv(sets, WideTile::kSets))));
  }
  // Sets how the work is shared out.
  static Grid Share(FilterParams& q, const Problem& p, const WideTile& t) {
    const int64_t slabs = p.batch * t.chunks.divisor, places = std::max<int64_t>(kMultiprocessors / slabs, 1);
    q.units = int(p.images * q.at[0].out * t.blocks.divisor * t.tiles.divisor);
    q.splits = int(std::clamp<int64_t>(q.units, 1, std::min<int64_t>(places, q.splits)));
    const int taps = q.at[1].window * q.at[2].window;
    const size_t planes = t.PlaneBytes() + t.Lines() * t.PitchY();
    return {slabs * q.splits, kThreads, WideTile::kChannels * (planes + taps * sizeof(float)) + kWarps * kSum * 4};
  }
};

// What a block goes through.
struct WideUnit {
  int image, plane, line, column, x_plane;  // of y; the image counts through all problems
  bool inside;                              // whether its plane of x is

  __device__ WideUnit(const FilterParams& p, const WideTile& t, int problem, int id) {
    int rest = t.tiles.Div(id, &column);
    rest = t.blocks.Div(rest, &line);
    image = t.planes.Div(rest, &plane) + problem * static_cast<int>(p.images.divisor);
    column *= t.Columns();
    line *= t.Lines();
    x_plane = p.at[0].axis.Origin(plane);
    inside = static_cast<unsigned>(x_plane) < static_cast<unsigned>(p.at[0].axis.extent);
  }
};

template <class W, class T>
__global__ void __launch_bounds__(W::kThreads, 1)
    WideFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ WideTile t, const char* x,
                     const char* y, float* partial, char* out) {
  constexpr int kSteps = W::kSteps, kHeld = W::kHeld, kChannels = WideTile::kChannels;
  extern __shared__ __align__(16) char shared[];
  int chunk;
  const int rest = t.chunks.Div(static_cast<int>(blockIdx.x), &chunk), split = rest % p.splits,
            problem = rest / p.splits;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  const int channel0 = chunk * kChannels, window = p.at[1].window, columns = p.at[2].window;
  const int x_bytes = t.PlaneBytes(), y_bytes = t.Lines() * t.PitchY();
  char* const shared_y = shared + kChannels * x_bytes;
  float* const taps = reinterpret_cast<float*>(shared_y + kChannels * y_bytes);  // of all channels side by side
  float* const own = taps + kChannels * window * columns + warp * W::kSum;
  for (int i = thread; i < kChannels * window * columns; i += W::kThreads) taps[i] = 0;

  const uint32_t rows_x = SetRow(t, shared + warp * x_bytes),
                 rows_y = SetRow(t, shared_y + warp * y_bytes, t.PitchY(), lane / 8 % 2);
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    const WideUnit unit(p, t, problem, id);
    const int x_line0 = p.at[1].axis.offset + unit.line;
    if (!unit.inside) continue;
    __syncthreads();
    LoadPlanes<T>(shared, x_bytes, t.pairs, t.in_lines,
                  x + unit.image * p.x_image + unit.x_plane * p.x_line[0] + channel0 * sizeof(T), x_line0,
                  p.at[2].axis.offset + unit.column, p.at[1].axis.extent, p.at[2].axis.extent, p.x_line[1], p.x_pixel);
    LoadPlanes<T>(shared_y, y_bytes, t.pairs_y, t.Lines(),
                  y + unit.image * p.y_image + unit.plane * p.y_line[0] + channel0 * sizeof(T), unit.line, unit.column,
                  p.at[1].out, p.at[2].out, p.y_line[1], p.y_pixel);
    __syncthreads();
#pragma unroll 1
    for (int phase = 0; phase < min(t.beside, window); ++phase) {
      const int steps = (window - 1 - phase) / t.beside + 1;  // lines of the window of this phase
#pragma unroll 1
      for (int first = 0; first < steps; first += kHeld) {
        const int count = min(kHeld, steps - first);
        float sums[kHeld][kSteps][4] = {};
        // Set i of y is in place i % kHeld.
        uint32_t held[kHeld][2] = {};
#pragma unroll 1
        for (int i0 = 0; i0 < t.sets + count - 1; i0 += kHeld) {
#pragma unroll
          for (int place = 0; place < kHeld; ++place) {
            const int i = i0 + place, line = phase + t.beside * (first + i);
            if (i >= t.sets + count - 1) break;
            if (i < t.sets) {
              uint32_t set[4];
              LoadMatrices<true>(set, rows_y + i * t.beside * t.PitchY());
              held[place][0] = set[0];
              held[place][1] = set[1];
            }
            if (x_line0 + line + t.beside <= 0 || x_line0 + line >= p.at[1].axis.extent) continue;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
              uint32_t a[4];
              LoadMatrices<true>(a, rows_x + line * t.pitch + 32 * k);
#pragma unroll
              for (int j = 0; j < kHeld; ++j) {
                const auto& of = held[(place - j + kHeld) % kHeld];
                if (j < count && static_cast<unsigned>(i - j) < static_cast<unsigned>(t.sets))
                  Mma<T>(sums[j][k], a, of[0], of[1]);
              }
            }
          }
        }
        // Those of one tap are a diagonal.
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
          __syncwarp();
#pragma unroll
          for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              own[(16 * k + row + i / 2 * 8) * W::kSumPitch + 2 * pair + i % 2] = sums[j][k][i];
          __syncwarp();
          for (int s = lane; j < count && s < columns; s += 32) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < 8; ++n) sum += own[(s + n) * W::kSumPitch + n];
            taps[((phase + t.beside * (first + j)) * columns + s) * kChannels + warp] += sum;
          }
        }
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < window * columns * kChannels / 2; i += W::kThreads) {
    const int tap = i / (kChannels / 2), channel = channel0 + i % (kChannels / 2) * 2;
    const auto add_all = [&](int of, float& sum) {
#pragma unroll 1
      for (int id = split; id < p.units; id += p.splits) {
        const WideUnit unit(p, t, problem, id);
        if (unit.inside)
          AddTerms<T>(p, x, y, unit.image, unit.plane, unit.line, unit.line + t.Lines(), unit.column,
                      unit.column + t.Columns(), 0, tap / columns, tap % columns, of, sum);
      }
    };
    StoreFinite<T>(p, reinterpret_cast<const float2*>(taps)[i], add_all, split,
                   int64_t{problem} * window * columns + tap, channel, partial, out);
  }
}

}  // namespace jaxdnn::conv::depthwise
