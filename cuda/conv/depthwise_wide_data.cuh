// Forward and data gradient of depthwise convolution in large windows without stride, of 16-bit floats, as products
// with band matrices (depthwise_band.cuh says what these are). A line of the window is some matrices of 16x8, one below
// the other, and the window has more lines than there could be sums in registers: a warp keeps its results instead, of
// one channel, and goes through the lines of the operand.
//
// A block has eight channels, whose pixels it brings into shared memory in planes, so that neighbours of one channel
// lie side by side and ldmatrix reads a product's rows. Rows are strips of 16 results, in one line or in `beside`
// lines: so many lines lie between the results of a warp's kSums products, and between the lines of the window that
// these meet with the same rows. With the next rows each of them meets what its neighbour met before: matrices move
// through registers, and only one line of the window is loaded for all.
//
// Results that are not finite are computed again, as zeros of a band do not make up for an infinity or NaN.
#pragma once

#include "cuda/conv/depthwise_data.cuh"
#include "cuda/conv/depthwise_wide.cuh"

namespace jaxdnn::conv::depthwise {

// Windows of up to 16 kSteps - 7 columns.
template <int kSteps_>
struct Wide {
  static constexpr int kSteps = kSteps_, kColumns = 16 * kSteps - 7;
  static_assert(2 * kSteps + 1 <= 8, "as many matrices as a warp loads twice");

  static WideTile Tile(const DataParams& q) { return WideTile(q.at, q.channels, kSteps, WideTile::kSets); }
  static Grid GridOf(const DataParams& q, const Problem& p, const WideTile& t) {
    const int64_t blocks = p.batch * p.images * q.at[0].out * t.blocks.divisor * t.tiles.divisor * t.chunks.divisor;
    const size_t planes = t.PlaneBytes() + size_t(q.at[1].window) * WideTile::kLineTaps * 4;
    return {blocks, WideTile::kThreads,
            WideTile::kChannels * std::max(planes, WideTile::kStagedChannel * sizeof(float))};
  }
};

template <int kSteps, class T>
__global__ void __launch_bounds__(WideTile::kThreads, 1)
    WideKernel(const __grid_constant__ DataParams p, const __grid_constant__ WideTile t, const char* in,
               const char* filter, char* out) {
  constexpr int kThreads = WideTile::kThreads, kChannels = WideTile::kChannels, kSums = WideTile::kSums;
  extern __shared__ __align__(16) char shared[];
  int chunk, tile, line_block, plane;
  int image = t.chunks.Div(static_cast<int>(blockIdx.x), &chunk);
  image = t.tiles.Div(image, &tile);
  image = t.blocks.Div(image, &line_block);
  image = t.planes.Div(image, &plane);
  const int64_t problem = p.images.Div(image);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  const int column0 = tile * t.Columns(), line0 = line_block * t.Lines(), channel0 = chunk * kChannels;
  const int lines = p.at[1].axis.extent, columns = p.at[2].axis.extent, taps = p.whole[1].taps;
  const int in_line0 = p.whole[1].origin + line0, in_column0 = p.whole[2].origin + column0;
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const bool inside = static_cast<unsigned>(in_plane) < static_cast<unsigned>(p.at[0].axis.extent);
  const int plane_bytes = t.PlaneBytes();
  char* const tap_tables = shared + kChannels * plane_bytes;

  LoadPlanes<T>(shared, plane_bytes, t.pairs, t.in_lines,
                in + image * p.in_image + in_plane * p.in_line[0] + channel0 * sizeof(T), in_line0, in_column0,
                inside ? lines : 0, columns, p.in_line[1], p.in_pixel);
  for (int i = thread; i < kChannels * taps * WideTile::kLineTaps; i += kThreads)
    reinterpret_cast<uint32_t*>(tap_tables)[i] = 0;
  __syncthreads();
  const int table_bytes = taps * WideTile::kLineTaps * 4;
  {
    const char* const w_from = FirstTap<T>(p, p.whole, filter, problem, channel0);
#pragma unroll 2
    for (int i = thread; i < taps * p.whole[2].taps; i += kThreads) {
      const int r = i / p.whole[2].taps, s = i % p.whole[2].taps;
      const Packed<T, kChannels> w = LoadConstant(reinterpret_cast<const Packed<T, kChannels>*>(
          w_from + r * p.whole[1].tap_step * p.filter_tap[1] + s * p.whole[2].tap_step * p.filter_tap[2]));
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        auto* to = reinterpret_cast<uint16_t*>(tap_tables + c * table_bytes + r * WideTile::kLineTaps * 4) +
                   2 * WideTile::kBeforeTaps + s;
        const uint16_t bits = static_cast<uint16_t>(w.v[c / 2] >> (c % 2 * 16));
        to[0] = bits;
        to[2 * WideTile::kOddTaps - 1] = bits;
      }
    }
  }
  __syncthreads();

