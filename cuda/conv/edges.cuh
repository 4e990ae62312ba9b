// Where the elements beyond the edges are.
#pragma once

#include "cuda/conv/frame.h"

namespace jaxdnn::conv {

// A dimension of the operand that windows gather.
struct Edges {
  int extent, sign, low, high;
  bool mapped;  // or zeros beyond

  // Replaces a position beyond an edge by the element that is read there, if there is one. Of positions further out
  // than windows reach that may be one beyond an edge again.
  __device__ bool Find(int* at) const {
    const bool inside = static_cast<unsigned>(*at) < static_cast<unsigned>(extent);
    const int beyond = sign * *at + (*at < 0 ? low : high);
    if (!inside) *at = beyond;
    return inside || mapped;
  }

  // As Find, of any position at all.
  __device__ bool FindAny(int* at) const {
    return Find(at) && static_cast<unsigned>(*at) < static_cast<unsigned>(extent);
  }
};

inline Edges InputEdges(const Problem& p, int d) {
  const int n = int(p.x[d]);
  switch (p.mode[d]) {
    case PadMode::kReflect:
      return {n, -1, 0, 2 * (n - 1), true};
    case PadMode::kReplicate:
      return {n, 0, 0, n - 1, true};
    case PadMode::kCircular:
      return {n, 1, n, -n, true};
    default:
      return {n, 0, 0, 0, false};
  }
}

// Of the operand that kernels gather which do all of such a problem: x, or y of a data gradient, which is circular and
// without strides there, and so a circular convolution of y.
inline Edges OperandEdges(const Problem& p, int d) {
  const Reach reach = ReachOf(p, d);
  Edges edges = InputEdges(p, d);
  edges.mapped = reach.low > 0 || reach.high > 0;
  if (p.direction == Direction::kDataGradient) edges.extent = int(p.y[d]);
  return edges;
}

}  // namespace jaxdnn::conv
