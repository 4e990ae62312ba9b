// What the kernels of few input channels share: tiles, strips in shared memory, and where in them a window's words are.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/mma_tile.cuh"
#include "cuda/conv/strips.h"

namespace jaxdnn::conv {

// Bytes that the array's beginning is a multiple of, as far as it matters.
inline int Alignment(const void* array) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(array);
  return address % 16 == 0 ? 16 : address % 4 == 0 ? 4 : 1;
}

struct StripParams {
  Strips strips;
  int run;                                     // a class's pixels of a line of a tile
  FastDiv run_div, chunks, plane_div;          // of a strip's line; lines of a plane
  FastDiv line_words[2], window_height;        // by class; lines of a plane of a window
  FastDiv tile_columns, tile_lines, y_planes;  // tiles along y's lines, and down a plane; planes of an image
  int tiles;                                   // of a problem
  int x[kRank], y[kRank], stride[kRank], pad[kRank], dilation[kRank];
  int line, step, start;                          // elements of a line of x, between windows, and before the first one
  int window_lines, window_run;                   // lines of a window, and elements of one
  int64_t x_image, x_problem, filter, y_problem;  // elements, but pixels of y
  int features, column_tiles;
};

inline StripParams MakeStripParams(const Problem& p, const Strips& s, int tile_columns) {
  StripParams q = {};
  q.strips = s;
  q.run = s.width / s.classes;
  q.run_div = FastDiv(q.run);
  q.chunks = FastDiv(s.line_bytes / s.copy_bytes);
  q.plane_div = FastDiv(s.plane_lines);
  for (int i = 0; i < 2; ++i) q.line_words[i] = FastDiv(s.line_words[i]);
  const int64_t across = CeilDiv(p.y[2], s.width), down = CeilDiv(p.y[1], s.height);
  q.tile_columns = FastDiv(across);
  q.tile_lines = FastDiv(down);
  q.y_planes = FastDiv(p.y[0]);
  q.tiles = int(p.images * p.y[0] * across * down);
  for (int d = 0; d < kRank; ++d) {
    q.x[d] = int(p.x[d]);
    q.y[d] = int(p.y[d]);
    q.stride[d] = int(p.stride[d]);
    q.pad[d] = int(p.pad[d]);
    q.dilation[d] = int(p.rhs_dilation[d]);
  }
  q.line = int(p.x[2] * p.channels);
  q.step = int(p.stride[2] * p.channels);
  q.start = int(-p.pad[2] * p.channels) - s.lead;
  q.window_lines = int(p.window[0] * p.window[1]);
  q.window_height = FastDiv(p.window[1]);
  q.window_run = int(p.window[2] * p.channels);
  q.x_image = p.XPixels() * p.channels;
  q.x_problem = q.x_image * p.images;
  q.filter = p.Taps() * p.channels * p.features;
  q.y_problem = p.images * p.YPixels();
  q.features = int(p.features);
  q.column_tiles = int(CeilDiv(p.features, tile_columns));
  return q;
}

// Where a tile is: its image, and first pixel of y.
struct StripTile {
  int image, at[kRank];

  __device__ StripTile(const StripParams& q, int tile) {
    int rest = q.tile_columns.Div(tile, &at[2]);
    rest = q.tile_lines.Div(rest, &at[1]);
    image = q.y_planes.Div(rest, &at[0]);
    at[1] *= q.strips.height;
    at[2] *= q.strips.width;
  }

  __device__ int64_t FirstPixel(const StripParams& q) const {
    return ((int64_t{image} * q.y[0] + at[0]) * q.y[1] + at[1]) * q.y[2] + at[2];
  }
  __device__ bool Contains(const StripParams& q, int line, int column) const {
    return at[1] + line < q.y[1] && at[2] + column < q.y[2];
  }
};

// A pixel of a tile, counted class by class.
struct StripPixel {
  int line, column;

