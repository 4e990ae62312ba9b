// Group normalization of x [batch, n, spatial, channels] (channels last) or
// [batch, n, channels, spatial], and its gradient. Each of `batch` independent
// problems has its own scale and bias [batch, channels].
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "cuda/activation/kind.h"
#include "cuda/common/dtype.h"

namespace jaxdnn::group_norm {

struct Problem {
  DType dtype;
  activation::Kind activation;  // identity, relu or silu
  bool channels_last;
  int64_t batch, n, spatial, channels, groups;
  double epsilon;

  bool Empty() const { return batch == 0 || n == 0 || spatial == 0 || channels == 0; }
};

// Statistics and parameters are float, or double where x is. Statistics are
// [batch, n, groups, 3]: the mean, what rounding took off it, and the inverse
// deviation.
constexpr int kStatistics = 3;

// Bytes of workspace, a function of the problem alone; none if no kernel takes
// it, as with groups of millions of channels.
std::optional<int64_t> ForwardWorkspace(const Problem& p);
std::optional<int64_t> BackwardWorkspace(const Problem& p);
std::optional<int64_t> TangentWorkspace(const Problem& p);

// y = f(p) with p = (x - mean) * rstd * scale + bias, the statistics over the
// spatial positions and channels of a group.
cudaError_t Forward(const Problem& p, const void* x, const void* scale, const void* bias, void* y, void* statistics,
                    void* workspace, cudaStream_t stream);

// dx, dscale and dbias from dy.
cudaError_t Backward(const Problem& p, const void* dy, const void* x, const void* scale, const void* bias,
                     const void* statistics, void* dx, void* dscale, void* dbias, void* workspace, cudaStream_t stream);

// ty from t, tscale and tbias.
cudaError_t Tangent(const Problem& p, const void* t, const void* tscale, const void* tbias, const void* x,
                    const void* scale, const void* bias, const void* statistics, void* ty, void* workspace,
                    cudaStream_t stream);

}  // namespace jaxdnn::group_norm