  const int channel = warp % kChannels, part = warp / kChannels;
  float sums[kSums][4] = {};
  {
    const uint32_t rows = SetRow(t, shared + channel * plane_bytes + part * kSums * t.beside * t.pitch);
    const int first_tap = 2 * pair - row;  // of the thread's column of the band
    const char* const own_taps = tap_tables + channel * table_bytes +
                                 ((first_tap & 1) * WideTile::kOddTaps + WideTile::kBeforeTaps + (first_tap >> 1)) * 4;
#pragma unroll 1
    for (int phase = 0; phase < min(t.beside, taps); ++phase) {
      const int steps = (taps - 1 - phase) / t.beside + 1;  // lines of the window of this phase
      // Line i of the phase is in place i % kSums.
      uint32_t band[kSums][2 * kSteps] = {};
#pragma unroll 1
      for (int i0 = 0; i0 < steps + kSums - 1; i0 += kSums) {
#pragma unroll
        for (int place = 0; place < kSums; ++place) {
          const int i = i0 + place, line = phase + t.beside * i;
          const int in_line = in_line0 + part * kSums * t.beside + line;
          if (i >= steps + kSums - 1) break;
#pragma unroll
          for (int k = 0; k < 2 * kSteps; ++k)
            if (i < steps)
              band[place][k] = *reinterpret_cast<const uint32_t*>(own_taps + line * WideTile::kLineTaps * 4 + k * 16);
          if (in_line + t.beside <= 0 || in_line >= lines) continue;
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            uint32_t x[4];
            LoadMatrices<false>(x, rows + line * t.pitch + 32 * k);
#pragma unroll
            for (int j = 0; j < kSums; ++j) {
              const auto& of = band[(place - j + kSums) % kSums];
              if (static_cast<unsigned>(i - j) < static_cast<unsigned>(steps))
                Mma<T>(sums[j], x, of[2 * k], of[2 * k + 1]);
            }
          }
        }
      }
    }
  }

  // Channels come together.
  __syncthreads();
  float* const staged = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < kSums; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(staged + channel * WideTile::kStagedChannel +
                                 ((part * kSums + j) * WideTile::kStrips + row) * WideTile::kStaged + 8 * half +
                                 2 * pair) = {sums[j][2 * half], sums[j][2 * half + 1]};
  __syncthreads();
  constexpr int kPixels = WideTile::kParts * kSums * WideTile::kStrips * WideTile::kStrip;
#pragma unroll 1
  for (int pixel = thread; pixel < kPixels; pixel += kThreads) {
    const int strip = pixel / WideTile::kStrip, column = column0 + (pixel & (t.Columns() - 1)),
              line = line0 + (strip >> t.across_bits);
    if (line >= p.whole[1].count || column >= p.whole[2].count) continue;
    float v[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
      v[c] = staged[c * WideTile::kStagedChannel + strip * WideTile::kStaged + pixel % WideTile::kStrip];
    StoreEight<T>(p, in, filter, out, problem, image, plane, line, column, channel0, v);
  }
}

}  // namespace jaxdnn::conv::depthwise
