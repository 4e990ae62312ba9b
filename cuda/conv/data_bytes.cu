// Forward convolution of 8-bit integers and floats on the tensor cores: every shape, stride, dilation, padding, rank
// and group count, on every architecture since sm_80, with no workspace.
//
// The kernels are data_mma.cu's and data_ragged.cu's. Integers are multiplied as they are, exactly, and their 32-bit
// sums wrap. Not every architecture has products of 8-bit floats: they become float16 on the way from shared memory to
// the product, which changes no value.
#include "cuda/conv/mma.h"
#include "cuda/conv/ragged.cuh"

namespace jaxdnn::conv {
namespace {

// The smaller tile with fewer registers where nothing takes more.
template <class In, int kBlocks>
using Tile128x64 = MmaTile<In, Direction::kForward, 128, 64, 2, 2, kBlocks>;
template <class In>
using Tile128x128 = MmaTile<In, Direction::kForward, 128, 128, 2, 2, 2>;

struct Arrays {
  const void *x, *w;
  void* y;
  const Epilogue& epilogue;
};

// Of columns that `whole_runs` are stored together.
DataParams ParamsOf(const Problem& p, const Arrays& arrays, int rows, int columns, const Dense& dense,
                    bool whole_runs) {
  DataParams q = MakeDataParams(p, arrays.epilogue, rows, columns, dense);
  q.operand_run = int16_t(AlignedRun(p.channels * dense.groups, p.in, {arrays.x}));
  q.filter_run = int16_t(AlignedRun(p.features, p.in, {arrays.w}));
  q.whole_runs = whole_runs;
  return q;
}

template <class In, class T, bool kDense>
cudaError_t LaunchChunks(const Problem& p, const Arrays& arrays, const Dense& dense, bool whole_runs,
                         cudaStream_t stream) {
  using LoadA = LoadOperand<T, kDense, In>;
  const DataParams q = ParamsOf(p, arrays, T::kRows, T::kColumns, dense, whole_runs);
  const Grid grid = {DataBlocks(p, q), T::kThreads, kSharedBytes<T, LoadA, LoadFilter<T, kDense, true, In>>};
  return LaunchKernel(DataMmaKernel<T, kDense, true, In>, grid, stream, q, static_cast<const In*>(arrays.x),
                      static_cast<const In*>(arrays.w), arrays.y);
}

template <class In, class T, bool kAligned>
cudaError_t LaunchLines(const Problem& p, const Arrays& arrays, bool whole_runs, cudaStream_t stream) {
  const DataParams q = ParamsOf(p, arrays, T::kRows, T::kColumns, {}, whole_runs);
  return LaunchRagged<T, kAligned, true, In>(p, q, arrays.x, arrays.w, arrays.y, stream);
}

template <class In>
cudaError_t LaunchType(const Problem& p, const Config& config, const Arrays& arrays, cudaStream_t stream) {
  const Dense dense = DenseOf(p);
  const Epilogue& e = arrays.epilogue;
  const int64_t columns = p.features * (dense.Folds() ? 1 : dense.groups);
  const bool whole_runs = IsChunk(AlignedRun(columns, p.out, {arrays.y, e.bias, e.residual}), p.out) &&
                          IsChunk(AlignedRun(columns, DType::kF32, {e.scale}), DType::kF32);
  const bool filter_chunks = IsChunk(AlignedRun(p.features, p.in, {arrays.w}), p.in);
  const bool chunks = IsChunk(AlignedRun(p.channels * dense.groups, p.in, {arrays.x}), p.in);
  using Small = Tile128x64<In, 2>;
  if (dense.groups > 1 || dense.Folds()) return LaunchChunks<In, Small, false>(p, arrays, dense, whole_runs, stream);
  if (!chunks) return LaunchLines<In, Small, false>(p, arrays, whole_runs, stream);
  if (!filter_chunks || !whole_runs) return LaunchLines<In, Small, true>(p, arrays, whole_runs, stream);
  if (config.tile == Tile::kMma128x128)
    return LaunchChunks<In, Tile128x128<In>, true>(p, arrays, dense, whole_runs, stream);
  return LaunchChunks<In, Tile128x64<In, 3>, true>(p, arrays, dense, whole_runs, stream);
}

}  // namespace

cudaError_t LaunchDataBytes(const Problem& p, const Config& config, const void* x, const void* w, void* y,
                            const Epilogue& epilogue, cudaStream_t stream) {
  const Arrays arrays = {x, w, y, epilogue};
  return p.in == DType::kS8 ? LaunchType<int8_t>(p, config, arrays, stream)
                            : LaunchType<Float8>(p, config, arrays, stream);
}

}  // namespace jaxdnn::conv
