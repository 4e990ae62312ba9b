// What the filter gradient of depthwise convolution with a window of 3x3x3 copies (depthwise_band_filter.cuh): lines of
// neighbouring planes of y, and of as many planes of x and two more. Chunks are of 8 bytes, since channels of video
// networks are often multiples of four alone.
#pragma once

#include "cuda/conv/depthwise_band.cuh"
#include "cuda/conv/depthwise_filter.cuh"

namespace jaxdnn::conv::depthwise {

// Chunks that are equally far apart, in memory and in shared memory; zeros where one is not `there`, or no line inside.
template <int kMost>
struct EvenCopies {
  const char* from;
  uint32_t to;
  unsigned there = 0;

  __device__ void Start(uint32_t stage, int count, int to_apart, int64_t from_apart, bool inside, int64_t line_bytes) {
#pragma unroll
    for (int k = 0; k < kMost; ++k)
      if (k < count) CopyAsync<8>(stage + to + k * to_apart, from + k * from_apart, inside && (there >> k & 1));
    from += line_bytes;
  }
};

// What a thread copies of x and y in the steps of a unit, as BandFilterCopies.
template <class B, class T>
struct VolumeFilterCopies {
  // Two strips at a time: of a run, or of two. What runs of x have at their ends is a chunk of some threads.
  static constexpr int kSets = kBandStrips / 2, kSetsX = kSets + B::kPlanes - 1;
  static_assert(B::kThreads == 2 * kBandStrip * B::kChunks && 2 * B::kChunk == 8);
  const FilterParams& p;
  const BandTile<B>& t;
  EvenCopies<kSetsX> of_x;
  EvenCopies<1> of_ends;
  EvenCopies<kSets> of_y;
  int planes;        // from one set to the next
  int line, y_line;  // of the next step; y's count to those of the longest part

  __device__ VolumeFilterCopies(const FilterParams& p, const BandTile<B>& t, const char* x, const char* y, int problem,
                                int slab, int id)
      : p(p), t(t), planes(2 >> t.across_bits) {
    const int thread = threadIdx.x, chunk = thread % B::kChunks, channel = slab * B::kChannels + B::kChunk * chunk;
    int tile;
    const int group = t.tiles.Div(id, &tile), images = static_cast<int>(p.images.divisor);
    // Neighbouring threads copy pixels that lie in different banks.
    const int of_set = thread / B::kChunks, pixel = of_set / 16 * 16 + of_set % 4 * 4 + of_set % 16 / 4;
    const int run = (pixel / kBandStrip) >> t.across_bits, in_run = pixel & (t.Columns() - 1);
    const BandRun<B> r(t, images, problem, group, tile, run), first(t, images, problem, group, tile, 0);
    line = p.at[1].axis.offset + first.line;
    // What follows a part's last line of y is another part's.
    y_line = max(0, t.lines - (p.at[1].out - first.line));
    const auto is_there = [&](int plane, int column) {
      return channel < p.channels && static_cast<unsigned>(plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
             static_cast<unsigned>(column) < static_cast<unsigned>(p.at[2].axis.extent);
    };
    const auto source = [&](int plane, int column) {
      return x + first.image * p.x_image + plane * p.x_line[0] + int64_t{line} * p.x_line[1] +
             int64_t{column} * p.x_pixel + channel * sizeof(T);
    };
    const int x_plane = p.at[0].axis.Origin(r.plane), x_column = p.at[2].axis.offset + r.column + in_run;
    of_x.from = source(x_plane, x_column);
    of_x.to = t.ChunkAt(run, in_run, chunk);
#pragma unroll
    for (int k = 0; k < kSetsX; ++k) of_x.there |= unsigned{is_there(x_plane + k * planes, x_column)} << k;

    const int end_run = of_set / B::kHalo, end = t.Columns() + of_set % B::kHalo;
    const int end_plane = p.at[0].axis.Origin(first.plane) + end_run, end_column = p.at[2].axis.offset + r.column + end;
    of_ends.from = source(end_plane, end_column);
    of_ends.to = end_run < t.Runs() ? t.ChunkAt(end_run, end, chunk) : ~0u;
    of_ends.there = is_there(end_plane, end_column);

    const int y_column = r.column + in_run;
    of_y.from = y + first.image * p.y_image + r.plane * p.y_line[0] + first.line * p.y_line[1] +
                int64_t{y_column} * p.y_pixel + channel * sizeof(T);
    of_y.to = t.LineBytes() + t.ChunkAt(0, pixel, chunk);
#pragma unroll
    for (int k = 0; k < kSets; ++k)
      of_y.there |= unsigned{channel < p.channels && y_column < p.at[2].out && r.plane + k * planes < t.depth} << k;
  }

  __device__ void Start(uint32_t stage) {
    const bool inside = static_cast<unsigned>(line) < static_cast<unsigned>(p.at[1].axis.extent);
    of_x.Start(stage, t.Runs() / planes, planes * t.RunBytes(), planes * p.x_line[0], inside, p.x_line[1]);
    of_ends.Start(stage, of_ends.to != ~0u, 0, 0, inside, p.x_line[1]);
    of_y.Start(stage, kSets, B::PixelAt(2 * kBandStrip), planes * p.y_line[0], y_line < t.lines, p.y_line[1]);
    ++line;
    ++y_line;
    CommitCopies();
  }
};

}  // namespace jaxdnn::conv::depthwise
