// The derivatives of softmax and log-softmax as linear maps in g, from the output y:
//   softmax                 y (g - sum(y g))
//   log-softmax, tangent    g - sum(exp(y) g)
//   log-softmax, cotangent  g - exp(y) sum(g)
//
// Bound by memory: two reads and one write, by the same kernels as forward.
#include "cuda/softmax/plan.cuh"

namespace jaxdnn::softmax {

cudaError_t Backward(Map map, DType dtype, const void* g, const void* y, void* out, const Problem& problem,
                     cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return Run(BackwardOp<T>{map}, problem, static_cast<const T*>(g), static_cast<const T*>(y), static_cast<T*>(out),
               stream);
  });
}

}  // namespace jaxdnn::softmax
