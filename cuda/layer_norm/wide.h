// Rows too long for the registers of a cluster of blocks, or of a block where
// there are no clusters.
#pragma once

#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

cudaError_t RunWideForward(const Forward& f, DType dtype, const Shape& shape, const Options& options, void* workspace,
                           cudaStream_t stream);
cudaError_t RunWideBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options, void* workspace,
                            cudaStream_t stream);

}  // namespace jaxdnn::layer_norm
