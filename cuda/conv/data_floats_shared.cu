// Forward convolution and data gradient of float32 on the CUDA cores (data_floats.cuh), in the tiles whose steps the
// blocks of a cluster may share.
#include "cuda/conv/data_floats.cuh"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {

cudaError_t LaunchDataFloatsShared(const Problem& p, const Config& config, Tile tile, int64_t first, int64_t end,
                                   const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                                   cudaStream_t stream) {
  const auto launch = [&](auto of) {
    return LaunchFloatTile<typename decltype(of)::type>(p, config, first, end, operand, filter, out, epilogue, stream);
  };
  return tile == Tile::kSimt128x64 ? launch(TypeTag<FloatTile<8, 8, false, true>>{})
                                   : launch(TypeTag<FloatTile<4, 4, false, true, kFloatParts>>{});
}

}  // namespace jaxdnn::conv
