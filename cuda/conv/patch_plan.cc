#include "cuda/conv/patch_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/common/int_div.h"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {
namespace {

// The most terms of a sum; shared memory that a block may have on every device since sm_80, and all that an H200 has.
constexpr int64_t kMostDepth = 256, kMostSharedBytes = 96 << 10, kOfMultiprocessor = 227 << 10;
// Numbers of a tile's pixels of y, in the filter gradient.
constexpr int64_t kMostCotangents = 6 << 10, kLeastCotangents = 1 << 9;

// The tiles of up to so many pixels that leave the fewest threads without one. Wide ones bring few numbers twice.
PatchTiles TilesOf(const Problem& p, bool forward, int64_t pixels) {
  const int64_t* const out = forward ? p.y : p.x;
  const int64_t step1 = forward ? p.stride[1] : 1, step2 = forward ? p.stride[2] : 1;
  int64_t least = INT64_MAX;
  PatchTiles t = {};
  for (int64_t parts = CeilDiv(out[2], pixels); parts <= out[2] && parts < least; ++parts) {
    const int64_t width = CeilDiv(out[2], parts), down = CeilDiv(out[1], std::min(out[1], pixels / width));
    if (down * parts >= least) continue;
    least = down * parts;
    t.rows = int(CeilDiv(out[1], down)), t.width = int(width);
  }
  t.lines = (t.rows - 1) * step1 + (p.window[1] - 1) * p.rhs_dilation[1] + 1;
  t.pitch = ((t.width - 1) * step2 + p.window[2]) * p.DepthChannels();
  t.tiles = p.images * out[0] * least;
  return t;
}

// How long a multiprocessor takes for so many blocks, in shares of a full one's time that each of its blocks has. A
// block by itself takes twice its share.
double Rounds(double blocks, int64_t resident) {
  const double last = std::fmod(blocks, resident);
  const double alone = 2 + (last - 1) * (resident - 2.) / std::max<int64_t>(1, resident - 1);
  return blocks - last + (last > 0 ? alone : 0);
}

}  // namespace

PatchShape PatchShapeOf(const Problem& p) {
  const int64_t columns = GemmOf(p).columns;
  PatchShape s = {};
  s.across = columns <= 8 ? 1 : columns <= 32 ? 4 : 8;
  s.columns = s.across * kPatchEach;
  s.depth = p.Taps() * p.DepthChannels();
  s.tile = TilesOf(p, p.direction == Direction::kForward, kPatchThreads / s.across * kPatchEach);
  s.shared_bytes = 4 * ((1 + s.depth) * s.columns + 2 * p.window[0] * s.tile.lines * s.tile.pitch);
  s.resident = std::min<int64_t>(4, kOfMultiprocessor / (s.shared_bytes + 1024));
  const int64_t others = std::max<int64_t>(p.batch * CeilDiv(columns, s.columns), 1);
  const int64_t most = std::clamp<int64_t>(s.resident * kMultiprocessors / others, 1, s.tile.tiles);
  s.slices = CeilDiv(s.tile.tiles, CeilDiv(s.tile.tiles, most));
  return s;
}

bool TakesPatch(const Problem& p) {
  if (p.in != DType::kF32 || p.direction == Direction::kFilterGradient || p.groups != 1) return false;
  const bool forward = p.direction == Direction::kForward;
  for (int d = 0; d < kRank; ++d)
    if ((forward ? p.lhs_dilation : p.stride)[d] != 1 || (!forward && p.lhs_dilation[d] != 1)) return false;
  if (p.images == 0 || p.XPixels() == 0 || p.YPixels() == 0 || p.Taps() * p.DepthChannels() > kMostDepth) return false;
  if (p.window[2] > 1 && p.rhs_dilation[2] != 1) return false;
  const PatchShape s = PatchShapeOf(p);
  return s.shared_bytes <= kMostSharedBytes && s.tile.tiles <= INT32_MAX;
}

