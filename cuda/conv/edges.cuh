// Where the elements beyond the edges are.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// A dimension of the operand that windows gather.
struct Edges {
  int extent, sign, low, high;
  bool mapped;  // or zeros beyond

  // Replaces a position beyond an edge by the element that is read there, if there is one.
  __device__ bool Find(int* at) const {
    const bool inside = static_cast<unsigned>(*at) < static_cast<unsigned>(extent);
    const int beyond = sign * *at + (*at < 0 ? low : high);
    if (!inside) *at = beyond;
    return inside || mapped;
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

}  // namespace jaxdnn::conv
