// The native module: FFI targets by name, and the planner. The version in a target's name changes with its attributes,
// since caches and exported programs hold names and attributes, not code.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bindings/conv_problem.h"
#include "cuda/conv/depthwise_plan.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAXDNN_WITH_CUDA
#include "bindings/handlers.h"
#include "cuda/activation/activation.h"
#include "cuda/conv/depthwise_causal.h"
#include "cuda/group_norm/group_norm.h"
#include "cuda/layer_norm/layer_norm.h"
#include "cuda/loss/log_partition.h"
#include "cuda/softmax/softmax.h"
#else
#define JAXDNN_CUDA_ARCHITECTURES ""
#define JAXDNN_CUDA_VERSION ""
#endif

namespace nb = nanobind;

static const std::map<std::string, jaxdnn::DType> kTypes = {
    {"float32", jaxdnn::DType::kF32},        {"float64", jaxdnn::DType::kF64},     {"float16", jaxdnn::DType::kF16},
    {"bfloat16", jaxdnn::DType::kBF16},      {"int8", jaxdnn::DType::kS8},         {"int32", jaxdnn::DType::kS32},
    {"float8_e4m3fn", jaxdnn::DType::kE4M3}, {"float8_e5m2", jaxdnn::DType::kE5M2}};

static nb::dict Handlers() {
  nb::dict d;
#ifdef JAXDNN_WITH_CUDA
  using namespace jaxdnn;
  const auto add = [&d](const char* name, XLA_FFI_Handler* handler) {
    d[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("jaxdnn.activation.v2", Activation);
  add("jaxdnn.activation_bwd.v2", ActivationBwd);
  add("jaxdnn.channel_activation.v1", ChannelActivation);
  add("jaxdnn.channel_activation_bwd.v1", ChannelActivationBwd);
  add("jaxdnn.dropout.v1", Dropout);
  add("jaxdnn.gate.v1", Gate);
  add("jaxdnn.gate_bwd.v1", GateBwd);
  add("jaxdnn.batch_norm_statistics.v1", BatchNormStatistics);
  add("jaxdnn.batch_norm_apply.v1", BatchNormApply);
  add("jaxdnn.batch_norm_train.v1", BatchNormTrain);
  add("jaxdnn.batch_norm_train_gradient.v1", BatchNormTrainGradient);
  add("jaxdnn.batch_norm_tangent.v1", BatchNormTangent);
  add("jaxdnn.batch_norm_sums.v1", BatchNormSums);
  add("jaxdnn.batch_norm_moments.v1", BatchNormMoments);
  add("jaxdnn.batch_norm_gradient.v1", BatchNormGradient);
  add("jaxdnn.group_norm.v1", GroupNorm);
  add("jaxdnn.group_norm_bwd.v1", GroupNormBwd);
  add("jaxdnn.group_norm_jvp.v1", GroupNormJvp);
  add("jaxdnn.layer_norm.v1", LayerNorm);
  add("jaxdnn.layer_norm_bwd.v1", LayerNormBwd);
  add("jaxdnn.divisive.v1", Divisive);
  add("jaxdnn.divisive_jvp.v1", DivisiveJvp);
  add("jaxdnn.divisive_vjp.v1", DivisiveVjp);
  add("jaxdnn.lrn.v1", Lrn);
  add("jaxdnn.lrn_jvp.v1", LrnJvp);
  add("jaxdnn.lrn_vjp.v1", LrnVjp);
  add("jaxdnn.max_pool.v2", MaxPool);
  add("jaxdnn.pool_gather.v2", PoolGather);
  add("jaxdnn.pool_scatter.v2", PoolScatter);
  add("jaxdnn.sum_pool.v1", SumPool);
  add("jaxdnn.sum_pool_bwd.v1", SumPoolBwd);
  add("jaxdnn.lp_pool.v1", LpPool);
  add("jaxdnn.lp_pool_bwd.v1", LpPoolBwd);
  add("jaxdnn.causal_backward.v1", CausalBackward);
  add("jaxdnn.conv_fwd.v5", ConvFwd);
  add("jaxdnn.conv_dgrad.v5", ConvDgrad);
  add("jaxdnn.conv_wgrad.v4", ConvWgrad);
  add("jaxdnn.log_partition.v2", LogPartition);
  add("jaxdnn.log_partition_bwd.v2", LogPartitionBwd);
  add("jaxdnn.softmax.v2", Softmax);
  add("jaxdnn.softmax_bwd.v2", SoftmaxBwd);
  add("jaxdnn.transform.v1", Transform);
  add("jaxdnn.im2col.v1", Im2col);
  add("jaxdnn.col2im.v1", Col2im);
#endif
  return d;
}

// The convolution planner, on plain shapes; None where no kernel takes the problem.
static nb::object PlanConv(const std::string& direction, const std::string& in_dtype, const std::string& out_dtype,
                           const std::vector<int64_t>& x, const std::vector<int64_t>& w, const std::vector<int64_t>& y,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding_low,
                           const std::vector<int64_t>& lhs_dilation, const std::vector<int64_t>& rhs_dilation,
                           const std::vector<int64_t>& padding_mode, int64_t groups, int products, bool hopper,
                           const std::string& algorithm, int64_t workspace_limit) {
  using namespace jaxdnn;
  static const std::map<std::string, conv::Direction> kDirections = {{"conv_fwd", conv::Direction::kForward},
                                                                     {"conv_dgrad", conv::Direction::kDataGradient},
                                                                     {"conv_wgrad", conv::Direction::kFilterGradient}};
  if (!kTypes.count(in_dtype) || !kTypes.count(out_dtype)) return nb::none();
  auto problem = MakeConvProblem(kDirections.at(direction), kTypes.at(in_dtype), kTypes.at(out_dtype), x, w, y, stride,
                                 padding_low, lhs_dilation, rhs_dilation, padding_mode, groups);
  if (problem) problem->products = products;
  const auto config = problem ? conv::Choose(*problem, hopper, algorithm, workspace_limit) : std::nullopt;
  if (!config) return nb::none();
  nb::dict d;
  const conv::TileShape& tile = conv::kTiles[static_cast<int>(config->tile)];
  d["algorithm"] = conv::kAlgorithms[static_cast<int>(tile.unit)];
  d["tile"] = std::string(tile.name).append(config->edges != 0 ? conv::kEdgesSuffix : "");
  d["splits"] = config->splits;
  d["cluster"] = config->cluster;
  d["blocks"] = config->blocks;
  d["workspace_bytes"] = config->workspace_bytes;
  d["cycles"] = config->cycles;
  const bool depthwise = tile.unit == conv::Unit::kDepthwise;
  constexpr const char* kFinish[] = {"bias", "clamp", "any"};
  d["finish"] = kFinish[static_cast<int>(depthwise ? conv::FinishOf(*problem) : conv::Finish::kAny)];
  return d;
}

#ifdef JAXDNN_WITH_CUDA
// Bytes of workspace of group normalization; None where no kernel takes the problem.
static std::optional<int64_t> GroupNormWorkspace(const std::string& call, const std::string& dtype, bool channels_last,
                                                 const std::vector<int64_t>& x, int64_t groups) {
  using namespace jaxdnn;
  const group_norm::Problem problem = {kTypes.at(dtype),         activation::Kind::kIdentity, channels_last, x[0], x[1],
                                       x[channels_last ? 2 : 3], x[channels_last ? 3 : 2],    groups,        0};
  if (call == "jvp") return group_norm::TangentWorkspace(problem);
  return call == "bwd" ? group_norm::BackwardWorkspace(problem) : group_norm::ForwardWorkspace(problem);
}
#endif

NB_MODULE(_jaxdnn, m) {
  using nb::literals::operator""_a;
  m.attr("conv_workspace_limit") = jaxdnn::conv::kWorkspaceLimit;
  m.def("plan_conv", &PlanConv, "direction"_a, "in_dtype"_a, "out_dtype"_a, "x"_a, "w"_a, "y"_a, "stride"_a,
        "padding_low"_a, "lhs_dilation"_a, "rhs_dilation"_a, "padding_mode"_a, "groups"_a, "products"_a, "hopper"_a,
        "algorithm"_a, "workspace_limit"_a);
#ifdef JAXDNN_WITH_CUDA
  m.def("group_norm_workspace", &GroupNormWorkspace, "call"_a, "dtype"_a, "channels_last"_a, "x"_a, "groups"_a);
  m.def(
      "causal_workspace",
      [](int64_t problems, int64_t sequences, int64_t length, int64_t channels, int taps, bool bias) {
        return jaxdnn::conv::CausalWorkspace({{}, problems, sequences, length, channels, taps, bias, {}});
      },
      "problems"_a, "sequences"_a, "length"_a, "channels"_a, "taps"_a, "bias"_a);
  m.def(
      "channel_activation_workspace",
      [](int64_t itemsize, int64_t groups, int64_t outer, int64_t channels, int64_t inner) {
        using namespace jaxdnn;
        const DType dtype = itemsize == 8 ? DType::kF64 : itemsize == 4 ? DType::kF32 : DType::kBF16;
        return activation::ChannelWorkspace(dtype, {groups, outer, channels, inner});
      },
      "itemsize"_a, "groups"_a, "outer"_a, "channels"_a, "inner"_a);
  m.def(
      "layer_norm_workspace",
      [](const std::string& dtype, int64_t problems, int64_t rows, int64_t n, std::optional<int> gradients) {
        using namespace jaxdnn::layer_norm;
        const Shape shape = {problems, rows, n};
        return gradients ? BackwardWorkspace(shape, kTypes.at(dtype), *gradients) : ForwardWorkspace(shape);
      },
      "dtype"_a, "problems"_a, "rows"_a, "n"_a, nb::kw_only(), "gradients"_a);
  m.def(
      "softmax_workspace",
      [](const std::string& op, const std::string& dtype, int64_t outer, int64_t n, int64_t inner) {
        using namespace jaxdnn;
        const auto bytes = op == "softmax" ? softmax::WorkspaceBytes : loss::WorkspaceBytes;
        return bytes(kTypes.at(dtype), {outer, n, inner});
      },
      "op"_a, "dtype"_a, "outer"_a, "n"_a, "inner"_a);
#endif
  std::vector<std::string> tiles;
  for (const jaxdnn::conv::TileShape& t : jaxdnn::conv::kTiles) tiles.push_back(t.name);
  m.attr("conv_tiles") = tiles;
  m.def("handlers", &Handlers);
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("cuda_architectures") = JAXDNN_CUDA_ARCHITECTURES;
  m.attr("cuda_version") = JAXDNN_CUDA_VERSION;
}
