// Activations and their derivatives: elementwise, with an operand per channel, and gated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/activation/kind.h"
#include "cuda/common/dtype.h"

namespace jaxdnn::activation {

// x [groups, outer, channels, inner] with an operand [groups, channels].
struct ChannelShape {
  int64_t groups, outer, channels, inner;
};

// y = f(x + bias), or f(x) where `bias` is null. `mask`, if not null, is given a bit for each element of a function
// with two slopes, packed into bytes group by group: which slope it has there.
cudaError_t Forward(const Activation& f, DType dtype, const ChannelShape& shape, const void* x, const void* bias,
                    void* y, uint8_t* mask, cudaStream_t stream);

// dx = g f'(x) for `rows` independent rows of n elements, the derivative from what the forward pass kept: the mask of a
// function with two slopes, the output of sigmoid and tanh, the input of the others.
cudaError_t Backward(const Activation& f, DType dtype, const void* g, const void* residual, void* dx, int64_t rows,
                     int64_t n, cudaStream_t stream);

// dx = g f'(x + bias) and dbias = the sums of dx over each channel. `residual` is the mask or the output, or the input,
// with which alone `bias` is read. `workspace` holds ChannelWorkspace(dtype, shape) bytes.
cudaError_t BiasBackward(const Activation& f, DType dtype, const ChannelShape& shape, const void* g,
                         const void* residual, const void* bias, void* dx, void* dbias, void* workspace,
                         cudaStream_t stream);

// y = x where x >= 0, else alpha x, and its backward pass.
cudaError_t PReluForward(DType dtype, const ChannelShape& shape, const void* x, const void* alpha, void* y,
                         cudaStream_t stream);
cudaError_t PReluBackward(DType dtype, const ChannelShape& shape, const void* g, const void* x, const void* alpha,
                          void* dx, void* dalpha, void* workspace, cudaStream_t stream);

// Bytes of scratch memory that the two backward functions need.
int64_t ChannelWorkspace(DType dtype, const ChannelShape& shape);

// Gated ---------------------------------------------------------------------------------------------------------------

// x [outer, 2, inner], of which the gate is the second half, or the first.
struct GateShape {
  int64_t outer, inner;
  bool gate_first;
};

// y [outer, inner] = value * f(gate), for f one of identity, relu, sigmoid, tanh, silu, gelu and gelu_tanh.
cudaError_t GateForward(const Activation& f, DType dtype, const GateShape& shape, const void* x, void* y,
                        cudaStream_t stream);

// dx [outer, 2, inner]: g f(gate) in the value's half, g value f'(gate) in the gate's.
cudaError_t GateBackward(const Activation& f, DType dtype, const GateShape& shape, const void* g, const void* x,
                         void* dx, cudaStream_t stream);

}  // namespace jaxdnn::activation
