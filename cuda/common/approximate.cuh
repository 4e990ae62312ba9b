// Functions of the special-function unit, each an instruction with a relative error of 2^-22 or so. Subnormal operands
// and results count as 0.
#pragma once

namespace jaxdnn {

#define JAXDNN_APPROXIMATE(name, instruction)                      \
  __device__ __forceinline__ float name(float x) {                 \
    float y;                                                       \
    asm(instruction ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                                      \
  }
JAXDNN_APPROXIMATE(ApproximateReciprocal, "rcp")
JAXDNN_APPROXIMATE(ApproximateSqrt, "sqrt")
JAXDNN_APPROXIMATE(ApproximateRsqrt, "rsqrt")
JAXDNN_APPROXIMATE(ApproximateExp2, "ex2")
JAXDNN_APPROXIMATE(ApproximateLog2, "lg2")
#undef JAXDNN_APPROXIMATE

}  // namespace jaxdnn
