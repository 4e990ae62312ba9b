// The activations by the names that Python uses for them.
#pragma once

#include <map>
#include <optional>
#include <string_view>

#include "cuda/activation/kind.h"

namespace jaxdnn {

inline std::optional<activation::Activation> ToActivation(std::string_view name, double parameter) {
  using activation::Kind;
  static const std::map<std::string_view, Kind> kKinds = {
      {"identity", Kind::kIdentity},
      {"relu", Kind::kRelu},
      {"clipped_relu", Kind::kClippedRelu},
      {"leaky_relu", Kind::kLeakyRelu},
      {"hard_sigmoid", Kind::kHardSigmoid},
      {"hard_tanh", Kind::kHardTanh},
      {"sigmoid", Kind::kSigmoid},
      {"tanh", Kind::kTanh},
      {"elu", Kind::kElu},
      {"celu", Kind::kCelu},
      {"selu", Kind::kSelu},
      {"softplus", Kind::kSoftplus},
      {"log_sigmoid", Kind::kLogSigmoid},
      {"silu", Kind::kSilu},
      {"hard_swish", Kind::kHardSwish},
      {"gelu", Kind::kGelu},
      {"gelu_tanh", Kind::kGeluTanh},
      {"mish", Kind::kMish},
      {"soft_sign", Kind::kSoftSign},
      {"squareplus", Kind::kSquareplus},
  };
  const auto found = kKinds.find(name);
  if (found == kKinds.end()) return std::nullopt;
  return activation::Activation{found->second, parameter};
}

}  // namespace jaxdnn
