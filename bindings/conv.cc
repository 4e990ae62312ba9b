// FFI handlers of the convolution.
#include "cuda/conv/conv.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/activation_kind.h"
#include "bindings/conv_problem.h"
#include "bindings/ffi.h"
#include "bindings/handlers.h"
#include "cuda/common/device_code.h"
#include "cuda/conv/depthwise_causal.h"

namespace jaxdnn {

struct ConvAttrs {
  ffi::Span<const int64_t> stride, padding_low, lhs_dilation, rhs_dilation, padding_mode;
  int64_t groups;
  int64_t products;            // as in conv::Problem
  std::string_view algorithm;  // of conv::kAlgorithms or a tile, or empty: the best
  int64_t workspace_limit;
};

struct ConvFwdAttrs {
  ffi::Span<const int64_t> stride, padding_low, lhs_dilation, rhs_dilation, padding_mode;
  int64_t groups, products;
  std::string_view algorithm;
  int64_t workspace_limit;
  std::string_view activation;
  double parameter;
  bool bias, residual, scale;  // which of the optional operands there are, in this order
};

struct CausalAttrs {
  std::string_view activation;
  double parameter;
};

}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::ConvAttrs,
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("stride"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("padding_low"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("lhs_dilation"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("rhs_dilation"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("padding_mode"),
                                      xla::ffi::StructMember<int64_t>("groups"),
                                      xla::ffi::StructMember<int64_t>("products"),
                                      xla::ffi::StructMember<std::string_view>("algorithm"),
                                      xla::ffi::StructMember<int64_t>("workspace_limit"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxdnn::ConvFwdAttrs, xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("stride"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("padding_low"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("lhs_dilation"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("rhs_dilation"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("padding_mode"), xla::ffi::StructMember<int64_t>("groups"),
    xla::ffi::StructMember<int64_t>("products"), xla::ffi::StructMember<std::string_view>("algorithm"),
    xla::ffi::StructMember<int64_t>("workspace_limit"), xla::ffi::StructMember<std::string_view>("activation"),
    xla::ffi::StructMember<double>("parameter"), xla::ffi::StructMember<bool>("bias"),
    xla::ffi::StructMember<bool>("residual"), xla::ffi::StructMember<bool>("scale"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::CausalAttrs, xla::ffi::StructMember<std::string_view>("activation"),
                                      xla::ffi::StructMember<double>("parameter"));

namespace jaxdnn {

// Convolution takes bytes too.
static std::optional<DType> ToConvDType(ffi::DataType type) {
  switch (type) {
    case ffi::S8:
      return DType::kS8;
    case ffi::S32:
      return DType::kS32;
    case ffi::F8E4M3FN:
      return DType::kE4M3;
    case ffi::F8E5M2:
      return DType::kE5M2;
    default:
      return ToDType(type);
  }
}

// Whether kernels have the instructions of compute capability 9.0, whose loads want arrays on 16 bytes.
static bool TakesHopperKernels(std::initializer_list<const void*> arrays) {
  for (const void* a : arrays)
    if (reinterpret_cast<uintptr_t>(a) % 16 != 0) return false;
  return HasHopperCode();
}

// conv::Choose, which takes tens of microseconds, once for each problem: a program launches the same ones again and
// again, and would otherwise wait for the host wherever kernels are short and XLA has not recorded them in a graph.
static std::optional<conv::Config> ChooseOnce(const conv::Problem& p, bool hopper, std::string_view algorithm,
                                              int64_t workspace_limit) {
  using Key = std::pair<std::vector<int64_t>, std::string>;
  static std::map<Key, std::optional<conv::Config>> chosen;
  static std::shared_mutex mutex;
  Key key = {{}, std::string(algorithm)};
  key.first.reserve(64);
  const auto add = [&](auto... values) { (key.first.push_back(static_cast<int64_t>(values)), ...); };
  add(p.direction, p.in, p.filter, p.out, p.products, p.batch, p.images, p.groups, p.channels, p.features, p.exchanged,
      hopper, workspace_limit);
  for (int d = 0; d < conv::kRank; ++d)
    add(p.x[d], p.window[d], p.y[d], p.stride[d], p.pad[d], p.lhs_dilation[d], p.rhs_dilation[d], p.mode[d]);
  {
    const std::shared_lock lock(mutex);
    if (const auto found = chosen.find(key); found != chosen.end()) return found->second;
  }
  const auto config = conv::Choose(p, hopper, algorithm, workspace_limit);
  const std::unique_lock lock(mutex);
  return chosen.emplace(std::move(key), config).first->second;
}

// Whichever of x, w and y are operands, `lhs` and `rhs` are them in that order, and `out` is the third.
template <class Attrs>
ffi::Error Convolve(conv::Direction direction, cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                    ffi::AnyBuffer out, ffi::AnyBuffer workspace, const Attrs& attrs,
                    const conv::Epilogue& epilogue = {}) {
  using conv::Direction;
  const char* name = direction == Direction::kForward        ? "conv_fwd"
                     : direction == Direction::kDataGradient ? "conv_dgrad"
                                                             : "conv_wgrad";
  const auto in_type = ToConvDType(lhs.element_type()), rhs_type = ToConvDType(rhs.element_type()),
             out_type = ToConvDType(out.element_type());
  if (!in_type || !out_type || !rhs_type || !(*in_type == *rhs_type || (IsFloat8(*in_type) && IsFloat8(*rhs_type))))
    return Unsupported("no kernel for these types", name, lhs, rhs, out);
  const ffi::AnyBuffer& x = direction == Direction::kDataGradient ? out : lhs;
  const ffi::AnyBuffer& w = direction == Direction::kFilterGradient ? out : rhs;
  const ffi::AnyBuffer& y = direction == Direction::kForward ? out : direction == Direction::kDataGradient ? lhs : rhs;
  auto problem =
      MakeConvProblem(direction, *in_type, *out_type, x.dimensions(), w.dimensions(), y.dimensions(), attrs.stride,
                      attrs.padding_low, attrs.lhs_dilation, attrs.rhs_dilation, attrs.padding_mode, attrs.groups);
  if (problem) problem->products = attrs.products;
  if (problem) problem->filter = *rhs_type;
  const auto config = problem
                          ? ChooseOnce(*problem,
                                       TakesHopperKernels({lhs.untyped_data(), rhs.untyped_data(), out.untyped_data(),
                                                           epilogue.bias, epilogue.residual, epilogue.scale}),
                                       attrs.algorithm, attrs.workspace_limit)
                          : std::nullopt;
  if (!config)
    return Unsupported(attrs.algorithm.empty() ? "no kernel for these shapes" : "the algorithm cannot do this here",
                       name, lhs, rhs, out);
  if (static_cast<int64_t>(workspace.size_bytes()) < config->workspace_bytes)
    return Unsupported("workspace too small", name, lhs, rhs, out);
  const int status = conv::Launch(*problem, *config, lhs.untyped_data(), rhs.untyped_data(), out.untyped_data(),
                                  workspace.untyped_data(), epilogue, stream);
  return FromCuda(static_cast<cudaError_t>(status), name, lhs, rhs, out);
}

static ffi::Error ConvFwdImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                              ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                              ConvFwdAttrs attrs) {
  const auto activation = ToActivation(attrs.activation, attrs.parameter);
  if (!activation || rest.size() != size_t{attrs.bias} + attrs.residual + attrs.scale)
    return Unsupported("no such epilogue", "conv_fwd", x, w, *y);
  conv::Epilogue epilogue = {nullptr, nullptr, *activation};
  const auto y_dims = y->dimensions();
  size_t next = 0;
  if (attrs.bias) {
    const auto bias = rest.get<ffi::AnyBuffer>(next++);
    if (bias->element_type() != y->element_type() ||
        static_cast<int64_t>(bias->element_count()) != y_dims.front() * y_dims.back())
      return Unsupported("the bias does not fit", "conv_fwd", x, w, *y, *bias);
    epilogue.bias = bias->untyped_data();
  }
  if (attrs.residual) {
    const auto residual = rest.get<ffi::AnyBuffer>(next++);
    if (residual->element_type() != y->element_type() || !SameShape(*residual, *y))
      return Unsupported("the residual does not fit", "conv_fwd", x, w, *y, *residual);
    epilogue.residual = residual->untyped_data();
  }
  if (attrs.scale) {
    const auto scale = rest.get<ffi::AnyBuffer>(next++);
    if (scale->element_type() != ffi::F32 ||
        static_cast<int64_t>(scale->element_count()) != y_dims.front() * y_dims.back())
      return Unsupported("the scale does not fit", "conv_fwd", x, w, *y, *scale);
    epilogue.scale = static_cast<const float*>(scale->untyped_data());
  }
  return Convolve(conv::Direction::kForward, stream, x, w, *y, *workspace, attrs, epilogue);
}

static ffi::Error ConvDgradImpl(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> x,
                                ffi::Result<ffi::AnyBuffer> workspace, ConvAttrs attrs) {
  return Convolve(conv::Direction::kDataGradient, stream, y, w, *x, *workspace, attrs);
}

static ffi::Error ConvWgradImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::Result<ffi::AnyBuffer> w,
                                ffi::Result<ffi::AnyBuffer> workspace, ConvAttrs attrs) {
  return Convolve(conv::Direction::kFilterGradient, stream, x, y, *w, *workspace, attrs);
}

JAXDNN_HANDLER(ConvFwd, Bind<2, 2, true>().Attrs<ConvFwdAttrs>());
JAXDNN_HANDLER(ConvDgrad, Bind<2, 2>().Attrs<ConvAttrs>());
JAXDNN_HANDLER(ConvWgrad, Bind<2, 2>().Attrs<ConvAttrs>());

// x is [problems..., sequences, length, channels], w [problems..., taps, 1, channels], and the bias, where there is
// one, [problems..., channels].
static ffi::Error CausalBackwardImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x, ffi::AnyBuffer w,
                                     ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> dx,
                                     ffi::Result<ffi::AnyBuffer> dw, ffi::RemainingRets rest, CausalAttrs attrs) {
  const char* name = "causal_backward";
  const auto activation = ToActivation(attrs.activation, attrs.parameter);
  const auto dtype = ToDType(x.element_type());
  const auto dims = x.dimensions(), w_dims = w.dimensions();
  const bool bias = more.size() == 1;
  const auto is_like = [](const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
    return a.element_type() == b.element_type() && SameShape(a, b);
  };
  if (!activation || !dtype || dims.size() < 3 || w_dims.size() != dims.size() || more.size() > 1 ||
      rest.size() != size_t{bias} + 1 || !is_like(g, x) || !is_like(*dx, x) || !is_like(*dw, w) ||
      w.element_type() != x.element_type())
    return Unsupported("no kernel", name, g, x, w, *dx);
  const size_t lead = dims.size() - 3;
  conv::CausalLayer layer = {
      *dtype, 1, dims[lead], dims[lead + 1], dims[lead + 2], static_cast<int>(w_dims[lead]), bias, *activation};
  bool fits = w_dims[lead + 1] == 1 && w_dims[lead + 2] == layer.channels;
  for (size_t i = 0; i < lead; ++i) {
    layer.problems *= dims[i];
    fits = fits && w_dims[i] == dims[i];
  }
  conv::CausalGradients a = {g.untyped_data(),   x.untyped_data(),   w.untyped_data(), nullptr,
                             dx->untyped_data(), dw->untyped_data(), nullptr};
  if (bias) {
    const auto b = more.get<ffi::AnyBuffer>(0);
    auto db = rest.get<ffi::AnyBuffer>(0);
    fits = fits && b.has_value() && db.has_value() && b->element_type() == x.element_type() && is_like(**db, *b) &&
           static_cast<int64_t>(b->element_count()) == layer.problems * layer.channels;
    if (fits) a.bias = b->untyped_data();
    if (fits) a.dbias = (*db)->untyped_data();
  }
  auto workspace = rest.get<ffi::AnyBuffer>(bias);
  if (!fits || !workspace.has_value() ||
      static_cast<int64_t>((*workspace)->size_bytes()) < conv::CausalWorkspace(layer))
    return Unsupported("no kernel for these shapes", name, g, x, w, *dx);
  const int status = conv::LaunchCausalBackward(layer, a, (*workspace)->untyped_data(), stream);
  return FromCuda(static_cast<cudaError_t>(status), name, g, x, w);
}

JAXDNN_HANDLER(CausalBackward, Bind<3, 2, true>().RemainingRets().Attrs<CausalAttrs>());

}  // namespace jaxdnn
