// Config -> kernel.
#include "cuda/conv/mma.h"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {

int Launch(const Problem& p, const Config& config, const void* lhs, const void* rhs, void* out, void* workspace,
           CUstream_st* stream) {
  const bool tensor_cores = kTiles[static_cast<int>(config.tile)].tensor_cores;
  if (p.direction == Direction::kFilterGradient)
    return (tensor_cores ? LaunchFilterMma : LaunchFilterSimt)(p, config, lhs, rhs, out, workspace, stream);
  return (tensor_cores ? LaunchDataMma : LaunchDataSimt)(p, config, lhs, rhs, out, stream);
}

}  // namespace jaxdnn::conv
