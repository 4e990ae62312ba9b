// FFI handlers of batch normalization. Data is [..., n, c, s], statistics and parameters are [..., c], pairs [..., 2,
// c].
#include "cuda/batch_norm/batch_norm.h"

#include <initializer_list>

#include "bindings/activation_kind.h"
#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct BatchNormStatisticsAttrs {
  bool where;
};

// `source` and `where` say which of the optional operands there are; they come last, in this order.
struct BatchNormAttrs {
  double epsilon;
  std::string_view activation;
  double parameter;
  bool source, where;
};

struct BatchNormSlotAttrs {
  double epsilon;
  std::string_view activation;
  double parameter;
  bool source, where;
  std::string_view slot;
};

std::optional<batch_norm::Slot> ToSlot(std::string_view name) {
  if (name == "none") return batch_norm::Slot::kNone;
  if (name == "outer") return batch_norm::Slot::kOuter;
  if (name == "inner") return batch_norm::Slot::kInner;
  if (name == "scaled") return batch_norm::Slot::kScaled;
  return std::nullopt;
}

std::optional<batch_norm::Problem> ToProblem(const ffi::AnyBuffer& x) {
  const auto dtype = ToDType(x.element_type());
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  if (!dtype || rank < 3) return std::nullopt;
  batch_norm::Problem p = {*dtype, 1, dims[rank - 3], dims[rank - 2], dims[rank - 1], nullptr};
  for (size_t i = 0; i + 3 < rank; ++i) p.outer *= dims[i];
  return p;
}

bool IsData(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& x) {
  return buffer.element_type() == x.element_type() && SameShape(buffer, x);
}

// `count` numbers for each channel.
bool IsOfChannels(const ffi::AnyBuffer& buffer, const batch_norm::Problem& p, int count) {
  return buffer.element_type() == (p.dtype == DType::kF64 ? ffi::F64 : ffi::F32) &&
         static_cast<int64_t>(buffer.element_count()) == count * p.outer * p.c;
}

bool IsMask(const ffi::AnyBuffer& buffer, const batch_norm::Problem& p) {
  return buffer.element_type() == ffi::PRED && static_cast<int64_t>(buffer.element_count()) == p.outer * p.n * p.s;
}

batch_norm::Workspace ToWorkspace(const ffi::AnyBuffer& buffer) {
  return {buffer.untyped_data(), static_cast<size_t>(buffer.size_bytes())};
}

// Operands and results that vary in number.
std::optional<ffi::AnyBuffer> Get(const ffi::RemainingArgs& args, size_t i) {
  const auto buffer = args.get<ffi::AnyBuffer>(i);
  return buffer.has_value() ? std::optional(*buffer) : std::nullopt;
}

std::optional<ffi::AnyBuffer> Get(const ffi::RemainingRets& rets, size_t i) {
  auto buffer = rets.get<ffi::AnyBuffer>(i);
  return buffer.has_value() ? std::optional(**buffer) : std::nullopt;
}

// What all maps take: x, the affine map, the activation, and the optional operands.
struct Call {
  batch_norm::Problem problem;
  batch_norm::Affine affine;
  activation::Activation activation;
  const void* source;
};

