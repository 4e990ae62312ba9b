// Encodes what the TMA unit wants to know of an array. The driver's encoders are looked up at run time: the module does
// not link to the driver's library.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <initializer_list>

#include "cuda/common/dtype.h"

namespace jaxdnn {

// The driver's function of that name, or null if it has none.
template <class Function>
Function* FindDriverFunction(const char* name) {
  cudaDriverEntryPointQueryResult found;
  void* address = nullptr;
  cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<Function*>(address);
}

// Floats are rounded to TF32 on their way, if they may be.
inline CUtensorMapDataType MapType(DType t, bool rounded = true) {
  return IsByte(t)           ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : t == DType::kF32  ? (rounded ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
         : t == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Boxes of an array with these extents, the contiguous one first; boxes are one line wide, of 32, 64 or 128 bytes.
// Plain ones may be wider, and lie as they are. From one index of a further dimension to the next it is so many
// elements as `strides` has, or, where it has none, as all dimensions before have together.
inline cudaError_t EncodeBoxes(CUtensorMap* map, DType type, const void* data, std::initializer_list<int64_t> extents,
                               std::initializer_list<int> box, bool rounded = true, bool plain = false,
                               std::initializer_list<int64_t> strides = {}) {
  static const auto encode = FindDriverFunction<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t size[5], stride[6] = {cuuint64_t(SizeOf(type))};
  cuuint32_t shape[5], ones[5];
  int n = 0;
  for (const int64_t extent : extents) {
    size[n] = extent;
    stride[n + 1] = n < int(strides.size()) ? strides.begin()[n] * SizeOf(type) : stride[n] * extent;
    ones[n] = 1;
    shape[n] = box.begin()[n];
    ++n;
  }
  const CUtensorMapSwizzle swizzle = plain                           ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : shape[0] * SizeOf(type) <= 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                     : shape[0] * SizeOf(type) <= 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                     : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult r = encode(map, MapType(type, rounded), n, const_cast<void*>(data), size, stride + 1, shape, ones,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                            plain ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxdnn
