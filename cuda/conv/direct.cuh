// What the direct kernels (direct_plan.h) have in common.
#pragma once

#include <type_traits>

#include "cuda/common/tensor_map.h"
#include "cuda/conv/direct_plan.h"

namespace jaxdnn::conv {

// Boxes of an array [images, height, width, groups, channels], of a group's channels, as many as `line` bytes hold:
// what fills them up are zeros.
inline cudaError_t EncodeGroups(CUtensorMap* map, DType type, const void* data, int64_t groups, int64_t channels,
                                const int64_t (&extent)[2], int64_t images, int line, int columns, int lines,
                                int box_images) {
  const int64_t pixel = groups * channels, row = pixel * extent[1];
  return EncodeBoxes(map, type, data, {channels, groups, extent[1], extent[0], images},
                     {line / int(SizeOf(type)), 1, columns, lines, box_images}, true, false,
                     {channels, pixel, row, row * extent[0]});
}

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
