// The second stage of a two-stage sum over rows: blocks leave partial rows behind, and this adds them up in a fixed
// order, so that the result has the same bits on every run, without atomics.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn {

// The sums over the `rows` rows of `outer` tables of `columns` into first [outer, columns], and of as many as `others`
// that follow these in `partial` into second [others, columns]: sums of floats as floats of 16 or 32 bits, and of
// doubles.
template <class A, class Out>
cudaError_t SumRowsOfTwo(const A* partial, int64_t outer, int64_t others, int64_t rows, int64_t columns, Out* first,
                         Out* second, cudaStream_t stream);

// first[o, c] = the sum over r of partial[0, o, r, c], and second[o, c] that of partial[1, o, r, c].
template <class A, class Out>
cudaError_t SumRows(const A* partial, int64_t outer, int64_t rows, int64_t columns, Out* first, Out* second,
                    cudaStream_t stream) {
  return SumRowsOfTwo(partial, outer, second == nullptr ? 0 : outer, rows, columns, first, second, stream);
}

// out[o, c] = the sum over r of partial[o, r, c].
template <class A, class Out>
cudaError_t SumRows(const A* partial, int64_t outer, int64_t rows, int64_t columns, Out* out, cudaStream_t stream) {
  return SumRows(partial, outer, rows, columns, out, static_cast<Out*>(nullptr), stream);
}

}  // namespace jaxdnn