// The optional operands are rest[next], rest[next + 1].
template <class Attrs>
std::optional<Call> ToCall(const ffi::AnyBuffer& x, std::initializer_list<ffi::AnyBuffer> affine, const Attrs& attrs,
                           const ffi::RemainingArgs& rest, size_t next = 0) {
  const auto problem = ToProblem(x);
  const auto f = ToActivation(attrs.activation, attrs.parameter);
  if (!problem || !f) return std::nullopt;
  for (const auto& buffer : affine)
    if (!IsOfChannels(buffer, *problem, 1)) return std::nullopt;
  const auto* p = affine.begin();
  Call call = {*problem,
               {p[0].untyped_data(), p[1].untyped_data(), p[2].untyped_data(), p[3].untyped_data(), attrs.epsilon},
               *f,
               nullptr};
  if (attrs.source) {
    const auto source = Get(rest, next++);
    if (!source || !IsData(*source, x)) return std::nullopt;
    call.source = source->untyped_data();
  }
  if (attrs.where) {
    const auto where = Get(rest, next++);
    if (!where || !IsMask(*where, *problem)) return std::nullopt;
    call.problem.where = where->untyped_data();
  }
  return call;
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::BatchNormStatisticsAttrs, xla::ffi::StructMember<bool>("where"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::BatchNormAttrs, xla::ffi::StructMember<double>("epsilon"),
                                      xla::ffi::StructMember<std::string_view>("activation"),
                                      xla::ffi::StructMember<double>("parameter"),
                                      xla::ffi::StructMember<bool>("source"), xla::ffi::StructMember<bool>("where"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::BatchNormSlotAttrs, xla::ffi::StructMember<double>("epsilon"),
                                      xla::ffi::StructMember<std::string_view>("activation"),
                                      xla::ffi::StructMember<double>("parameter"),
                                      xla::ffi::StructMember<bool>("source"), xla::ffi::StructMember<bool>("where"),
                                      xla::ffi::StructMember<std::string_view>("slot"));

namespace jaxdnn {

static ffi::Error BatchNormStatisticsImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                                          ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> var,
                                          ffi::Result<ffi::AnyBuffer> workspace, BatchNormStatisticsAttrs attrs) {
  auto problem = ToProblem(x);
  const auto where = attrs.where ? Get(rest, 0) : std::nullopt;
  if (!problem || !IsOfChannels(*mean, *problem, 1) || !IsOfChannels(*var, *problem, 1) ||
      (attrs.where && (!where || !IsMask(*where, *problem))))
    return Unsupported("no kernel", "batch_norm_statistics", x, *mean, *var);
  if (where) problem->where = where->untyped_data();
  return FromCuda(batch_norm::Statistics(*problem, x.untyped_data(), mean->untyped_data(), var->untyped_data(),
                                         ToWorkspace(*workspace), stream),
                  "batch_norm_statistics", x);
}

JAXDNN_HANDLER(BatchNormStatistics, Bind<1, 3, true>().Attrs<BatchNormStatisticsAttrs>());

static ffi::Error BatchNormApplyImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer mean, ffi::AnyBuffer var,
                                     ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::RemainingArgs rest,
                                     ffi::Result<ffi::AnyBuffer> y, BatchNormAttrs attrs) {
  const auto call = ToCall(x, {mean, var, scale, bias}, attrs, rest);
  if (!call || !IsData(*y, x)) return Unsupported("no kernel", "batch_norm_apply", x, mean, *y);
  return FromCuda(batch_norm::Apply(call->problem, call->affine, call->activation, x.untyped_data(), call->source,
                                    y->untyped_data(), stream),
                  "batch_norm_apply", x);
}

JAXDNN_HANDLER(BatchNormApply, Bind<5, 1, true>().Attrs<BatchNormAttrs>());

static ffi::Error BatchNormTrainImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                                     ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                                     ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> var,
                                     ffi::Result<ffi::AnyBuffer> workspace, BatchNormAttrs attrs) {
  const auto call = ToCall(x, {*mean, *var, scale, bias}, attrs, rest);
  if (!call || !IsData(*y, x)) return Unsupported("no kernel", "batch_norm_train", x, *mean, *y);
  return FromCuda(
      batch_norm::Train(call->problem, call->affine, call->activation, x.untyped_data(), call->source,
                        y->untyped_data(), mean->untyped_data(), var->untyped_data(), ToWorkspace(*workspace), stream),
      "batch_norm_train", x);
}

JAXDNN_HANDLER(BatchNormTrain, Bind<3, 4, true>().Attrs<BatchNormAttrs>());

static ffi::Error BatchNormTrainGradientImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x,
                                             ffi::AnyBuffer mean, ffi::AnyBuffer var, ffi::AnyBuffer scale,
                                             ffi::AnyBuffer bias, ffi::RemainingArgs rest,
                                             ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> d_scale,
                                             ffi::Result<ffi::AnyBuffer> d_bias, ffi::Result<ffi::AnyBuffer> workspace,
                                             BatchNormAttrs attrs) {
  const auto call = ToCall(x, {mean, var, scale, bias}, attrs, rest);
  if (!call || call->source || call->problem.where || !IsData(g, x) || !IsData(*dx, x) ||
      !IsOfChannels(*d_scale, call->problem, 1) || !IsOfChannels(*d_bias, call->problem, 1))
    return Unsupported("no kernel", "batch_norm_train_gradient", g, x, mean, *dx);
  return FromCuda(batch_norm::TrainGradient(call->problem, call->affine, call->activation, g.untyped_data(),
                                            x.untyped_data(), dx->untyped_data(), d_scale->untyped_data(),
                                            d_bias->untyped_data(), ToWorkspace(*workspace), stream),
                  "batch_norm_train_gradient", x);
}

JAXDNN_HANDLER(BatchNormTrainGradient, Bind<6, 4, true>().Attrs<BatchNormAttrs>());

