#include "cuda/conv/pairs.h"

#include "cuda/common/int_div.h"
#include "cuda/conv/frame.h"

namespace jaxdnn::conv {

std::optional<Pairs> PairsOf(const Problem& p) {
  constexpr int d = kRank - 1;
  if (p.direction == Direction::kFilterGradient || p.groups != 1 || p.batch != 1 || SizeOf(p.in) != 2 ||
      p.rhs_dilation[d] != 1 || HasFrame(p))
    return std::nullopt;
  // index * divisor = position * stride + tap * tap_step + constant, as in axis.cuh.
  const bool data_gradient = p.direction == Direction::kDataGradient;
  const int64_t divisor = data_gradient ? p.stride[d] : p.lhs_dilation[d];
  const int64_t stride = data_gradient ? p.lhs_dilation[d] : p.stride[d];
  const int64_t tap_step = data_gradient ? -1 : 1, constant = data_gradient ? p.pad[d] : -p.pad[d];
  const bool of_result = divisor == 2 && stride == 1;
  if (!of_result && !(divisor == 1 && stride == 2)) return std::nullopt;

  Pairs pairs = {p, {of_result, int(p.window[d])}};
  Problem& view = pairs.view;
  const bool of_x = data_gradient == of_result;
  int64_t& channels = of_x ? view.channels : view.features;
  int64_t& extent = of_x ? view.x[d] : view.y[d];
  if (channels != kPairChannels || extent % 2 != 0 || extent == 0) return std::nullopt;
  channels *= 2;
  extent /= 2;
  view.stride[d] = view.lhs_dilation[d] = 1;

  // A result's pair m, or pixel, meets the operand's pixel, or pair, m + o. Of what is gathered its pixel q then has
  // the tap tap_step (2 o + q - constant), of the result it has tap_step (2 o - q - constant).
  const int64_t low = of_result ? -1 : 0, high = of_result ? 0 : 1;  // of what is added to 2 o
  const int64_t first = tap_step > 0 ? constant : constant - (p.window[d] - 1);
  const int64_t least = -FloorDiv(high - first, 2), most = FloorDiv(first + p.window[d] - 1 - low, 2);
  view.window[d] = most - least + 1;
  if (view.window[d] >= p.window[d]) return std::nullopt;
  view.pad[d] = data_gradient ? most : -least;
  pairs.taps.first = int(tap_step > 0 ? 2 * least - constant : constant - 2 * most);
  pairs.taps.second = int(of_result ? -tap_step : tap_step);
  return pairs;
}

}  // namespace jaxdnn::conv
