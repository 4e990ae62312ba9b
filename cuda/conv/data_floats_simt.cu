// Forward convolution and data gradient of float32 on the CUDA cores (data_floats.cuh), in tiles whose steps no other
// block shares.
#include "cuda/conv/data_floats.cuh"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

cudaError_t LaunchTile(const Problem& p, const Config& config, Tile tile, int64_t first, int64_t end,
                       const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  const auto launch = [&](auto of) {
    return LaunchFloatTile<typename decltype(of)::type>(p, config, first, end, operand, filter, out, epilogue, stream);
  };
  switch (tile) {
    case Tile::kSimt64x64:
      return launch(TypeTag<FloatTile<4, 8>>{});
    case Tile::kSimt128x32:
      return launch(TypeTag<FloatTile<8, 4>>{});
    case Tile::kSimt64x32:
      return launch(TypeTag<FloatTile<4, 4>>{});
    case Tile::kSimt256x8:
      return launch(TypeTag<FloatTile<2, 8, true>>{});
    case Tile::kSimt256x4:
      return launch(TypeTag<FloatTile<2, 4, true>>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchDataFloats(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t columns = GemmOf(p).columns, rest = config.floats.rest;
  const auto launch = [&](Tile tile, int64_t first, int64_t end) {
    if (tile == Tile::kSimtRuns && IsVectorAligned(operand))
      return LaunchDataRuns(p, first, operand, filter, out, epilogue, stream);
    if (tile == Tile::kSimtRuns) tile = end - first > 8 ? Tile::kSimt64x32 : Tile::kSimt256x8;
    const bool shared = tile == Tile::kSimt128x64 || (tile == Tile::kSimt64x32 && config.floats.parts > 1);
    return (shared ? LaunchDataFloatsShared : LaunchTile)(p, config, tile, first, end, operand, filter, out, epilogue,
                                                          stream);
  };
  if (config.tile == Tile::kSimtPatch) return LaunchDataPatch(p, operand, filter, out, epilogue, stream);
  const cudaError_t status = launch(config.tile, 0, columns - rest);
  return status == cudaSuccess && rest > 0 ? launch(config.floats.rest_tile, columns - rest, columns) : status;
}

}  // namespace jaxdnn::conv