double PatchCycles(const Problem& p) {
  const PatchShape s = PatchShapeOf(p);
  const double blocks = double(p.batch) * CeilDiv(GemmOf(p).columns, s.columns) * s.slices;
  const double tiles = double(CeilDiv(s.tile.tiles, s.slices)),
               patch = double(p.window[0] * s.tile.lines * s.tile.pitch);
  // Of a warp's pixels those whose distance is a multiple of all banks of shared memory are read one after the other.
  constexpr int64_t kBanks = 32;
  const int64_t step = (p.direction == Direction::kForward ? p.stride[2] : 1) * p.DepthChannels();
  const double turns = std::max(1., double(kBanks / s.across * std::gcd(step, kBanks)) / kBanks);
  // Of a block among as many as a multiprocessor has: the filter, and every tile.
  const double block = 1250 + s.depth * s.columns * .08;
  const double tile = s.depth * std::max(88., 32 * turns + 20) + patch * .27 + 1300;
  const double each = std::ceil(blocks / kMultiprocessors);
  constexpr double kLaunch = 3000;
  return kLaunch + each * block + Rounds(each, s.resident) * tiles * tile;
}

namespace {

FilterPatchShape FilterPatchShapeOf(const Problem& p, int64_t cotangents) {
  FilterPatchShape s = {};
  s.across = p.features <= 8 ? 1 : p.features <= 32 ? 4 : 8;
  s.features = s.across * kPatchEach;
  s.depth = p.Taps() * p.channels;
  s.down = int(std::max<int64_t>(1, CeilDiv(s.depth, kPatchEach)));
  s.tile = TilesOf(p, true, cotangents / s.features);
  s.groups = std::max(1, kPatchThreads / (s.across * s.down));
  const int across_groups = int(CeilDiv(s.groups, s.tile.rows));
  s.row_groups = std::max(1, s.groups / across_groups);
  s.groups = s.row_groups * across_groups;
  s.threads = s.across * s.down * s.groups;
  // Sums of some hundred terms.
  s.flush = int(std::max<int64_t>(1, 128 * s.groups / (int64_t{s.tile.rows} * s.tile.width)));
  s.shared_bytes = 8 * (p.window[0] * s.tile.lines * s.tile.pitch + s.tile.rows * s.tile.width * s.features) +
                   4 * kPatchEach * kPatchEach * s.threads;
  s.resident = std::min<int64_t>(4 * kPatchThreads / s.threads, kOfMultiprocessor / (s.shared_bytes + 1024));
  return s;
}

}  // namespace

// In the largest tiles that there is memory for.
FilterPatchShape FilterPatchShapeOf(const Problem& p) {
  int64_t cotangents = kMostCotangents;
  while (cotangents > kLeastCotangents && FilterPatchShapeOf(p, cotangents).shared_bytes > kMostSharedBytes)
    cotangents /= 2;
  return FilterPatchShapeOf(p, cotangents);
}

bool TakesFilterPatch(const Problem& p) {
  if (p.in != DType::kF32 || p.direction != Direction::kFilterGradient || p.groups != 1) return false;
  if (p.images == 0 || p.XPixels() == 0 || p.YPixels() == 0 || p.Taps() * p.channels > kMostDepth) return false;
  if (p.window[2] > 1 && p.rhs_dilation[2] != 1) return false;
  for (int d = 0; d < kRank; ++d)
    if (p.lhs_dilation[d] != 1) return false;
  const FilterPatchShape s = FilterPatchShapeOf(p);
  return s.shared_bytes <= kMostSharedBytes && s.tile.tiles <= INT32_MAX;
}

double FilterPatchCycles(const Problem& p, int64_t splits) {
  const FilterPatchShape s = FilterPatchShapeOf(p);
  const double blocks = double(p.batch) * CeilDiv(p.features, s.features) * splits;
  // A multiprocessor has four schedulers; a block's share of them.
  const double share = double(CeilDiv(s.resident * CeilDiv(s.threads, 32), 4)) / s.resident;
  const double tiles = double(CeilDiv(s.tile.tiles, splits)), pixels = double(s.tile.rows) * s.tile.width;
  const double brought = p.window[0] * s.tile.lines * s.tile.pitch + pixels * s.across * 2;
  const double tile = (pixels / s.groups * 100 + 130. / s.flush) * share + brought * .27 + 1000;
  const double each = std::ceil(blocks / kMultiprocessors);
  constexpr double kLaunch = 3000, kEnd = 1500;
  return kLaunch + each * kEnd + Rounds(each, s.resident) * tiles * tile;
}

}  // namespace jaxdnn::conv
