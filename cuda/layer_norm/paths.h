// The kernels for rows that forward.cu and backward.cu leave to others.
#pragma once

#include "cuda/layer_norm/layer_norm.h"

namespace jaxdnn::layer_norm {

struct Device;
struct Spread;

// Rows of which a vector of 16 bytes is one or several. The forward pass leaves no statistics.
bool TakesPacked(DType dtype, const Shape& shape);
cudaError_t RunPackedForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                             cudaStream_t stream);
cudaError_t RunPackedBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                              void* workspace, cudaStream_t stream);

// Rows of 3 to 7 elements that end within a vector, without statistics.
bool TakesRuns(const Forward& f, DType dtype, const Shape& shape);
cudaError_t RunRuns(const Forward& f, DType dtype, const Shape& shape, const Options& options, cudaStream_t stream);

// Short rows that are not aligned to 16 bytes, in slabs of several rows that are.
bool TakesSlabs(DType dtype, const Shape& shape);
cudaError_t RunSlabForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                           cudaStream_t stream);
cudaError_t RunSlabBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                            const Device& device, void* workspace, cudaStream_t stream);

// Rows of whole vectors, so few that all run at once; with a scale, and of layer norm a bias.
bool TakesFewRows(const Forward& f, DType dtype, const Shape& shape, const Options& options, const Device& device);
cudaError_t RunFewRows(const Forward& f, DType dtype, const Shape& shape, const Options& options, const Device& device,
                       cudaStream_t stream);

// Rows of float or bf16 that start anywhere in a vector; not `done` where no cluster of blocks holds one.
cudaError_t RunShiftedForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                              const Device& device, cudaStream_t stream, bool* done);

// The same of those that registers do not hold.
cudaError_t RunLongForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                           const Device& device, cudaStream_t stream, bool* done);

// Rows of whole vectors, of which a cluster's registers do not hold one; not `done` where its shared memory does not.
cudaError_t RunLongestForward(const Forward& f, DType dtype, const Shape& shape, const Options& options,
                              const Device& device, cudaStream_t stream, bool* done);

// Long rows of whole vectors; not `done` where no cluster of blocks holds one.
cudaError_t RunLongBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                            const Device& device, void* workspace, cudaStream_t stream, bool* done);

// Rows that a cluster of blocks shares as `spread` says, in the registers of backward.cuh: float or bf16, which start
// anywhere in a vector if `shifted`.
cudaError_t RunClusterBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                               const Spread& spread, bool shifted, void* workspace, cudaStream_t stream);

// Small tensors in vectors of 16 bytes, in one launch; not `done` where no cluster of blocks holds a row.
cudaError_t RunSmallBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options,
                             const Device& device, cudaStream_t stream, bool* done);

// Rows too long for the registers of a cluster of blocks, or of a block where there are no clusters.
cudaError_t RunWideForward(const Forward& f, DType dtype, const Shape& shape, const Options& options, void* workspace,
                           cudaStream_t stream);
cudaError_t RunWideBackward(const Backward& b, DType dtype, const Shape& shape, const Options& options, void* workspace,
                            cudaStream_t stream);

}  // namespace jaxdnn::layer_norm
