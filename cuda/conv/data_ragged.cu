// Forward convolution and data gradient on the tensor cores where lines are no whole chunks (ragged.cuh): an implicit
// matrix product as in data_mma.cu, of one group at a time.
//
// Bound by the tensor cores as long as the shifting, some thirty instructions for each chunk, keeps up: a step of
// 128x64 sums has six chunks a thread and 32 products a warp.
#include "cuda/conv/ragged.cuh"

namespace jaxdnn::conv {
namespace {

template <Direction kDirection, class In, int kProducts>
cudaError_t LaunchTyped(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                        const Epilogue& epilogue, cudaStream_t stream) {
  constexpr bool kForward = kDirection == Direction::kForward;
  const bool aligned = IsChunk(AlignedRun(p.DepthChannels(), p.in, {operand}), p.in);
  const auto launch = [&](auto tile, auto is_aligned) {
    using T = typename decltype(tile)::type;
    constexpr bool kAligned = decltype(is_aligned)::value;
    DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns);
    q.whole_runs = IsChunk(AlignedRun(GemmOf(p).columns, p.out, {out, epilogue.bias, epilogue.residual}), p.out);
    return LaunchRagged<T, kAligned, kForward, In>(p, q, operand, filter, out, stream);
  };
  const auto with_tile = [&](auto tile) {
    return aligned ? launch(tile, std::true_type()) : launch(tile, std::false_type());
  };
  if constexpr (kProducts == 1)
    if (config.tile == Tile::kMma128x32) return with_tile(TypeTag<MmaTile<In, kDirection, 128, 32, 4, 1, 3>>());
  return with_tile(TypeTag<MmaTile<In, kDirection, 128, 64, 2, 2, 2, kProducts>>());
}

}  // namespace

cudaError_t LaunchDataRagged(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                             const Epilogue& epilogue, cudaStream_t stream) {
  return VisitDataDirection(p, [&](auto direction) {
    return VisitMmaType(p, [&](auto in, auto products) {
      return LaunchTyped<direction(), typename decltype(in)::type, products()>(p, config, operand, filter, out,
                                                                               epilogue, stream);
    });
  });
}

}  // namespace jaxdnn::conv