// After k: t, unless the slot is none, and then what the other maps take.
static ffi::Error BatchNormTangentImpl(cudaStream_t stream, ffi::AnyBuffer k, ffi::RemainingArgs rest,
                                       ffi::Result<ffi::AnyBuffer> out, BatchNormSlotAttrs attrs) {
  const auto slot = ToSlot(attrs.slot);
  const size_t first = slot == batch_norm::Slot::kNone ? 0 : 1;
  const auto t = first ? Get(rest, 0) : std::nullopt, x = Get(rest, first), mean = Get(rest, first + 1),
             var = Get(rest, first + 2), scale = Get(rest, first + 3), bias = Get(rest, first + 4);
  if (!slot || !x || !mean || !var || !scale || !bias) return Unsupported("no kernel", "batch_norm_tangent", k, *out);
  const auto call = ToCall(*x, {*mean, *var, *scale, *bias}, attrs, rest, first + 5);
  if (!call || !IsOfChannels(k, call->problem, 2) || !IsData(*out, *x) || (t && !IsData(*t, *x)))
    return Unsupported("no kernel", "batch_norm_tangent", k, *x, *out);
  return FromCuda(
      batch_norm::Tangent(call->problem, call->affine, call->activation, *slot, t ? t->untyped_data() : nullptr,
                          k.untyped_data(), x->untyped_data(), call->source, out->untyped_data(), stream),
      "batch_norm_tangent", *x);
}

JAXDNN_HANDLER(BatchNormTangent, Bind<1, 1, true>().Attrs<BatchNormSlotAttrs>());

// After the sums: the elementwise result where the slot has one, and the workspace.
static ffi::Error BatchNormSumsImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x, ffi::AnyBuffer mean,
                                    ffi::AnyBuffer var, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                                    ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> sums, ffi::RemainingRets rets,
                                    BatchNormSlotAttrs attrs) {
  const auto slot = ToSlot(attrs.slot);
  const bool writes = slot == batch_norm::Slot::kInner || slot == batch_norm::Slot::kScaled;
  const auto out = writes ? Get(rets, 0) : std::nullopt, workspace = Get(rets, writes ? 1 : 0);
  const auto call = ToCall(x, {mean, var, scale, bias}, attrs, rest);
  if (!slot || !call || !workspace || !IsData(g, x) || !IsOfChannels(*sums, call->problem, 2) ||
      (writes && (!out || !IsData(*out, x))))
    return Unsupported("no kernel", "batch_norm_sums", g, x, mean, *sums);
  return FromCuda(batch_norm::Sums(call->problem, call->affine, call->activation, *slot, g.untyped_data(),
                                   x.untyped_data(), call->source, sums->untyped_data(),
                                   out ? out->untyped_data() : nullptr, ToWorkspace(*workspace), stream),
                  "batch_norm_sums", x);
}

JAXDNN_HANDLER(BatchNormSums, Bind<6, 1, true>().RemainingRets().Attrs<BatchNormSlotAttrs>());

static ffi::Error BatchNormMomentsImpl(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer x, ffi::AnyBuffer mean,
                                       ffi::AnyBuffer var, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                                       ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                       ffi::Result<ffi::AnyBuffer> moments, ffi::Result<ffi::AnyBuffer> workspace,
                                       BatchNormAttrs attrs) {
  const auto call = ToCall(x, {mean, var, scale, bias}, attrs, rest);
  if (!call || !IsData(t, x) || !IsData(*out, x) || !IsOfChannels(*moments, call->problem, 2))
    return Unsupported("no kernel", "batch_norm_moments", t, x, mean, *moments);
  return FromCuda(batch_norm::Moments(call->problem, call->affine, call->activation, t.untyped_data(), x.untyped_data(),
                                      out->untyped_data(), moments->untyped_data(), ToWorkspace(*workspace), stream),
                  "batch_norm_moments", x);
}

JAXDNN_HANDLER(BatchNormMoments, Bind<6, 3, true>().Attrs<BatchNormAttrs>());

static ffi::Error BatchNormGradientImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer k, ffi::AnyBuffer x,
                                        ffi::AnyBuffer mean, ffi::AnyBuffer var, ffi::AnyBuffer scale,
                                        ffi::AnyBuffer bias, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx,
                                        BatchNormAttrs attrs) {
  const auto call = ToCall(x, {mean, var, scale, bias}, attrs, rest);
  if (!call || !IsData(g, x) || !IsData(*dx, x) || !IsOfChannels(k, call->problem, 2))
    return Unsupported("no kernel", "batch_norm_gradient", g, k, x, mean, *dx);
  return FromCuda(batch_norm::Gradient(call->problem, call->affine, call->activation, g.untyped_data(),
                                       k.untyped_data(), x.untyped_data(), dx->untyped_data(), stream),
                  "batch_norm_gradient", x);
}

JAXDNN_HANDLER(BatchNormGradient, Bind<7, 1, true>().Attrs<BatchNormAttrs>());

}  // namespace jaxdnn
