// Config -> kernel.
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {

int Launch(const Problem& p, const Config& config, const void* lhs, const void* rhs, void* out, void* workspace,
           CUstream_st* stream) {
  if (p.direction == Direction::kFilterGradient) return LaunchFilterSimt(p, config, lhs, rhs, out, workspace, stream);
  return LaunchDataSimt(p, config, lhs, rhs, out, stream);
}

}  // namespace jaxdnn::conv
