// Forward convolution and data gradient as an implicit matrix product on the tensor cores, for 16-bit floats and TF32:
// every shape, stride, dilation, padding, rank and group count, on every architecture since sm_80, with no workspace.
//
// data.cuh says what rows, columns and taps are. A thread copies chunks of 16 bytes: of the operand always the same
// few rows, whose first address and valid taps it keeps in registers, and of each step the chunk at one depth. It walks
// along the depth, channels within taps, so that the main loop divides nothing. Single groups whose lines are no whole
// chunks are data_ragged.cu's.
#include "cuda/conv/data_mma.cuh"

namespace jaxdnn::conv {
namespace {

template <Direction kDirection>
cudaError_t LaunchDirection(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            const Epilogue& epilogue, cudaStream_t stream) {
  const Dense dense = DenseOf(p);
  const int64_t columns = GemmOf(p).columns * (dense.Folds() ? 1 : dense.groups);
  const int filter_run = AlignedRun(p.features, p.in, {filter});
  const bool whole_runs = IsChunk(AlignedRun(columns, p.out, {out, epilogue.bias, epilogue.residual}), p.out);
  const int run = AlignedRun(p.DepthChannels() * dense.groups, p.in, {operand});
  const bool whole = whole_runs && IsChunk(filter_run, p.in), whole_operand = IsChunk(run, p.in);
  if (dense.groups == 1 && !dense.Folds() && !(whole && whole_operand))
    return LaunchDataRagged(p, config, operand, filter, out, epilogue, stream);
  return VisitMmaKernel<kDirection>(p, config, whole_operand, whole, [&](auto tile, auto is_dense, auto in) {
    using T = typename decltype(tile)::type;
    using In = typename decltype(in)::type;
    constexpr bool kDense = decltype(is_dense)::value, kForward = kDirection == Direction::kForward;
    DataParams q = MakeDataParams(p, epilogue, T::kRows, T::kColumns, dense);
    q.operand_run = int16_t(run);
    q.filter_run = int16_t(filter_run);
    q.whole_runs = whole_runs;
    const Grid grid = {DataBlocks(p, q), T::kThreads,
                       kSharedBytes<T, LoadOperand<T, kDense, In>, LoadFilter<T, kDense, kForward, In>>};
    return LaunchKernel(DataMmaKernel<T, kDense, kForward, In>, grid, stream, q, static_cast<const In*>(operand),
                        static_cast<const In*>(filter), out);
  });
}

}  // namespace

cudaError_t LaunchDataMma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream) {
  return VisitDataDirection(p, [&](auto direction) {
    return LaunchDirection<direction()>(p, config, operand, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
