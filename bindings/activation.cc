// FFI handlers of the activations.
#include "cuda/activation/activation.h"

#include "bindings/activation_kind.h"
#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

// A problem is the last `rank` dimensions; those before them count independent ones.
struct ActivationAttrs {
  std::string_view kind;
  double parameter;
  int64_t rank;
};
struct ChannelAttrs {
  std::string_view kind;
  double parameter;
};
struct GateAttrs {
  std::string_view kind;
  double parameter;
  bool gate_first;
};

// x is [groups..., outer, channels, inner] and the operand [groups..., channels].
std::optional<activation::ChannelShape> ToChannelShape(const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  if (dims.size() < 3) return std::nullopt;
  const size_t lead = dims.size() - 3;
  activation::ChannelShape shape = {1, dims[lead], dims[lead + 1], dims[lead + 2]};
  for (size_t i = 0; i < lead; ++i) shape.groups *= dims[i];
  return shape;
}

// x is [..., 2, inner].
std::optional<activation::GateShape> ToGateShape(const ffi::AnyBuffer& x, bool gate_first) {
  const auto dims = x.dimensions();
  if (dims.size() < 2 || dims[dims.size() - 2] != 2) return std::nullopt;
  activation::GateShape shape = {1, dims[dims.size() - 1], gate_first};
  for (size_t i = 0; i + 2 < dims.size(); ++i) shape.outer *= dims[i];
  return shape;
}

// The mask, if it was asked for.
ffi::ErrorOr<uint8_t*> MaskOf(ffi::RemainingRets& rest) {
  if (rest.size() == 0) return static_cast<uint8_t*>(nullptr);
  auto mask = rest.get<ffi::AnyBuffer>(0);
  if (!mask.has_value()) return ffi::Unexpected(mask.error());
  return static_cast<uint8_t*>((*mask)->untyped_data());
}

bool SameType(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return a.element_type() == b.element_type() && SameShape(a, b);
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::ActivationAttrs, xla::ffi::StructMember<std::string_view>("kind"),
                                      xla::ffi::StructMember<double>("parameter"),
                                      xla::ffi::StructMember<int64_t>("rank"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::ChannelAttrs, xla::ffi::StructMember<std::string_view>("kind"),
                                      xla::ffi::StructMember<double>("parameter"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::GateAttrs, xla::ffi::StructMember<std::string_view>("kind"),
                                      xla::ffi::StructMember<double>("parameter"),
                                      xla::ffi::StructMember<bool>("gate_first"));

namespace jaxdnn {

// Elementwise ---------------------------------------------------------------------------------------------------------

static ffi::Error ActivationImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                                 ffi::RemainingRets rest, ActivationAttrs attrs) {
  const auto f = ToActivation(attrs.kind, attrs.parameter);
  const auto dtype = ToDType(x.element_type());
  const auto mask = MaskOf(rest);
  const auto dims = x.dimensions();
  if (!f || !dtype || !mask.has_value() || !SameType(x, *y) || attrs.rank < 0 ||
      attrs.rank > static_cast<int64_t>(dims.size()))
    return Unsupported("no kernel", "activation", x, *y);
  activation::ChannelShape shape = {1, 1, 1, 1};
  for (size_t i = 0; i < dims.size(); ++i) (i + attrs.rank < dims.size() ? shape.groups : shape.outer) *= dims[i];
  const cudaError_t status =
      activation::Forward(*f, *dtype, shape, x.untyped_data(), nullptr, y->untyped_data(), *mask, stream);
  return FromCuda(status, "activation", x);
}

JAXDNN_HANDLER(Activation, Bind<1, 1>().RemainingRets().Attrs<ActivationAttrs>());

static ffi::Error ActivationBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer residual,
                                    ffi::Result<ffi::AnyBuffer> dx, ActivationAttrs attrs) {
  const auto f = ToActivation(attrs.kind, attrs.parameter);
  const auto dtype = ToDType(g.element_type());
  const auto dims = g.dimensions();
  if (!f || !dtype || !SameType(g, *dx) || attrs.rank < 0 || attrs.rank > static_cast<int64_t>(dims.size()) ||
      (residual.element_type() != ffi::U8 && !SameType(g, residual)))
    return Unsupported("no kernel", "activation_bwd", g, residual, *dx);
  int64_t rows = 1, n = 1;
  for (size_t i = 0; i < dims.size(); ++i) (i + attrs.rank < dims.size() ? rows : n) *= dims[i];
  const cudaError_t status =
      activation::Backward(*f, *dtype, g.untyped_data(), residual.untyped_data(), dx->untyped_data(), rows, n, stream);
  return FromCuda(status, "activation_bwd", g);
}

JAXDNN_HANDLER(ActivationBwd, Bind<2, 1>().Attrs<ActivationAttrs>());

// An operand per channel ----------------------------------------------------------------------------------------------

static ffi::Error ChannelActivationImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer operand,
                                        ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets rest, ChannelAttrs attrs) {
  const bool prelu = attrs.kind == "prelu";
  const auto f = ToActivation(prelu ? "identity" : attrs.kind, attrs.parameter);
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToChannelShape(x);
  const auto mask = MaskOf(rest);
  if (!f || !dtype || !shape || !mask.has_value() || !SameType(x, *y) || operand.element_type() != x.element_type() ||
      static_cast<int64_t>(operand.element_count()) != shape->groups * shape->channels)
    return Unsupported("no kernel", "channel_activation", x, operand, *y);
  const cudaError_t status = prelu ? activation::PReluForward(*dtype, *shape, x.untyped_data(), operand.untyped_data(),
                                                              y->untyped_data(), stream)
                                   : activation::Forward(*f, *dtype, *shape, x.untyped_data(), operand.untyped_data(),
                                                         y->untyped_data(), *mask, stream);
  return FromCuda(status, "channel_activation", x, operand);
}

