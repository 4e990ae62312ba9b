// Encodes arrays for the TMA unit's im2col mode (pixel_map.h), beside boxes of them.
#pragma once

#include "cuda/common/tensor_map.h"
#include "cuda/conv/pixel_map.h"

namespace jaxdnn::conv {

// Bytes of a line, the widest that the unit swizzles.
constexpr int kLineBytes = 128;

// Columns of `rows` pixels of an array [images, *extent, channels], one line of channels of each. From one image to the
// next, and from one index of a dimension, it is so many pixels as `pitch` has. Floats are rounded to TF32 if they may
// be.
inline cudaError_t EncodePixels(CUtensorMap* map, DType type, const void* data, int64_t images, const int64_t* extent,
                                const int64_t (&pitch)[kRank + 1], int64_t channels, const PixelMap& pixels, int rows,
                                bool rounded = true, int line_bytes = kLineBytes) {
  static const auto encode = FindDriverFunction<decltype(cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t pixel = SizeOf(type) * channels;
  cuuint64_t size[5] = {cuuint64_t(channels)}, stride[5];
  cuuint32_t step[5] = {1};
  int lower[kRank], upper[kRank];
  const int n = pixels.dimensions;
  for (int i = 0; i < n; ++i) {
    const int d = kRank - 1 - i;
    size[i + 1] = extent[d];
    stride[i + 1] = pixel * pitch[d + 1];
    step[i + 1] = pixels.step[d];
    lower[i] = pixels.lower[d];
    upper[i] = pixels.upper[d];
  }
  size[n + 1] = images;
  stride[n + 1] = pixel * pitch[0];
  step[n + 1] = 1;
  const CUresult r =
      encode(map, MapType(type, rounded), n + 2, const_cast<void*>(data), size, stride + 1, lower, upper,
             static_cast<cuuint32_t>(line_bytes / SizeOf(type)), rows, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             line_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
             : line_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                : CU_TENSOR_MAP_SWIZZLE_32B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t EncodePixels(CUtensorMap* map, DType type, const void* data, int64_t images,
                                const int64_t (&extent)[kRank], int64_t channels, const PixelMap& pixels, int rows,
                                bool rounded = true) {
  const int64_t plane = extent[1] * extent[2];
  return EncodePixels(map, type, data, images, extent, {extent[0] * plane, plane, extent[2], 1}, channels, pixels, rows,
                      rounded);
}

// Columns of a phase's pixels of the result [images, *extent, channels], to be stored.
inline cudaError_t EncodePhase(CUtensorMap* map, DType type, void* data, int64_t images, const int (&extent)[kRank],
                               int64_t channels, const MappedPhase& f, int rows) {
  const int64_t row = extent[2], plane = extent[1] * row;
  const int64_t positions[] = {f.positions[0], f.positions[1], f.positions[2]};
  const int64_t first = f.first[0] * plane + f.first[1] * row + f.first[2];
  const PixelMap all = {f.map.dimensions, {}, {}, {1, 1, 1}};
  return EncodePixels(map, type, static_cast<char*>(data) + first * channels * SizeOf(type), images, positions,
                      {extent[0] * plane, f.period[0] * plane, f.period[1] * row, f.period[2]}, channels, all, rows,
                      false);
}

}  // namespace jaxdnn::conv
