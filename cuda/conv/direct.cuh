// What the direct kernels (direct_plan.h) have in common.
#pragma once

#include <type_traits>

#include "cuda/common/tensor_map.h"
#include "cuda/conv/direct_plan.h"

namespace jaxdnn::conv {

// Boxes of as many channels as `line` bytes hold: what fills them up are zeros. Further dimensions are groups, residues
// or planes, of which a box has one, columns, lines and images, so many elements apart.
inline cudaError_t EncodeArray(CUtensorMap* map, DType type, const void* data, int64_t channels,
                               const int64_t (&extents)[4], const int64_t (&apart)[4], int line, const int (&box)[3]) {
  return EncodeBoxes(map, type, data, {channels, extents[0], extents[1], extents[2], extents[3]},
                     {line / int(SizeOf(type)), 1, box[0], box[1], box[2]}, true, false,
                     {apart[0], apart[1], apart[2], apart[3]});
}

// From one group to the next, in such a map's first two dimensions.
struct GroupSteps {
  int channels, groups;

  GroupSteps() = default;
  explicit GroupSteps(const DirectGroups& of) : channels(of.merged > 1 ? int(of.channels) : 0), groups(of.Apart()) {}
};

// Calls f with a tile's columns, as a type.
template <class F>
cudaError_t VisitDirectColumns(int columns, const F& f) {
  switch (columns) {
    case 32:
      return f(std::integral_constant<int, 32>());
    case 48:
      return f(std::integral_constant<int, 48>());
    default:
      return f(std::integral_constant<int, 64>());
  }
}

}  // namespace jaxdnn::conv
