// Array shapes and attributes -> conv::Problem, for the handlers and for the planner that Python calls.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/conv/conv.h"

namespace jaxdnn {

// A view of some dimensions; FFI spans and std::vector both become one.
struct Dims {
  const int64_t* data;
  size_t size;

  template <class Container>
  Dims(const Container& c) : data(c.begin() == c.end() ? nullptr : &*c.begin()), size(c.size()) {}  // NOLINT
  int64_t operator[](size_t i) const { return data[i]; }
};

// Empty if there are more than conv::kRank spatial dimensions or if the shapes contradict one another.
inline std::optional<conv::Problem> MakeConvProblem(conv::Direction direction, DType in, DType out, Dims x, Dims w,
                                                    Dims y, Dims stride, Dims padding_low, Dims lhs_dilation,
                                                    Dims rhs_dilation, Dims padding_mode, int64_t groups) {
  const size_t rank = stride.size;
  if (rank > conv::kRank || x.size != rank + 3 || w.size != rank + 3 || y.size != rank + 3) return std::nullopt;
  if (padding_low.size != rank || lhs_dilation.size != rank || rhs_dilation.size != rank || padding_mode.size != rank)
    return std::nullopt;
  conv::Problem p = {};
  p.direction = direction;
  p.in = p.filter = in;
  p.out = out;
  p.batch = x[0];
  p.images = x[1];
  p.groups = groups;
  p.channels = w[rank + 1];
  p.features = groups > 0 ? w[rank + 2] / groups : 0;
  if (groups < 1 || w[0] != p.batch || y[0] != p.batch || y[1] != p.images || x[rank + 2] != groups * p.channels ||
      y[rank + 2] != groups * p.features || w[rank + 2] != groups * p.features)
    return std::nullopt;
  for (int d = 0; d < conv::kRank; ++d) {
    // Missing dimensions come first, with extent 1.
    const int s = d - (conv::kRank - static_cast<int>(rank));
    p.x[d] = s < 0 ? 1 : x[2 + s];
    p.y[d] = s < 0 ? 1 : y[2 + s];
    p.window[d] = s < 0 ? 1 : w[1 + s];
    p.stride[d] = s < 0 ? 1 : stride[s];
    p.pad[d] = s < 0 ? 0 : padding_low[s];
    p.lhs_dilation[d] = s < 0 ? 1 : lhs_dilation[s];
    p.rhs_dilation[d] = s < 0 ? 1 : rhs_dilation[s];
    p.mode[d] = s < 0 ? conv::PadMode::kZeros : static_cast<conv::PadMode>(padding_mode[s]);
    if (p.stride[d] < 1 || p.lhs_dilation[d] < 1 || p.rhs_dilation[d] < 1) return std::nullopt;
  }
  return conv::Folded(p);
}

}  // namespace jaxdnn