JAXDNN_HANDLER(ChannelActivation, Bind<2, 1>().RemainingRets().Attrs<ChannelAttrs>());

static ffi::Error ChannelActivationBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer residual,
                                           ffi::AnyBuffer operand, ffi::Result<ffi::AnyBuffer> dx,
                                           ffi::Result<ffi::AnyBuffer> doperand, ffi::Result<ffi::AnyBuffer> workspace,
                                           ChannelAttrs attrs) {
  const bool prelu = attrs.kind == "prelu";
  const auto f = ToActivation(prelu ? "identity" : attrs.kind, attrs.parameter);
  const auto dtype = ToDType(g.element_type());
  const auto shape = ToChannelShape(g);
  if (!f || !dtype || !shape || !SameType(g, *dx) || !SameType(operand, *doperand) ||
      operand.element_type() != g.element_type() ||
      static_cast<int64_t>(operand.element_count()) != shape->groups * shape->channels ||
      (residual.element_type() != ffi::U8 && !SameType(g, residual)) ||
      static_cast<int64_t>(workspace->size_bytes()) < activation::ChannelWorkspace(*dtype, *shape))
    return Unsupported("no kernel", "channel_activation_bwd", g, residual, operand);
  const cudaError_t status =
      prelu
          ? activation::PReluBackward(*dtype, *shape, g.untyped_data(), residual.untyped_data(), operand.untyped_data(),
                                      dx->untyped_data(), doperand->untyped_data(), workspace->untyped_data(), stream)
          : activation::BiasBackward(*f, *dtype, *shape, g.untyped_data(), residual.untyped_data(),
                                     operand.untyped_data(), dx->untyped_data(), doperand->untyped_data(),
                                     workspace->untyped_data(), stream);
  return FromCuda(status, "channel_activation_bwd", g, operand);
}

JAXDNN_HANDLER(ChannelActivationBwd, Bind<3, 3>().Attrs<ChannelAttrs>());

// Gated ---------------------------------------------------------------------------------------------------------------

static ffi::Error GateImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, GateAttrs attrs) {
  const auto f = ToActivation(attrs.kind, attrs.parameter);
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToGateShape(x, attrs.gate_first);
  if (!f || !dtype || !shape || y->element_type() != x.element_type() || 2 * y->element_count() != x.element_count())
    return Unsupported("no kernel", "gate", x, *y);
  const cudaError_t status = activation::GateForward(*f, *dtype, *shape, x.untyped_data(), y->untyped_data(), stream);
  return FromCuda(status, "gate", x);
}

JAXDNN_HANDLER(Gate, Bind<1, 1>().Attrs<GateAttrs>());

static ffi::Error GateBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> dx,
                              GateAttrs attrs) {
  const auto f = ToActivation(attrs.kind, attrs.parameter);
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToGateShape(x, attrs.gate_first);
  if (!f || !dtype || !shape || !SameType(x, *dx) || g.element_type() != x.element_type() ||
      2 * g.element_count() != x.element_count())
    return Unsupported("no kernel", "gate_bwd", g, x, *dx);
  const cudaError_t status =
      activation::GateBackward(*f, *dtype, *shape, g.untyped_data(), x.untyped_data(), dx->untyped_data(), stream);
  return FromCuda(status, "gate_bwd", g, x);
}

JAXDNN_HANDLER(GateBwd, Bind<2, 1>().Attrs<GateAttrs>());

}  // namespace jaxdnn
