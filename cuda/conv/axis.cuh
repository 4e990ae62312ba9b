// How positions, taps and indices of one spatial dimension belong together.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// The element that output position `o` reads at tap `t` is the `index` with
//   index * step = o * stride + t * tap_step + offset,   0 <= index < extent,
// and there is none, hence a zero, where that has no solution: in the padding, in a hole of a dilated input, or, for a
// data gradient, between the windows of a strided convolution.
struct Axis {
  int stride, tap_step, offset, extent;
  FastDiv step;

  __device__ int Origin(int o) const { return o * stride + offset; }

  __device__ bool Find(int position, int* index) const {
    int remainder;
    *index = step.Div(position, &remainder);
    return position >= 0 && remainder == 0 && *index < extent;
  }
};

// Reading x at an output position (forward and filter gradient).
inline Axis InputAxis(const Problem& p, int d) {
  return {int(p.stride[d]), int(p.rhs_dilation[d]), int(-p.pad[d]), int(p.x[d]), FastDiv(p.lhs_dilation[d])};
}

// Reading y at an input position (data gradient): the same equation, solved for the other side.
inline Axis OutputAxis(const Problem& p, int d) {
  return {int(p.lhs_dilation[d]), int(-p.rhs_dilation[d]), int(p.pad[d]), int(p.y[d]), FastDiv(p.stride[d])};
}

// A row-major box of positions: index to coordinates.
struct Box {
  FastDiv plane, row;

  Box() = default;
  template <class Int>
  __host__ __device__ explicit Box(const Int (&extent)[kRank])
      : plane(int64_t{extent[1]} * extent[2]), row(int64_t{extent[2]}) {}

  __device__ void Split(int index, int (&coordinate)[kRank]) const {
    int in_plane;
    coordinate[0] = plane.Div(index, &in_plane);
    coordinate[1] = row.Div(in_plane, &coordinate[2]);
  }
};

}  // namespace jaxdnn::conv
