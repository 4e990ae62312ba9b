// Softmax and log-softmax: y = exp(x - m) / s and y = x - m - log(s), with m = max(x) and s = sum(exp(x - m)).
//
// Bound by memory: one read and one write. Short rows, several to a warp, are held in registers or, packed, in shared
// memory (rows.cuh); longer ones in the registers of warps, blocks and clusters (held.cuh), and so are columns
// (columns.cuh); the longest of both are read twice (shares.cuh). What is left, as masks, doubles and unaligned
// buffers, is tiles in shared memory (tile.cuh). plan.cuh chooses.
#include "cuda/softmax/plan.cuh"

namespace jaxdnn::softmax {

cudaError_t Forward(bool log, DType dtype, double without_entries, const void* x, void* y, const Problem& problem,
                    cudaStream_t stream) {
  const double absent = log ? std::log(without_entries) : without_entries;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto* in = static_cast<const T*>(x);
    auto* out = static_cast<T*>(y);
    return Run(ForwardOp<T>{log, static_cast<Accumulator<T>>(absent)}, problem, in, in, out, stream);
  });
}

int64_t WorkspaceBytes(DType dtype, Shape s) {
  const int64_t element_bytes = dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
  // One share is held by a block.
  const int64_t shares = std::max(WorkspaceShares(s, element_bytes), MostShares(s, element_bytes));
  return shares == 1 ? 0 : s.outer * (shares + 1) * s.inner * 2 * std::max<int64_t>(element_bytes, 4);
}

}  // namespace jaxdnn::softmax
