// Included before the bindings: handlers have a stream where the interpreter is asked for, and none elsewhere.
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
template <>
struct CtxDecoding<PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine& diagnostic) {
    if (std::getenv("JAXDNN_EMULATED")) return nullptr;
    return diagnostic.Emit("No platform stream: JAXDNN_EMULATED is not set");
  }
};
}  // namespace xla::ffi
