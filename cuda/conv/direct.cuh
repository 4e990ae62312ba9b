// What the direct kernels (direct_plan.h) have in common.
#pragma once

#include <type_traits>

#include "cuda/common/tensor_map.h"
#include "cuda/conv/direct_plan.h"

namespace jaxdnn::conv {

// Boxes of an array [images, height, width, pixel], of a group's channels, as many as `line` bytes hold: what fills
// them up are zeros. Groups are an array of their own; or they are merged, which leaves none half in a box.
inline cudaError_t EncodeGroups(CUtensorMap* map, DType type, const void* data, int64_t pixel, int64_t groups,
                                bool merged, const int64_t (&extent)[2], int64_t images, int line, int columns,
                                int lines, int box_images) {
  const int64_t row = pixel * extent[1], channels = merged ? pixel : pixel / groups;
  return EncodeBoxes(map, type, data, {channels, pixel / channels, extent[1], extent[0], images},
                     {line / int(SizeOf(type)), 1, columns, lines, box_images}, true, false,
                     {channels, pixel, row, row * extent[0]});
}

// From one group to the next, in such a map's first two dimensions.
struct GroupSteps {
  int channels, groups;

  GroupSteps() = default;
  explicit GroupSteps(const DirectGroups& of)
      : channels(of.merged > 1 ? int(of.channels) : 0), groups(of.merged > 1 ? 0 : 1) {}
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
