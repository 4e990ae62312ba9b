#include "cuda/conv/strips.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace

bool Strips::Fit(const Problem& p, int pixels, int alignment) {
  const int size = SizeOf(p.in), per_word = std::max(1, 4 / size);
  if (size > 4 || p.groups != 1 || p.channels > kFewMostChannels ||
      std::min({p.images, p.channels, p.features, p.XPixels(), p.YPixels(), p.Taps()}) == 0)
    return false;
  for (int d = 0; d < kRank; ++d)
    if (p.lhs_dilation[d] != 1) return false;
  if (p.rhs_dilation[2] != 1 && p.window[2] > 1) return false;
  const int64_t step = p.stride[2] * p.channels, start = -p.pad[2] * p.channels;
  const int64_t run = p.window[2] * p.channels, line = p.x[2] * p.channels;
  // The kernels count tiles, and elements of a line, with 32 bits.
  if (run > 1024 || step > 1024 || std::max(line, p.y[2] * step) >= INT32_MAX / 2) return false;
  if (p.images * p.YPixels() >= INT32_MAX / 2) return false;

  copy_bytes = size;
  for (const int bytes : {4, 16})
    if (line * size % bytes == 0 && alignment % bytes == 0) copy_bytes = bytes;
  const int64_t vec = copy_bytes / size;
  lead = int((start % vec + vec) % vec);
  classes = step % per_word == 0 ? 1 : 2;
  for (int c = 0; c < 2; ++c) {
    front[c] = int((lead + c * step) % per_word);
    line_words[c] = int(CeilDiv(front[c] + run, per_word));
  }

  // Every tile's strips begin as far from whole copies, and its pixels in the same class, as the first one's.
  const int64_t unit = std::lcm(vec / std::gcd(step, vec), int64_t{classes});
  const int64_t lines_of = p.rhs_dilation[1] * (p.window[1] - 1) + 1;
  // Twice, and with what else a kernel has, no more than every device's shared memory.
  const int64_t most_bytes = (p.direction == Direction::kForward ? 24 : 16) << 10;
  double best = 0;
  for (int64_t w = unit; w <= pixels; w += unit) {
    const int64_t granule = std::max(copy_bytes, 4), bytes = RoundUp((lead + (w - 1) * step + run + 1) * size, granule);
    // Eight banks past the window's last word, so that a fragment that goes over to the next line seldom meets itself.
    const int64_t place = RoundUp(line_words[0] * 4 + 32, granule), apart = bytes + ((place - bytes) % 128 + 128) % 128;
    const int64_t most_lines = most_bytes / apart / p.window[0];
    if (most_lines < lines_of) break;
    const int64_t fit = std::min({pixels / w, p.y[1], (most_lines - lines_of) / p.stride[1] + 1});
    const int64_t h = CeilDiv(p.y[1], CeilDiv(p.y[1], fit)), plane = (h - 1) * p.stride[1] + lines_of;
    // A tile takes about as long as the bytes of all its pixels, those outside y too, and of its strips.
    const double tiles = double(CeilDiv(p.y[2], w)) * CeilDiv(p.y[1], h);
    const double cost = tiles * (pixels * 128 + p.window[0] * plane * bytes);
    if (best == 0 || cost < best) {
      best = cost;
      width = int(w);
      height = int(h);
      plane_lines = int(plane);
      lines = int(p.window[0] * plane);
      line_bytes = int(bytes);
      pitch = int(apart);
    }
    if (w >= p.y[2]) break;
  }
  return best > 0;
}

int64_t Strips::Tiles(const Problem& p) const {
  return p.images * p.y[0] * CeilDiv(p.y[1], height) * CeilDiv(p.y[2], width);
}

int Strips::Steps(const Problem& p) const {
  const int64_t words = p.window[0] * p.window[1] * std::max(line_words[0], line_words[classes - 1]);
  return int(CeilDiv(words, kStepWords));
}

bool TakesFewChannels(const Problem& problem, bool hopper) {
  const Problem p = AsForward(problem);
  if (p.in == DType::kF32 && p.products != 1) return false;
  const auto takes = [&](int alignment) {
    Strips s;
    if (!s.Fit(p, FewPixels(p), alignment)) return false;
    if (p.direction == Direction::kForward)
      return s.classes * s.Steps(p) <= (hopper ? kFewMostStepsHopper : kFewMostSteps);
    return std::max(s.line_words[0], s.line_words[s.classes - 1]) * 4 / int(SizeOf(p.in)) <= kFewMostRows;
  };
  return takes(16) && takes(4) && takes(1);
}

// A tile's products, and what it moves to and from memory. Fitted to an H200.
double FewChannelsCycles(const Problem& p, const Strips& s, int64_t splits) {
  const bool filter = p.direction == Direction::kFilterGradient;
  const double size = SizeOf(filter ? p.in : p.out), strips = s.lines * s.line_bytes;
  const double outputs = double(FewPixels(p)) * FewFeatures(p), columns = CeilDiv(p.features, FewFeatures(p));
  const double tiles = s.Tiles(p);
  const double bytes = outputs * size + strips, pieces = s.copy_bytes == 2 ? 0.3 * strips : 0;
  // Features that are no whole chunks are stored, or loaded, one by one.
  const double apart = p.features % (16 / SizeOf(p.in)) != 0 ? outputs : 0;
  constexpr double kStart = 8000;
  if (!filter) {
    const double tile = 0.0125 * outputs * s.Steps(p) + bytes / kBytesPerCycle + pieces + 1.9 * apart;
    return kStart + std::ceil(tiles * columns * p.batch / kMultiprocessors) * tile;
  }
  const double rows = s.Steps(p) * Strips::kStepWords * 4.0 / SizeOf(p.in);
  const double row_tiles = std::ceil(rows / kFewMostRows);
  const double taken = rows > 80 ? kFewMostRows : rows > 48 ? 80 : rows > 32 ? 48 : 32;
  const double tile =
      1.1 * (outputs * SizeOf(p.in) / 2 * taken * 0.8e-3 + bytes / kBytesPerCycle + pieces) + 2.7 * apart;
  const double each = std::ceil(splits * row_tiles * columns * p.batch / kMultiprocessors);
  const double resident = taken > 32 ? 2 : 3;
  return kStart * std::ceil(each / resident) + std::ceil(tiles / splits) * std::max(500 + 1.25 * tile, each * tile);
}

}  // namespace jaxdnn::conv
