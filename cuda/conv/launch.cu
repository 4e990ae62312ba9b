// Config -> kernel.
#include "cuda/conv/depthwise.h"
#include "cuda/conv/direct.h"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/few_channels.h"
#include "cuda/conv/few_features.h"
#include "cuda/conv/filter.cuh"
#include "cuda/conv/frame.h"
#include "cuda/conv/grouped.h"
#include "cuda/conv/mma.h"
#include "cuda/conv/planes.h"
#include "cuda/conv/simt.h"
#include "cuda/conv/unaligned.h"
#include "cuda/conv/wgmma.h"

namespace jaxdnn::conv {
namespace {

// The filter gradient of the problem with zeros, as sums, and the frame's terms after it, which are then added.
int LaunchFilterWithFrame(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                          char* workspace, cudaStream_t stream) {
  Config plain = config;
  plain.frame_slices = 0;
  char* const frame = workspace + p.FilterSize() * (p.in == DType::kF64 ? 8 : 4);
  char* const rest = workspace + FrameBytes(p);
  if (const int e = Launch(WithZeros(p), plain, x, y, workspace, rest, {}, stream)) return e;
  const auto launch = OnTensorCores(p) ? LaunchFrameFilterMma : LaunchFrameFilterSimt;
  if (const int e = launch(p, config.frame_slices, x, y, frame, stream)) return e;
  return SumSlices(p, workspace, 1 + config.frame_slices, false, x, y, out, stream);
}

int LaunchDepthwise(const Problem& p, const Config& config, const void* lhs, const void* rhs, void* out,
                    void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  const bool filter = p.direction == Direction::kFilterGradient;
  if (config.unaligned && !HasFrame(p)) {
    const int e = filter ? LaunchUnalignedDepthwiseFilter(p, config, lhs, rhs, out, workspace, stream)
                         : LaunchUnalignedDepthwiseData(p, lhs, rhs, out, epilogue, stream);
    if (e != cudaErrorInvalidValue) return e;
  }
  return filter ? LaunchDepthwiseFilter(p, config, lhs, rhs, out, workspace, stream)
                : LaunchDepthwiseData(p, lhs, rhs, out, epilogue, stream);
}

}  // namespace

int Launch(const Problem& p, const Config& config, const void* lhs, const void* rhs, void* out, void* workspace,
           const Epilogue& epilogue, CUstream_st* stream) {
  const bool filter = p.direction == Direction::kFilterGradient;
  if (p.direction != Direction::kForward && !IsNone(epilogue)) return cudaErrorInvalidValue;
  const Unit unit = kTiles[static_cast<int>(config.tile)].unit;
  if (HasFrame(p) && config.patched && unit == Unit::kDepthwise) {
    const int e = LaunchDepthwise(p, config, lhs, rhs, out, workspace, epilogue, stream);
    if (e != cudaErrorInvalidValue) return e;
  }
  if (HasFrame(p) && (!config.patched || unit == Unit::kDepthwise)) {
    if (filter) return LaunchFilterWithFrame(p, config, lhs, rhs, out, static_cast<char*>(workspace), stream);
    if (FrameShare(p) < 1)
      if (const int e = Launch(WithZeros(p), config, lhs, rhs, out, workspace, epilogue, stream)) return e;
    if (OnTensorCores(p) && IsNone(epilogue))
      if (const int e = LaunchFrameWgmma(p, lhs, rhs, out, stream); e != cudaErrorInvalidValue) return e;
    return (OnTensorCores(p) ? LaunchFrameMma : LaunchFrameSimt)(p, lhs, rhs, out, epilogue, stream);
  }
  if (epilogue.scale != nullptr && !IsByte(p.in)) return cudaErrorInvalidValue;
  if (config.exchanged != p.exchanged) return Launch(Exchanged(p), config, rhs, lhs, out, workspace, epilogue, stream);
  if (IsByte(p.in))
    return unit == Unit::kWgmma ? LaunchDataBytesWgmma(p, config, lhs, rhs, out, workspace, epilogue, stream)
                                : LaunchDataBytes(p, config, lhs, rhs, out, epilogue, stream);
  switch (unit) {
    case Unit::kSimt:
      return filter ? LaunchFilterSimt(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDataSimt(p, config, lhs, rhs, out, epilogue, stream);
    case Unit::kMma:
      return filter ? LaunchFilterMma(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDataMma(p, config, lhs, rhs, out, epilogue, stream);
    case Unit::kWgmma:
      if (IsOfPairs(config.tile)) return LaunchDataPairsWgmma(p, config, lhs, rhs, out, epilogue, stream);
      return filter ? LaunchFilterWgmma(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDataWgmma(p, config, lhs, rhs, out, workspace, epilogue, stream);
    case Unit::kDepthwise:
      return LaunchDepthwise(p, config, lhs, rhs, out, workspace, epilogue, stream);
    case Unit::kFewChannels:
      if (config.tile == Tile::kFewChannelsWgmma)
        return filter ? LaunchFewChannelsFilterWgmma(p, config, lhs, rhs, out, workspace, stream)
                      : LaunchFewChannelsWgmma(p, lhs, rhs, out, epilogue, stream);
      return filter ? LaunchFewChannelsFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchFewChannelsData(p, lhs, rhs, out, epilogue, stream);
    case Unit::kGrouped:
      return filter ? LaunchGroupedFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchGrouped(p, lhs, rhs, out, epilogue, stream);
    case Unit::kFewFeatures:
      return (config.tile == Tile::kFewFeaturesWgmma ? LaunchFewFeaturesWgmma : LaunchFewFeatures)(p, lhs, rhs, out,
                                                                                                   epilogue, stream);
    case Unit::kUnaligned:
      return filter ? LaunchUnalignedFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchUnaligned(p, lhs, rhs, out, workspace, epilogue, stream);
    case Unit::kPlanes:
      return filter ? LaunchPlanesFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchPlanes(p, lhs, rhs, out, epilogue, stream);
    case Unit::kDirect:
      return filter ? LaunchDirectFilter(p, config, lhs, rhs, out, workspace, stream)
                    : LaunchDirect(p, lhs, rhs, out, epilogue, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxdnn::conv
