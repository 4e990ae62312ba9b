// Forward convolution and data gradient on the tensor cores where lines are no whole chunks (ragged.cuh): an implicit
// matrix product as in data_mma.cu, of one group at a time.
//
// Bound by the tensor cores as long as the shifting, some thirty instructions for each chunk, keeps up: a step of
// 128x64 sums has six chunks a thread and 32 products a warp.
#include "cuda/conv/ragged.cuh"

namespace jaxdnn::conv {

cudaError_t LaunchDataRagged(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream) {
  return p.in == DType::kF32 ? LaunchDataRaggedFloats(p, config, operand, filter, out, epilogue, stream)
                             : LaunchDataRaggedOf<false>(p, config, operand, filter, out, epilogue, stream);
}

}  // namespace jaxdnn::conv
