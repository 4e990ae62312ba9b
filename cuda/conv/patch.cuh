// Patches of an operand of few channels, in shared memory as they lie in memory.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/four.cuh"
#include "cuda/conv/patch_plan.h"

namespace jaxdnn::conv {

// The operand, what of it the pixels of a tile meet, and how tiles are numbered: across, down, planes, images.
struct Patches {
  int in[kRank], out[kRank], step[kRank], pad[kRank], dilation[kRank];
  int channels, rows, width;  // of a tile, in pixels
  int lines, pitch, size;     // of a plane's part of a patch; numbers of a line, and of a patch
  int length;                 // numbers of a window's line
  int tiles;
  FastDiv by_width, by_pitch, by_line, across, down, by_plane;

  Patches(const Problem& p, bool forward, const PatchTiles& t)
      : channels(int(p.DepthChannels())),
        rows(t.rows),
        width(t.width),
        lines(int(t.lines)),
        pitch(int(t.pitch)),
        size(int(p.window[0] * t.lines * t.pitch)),
        length(int(p.window[2]) * channels),
        tiles(int(t.tiles)),
        by_width(width),
        by_pitch(pitch),
        by_line(lines) {
    for (int d = 0; d < kRank; ++d) {
      in[d] = int(forward ? p.x[d] : p.y[d]), out[d] = int(forward ? p.y[d] : p.x[d]);
      step[d] = forward ? int(p.stride[d]) : 1;
      dilation[d] = int(p.rhs_dilation[d]);
      pad[d] = int(forward ? p.pad[d] : (p.window[d] - 1) * p.rhs_dilation[d] - p.pad[d]);
    }
    across = FastDiv(CeilDiv(out[2], width)), down = FastDiv(CeilDiv(out[1], rows)), by_plane = FastDiv(out[0]);
  }

  // Where a tile begins, in pixels of the result.
  struct Place {
    int64_t image;
    int plane, row, column;
  };
  __device__ Place Of(int tile, int64_t first_image) const {
    Place t;
    int right, below;
    t.image = first_image + by_plane.Div(down.Div(across.Div(tile, &right), &below), &t.plane);
    t.row = below * rows, t.column = right * width;
    return t;
  }
  __device__ int64_t Pixel(const Place& t) const {
    return ((t.image * out[0] + t.plane) * out[1] + t.row) * out[2] + t.column;
  }

  // From the first number of a patch to what a pixel of the tile meets there first, and on to a line of the window.
  __device__ int Number(int row, int column) const { return row * step[1] * pitch + column * step[2] * channels; }
  __device__ int Line(int plane, int line) const { return (plane * lines + line * dilation[1]) * pitch; }

  // Asks for a patch, with zeros for the padding.
  __device__ void Bring(const float* operand, const Place& t, float* to) const {
    const int numbers = in[2] * channels, first = (t.column * step[2] - pad[2]) * channels;
    const int first_plane = t.plane * step[0] - pad[0], first_line = t.row * step[1] - pad[1];
    const float* const from = operand + t.image * in[0] * in[1] * numbers;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
      int at, line;
      const int plane = first_plane + by_line.Div(by_pitch.Div(i, &at), &line) * dilation[0];
      line += first_line, at += first;
      const bool inside = static_cast<unsigned>(plane) < static_cast<unsigned>(in[0]) &&
                          static_cast<unsigned>(line) < static_cast<unsigned>(in[1]) &&
                          static_cast<unsigned>(at) < static_cast<unsigned>(numbers);
      CopyAsync<4>(SharedAddress(to + i), from + (int64_t{plane} * in[1] + line) * numbers + at, inside);
    }
  }
};

}  // namespace jaxdnn::conv
