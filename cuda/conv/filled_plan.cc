#include "cuda/conv/filled_plan.h"

#include <cmath>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

int64_t Modulo(int64_t a, int64_t b) { return (a % b + b) % b; }

// Cycles of a unit, and of a piece beside its units. Fitted to an H200.
double UnitCycles(const Problem& p, const FilledShape& s) {
  constexpr double kLeast = 200, kBeside = 20, kFour = 2.5;
  const int64_t chunks = s.pixels * SizeOf(p.in) / 4, tiles = std::min<int64_t>(s.tiles, CeilDiv(p.features, 64));
  const double products = s.lines * chunks * 16;
  const double fours = FilledPlan::kHeight * p.stride[1] * FilledPlan::kColumns * s.stride / 4;
  return kBeside + std::max(tiles * std::max(kLeast, products), fours * kFour);
}
constexpr double kPieceCycles = 350;

}  // namespace

void FilledPlan::SetGroups(const Problem& p, int64_t n) {
  const FilledShape& s = kFilledShapes[shape];
  groups = int(n);
  pieces = p.images * p.y[0] * bands * groups;
  units = int(CeilDiv(line_units, n));
  fours = int(CeilDiv(s.stride * (lead + kColumns * units - 1) + s.pixels, 4));
  pitch = int(fours * 4 * kChannels * SizeOf(p.in));
}

bool FilledPlan::Fit(const Problem& p) {
  const bool filter = p.direction == Direction::kFilterGradient, floats = p.in == DType::kF32;
  if (p.direction == Direction::kDataGradient || p.exchanged || p.batch != 1 || p.groups != 1 ||
      (floats ? filter || p.products != 1 : p.in != DType::kBF16 && p.in != DType::kF16) || p.channels < 3 ||
      p.channels > kChannels || p.features % 8 != 0 || p.features <= kFeatures / 2 ||
      std::min({p.images, p.features, p.XPixels(), p.YPixels(), p.Taps()}) == 0)
    return false;
  // The filter gradient goes over a volume's window plane by plane.
  volume = p.x[0] != 1 || p.y[0] != 1 || p.window[0] != 1 || p.pad[0] != 0;
  planes = filter ? 1 : int(std::min<int64_t>(p.window[0], kMostPlanes + 1));
  if (volume && (floats || planes > kMostPlanes)) return false;
  for (int d = 0; d < kRank; ++d)
    if (p.lhs_dilation[d] != 1 || (p.rhs_dilation[d] != 1 && p.window[d] > 1)) return false;
  // Fours of pixels begin on 8 bytes, and inside a line or outside. Everything is counted with 31 bits.
  if (p.x[2] % 4 != 0 || p.images * std::max(p.XPixels() * p.channels, p.YPixels() * p.features) >= INT32_MAX)
    return false;
  for (shape = 0; shape < int(std::size(kFilledShapes)); ++shape)
    if (FitShape(p)) return true;
  return false;
}

bool FilledPlan::FitShape(const Problem& p) {
  // Windows much smaller than a shape are left to the general kernel.
  const FilledShape& s = kFilledShapes[shape];
  const bool filter = p.direction == Direction::kFilterGradient;
  front = int(Modulo(-p.pad[2], s.stride));
  const int64_t run = front + p.window[2];
  if (((volume || p.in == DType::kF32) && shape > 0) || p.stride[2] != s.stride || p.stride[1] > s.stride ||
      p.window[1] > s.lines || p.window[1] < s.lines - 1 || run > s.pixels || run < s.pixels - 2)
    return false;
  lead = int(Modulo(p.pad[2] + front, 4) / s.stride);
  lines = int(p.stride[1]) * (kHeight - 1) + s.lines;
  bands = int(CeilDiv(p.y[1], kHeight));
  column_tiles = int(CeilDiv(p.features, s.tiles * kFeatures));
  line_units = int(CeilDiv(p.y[2], kColumns));
  // The shortest way of the block that has most, whose shared memory several stages go into.
  const int most_bytes = filter ? 56 << 10 : (76 << 10) - (volume ? planes * kFilterBytes / 2 : 0);
  const double unit_cycles = UnitCycles(p, s);
  const int64_t problems = filter ? p.window[0] * column_tiles : column_tiles;
  double best = 0;
  int64_t best_groups = 0;
  for (int64_t n = CeilDiv(line_units, 8); n <= line_units; ++n) {
    SetGroups(p, n);
    if (StripBytes() + (filter ? CotangentBytes() : 0) > most_bytes) continue;
    // Pieces of a line differ by a unit, and those of a block are neighbours.
    const double each = double(line_units) / n * unit_cycles + kPieceCycles;
    const double cost = CeilDiv(pieces * problems, kMultiprocessors) * each;
    if (best_groups > 0 && cost >= best) continue;
    best = cost;
    best_groups = n;
  }
  if (best_groups > 0) SetGroups(p, best_groups);
  return best_groups > 0;
}

bool TakesFilled(const Problem& p) { return FilledPlan().Fit(p); }

int64_t FilledPieces(const Problem& p) {
  FilledPlan plan;
  return plan.Fit(p) ? plan.pieces : 0;
}

double FilledCycles(const Problem& p, int64_t splits) {
  constexpr double kStart = 8000, kApart = 1.3;  // products, and what comes and goes meanwhile, are in each other's way
  FilledPlan plan;
  if (!plan.Fit(p)) return HUGE_VAL;
  const bool filter = p.direction == Direction::kFilterGradient;
  const int64_t blocks = filter ? splits : FilledPlan::Workers(plan.column_tiles);
  const double rounds = CeilDiv(blocks * plan.column_tiles * (filter ? p.window[0] : 1), kMultiprocessors);
  const double units = double(plan.line_units) / plan.groups;
  const double piece = plan.planes * (units * UnitCycles(p, kFilledShapes[plan.shape]) + kPieceCycles);
  const double bytes = p.images * (double(p.XPixels()) * p.channels + double(p.YPixels()) * p.features) * SizeOf(p.in);
  const double moved = bytes / (kMultiprocessors * kBytesPerCycle);
  return rounds * kStart + kApart * std::max(rounds * CeilDiv(plan.pieces, blocks) * piece, moved);
}

}  // namespace jaxdnn::conv
