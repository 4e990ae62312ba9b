// Gradients of a causal depthwise convolution of sequences with its bias and activation. Plain host declarations.
#pragma once

#include <cstdint>

#include "cuda/activation/kind.h"
#include "cuda/common/dtype.h"

struct CUstream_st;

namespace jaxdnn::conv {

// x [problems, sequences, length, channels], w [problems, taps, channels], bias [problems, channels] or null:
// y[t] = activation(bias + sum over j of w[j] x[t - (taps - 1) + j]), of 2 to 4 taps, channels a multiple of four,
// fewer than 2^31 positions, and any element type but double.
struct CausalLayer {
  DType dtype;
  int64_t problems, sequences, length, channels;
  int taps;
  bool bias;
  activation::Activation activation;
};

// Each of its array's shape and of one element type; dbias is null with bias.
struct CausalGradients {
  const void *g, *x, *w, *bias;
  void *dx, *dw, *dbias;
};

// Bytes of workspace: the blocks' partial sums of dw and dbias.
int64_t CausalWorkspace(const CausalLayer& layer);

// The gradients of x, w and bias, given that of y. Returns a cudaError_t.
int LaunchCausalBackward(const CausalLayer& layer, const CausalGradients& a, void* workspace, CUstream_st* stream);

}  // namespace jaxdnn::conv
