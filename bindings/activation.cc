// FFI handlers of the activations.
#include "cuda/activation/activation.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct ActivationAttrs {
  std::string_view kind;
};

std::optional<activation::Kind> ToKind(std::string_view name) {
  if (name == "relu") return activation::Kind::kRelu;
  if (name == "sigmoid") return activation::Kind::kSigmoid;
  if (name == "tanh") return activation::Kind::kTanh;
  return std::nullopt;
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::ActivationAttrs, xla::ffi::StructMember<std::string_view>("kind"));

namespace jaxdnn {

static ffi::Error ActivationImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                                 ActivationAttrs attrs) {
  const auto kind = ToKind(attrs.kind);
  const auto dtype = ToDType(x.element_type());
  if (!kind || !dtype || y->element_type() != x.element_type() || !SameShape(x, *y))
    return Unsupported("no kernel", "activation", x, *y);
  const cudaError_t status =
      activation::Forward(*kind, *dtype, x.untyped_data(), y->untyped_data(), x.element_count(), stream);
  return FromCuda(status, "activation", x);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Activation, ActivationImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs<ActivationAttrs>(),
                              {ffi::Traits::kCmdBufferCompatible});

static ffi::Error ActivationBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer y,
                                    ffi::Result<ffi::AnyBuffer> dx, ActivationAttrs attrs) {
  const auto kind = ToKind(attrs.kind);
  const auto dtype = ToDType(g.element_type());
  if (!kind || !dtype || y.element_type() != g.element_type() || dx->element_type() != g.element_type() ||
      !SameShape(g, y) || !SameShape(g, *dx))
    return Unsupported("no kernel", "activation_bwd", g, y, *dx);
  const cudaError_t status = activation::Backward(*kind, *dtype, g.untyped_data(), y.untyped_data(), dx->untyped_data(),
                                                  g.element_count(), stream);
  return FromCuda(status, "activation_bwd", g);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ActivationBwd, ActivationBwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs<ActivationAttrs>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxdnn
