// Which activation, as host code names it.
#pragma once

namespace jaxdnn::activation {

enum class Kind {
  kIdentity,
  kRelu,
  kClippedRelu,
  kLeakyRelu,
  kHardSigmoid,
  kHardTanh,
  kSigmoid,
  kTanh,
  kElu,
  kCelu,
  kSelu,
  kSoftplus,
  kLogSigmoid,
  kSilu,
  kHardSwish,
  kGelu,
  kGeluTanh,
  kMish,
  kSoftSign,
  kSquareplus,
};

// `parameter` is the ceiling of a clipped relu, the slope of a leaky one, the alpha of elu and celu, the beta of
// softplus and silu, the b of squareplus; the others have none.
struct Activation {
  Kind kind;
  double parameter = 0;
};

}  // namespace jaxdnn::activation
