// Encodes arrays for the TMA unit's im2col mode (pixel_map.h), beside boxes of them.
#pragma once

#include "cuda/common/tensor_map.h"
#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {

// Bytes of a line, the widest that the unit swizzles.
constexpr int kLineBytes = 128;

// Columns of `rows` pixels of an array [images, *extent, channels], one line of channels of each.
inline cudaError_t EncodePixels(CUtensorMap* map, DType type, const void* data, int64_t images,
                                const int64_t (&extent)[kRank], int64_t channels, const PixelMap& pixels, int rows) {
  static const auto encode = FindDriverFunction<decltype(cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t size[5] = {cuuint64_t(channels)}, stride[5] = {0, SizeOf(type) * cuuint64_t(channels)};
  cuuint32_t step[5] = {1};
  int lower[kRank], upper[kRank];
  const int n = pixels.dimensions;
  for (int i = 0; i < n; ++i) {
    const int d = kRank - 1 - i;
    size[i + 1] = extent[d];
    stride[i + 2] = stride[i + 1] * extent[d];
    step[i + 1] = pixels.step[d];
    lower[i] = pixels.lower[d];
    upper[i] = pixels.upper[d];
  }
  size[n + 1] = images;
  step[n + 1] = 1;
  const CUresult r =
      encode(map, MapType(type), n + 2, const_cast<void*>(data), size, stride + 1, lower, upper,
             static_cast<cuuint32_t>(kLineBytes / SizeOf(type)), rows, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxdnn::conv
