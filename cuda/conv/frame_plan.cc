// Which problems have a frame, and how it is shared out.
#include <algorithm>

#include "cuda/conv/frame.h"

namespace jaxdnn::conv {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t Size(const Range& r) { return std::max<int64_t>(0, r.last - r.first + 1); }

// Results of an image that are not the frame's.
int64_t Interior(const Problem& p) {
  int64_t pixels = 1;
  for (int d = 0; d < kRank; ++d) {
    const Reach reach = ReachOf(p, d);
    int64_t inside = p.y[d] - CeilDiv(reach.low, p.stride[d]) - CeilDiv(reach.high, p.stride[d]);
    if (p.direction == Direction::kDataGradient) {
      const AliasedElements of = AliasedBy(p, d);
      const Range both = {std::max(of.low.first, of.high.first), std::min(of.low.last, of.high.last)};
      inside = p.x[d] - Size(of.low) - Size(of.high) + Size(both);
    }
    pixels *= std::max<int64_t>(0, inside);
  }
  return pixels;
}

// Whether the kernels take the frame: floats of 16 bits and more, no dilated input, and no reach further than there are
// elements.
bool TakesFrame(const Problem& p) {
  if (IsByte(p.in)) return false;
  // The kernels have the frame's pixels of an image, in tiles, in an int.
  constexpr int64_t kMost = int64_t{1} << 30;
  for (int d = 0; d < kRank; ++d) {
    const Reach reach = ReachOf(p, d);
    const int64_t most = p.mode[d] == PadMode::kReflect    ? p.x[d] - 1
                         : p.mode[d] == PadMode::kCircular ? p.x[d]
                         : p.x[d] > 0                      ? kMost
                                                           : 0;
    if (std::max(reach.low, reach.high) > most || p.lhs_dilation[d] != 1) return false;
  }
  return p.images * std::max(p.XPixels(), p.YPixels()) < kMost;
}

}  // namespace

Reach ReachOf(const Problem& p, int d) {
  if (p.mode[d] == PadMode::kZeros || p.y[d] == 0) return {0, 0};
  const int64_t last = (p.y[d] - 1) * p.stride[d] + (p.window[d] - 1) * p.rhs_dilation[d] - p.pad[d];
  return {std::max<int64_t>(0, p.pad[d]), std::max<int64_t>(0, last - (p.x[d] - 1))};
}

AliasedElements AliasedBy(const Problem& p, int d) {
  const Reach reach = ReachOf(p, d);
  const int64_t n = p.x[d];
  switch (p.mode[d]) {
    case PadMode::kReflect:
      return {{1, reach.low}, {n - 1 - reach.high, n - 2}};
    case PadMode::kReplicate:
      return {{0, reach.low > 0 ? 0 : -1}, {n - 1, reach.high > 0 ? n - 1 : n - 2}};
    case PadMode::kCircular:
      return {{n - reach.low, n - 1}, {0, reach.high - 1}};
    default:
      return {{0, -1}, {0, -1}};
  }
}

bool HasFrame(const Problem& p) {
  for (int d = 0; d < kRank; ++d)
    if (const Reach reach = ReachOf(p, d); reach.low > 0 || reach.high > 0) return true;
  return false;
}

Problem WithZeros(const Problem& p) {
  Problem z = p;
  for (PadMode& mode : z.mode) mode = PadMode::kZeros;
  if (p.direction == Direction::kFilterGradient && p.in != DType::kF64) z.out = DType::kF32;
  return z;
}

double FrameShare(const Problem& p) {
  const int64_t pixels = p.direction == Direction::kDataGradient ? p.XPixels() : p.YPixels();
  return HasFrame(p) ? 1 - double(Interior(p)) / std::max<int64_t>(1, pixels) : 0;
}

bool OnTensorCores(const Problem& p) {
  if (p.in == DType::kF64 || (p.in == DType::kF32 && p.products == 0)) return false;
  return p.groups == 1 || p.DepthChannels() * SizeOf(p.in) >= 16;
}

int64_t FrameSlices(const Problem& p) {
  if (p.direction != Direction::kFilterGradient || !HasFrame(p)) return 0;
  // Blocks that fill the device, and pixels that are worth one.
  const int64_t blocks = OnTensorCores(p) ? 528 : 2112, least = 256;
  const int64_t tiles =
      p.batch * (OnTensorCores(p) ? p.groups * CeilDiv(p.Taps() * p.channels, 128) * CeilDiv(p.features, 64)
                                  : p.Taps() * CeilDiv(p.channels * p.groups * p.features, 128));
  const int64_t pixels = p.images * (p.YPixels() - Interior(p));
  return std::max<int64_t>(1, std::min(blocks / std::max<int64_t>(1, tiles), CeilDiv(pixels, least)));
}

int64_t FrameBytes(const Problem& p) {
  constexpr int64_t kAlignment = 256;
  const int64_t slices = FrameSlices(p), bytes = (1 + slices) * p.FilterSize() * (p.in == DType::kF64 ? 8 : 4);
  return slices == 0 ? 0 : CeilDiv(bytes, kAlignment) * kAlignment;
}

std::optional<Config> ChooseWithFrame(const Problem& p, bool hopper, std::string_view algorithm,
                                      int64_t workspace_limit) {
  constexpr double kLaunchCycles = 4000;  // of one more kernel
  const int64_t bytes = FrameBytes(p);
  if (!TakesFrame(p) || bytes > workspace_limit) return std::nullopt;
  std::optional<Config> config = Choose(WithZeros(p), hopper, algorithm, workspace_limit - bytes);
  if (!config) return config;
  config->workspace_bytes += bytes;
  config->frame_slices = FrameSlices(p);
  config->cycles += kLaunchCycles + FrameShare(p) * config->cycles;
  return config;
}

}  // namespace jaxdnn::conv
