// What a problem amounts to: a forward convolution, a matrix product, phases, dense groups.
#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/common/int_div.h"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

namespace {

bool AreSideBySide(const Problem& p, int d) {
  return p.window[d] == p.stride[d] && p.x[d] == p.stride[d] * p.y[d] && p.y[d] > 0 && p.pad[d] == 0 &&
         p.lhs_dilation[d] == 1 && p.rhs_dilation[d] == 1;
}

// Along the last dimension, s pixels each, they are further channels: x [W, C] is x [W / s, s C] in memory, and w [s,
// C, K] is w [1, s C, K]. So patches of few channels become lines of whole 16-byte chunks; or of halves of them, of
// 16-bit floats that are only stored.
void FoldIntoChannels(Problem* p) {
  constexpr int d = kRank - 1;
  const int64_t s = p->stride[d], chunk = p->direction == Direction::kDataGradient && SizeOf(p->in) == 2 ? 8 : 16;
  if (s == 1 || p->groups != 1 || !AreSideBySide(*p, d) || s * p->channels * SizeOf(p->in) % chunk != 0) return;
  p->channels *= s;
  p->x[d] = p->y[d];
  p->window[d] = p->stride[d] = 1;
}

// Along the first dimension that has a stride they are images of their own, x [N, H, W] is x [N H / s, s, W], and so
// are the positions before it. That leaves no stride, of which the TMA unit has limits. But kernels of few channels go
// down images, and in the data gradient all but one of the taps would meet nothing.
void FoldIntoImages(Problem* p) {
  if (p->direction == Direction::kDataGradient || p->groups != 1 || p->channels * SizeOf(p->in) % 16 != 0) return;
  int d = 0;
  while (d < kRank - 1 && p->stride[d] == 1 && AreSideBySide(*p, d)) ++d;
  if (d == kRank - 1 || p->stride[d] == 1 || !AreSideBySide(*p, d)) return;
  for (int i = 0; i <= d; ++i) {
    p->images *= p->y[i];
    p->x[i] = p->stride[i];
    p->y[i] = p->stride[i] = 1;
  }
}

}  // namespace

Problem Folded(const Problem& p) {
  Problem f = p;
  FoldIntoChannels(&f);
  FoldIntoImages(&f);
  return f;
}

Problem Exchanged(const Problem& p) {
  Problem e = p;
  e.exchanged = !p.exchanged;
  std::swap(e.channels, e.features);
  std::swap(e.x, e.y);
  std::swap(e.stride, e.lhs_dilation);
  for (int d = 0; d < kRank; ++d) e.pad[d] = (p.window[d] - 1) * p.rhs_dilation[d] - p.pad[d];
  return e;
}

Problem AsForward(const Problem& p) {
  if (p.direction != Direction::kDataGradient) return p;
  Problem f = Exchanged(p);
  f.direction = Direction::kForward;
  return f;
}

Phases PhasesOf(const Problem& p) {
  // index * step = position * stride + tap * tap_step + constant, as in axis.cuh.
  const bool forward = p.direction == Direction::kForward;
  Phases f;
  for (int d = 0; d < kRank; ++d) {
    const int64_t step = forward ? p.lhs_dilation[d] : p.stride[d];
    const int64_t stride = forward ? p.stride[d] : p.lhs_dilation[d];
    const int64_t extent = forward ? p.y[d] : p.x[d];
    // More phases than positions would be empty.
    f.period[d] = std::min(step / std::gcd(stride, step), std::max<int64_t>(extent, 1));
    f.tap_period[d] = step / std::gcd(p.rhs_dilation[d], step);
  }
  return f;
}

Gemm GemmOf(const Problem& p) {
  const int64_t problems = p.batch * p.groups;
  switch (p.direction) {
    case Direction::kForward:
      return {problems, p.images * p.YPixels(), p.features, p.Taps() * p.channels};
    case Direction::kDataGradient:
      return {problems, p.images * p.XPixels(), p.channels, p.Taps() * p.features};
    case Direction::kFilterGradient:
      return {problems, p.Taps() * p.channels, p.features, p.images * p.YPixels()};
  }
  return {};
}

Dense DenseOf(const Problem& p) {
  constexpr int64_t kColumns = 32, kMostChannels = 128, kMostFolded = 64;
  const int64_t chunk = 16 / SizeOf(p.in), widest = std::max(p.channels, p.features);
  Dense dense;
  // Single channels are the depthwise kernels', which take no bytes.
  for (int64_t twice = 2; (p.channels > 1 || IsByte(p.in)) && p.groups % twice == 0; twice *= 2) {
    const int64_t run = chunk / std::gcd(chunk, dense.groups);
    const bool chunks = p.channels % run == 0 && p.features % run == 0;
    if (twice * widest > (chunks ? kColumns : kMostChannels) || p.Taps() * twice * widest >= kIndexLimit) break;
    dense.groups = twice;
  }
  if (p.direction == Direction::kFilterGradient || p.groups > 1 || p.DepthChannels() % chunk != 0) return dense;

  const bool forward = p.direction == Direction::kForward;
  Dense folded = dense;
  int64_t columns = forward ? p.features : p.channels;
  for (int d = 0; d < kRank; ++d) {
    // As in axis.cuh, for whose terms index * step = position * stride + tap * tap_step + constant.
    const int64_t step = forward ? p.lhs_dilation[d] : p.stride[d], tap_step = forward ? 1 : -1;
    folded.taps[d] = p.window[d];
    if (step == 1) continue;
    if (p.rhs_dilation[d] != 1 || (forward ? p.stride[d] : p.lhs_dilation[d]) != 1) return dense;
    const int64_t constant = forward ? -p.pad[d] : p.pad[d], offset = -FloorDiv(-constant, step);
    const int64_t first = tap_step * (step * offset - constant), least = forward ? first - (step - 1) : first;
    folded.fold[d] = step;
    folded.offset[d] = offset;
    folded.first_tap[d] = first;
    folded.taps[d] = FloorDiv(p.window[d] - 1 - least, step) + 1;
    columns *= step;
  }
  return columns <= kMostFolded ? folded : dense;
}

}  // namespace jaxdnn::conv
