// Forward convolution of few features, also over a dilated input, and the data gradient of few channels, also with
// strides, on the tensor cores (mma.sync, since sm_80).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// `operand` is x forward, y in the data gradient. Operands that are not on 16 bytes go to the kernels of mma.h.
cudaError_t LaunchFewFeatures(const Problem& p, const void* operand, const void* filter, void* out,
                              const Epilogue& epilogue, cudaStream_t stream);

// On Hopper's (few_features_wgmma.cu). What it cannot take, for an epilogue or where arrays begin, goes to the others.
cudaError_t LaunchFewFeaturesWgmma(const Problem& p, const void* operand, const void* filter, void* out,
                                   const Epilogue& epilogue, cudaStream_t stream);

}  // namespace jaxdnn::conv
