// Config -> kernel.
#include "cuda/conv/depthwise.h"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/few_channels.h"
#include "cuda/conv/few_features.h"
#include "cuda/conv/grouped.h"
#include "cuda/conv/mma.h"
#include "cuda/conv/simt.h"
#include "cuda/conv/unaligned.h"
#include "cuda/conv/wgmma.h"

namespace jaxdnn::conv {

int Launch(const Problem& p, const Config& config, const void* lhs, const void* rhs, void* out, void* workspace,
           const Epilogue& epilogue, CUstream_st* stream) {
  const bool filter = p.direction == Direction::kFilterGradient;
  if (p.direction != Direction::kForward && !IsNone(epilogue)) return cudaErrorInvalidValue;
  if (epilogue.scale != nullptr && !IsByte(p.in)) return cudaErrorInvalidValue;
  if (config.exchanged != p.exchanged) return Launch(Exchanged(p), config, rhs, lhs, out, workspace, epilogue, stream);
  if (IsByte(p.in))
    return kTiles[static_cast<int>(config.tile)].unit == Unit::kWgmma
               ? LaunchDataBytesWgmma(p, config, lhs, rhs, out, workspace, epilogue, stream)
               : LaunchDataBytes(p, config, lhs, rhs, out, epilogue, stream);
  switch (kTiles[static_cast<int>(config.tile)].unit) {
    case Unit::kSimt:
      return filter ? LaunchFilterSimt(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDataSimt(p, config, lhs, rhs, out, epilogue, stream);
    case Unit::kMma:
      return filter ? LaunchFilterMma(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDataMma(p, config, lhs, rhs, out, epilogue, stream);
    case Unit::kWgmma:
      return filter ? LaunchFilterWgmma(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDataWgmma(p, config, lhs, rhs, out, workspace, epilogue, stream);
    case Unit::kDepthwise:
      return filter ? LaunchDepthwiseFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDepthwiseData(p, lhs, rhs, out, epilogue, stream);
    case Unit::kFewChannels:
      return filter ? LaunchFewChannelsFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchFewChannelsData(p, lhs, rhs, out, epilogue, stream);
    case Unit::kGrouped:
      return filter ? LaunchGroupedFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchGrouped(p, lhs, rhs, out, epilogue, stream);
    case Unit::kFewFeatures:
      return LaunchFewFeatures(p, lhs, rhs, out, epilogue, stream);
    case Unit::kUnaligned:
      return filter ? LaunchUnalignedFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchUnaligned(p, lhs, rhs, out, epilogue, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxdnn::conv
