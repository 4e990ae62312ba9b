// Forward convolution and data gradient as an implicit matrix product on the tensor cores, for 16-bit floats and TF32:
// every shape, stride, dilation, padding, rank and group count, on every architecture since sm_80, with no workspace.
//
// data.cuh says what rows, columns and taps are. A thread copies chunks of 16 bytes: of the operand always the same
// few rows, whose first address and valid taps it keeps in registers, and of each step the chunk at one depth. It walks
// along the depth, channels within taps, so that the main loop divides nothing. Single groups whose lines are no whole
// chunks are data_ragged.cu's. The kernels of TF32 are compiled in mma_floats.cu.
#include "cuda/conv/data_mma.cuh"

namespace jaxdnn::conv {

cudaError_t LaunchDataMma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream) {
  return p.in == DType::kF32 ? LaunchDataMmaFloats(p, config, operand, filter, out, epilogue, stream)
                             : LaunchDataMmaOf<false>(p, config, operand, filter, out, epilogue, stream);
}

}  // namespace jaxdnn::conv