  __device__ StripPixel(const StripParams& q, int of_class, int index) {
    line = q.run_div.Div(index, &column);
    column = column * q.strips.classes + of_class;
  }
  // Where its window's words begin in the strips.
  __device__ int Offset(const StripParams& q, int of_class, int size) const {
    return line * q.stride[1] * q.strips.pitch + (q.strips.lead + column * q.step - q.strips.front[of_class]) * size;
  }
};

// A word of a window: its line, and the first of its elements there, -1 where that is in front of the line.
struct StripWord {
  int line, element;

  template <class In>
  static __device__ StripWord Make(const StripParams& q, int of_class, int word) {
    int in_line;
    const int line = q.line_words[of_class].Div(word, &in_line);
    return {line, in_line * int(4 / sizeof(In)) - q.strips.front[of_class]};
  }
  // From a pixel's first word.
  __device__ int Offset(const StripParams& q, int of_class, int size) const {
    int in_plane;
    const int plane = q.window_height.Div(line, &in_plane);
    return (plane * q.strips.plane_lines + in_plane * q.dilation[1]) * q.strips.pitch +
           (element + q.strips.front[of_class]) * size;
  }
};

// Begins to copy `all` elements, or zeros, in pieces of `bytes` (16, 4, or an element): locate(i, elements, &from, &to)
// says where piece i comes from and goes to, and whether it is valid. Elements of 16 bits come through registers,
// several at a time.
template <int kThreads, class In, class Locate>
__device__ __forceinline__ void CopyPieces(int all, int bytes, const In* any, unsigned char* shared,
                                           const Locate& locate) {
  const auto copy = [&](auto elements) {
    constexpr int kElements = decltype(elements)::value;
#pragma unroll 1
    for (int i = threadIdx.x; i < all / kElements; i += kThreads) {
      const In* from;
      int to;
      const bool valid = locate(i, kElements, &from, &to);
      CopyAsync<kElements * sizeof(In)>(SharedAddress(shared + to), valid ? from : any, valid);
    }
  };
  if (bytes == 16) return copy(std::integral_constant<int, kChunk<In>>());
  if (bytes == 4) return copy(std::integral_constant<int, 4 / sizeof(In)>());
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int begin = threadIdx.x; begin < all; begin += kAtOnce * kThreads) {
    unsigned short bits[kAtOnce];
    int to[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const In* from;
      const bool valid = locate(begin + j * kThreads, 1, &from, &to[j]) && begin + j * kThreads < all;
      bits[j] = valid ? *reinterpret_cast<const unsigned short*>(from) : 0;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (begin + j * kThreads < all) *reinterpret_cast<unsigned short*>(shared + to[j]) = bits[j];
  }
}

// Begins to copy a tile's strips, with zeros for what is outside x.
template <int kThreads, class In>
__device__ void FillStrips(const StripParams& q, const In* x, const StripTile& tile, unsigned char* strips) {
  const int first_plane = tile.at[0] * q.stride[0] - q.pad[0], first_line = tile.at[1] * q.stride[1] - q.pad[1];
  const int first = tile.at[2] * q.step + q.start;
  const In* image = x + tile.image * q.x_image;
  CopyPieces<kThreads>(q.strips.lines * q.strips.line_bytes / int(sizeof(In)), q.strips.copy_bytes, x, strips,
                       [&](int i, int elements, const In** from, int* to) {
                         int chunk, in_plane;
                         const int line = q.chunks.Div(i, &chunk);
                         const int plane = first_plane + q.plane_div.Div(line, &in_plane) * q.dilation[0];
                         const int down = first_line + in_plane, element = first + chunk * elements;
                         *to = line * q.strips.pitch + chunk * elements * int(sizeof(In));
                         *from = image + (int64_t{plane} * q.x[1] + down) * q.line + element;
                         return static_cast<unsigned>(plane) < static_cast<unsigned>(q.x[0]) &&
                                static_cast<unsigned>(down) < static_cast<unsigned>(q.x[1]) &&
                                static_cast<unsigned>(element) < static_cast<unsigned>(q.line);
                       });
}

}  // namespace jaxdnn::conv
