// The tuned kernels whose blocks form no clusters. Hopper has nothing for them that others have not, so they are
// compiled once for all architectures, in softmax_unclustered.cu, apart from those with clusters.
#pragma once

#include "cuda/softmax/columns.cuh"

namespace jaxdnn::softmax {

// Of buffers that begin on a vector. plan.cuh says which problem is whose.
template <class T, class Op>
struct Unclustered {
  const Op& op;
  const Problem& p;
  const T *in0, *in1;
  T* out;
  cudaStream_t stream;

  // Rows of whole vectors, `steps` of them in each of 1 << span threads: 1, 2 or all that a thread holds.
  cudaError_t VectorRows(int span, int64_t steps) const;
  // Rows of 1, 2 or 4 elements.
  cudaError_t RowsOfVector() const;
  cudaError_t PackedRows() const;
  // Rows with a mask, and columns.
  cudaError_t PackedLines() const;
  cudaError_t ShortColumns() const;
  // Rows and columns that blocks share through the workspace.
  cudaError_t SharedRows() const;
  cudaError_t SharedColumns(const HeldColumns& c) const;
};

}  // namespace jaxdnn::softmax
