// FFI handlers of softmax and log-softmax. Operands are [..., n, inner].
#include "cuda/softmax/softmax.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct SoftmaxAttrs {
  bool log;
};

struct SoftmaxBwdAttrs {
  std::string_view map;
};

std::optional<softmax::Map> ToMap(std::string_view name) {
  if (name == "softmax") return softmax::Map::kSoftmax;
  if (name == "log_softmax_jvp") return softmax::Map::kLogSoftmaxJvp;
  if (name == "log_softmax_vjp") return softmax::Map::kLogSoftmaxVjp;
  return std::nullopt;
}

std::optional<softmax::Shape> ToShape(const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  if (dims.size() < 2) return std::nullopt;
  softmax::Shape shape = {1, dims[dims.size() - 2], dims[dims.size() - 1]};
  for (size_t i = 0; i + 2 < dims.size(); ++i) shape.outer *= dims[i];
  return shape;
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::SoftmaxAttrs, xla::ffi::StructMember<bool>("log"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::SoftmaxBwdAttrs, xla::ffi::StructMember<std::string_view>("map"));

namespace jaxdnn {

static ffi::Error SoftmaxImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                              SoftmaxAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToShape(x);
  if (!dtype || !shape || y->element_type() != x.element_type() || !SameShape(x, *y))
    return Unsupported("no kernel", "softmax", x, *y);
  const cudaError_t status = softmax::Forward(attrs.log, *dtype, x.untyped_data(), y->untyped_data(), *shape, stream);
  return FromCuda(status, "softmax", x);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Softmax, SoftmaxImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs<SoftmaxAttrs>(),
                              {ffi::Traits::kCmdBufferCompatible});

static ffi::Error SoftmaxBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer y,
                                 ffi::Result<ffi::AnyBuffer> out, SoftmaxBwdAttrs attrs) {
  const auto map = ToMap(attrs.map);
  const auto dtype = ToDType(g.element_type());
  const auto shape = ToShape(g);
  if (!map || !dtype || !shape || y.element_type() != g.element_type() || out->element_type() != g.element_type() ||
      !SameShape(g, y) || !SameShape(g, *out))
    return Unsupported("no kernel", "softmax_bwd", g, y, *out);
  const cudaError_t status =
      softmax::Backward(*map, *dtype, g.untyped_data(), y.untyped_data(), out->untyped_data(), *shape, stream);
  return FromCuda(status, "softmax_bwd", g);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxBwd, SoftmaxBwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs<SoftmaxBwdAttrs>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxdnn
