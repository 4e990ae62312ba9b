#include "cuda/conv/wgmma_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/common/int_div.h"
#include "cuda/conv/frame.h"
#include "cuda/conv/nominal.h"
#include "cuda/conv/pairs.h"
#include "cuda/conv/pixel_map.h"
#include "cuda/conv/wgmma_cost.h"

namespace jaxdnn::conv {
namespace {

// In how many dimensions windows overlap that are a stride apart.
int OverlappingStrides(const Problem& p) {
  int count = 0;
  for (int d = 0; d < kRank; ++d) count += p.stride[d] > 1 && p.window[d] > p.stride[d];
  return count;
}

constexpr int64_t kMostPlanes = 65535;  // of a grid of blocks, and rows of one

// Whether pixels do not begin with the sectors that memory is read in.
bool AreApart(const Problem& p, int64_t channels) { return channels * SizeOf(p.in) % 32 != 0; }

// Tiles that multiprocessors take in turn, there and back where they alternate (wgmma_place.cuh), and how busy each is.
struct Rounds {
  bool alternate;
  int64_t tiles = 0;
  double all = 0, more[kMultiprocessors] = {};

  explicit Rounds(bool there_and_back) : alternate(there_and_back) {}
  void Add(int64_t count, double cycles) {
    const auto one = [&] {
      const int64_t at = tiles % kMultiprocessors, round = tiles / kMultiprocessors;
      more[alternate && round % 2 == 1 ? kMultiprocessors - 1 - at : at] += cycles;
      ++tiles, --count;
    };
    while (count > 0 && tiles % kMultiprocessors != 0) one();
    const int64_t whole = count / kMultiprocessors;
    all += whole * cycles, tiles += whole * kMultiprocessors, count -= whole * kMultiprocessors;
    while (count > 0) one();
  }
  double Longest() const { return all + *std::max_element(more, more + kMultiprocessors); }
};

// Of a kernel that makes a transposed copy, which moves its bytes so often.
double CopyingCycles(double bytes, double moves) {
  return bytes > 0 ? kLaunchCycles + moves * bytes / (kMultiprocessors * kBytesPerCycle) : 0;
}

// Of a filter gradient's tiles by so many blocks, with so many bytes of y transposed before.
double FilterCycles(const Problem& p, const TileShape& t, const FilterShape& shape, int64_t blocks,
                    int64_t transposed) {
  const Cost cost = CostOf(t, p);
  // Where the warpgroups share a tile, nothing hides how it is stored.
  const bool together = p.in == DType::kF32 || t.rows * t.columns > 128 * 128;
  // Parts of lines take longer for what they bring, and large tiles need less of it.
  const double part = AreApart(p, p.channels) ? 1.45 : p.channels % WgmmaDepth(p.in) != 0 && !together ? 1.25 : 1;
  // Edges are patched step by step, of which small tiles have more.
  const double patched = HasFrame(p) && t.rows * t.columns < 128 * 128 ? 1.25 : 1;
  // Floats that are not, the steps transpose themselves, in shared memory, after a longer beginning.
  constexpr double kBegin = 2000;
  const bool turned = p.in == DType::kF32 && transposed == 0;
  const bool part_of_y = p.in == DType::kF32 && p.features % WgmmaDepth(p.in) != 0;
  // Boxes come faster than columns of pixels, and these slower where no neighbour asks for them too.
  const double boxes = ReadsXAsItLies(p) ? 0.92 : p.Taps() > 1 && p.features <= 64 ? 1.15 : 1;
  const double part_of_line = p.in != DType::kF32 && p.features % WgmmaDepth(p.in) != 0 ? PartsOfLines(t) : 1;
  const double step = cost.step * part * patched * boxes * part_of_line *
                          (AreApart(p, p.features) ? 1.45
                           : part_of_y             ? 1.25
                                                   : 1) +
                      (turned ? 2 * t.columns : 0);
  const double x_pixels = std::min(p.XPixels(), p.YPixels() * p.Taps());
  // Of a problem; and what it takes to move those of all.
  const double x_bytes = p.images * x_pixels * p.channels * p.groups * SizeOf(p.in);
  const double y_bytes = double(p.images) * p.YPixels() * p.features * p.groups * SizeOf(p.in);
  const double memory = p.batch * (x_bytes + y_bytes) / (kMultiprocessors * kBytesPerCycle);
  const double before = turned ? kBegin : CopyingCycles(transposed, 2);
  // What dense layers move is not hidden where the warpgroups share their stages.
  const double more = p.in == DType::kF32 && std::min(p.channels, p.features) >= 64 ? memory / 2 : 0;
  constexpr double kSum = 5400;  // of the kernel that adds up pieces, beside what it moves
  if (blocks == shape.tiles && shape.count == 1) {
    const double busy = shape.sets[0].steps * step, each = std::ceil(double(blocks) / kMultiprocessors);
    // Whole tiles that are left are written and read once more, with what must be checked.
    constexpr double kLeft = 0.0015;
    const bool left = shape.left && !p.exchanged;
    const double beside = before + more + (left ? kSum + kLeft * blocks * t.rows * t.columns * 4 : 0);
    constexpr double kFirst = 1250;  // until the first step
    if (p.in == DType::kF32) return beside + each * (busy + cost.tile);
    if (together) return kFirst + beside + each * (busy + cost.tile);
    return kFirst + beside + each * std::max(busy, (busy + cost.tile) / 2) + cost.tile;
  }
  // Blocks that begin at many different steps, as all do where tiles have different ones, find less of what they read
  // in the cache, if that does not hold all. Then comes the kernel that adds up, and bytes of pieces to and from it;
  // that of exchanged problems is mostly counted elsewhere.
  constexpr double kAlike = 7, kSecond = 600, kExchanged = 4000;
  constexpr int64_t kReaders = 32;  // tiles that read the same
  const bool again_and_again = shape.count == 1 && shape.tiles >= kReaders;
  const double apart = again_and_again && p.batch * (x_bytes + y_bytes) > kCachedBytes ? 0.011 : 0.0035;
  const double byte = p.in == DType::kF32 ? 0.075 : 0.1;
  const double begins = double(blocks) / (shape.count > 1 ? 1 : std::gcd(blocks, shape.tiles));
  const double steps = CeilDiv(shape.work, blocks), slots = shape.Slots(blocks);
  // Where windows that are a stride apart overlap, few taps meet a pixel: blocks at different steps of their tiles
  // bring lines of x by themselves, while those of y are what others ask for too.
  constexpr double kLine = 128, kAloneRate = 39, kSharedRate = 100;  // bytes, and bytes a cycle
  const bool bring = blocks % shape.tiles != 0 && OverlappingStrides(p) > 0;
  const double brought = bring ? kLine * (t.rows / kAloneRate + t.columns / kSharedRate) : 0;
  const double busy = steps * std::max(step * (1 + apart * std::max(0.0, begins - kAlike)), brought) +
                      (together ? std::floor(steps * shape.tiles / shape.work) * cost.tile : 0);
  // Where a block has the columns of a row of tiles one after the other, what taps meet of a problem's x is read anew
  // for each of them, and for every tap, if the cache does not hold it.
  const double met = double(shape.work) / (shape.tiles * CeilDiv(p.images * p.YPixels(), WgmmaDepth(p.in)));
  const double reads = double(p.batch) * p.Taps() * CeilDiv(p.features, t.columns) * met;
  const double again =
      blocks < shape.tiles && x_bytes > kCachedBytes ? reads * x_bytes / (kMultiprocessors * kBytesPerCycle) : 0;
  const double sum = p.exchanged ? kExchanged : slots == 2 ? kSum + kSecond : kSum;
  return before + std::max({busy + more, memory, again}) + sum + slots * byte * t.rows * t.columns * 4;
}

// Whether each step and tile is of one group: then a group is where the columns of all say, and its channels begin so
// much later.
bool FillsGroups(const Problem& p, const TileShape& t) {
  const bool filter = p.direction == Direction::kFilterGradient;
  const int64_t depth = filter ? p.channels : p.DepthChannels(), columns = filter ? p.features : GemmOf(p).columns;
  return p.batch == 1 && !HasFrame(p) && !p.exchanged && (filter || TransposedBytes(p, t) == 0) &&
         depth % WgmmaDepth(p.in) == 0 && columns % t.columns == 0;
}

}  // namespace

bool TakesWgmma(const Problem& p, const TileShape& t) {
  if (IsOfPairs(t.tile)) {
    const std::optional<Pairs> pairs = PairsOf(p);
    return pairs && p.in == p.out && TakesWgmma(pairs->view, SingleTile(t));
  }
  const bool filter = p.direction == Direction::kFilterGradient, floats = p.in == DType::kF32;
  if (p.in == DType::kF64 || (floats && (p.products == 0 || (filter && t.rows != 128)))) return false;
  if (p.Tripled() && ((t.tile != Tile::kWgmma128x128 && t.tile != Tile::kWgmma128x64) || HasFrame(p))) return false;
  const bool forward = p.direction == Direction::kForward;
  if (IsAcross(t.tile)) {
    if (filter || p.out != p.in || (floats && !(forward && t.tile == Tile::kWgmma192Across))) return false;
  } else if (t.rows * t.columns > 128 * 160) {
    // But for the filter gradient there is one of floats, and one of 16-bit floats, forward.
    const bool there =
        floats ? t.tile == Tile::kWgmma128x256 : t.tile == Tile::kWgmma256x160 && forward && p.out == p.in;
    if (!filter && !there) return false;
  } else if (t.columns == 160 && !floats && filter) {
    return false;
  }
  if (t.tile == Tile::kWgmma128x128Copied && !(floats && forward)) return false;
  // The kernel that copies a filter has a plane of blocks for each tap, and a row of them for each 64 channels.
  if (forward && TransposedBytes(p, t) > 0 && std::max(p.batch * p.Taps(), CeilDiv(p.channels, 64)) > kMostPlanes)
    return false;
  // One group, lines of whole 16-byte chunks, and rows that 32 bits number. The TMA unit reads no array without
  // elements. A filter that is copied first is one problem's, or split.
  const int64_t chunk = 16 / SizeOf(p.in);
  if (p.batch == 0 || (p.groups != 1 && !FillsGroups(p, t)) || p.channels == 0 || p.features == 0 ||
      p.features % chunk != 0 || p.batch * p.images * std::max(p.XPixels(), p.YPixels()) >= INT32_MAX - t.rows ||
      (p.batch > 1 && forward && !p.Tripled() && TransposedBytes(p, t) > 0))
    return false;
  MappedPhase phases[kMaxMaps];
  const int count = MapPhases(p, phases);
  // Columns of taps are stored in halves of chunks too, of 16-bit floats.
  const bool halves =
      p.direction == Direction::kDataGradient && !floats && p.out == p.in && TapsAreColumns(p, count, phases[0]);
  return count > 0 && p.channels % (halves ? chunk / 2 : chunk) == 0;
}

bool MayShare(const Problem& p, const TileShape& t, int64_t blocks) {
  if (blocks == 1) return true;
  if (p.batch > 1 || p.groups > 1 || p.direction == Direction::kFilterGradient || t.tile == Tile::kWgmma128x128Copied ||
      IsOfPairs(t.tile) || p.Tripled())
    return false;
  // Large tiles are sent (wgmma_team.cuh), across of floats alone; of the others, blocks divide the rows evenly.
  if (IsAcross(t.tile) ? p.in != DType::kF32 || blocks > 3 : t.columns == 160 ? blocks > 2 : blocks == 3) return false;
  if (!IsAcross(t.tile) && (t.rows > 128 || t.columns > 160)) return false;
  // In a phase, or of a dilated input, some blocks could be left without a tap; or all of them, of an input so dilated.
  const Phases f = PhasesOf(p);
  for (int d = 0; d < kRank; ++d)
    if (f.period[d] > 1 || f.tap_period[d] > 1) return false;
  MappedPhase maps[kMaxMaps];
  if (MapPhases(p, maps) == 0 || maps[0].tap_count == 0) return false;
  return blocks <= p.Taps() * CeilDiv(p.DepthChannels(), WgmmaDepth(p.in)) / 2;
}

bool MaySplitEdges(const Problem& p, const TileShape& t, int edges) {
  if (edges == 0) return true;
  const bool filter = p.direction == Direction::kFilterGradient;
  if (IsOfPairs(t.tile) || HasFrame(p) || (filter && (p.batch > 1 || p.exchanged || p.Taps() > kMostInSets)))
    return false;
  MappedPhase maps[kMaxMaps];
  TapSet sets[kMaxMaps];
  const auto count_of = [&](int which) { return filter ? MapTaps(p, sets, which) : MapPhases(p, maps, which); };
  int count = count_of(0);
  for (int d = 0; d < kRank; ++d) {
    if ((edges >> d & 1) == 0) continue;
    const int split = count_of(edges & ((2 << d) - 1));
    if (split <= count) return false;
    count = split;
  }
  return true;
}

bool Alternates(const Problem& p, int edges, int phases, const MappedPhase& first, int tile_rows,
                int64_t tiles_of_row) {
  return edges != 0 || (phases > 1 && p.batch * CeilDiv(first.rows, tile_rows) * tiles_of_row < kMultiprocessors);
}

bool KeepsFilter(const Problem& p, const Config& config) {
  if (p.in == DType::kF32 || p.batch > 1 || HasFrame(p) || config.cluster > 1 || config.edges != 0) return false;
  MappedPhase maps[kMaxMaps];
  if (MapPhases(p, maps) != 1 || maps[0].Alike() > 1) return false;
  const int64_t steps = maps[0].tap_count * CeilDiv(p.DepthChannels(), WgmmaDepth(p.in));
  const int64_t columns = CeilDiv(GemmOf(p).columns * p.groups, 128), rows = CeilDiv(maps[0].rows, 128);
  if (steps == 0 || steps > kMostKeptSteps || columns > kMultiprocessors) return false;
  constexpr int64_t kLeastTiles = 3;  // of a block
  // Blocks are whole rows of tiles, which may leave more of the last round empty.
  const int64_t rounds = CeilDiv(rows, kMultiprocessors / columns);
  return rounds >= kLeastTiles && 16 * rounds <= 17 * CeilDiv(rows * columns, kMultiprocessors);
}

int64_t TransposedBytes(const Problem& p, const TileShape& t) {
  const bool filter = p.direction == Direction::kFilterGradient;
  if (p.Tripled()) return filter ? 0 : 2 * p.FilterSize() * 4;
  if (p.in != DType::kF32 || p.direction == Direction::kDataGradient) return 0;
  if (p.direction == Direction::kForward)
    return t.tile == Tile::kWgmma128x160 || t.tile == Tile::kWgmma128x256 || t.tile == Tile::kWgmma128x128Copied
               ? p.FilterSize() * 4
               : 0;
  const int64_t depth = WgmmaDepth(p.in);
  if (p.batch > 1 || CeilDiv(p.features, depth) > kMostPlanes) return 0;
  return CeilDiv(p.images * p.YPixels(), depth) * depth * p.features * 4;
}

bool ReadsXAsItLies(const Problem& p) {
  for (int d = 0; d < kRank; ++d)
    if (p.stride[d] != 1 || p.pad[d] != 0 || p.x[d] != p.y[d] || p.lhs_dilation[d] != 1) return false;
  return p.Taps() == 1;
}

FilterShape FilterShapeOf(const Problem& p, const TileShape& t, int edges) {
  const int64_t line = WgmmaDepth(p.in), lines = CeilDiv(p.channels, line), pixels = p.images * p.YPixels();
  TapSet sets[kMaxMaps];
  FilterShape shape = {};
  shape.count = MapTaps(p, sets, edges);
  for (int i = 0; i < shape.count; ++i) {
    const int64_t tiles =
        p.batch * CeilDiv(sets[i].Count() * lines, t.rows / line) * CeilDiv(p.features, t.columns) * p.groups;
    shape.sets[i] = {tiles, CeilDiv(p.images * sets[i].Positions(), line)};
    shape.tiles += tiles;
    shape.work += tiles * shape.sets[i].steps;
  }
  // Beyond a problem's last pixel x has the next one's, of which y's zeros do not make up for an infinity.
  const bool mixed = p.batch > 1 && pixels % line != 0 && !ReadsXAsItLies(p);
  shape.left = p.exchanged || mixed;
  return shape;
}

std::optional<Config> PlanFilterWgmma(const Problem& p, const TileShape& t, int64_t workspace_limit, int edges) {
  constexpr int64_t kMostBlocks = kMultiprocessors, kLeastSteps = 2;  // that are worth a block
  const FilterShape shape = FilterShapeOf(p, t, edges);
  const int64_t all = shape.work, piece = t.rows * t.columns * 4;
  if (all >= INT32_MAX) return std::nullopt;  // the kernel counts them with 32 bits
  std::optional<Config> best;
  const auto consider = [&](int64_t blocks, int64_t transposed) {
    const int64_t slots = shape.Slots(blocks), bytes = transposed + blocks * slots * piece;
    if (bytes > workspace_limit || (slots == 0 && blocks < shape.tiles) || (slots == 2 && shape.left)) return;
    const int64_t parts = CeilDiv(blocks, shape.tiles) + (slots == 2);
    const double cycles = FilterCycles(p, t, shape, blocks, transposed);
    if (best && best->cycles <= cycles) return;
    best = Config{t.tile, parts, 1, blocks, bytes, cycles};
    best->copies = transposed > 0;
    best->edges = edges;
  };
  // Floats with and without a copy; blocks of whole tiles; of spans of equal lengths; and of equal parts of one tile
  // each, which are fewer pieces.
  for (const int64_t transposed : {int64_t{0}, TransposedBytes(p, t)}) {
    // A copy has all positions one after the other, of one group.
    if (transposed > 0 && (edges != 0 || p.groups > 1)) break;
    if (shape.count == 1) consider(shape.tiles, transposed);
    const int64_t most = std::min(kMostBlocks, all / kLeastSteps), pieces = (workspace_limit - transposed) / piece;
    const int64_t spans = std::min(most, pieces / 2), parts = std::min(most, pieces) / shape.tiles;
    for (int64_t blocks = spans; blocks > spans * 3 / 4; --blocks) consider(blocks, transposed);
    if (parts > 1 && shape.count == 1) consider(parts * shape.tiles, transposed);
  }
  return best;
}

double WgmmaCycles(const Problem& problem, const TileShape& t, int64_t cluster, int edges) {
  const std::optional<Pairs> pairs = IsOfPairs(t.tile) ? PairsOf(problem) : std::nullopt;
  const Problem& p = pairs ? pairs->view : problem;
  // Of a filter's copy; and what waiting for it, and sending sums of floats, take beyond what they do.
  constexpr double kCopyMoves = 1.9, kWait = 2000, kSend = 3500;
  Cost cost = CostOf(t, p);
  const Gemm g = GemmOf(p);
  const int64_t channels = p.DepthChannels(), line = WgmmaDepth(p.in);
  MappedPhase maps[kMaxMaps];
  const int phases = MapPhases(p, maps, edges);
  const double copied = TransposedBytes(p, t), copying = copied > 0 ? CopyingCycles(copied, kCopyMoves) + kWait : 0;
  const bool read_as_it_is = p.direction == Direction::kForward && copied == 0;
  const bool taps = TapsAreColumns(p, phases, maps[0]) && p.out == p.in && p.batch == 1 &&
                    (!read_as_it_is || (g.columns % line == 0 && t.columns % line == 0));  // as the kernel has it
  const int64_t tiles_of_row =
      taps ? CeilDiv(g.columns * p.Taps(), t.columns) : maps[0].Alike() * CeilDiv(g.columns, t.columns) * p.groups;
  // What is not stored by TMA takes 16-bit floats longer.
  const bool boxes = taps && RowsAreBoxes(maps[0]) && g.columns % line == 0 && t.columns % line == 0;
  if (taps && !(boxes && !IsAcross(t.tile)) && p.in != DType::kF32)
    cost.tile = IsAcross(t.tile) ? 23 * t.rows - 350 : 1.42 * cost.tile;
  // What is left of a pixel's channels takes a load too, which is slower for what it brings.
  const int64_t left = channels % line;
  const double apart = p.in == DType::kF32 ? 2.2 : 2.9, last = left == 0 ? 0 : AreApart(p, left) ? apart : 1.75;
  const double lines = channels / line + last;
  // Data gradients have the filter's lines along channels, as others do whose filter is copied.
  const bool lines_of_both =
      p.direction == Direction::kDataGradient || t.tile == Tile::kWgmma128x128Copied || p.Tripled();
  if (lines_of_both ? left != 0 : g.columns % line != 0)
    cost.step *= lines_of_both && p.in == DType::kF32 ? 1.17 : PartsOfLines(t);
  if (t.tile == Tile::kWgmma128x160 && !lines_of_both && p.in != DType::kF32 && g.columns % t.columns != 0)
    cost.step *= 1.1;
  // Where all multiprocessors are busy, pixels that one tile's columns alone meet, tap by tap, take longer: no
  // neighbour has asked for them. Three products a step leave more time for that.
  const double alone = p.Tripled() ? 1.1 : 1.3;
  if (maps[0].tap_count > 1 && g.columns <= 64 && p.batch * g.rows > kMultiprocessors * t.rows) cost.step *= alone;
  // Where windows that are a stride apart overlap in two dimensions, tiles of many rows find less in the cache.
  constexpr double kOverlap = 1.03;
  if (p.direction == Direction::kForward && OverlappingStrides(p) > 1 && IsAcross(t.tile)) cost.step *= kOverlap;
  if (cluster > 1) {
    // Clusters have to fit into the device's groups of multiprocessors, and none has a second tile to hide the first.
    const double clusters = cluster == 2 ? 66 : cluster == 3 ? 36 : cluster == 4 ? 30 : 15;
    const double exchange = (IsAcross(t.tile) ? kSend : 0) + 3600 + t.rows * t.columns / 4;
    // Blocks that read different steps find less of what they read on its way to others already.
    const double delay = IsAcross(t.tile) ? (g.rows < 8 * t.rows ? 1.35 : 1) : t.columns == 160 ? 1 : 1.3;
    const double tiles = double(CeilDiv(maps[0].rows, t.rows)) * tiles_of_row, steps = maps[0].tap_count * lines;
    return std::ceil(tiles / clusters) * (delay * std::ceil(steps / cluster) * cost.step + cost.tile + exchange) +
           copying;
  }
  // Warpgroups that take turns hide half of each other's beginnings and ends.
  const bool together = IsAcross(t.tile) || t.rows * t.columns > 128 * 160;
  Rounds rounds(Alternates(p, edges, phases, maps[0], t.rows, tiles_of_row));
  std::stable_sort(maps, maps + phases, [&](const MappedPhase& a, const MappedPhase& b) {
    return rounds.alternate && a.tap_count > b.tap_count;
  });
  for (int i = 0; i < phases; ++i) {
    const double busy = std::max(1.0, maps[i].tap_count * lines) * cost.step;
    rounds.Add(p.batch * CeilDiv(maps[i].rows, t.rows) * tiles_of_row,
               together ? busy + cost.tile : std::max(busy, (busy + cost.tile) / 2));
  }
  // Memory bounds all but what comes before the first step and after the last.
  const double pixels = p.direction == Direction::kForward ? std::min(p.XPixels(), p.YPixels() * p.Taps())
                                                           : std::min(p.YPixels(), p.XPixels() * p.Taps());
  const double elements =
      p.batch * p.groups * (p.images * pixels * channels + double(g.rows) * g.columns) + double(p.FilterSize());
  const double memory = elements * SizeOf(p.in) / (kMultiprocessors * kBytesPerCycle);
  constexpr double kBegin = 1450;  // until the first step
  if (together) return std::max(rounds.Longest(), memory + 1.5 * cost.tile) + kBegin + copying;
  return std::max(rounds.Longest(), memory) + cost.tile + copying;
}

}  // namespace jaxdnn::conv
