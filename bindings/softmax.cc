// FFI handlers of softmax and log-softmax. Operands are [..., n, inner]; a
// mask, if there is one, comes last.
#include "cuda/softmax/softmax.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"
#include "bindings/softmax_problem.h"

namespace jaxdnn {
namespace {

struct SoftmaxAttrs {
  bool log;
  double without_entries;
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

std::optional<softmax::Problem> WithMask(const ffi::AnyBuffer& x, const ffi::RemainingArgs& rest,
                                         const ffi::AnyBuffer& workspace) {
  if (rest.size() == 0) return ToSoftmaxProblem(x, nullptr, workspace);
  const auto mask = rest.get<ffi::AnyBuffer>(0);
  return mask.has_value() && rest.size() == 1 ? ToSoftmaxProblem(x, &*mask, workspace) : std::nullopt;
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::SoftmaxAttrs, xla::ffi::StructMember<bool>("log"),
                                      xla::ffi::StructMember<double>("without_entries"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::SoftmaxBwdAttrs, xla::ffi::StructMember<std::string_view>("map"));

namespace jaxdnn {

static ffi::Error SoftmaxImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                              ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                              SoftmaxAttrs attrs) {
  const auto problem = WithMask(x, rest, *workspace);
  if (!problem || y->element_type() != x.element_type() || !SameShape(x, *y))
    return Unsupported("no kernel", "softmax", x, *y);
  const cudaError_t status = softmax::Forward(attrs.log, *ToDType(x.element_type()), attrs.without_entries,
                                              x.untyped_data(), y->untyped_data(), *problem, stream);
  return FromCuda(status, "softmax", x);
}

JAXDNN_HANDLER(Softmax, Bind<1, 2, true>().Attrs<SoftmaxAttrs>());

static ffi::Error SoftmaxBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer y, ffi::RemainingArgs rest,
                                 ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                                 SoftmaxBwdAttrs attrs) {
  const auto map = ToMap(attrs.map);
  const auto problem = WithMask(g, rest, *workspace);
  if (!map || !problem || y.element_type() != g.element_type() || out->element_type() != g.element_type() ||
      !SameShape(g, y) || !SameShape(g, *out))
    return Unsupported("no kernel", "softmax_bwd", g, y, *out);
  const cudaError_t status = softmax::Backward(*map, *ToDType(g.element_type()), g.untyped_data(), y.untyped_data(),
                                               out->untyped_data(), *problem, stream);
  return FromCuda(status, "softmax_bwd", g);
}

JAXDNN_HANDLER(SoftmaxBwd, Bind<2, 2, true>().Attrs<SoftmaxBwdAttrs>());

}  // namespace jaxdnn
