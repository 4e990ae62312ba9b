// The native module: FFI targets by name, and the planner. The version in a target's name changes with its attributes,
// since caches and exported programs hold names and attributes, not code.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "xla/ffi/api/c_api.h"

#ifdef JAXDNN_WITH_CUDA
#include "bindings/handlers.h"
#else
#define JAXDNN_CUDA_ARCHITECTURES ""
#define JAXDNN_CUDA_VERSION ""
#endif

namespace nb = nanobind;

static nb::dict Handlers() {
  nb::dict d;
#ifdef JAXDNN_WITH_CUDA
  using namespace jaxdnn;
  const auto add = [&d](const char* name, XLA_FFI_Handler* handler) {
    d[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("jaxdnn.activation.v1", Activation);
  add("jaxdnn.activation_bwd.v1", ActivationBwd);
#endif
  return d;
}

NB_MODULE(_jaxdnn, m) {
  m.def("handlers", &Handlers);
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("cuda_architectures") = JAXDNN_CUDA_ARCHITECTURES;
  m.attr("cuda_version") = JAXDNN_CUDA_VERSION;
}
