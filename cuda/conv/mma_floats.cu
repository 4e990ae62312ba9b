// The kernels of data_mma.cu and data_ragged.cu of float32, as TF32. They are compiled apart from the others, since on
// Hopper rounding to TF32 is one instruction that compute_80's PTX does not have.
#include "cuda/conv/data_mma.cuh"
#include "cuda/conv/ragged.cuh"

namespace jaxdnn::conv {

cudaError_t LaunchDataMmaFloats(const Problem& p, const Config& config, const void* operand, const void* filter,
                                void* out, const Epilogue& epilogue, cudaStream_t stream) {
  return LaunchDataMmaOf<true>(p, config, operand, filter, out, epilogue, stream);
}

cudaError_t LaunchDataRaggedFloats(const Problem& p, const Config& config, const void* operand, const void* filter,
                                   void* out, const Epilogue& epilogue, cudaStream_t stream) {
  return LaunchDataRaggedOf<true>(p, config, operand, filter, out, epilogue, stream);
}

}  // namespace jaxdnn::conv
