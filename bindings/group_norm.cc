// FFI handlers of group normalization. x is [batch, n, spatial, channels] or [batch, n, channels, spatial], parameters
// are [batch, channels], statistics [batch, n, groups, 3].
#include "cuda/group_norm/group_norm.h"

#include "bindings/activation_kind.h"
#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct GroupNormAttrs {
  bool channels_last;
  int64_t groups;
  double epsilon;
  std::string_view activation;
};

bool HasShape(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return buffer.element_type() == type && std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

// The problem, if x, the parameters and the statistics belong together.
std::optional<group_norm::Problem> ToProblem(const GroupNormAttrs& attrs, const ffi::AnyBuffer& x,
                                             std::initializer_list<const ffi::AnyBuffer*> parameters,
                                             const ffi::AnyBuffer& statistics) {
  const auto dtype = ToDType(x.element_type());
  const auto activation = ToActivation(attrs.activation, 1);
  const auto dims = x.dimensions();
  if (!dtype || !activation || dims.size() != 4 || attrs.groups < 1) return std::nullopt;
  const int64_t channels = dims[attrs.channels_last ? 3 : 2], spatial = dims[attrs.channels_last ? 2 : 3];
  if (channels % attrs.groups != 0) return std::nullopt;
  const auto wide = *dtype == DType::kF64 ? ffi::F64 : ffi::F32;
  for (const auto* p : parameters)
    if (!HasShape(*p, wide, {dims[0], channels})) return std::nullopt;
  if (!HasShape(statistics, wide, {dims[0], dims[1], attrs.groups, group_norm::kStatistics})) return std::nullopt;
  return group_norm::Problem{*dtype,  activation->kind, attrs.channels_last, dims[0],      dims[1],
                             spatial, channels,         attrs.groups,        attrs.epsilon};
}

bool SameArray(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return a.element_type() == b.element_type() && SameShape(a, b);
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::GroupNormAttrs, xla::ffi::StructMember<bool>("channels_last"),
                                      xla::ffi::StructMember<int64_t>("groups"),
                                      xla::ffi::StructMember<double>("epsilon"),
                                      xla::ffi::StructMember<std::string_view>("activation"));

namespace jaxdnn {

static ffi::Error GroupNormImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                                ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> statistics,
                                ffi::Result<ffi::AnyBuffer> workspace, GroupNormAttrs attrs) {
  const auto problem = ToProblem(attrs, x, {&scale, &bias}, *statistics);
  if (!problem || !SameArray(x, *y)) return Unsupported("no kernel", "group_norm", x, scale, bias, *statistics);
  const auto needed = group_norm::ForwardWorkspace(*problem);
  if (!needed || static_cast<int64_t>(workspace->size_bytes()) < *needed)
    return Unsupported("workspace is too small", "group_norm", x);
  const cudaError_t status =
      group_norm::Forward(*problem, x.untyped_data(), scale.untyped_data(), bias.untyped_data(), y->untyped_data(),
                          statistics->untyped_data(), workspace->untyped_data(), stream);
  return FromCuda(status, "group_norm", x);
}

JAXDNN_HANDLER(GroupNorm, Bind<3, 3>().Attrs<GroupNormAttrs>());

static ffi::Error GroupNormBwdImpl(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                   ffi::AnyBuffer bias, ffi::AnyBuffer statistics, ffi::Result<ffi::AnyBuffer> dx,
                                   ffi::Result<ffi::AnyBuffer> dscale, ffi::Result<ffi::AnyBuffer> dbias,
                                   ffi::Result<ffi::AnyBuffer> workspace, GroupNormAttrs attrs) {
  const auto problem = ToProblem(attrs, x, {&scale, &bias, &*dscale, &*dbias}, statistics);
  if (!problem || !SameArray(x, dy) || !SameArray(x, *dx))
    return Unsupported("no kernel", "group_norm_bwd", dy, x, scale, bias, statistics);
  const auto needed = group_norm::BackwardWorkspace(*problem);
  if (!needed || static_cast<int64_t>(workspace->size_bytes()) < *needed)
    return Unsupported("workspace is too small", "group_norm_bwd", x);
  const cudaError_t status =
      group_norm::Backward(*problem, dy.untyped_data(), x.untyped_data(), scale.untyped_data(), bias.untyped_data(),
                           statistics.untyped_data(), dx->untyped_data(), dscale->untyped_data(), dbias->untyped_data(),
                           workspace->untyped_data(), stream);
  return FromCuda(status, "group_norm_bwd", x);
}

JAXDNN_HANDLER(GroupNormBwd, Bind<5, 4>().Attrs<GroupNormAttrs>());

static ffi::Error GroupNormJvpImpl(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer tscale, ffi::AnyBuffer tbias,
                                   ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                                   ffi::AnyBuffer statistics, ffi::Result<ffi::AnyBuffer> ty,
                                   ffi::Result<ffi::AnyBuffer> workspace, GroupNormAttrs attrs) {
  const auto problem = ToProblem(attrs, x, {&tscale, &tbias, &scale, &bias}, statistics);
  if (!problem || !SameArray(x, t) || !SameArray(x, *ty))
    return Unsupported("no kernel", "group_norm_jvp", t, tscale, tbias, x, scale, bias, statistics);
  const auto needed = group_norm::TangentWorkspace(*problem);
  if (!needed || static_cast<int64_t>(workspace->size_bytes()) < *needed)
    return Unsupported("workspace is too small", "group_norm_jvp", x);
  const cudaError_t status = group_norm::Tangent(
      *problem, t.untyped_data(), tscale.untyped_data(), tbias.untyped_data(), x.untyped_data(), scale.untyped_data(),
      bias.untyped_data(), statistics.untyped_data(), ty->untyped_data(), workspace->untyped_data(), stream);
  return FromCuda(status, "group_norm_jvp", x);
}

JAXDNN_HANDLER(GroupNormJvp, Bind<7, 2>().Attrs<GroupNormAttrs>());

}  // namespace jaxdnn
