// How slabs are cut and spread over teams, blocks and threads.
//
// Channels last, a slab is some whole groups' channels of an example, at every position: a matrix of rows in which
// neighbouring threads take neighbouring vectors. A thread keeps its column, hence its channels; where the channels
// do not fill whole vectors, a row is several positions, the least that does. Channels first, a slab is one group of an
// example, contiguous in memory: a run is a piece of one channel that a few neighbouring lanes share. Where channels do
// not begin with whole vectors, runs are of the vectors that have elements of the channel, and both channels visit one
// that has elements of two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/group_norm/group_norm.h"
#include "cuda/group_norm/team.cuh"
#include "cuda/group_norm/tile.cuh"

namespace jaxdnn::group_norm {

constexpr int kThreads = 128;
// Blocks that a multiprocessor has at once: while one waits for its team, the others keep the memory busy.
constexpr int kResident = 3;
// Channels first, where slabs are small, more of them; but teams of more than this meet faster if blocks are fewer.
constexpr int kResidentRows = 5;
constexpr int kLargeTeam = 100;
constexpr int kFewest = 2;
// Channels last, the fewest bytes of a row that a slab takes, and of a slab.
constexpr int kMinRowBytes = 128;
constexpr int64_t kMinSlabBytes = 16 << 10;
// The fewest bytes of a slab that are worth another block.
constexpr int64_t kMinShareBytes = 16 << 10;
// What memory hands to a multiprocessor.
constexpr int64_t kBytesPerCycle = 16;
// Channels first, the most bytes of a run of every thread.
constexpr int64_t kRunBytes = 16 << 10;

inline int FloorLog2(int64_t n) {
  int log = 0;
  while (n >= int64_t{2} << log) ++log;
  return log;
}

inline int64_t Resident(const Device& d, int resident) { return int64_t{resident} * d.multiprocessors; }

// Shared memory of a block when `resident` share a multiprocessor.
inline int64_t ResidentShared(const Device& d, int resident) {
  return std::min<int64_t>(d.shared_per_multiprocessor / resident - 1024, d.shared_per_block);
}

// How many of the `steps` that a slab takes are one block's, a step being a vector or a run of every thread. A block
// takes what its shared memory holds, or less so that every multiprocessor has work.
inline int64_t StepsOfBlock(int64_t steps, int64_t step_bytes, int64_t scratch, int64_t slabs, int64_t most, int each) {
  const int64_t resident = Resident(kNominal, each);
  const int64_t fit = std::max<int64_t>(1, (ResidentShared(kNominal, each) - scratch) / step_bytes);
  // Two blocks on a multiprocessor that need no barrier are better than three that do.
  const int64_t alone = (kNominal.shared_per_multiprocessor / 2 - 1024 - scratch) / step_bytes;
  int64_t blocks = steps <= alone ? 1 : CeilDiv(steps, fit);
  blocks = std::max(blocks, std::min(resident / slabs, steps * step_bytes / kMinShareBytes));
  // One team more, reading some twice, rather than blocks that no team has a use for.
  const int64_t teams = resident / std::min(blocks, resident);
  if (resident - teams * blocks > resident / 5 && slabs > teams) blocks = resident / (teams + 1);
  // A few blocks more, so that the last round of units leaves none idle; large teams, which meet slowly, stay.
  const int64_t rounds = CeilDiv(slabs, std::max<int64_t>(1, resident / blocks));
  const int64_t even = resident / CeilDiv(slabs, rounds);
  if (even > blocks && 5 * even <= 6 * blocks && 3 * even <= resident) blocks = even;
  return CeilDiv(steps, std::clamp<int64_t>(blocks, 1, most));
}

// Runs of up to `length` steps for `steps` of them, of which `fit` find a place. Of more than `fit`, some stream.
inline Schedule MakeSchedule(int64_t steps, int64_t length, int64_t fit) {
  const int runs = static_cast<int>(CeilDiv(steps, length));
  if (steps <= fit) return {runs, static_cast<int>(length), runs, 0, static_cast<int>(steps)};
  const int places = static_cast<int>(std::max<int64_t>(1, fit / length));
  const int ring = std::min(kMaxRing, std::max(1, places / 2));
  return {runs, static_cast<int>(length), places - ring, ring, static_cast<int>(length) * places};
}

struct ColumnTiling {
  Team team;
  Schedule schedule;
  int threads;
  int64_t shared;    // bytes of shared memory
  int64_t examples;  // that share parameters
  int64_t example;   // vectors from one to the next
  int64_t rows;      // of a slab
  int row;           // vectors from one to the next
  int slabs;         // per example, side by side
  int columns;       // vectors of a slab's row
  int column_blocks, block_columns;
  int64_t block_rows;
  int parallel_rows;  // that a block's threads take at once
  int slab_channels, slab_groups;
  int channel_lanes;  // 1 << channel_lanes threads sum over what a block has of a channel
  int group_lanes;    // 1 << group_lanes threads sum over a group's channels
  // The channel of a slab's row element e is e % period, its group that / group_channels.
  FastDiv period, group_channels;
  FastDiv by_slabs, by_examples, by_parallel_rows;
  int64_t channels, groups;

  int64_t SlabGroups() const { return slab_groups; }
};

template <class T, int V>
ColumnTiling PlanColumns(const Problem& p, int arrays, const Device& d, int each = kResident) {
  ColumnTiling t = {};
  const int64_t c = p.channels, common = std::gcd<int64_t>(c, V), group = c / p.groups;
  t.channels = c, t.groups = p.groups;
  t.examples = p.n;
  t.example = p.spatial * c / V;
  t.row = static_cast<int>(c / common);
  t.rows = p.spatial * common / V;
  int64_t slab_channels = c;
  if (common == V) {
    const int64_t grain = std::lcm<int64_t>(group, V);
    for (int64_t k = 1; k <= c / grain; ++k) {
      const int64_t bytes = k * grain * sizeof(T);
      if (c / grain % k || bytes < kMinRowBytes || bytes * p.spatial * arrays < kMinSlabBytes) continue;
      slab_channels = k * grain;
      break;
    }
  }
  t.slabs = static_cast<int>(c / slab_channels);
  t.slab_channels = static_cast<int>(slab_channels);
  t.slab_groups = static_cast<int>(slab_channels / group);
  t.columns = t.row / t.slabs;
  t.period = FastDiv(slab_channels);
  t.by_slabs = FastDiv(t.slabs);
  t.by_examples = FastDiv(p.n);
  t.group_channels = FastDiv(group);
  t.column_blocks = static_cast<int>(CeilDiv(t.columns, kThreads));
  t.block_columns = static_cast<int>(CeilDiv(t.columns, t.column_blocks));
  t.parallel_rows = static_cast<int>(std::min<int64_t>(kThreads / t.block_columns, t.rows));
  t.by_parallel_rows = FastDiv(t.parallel_rows);
  t.threads = static_cast<int>(CeilDiv(t.block_columns * t.parallel_rows, 32) * 32);
  t.team.units = p.batch * p.n * t.slabs;

  const int half = (t.parallel_rows + 1) / 2;
  t.channel_lanes = std::min({5, FloorLog2(std::max<int64_t>(1, t.threads / slab_channels)), CeilLog2(half)});
  t.group_lanes = std::min(5, CeilLog2(group));

  // SumChannels' scratch and its sums, of two values each, and four values for each group of the slab.
  using A = Accumulator<T>;
  const int64_t value = arrays == 1 ? sizeof(double) : sizeof(A);
  const int64_t scratch = 2 * (half * t.block_columns * V + slab_channels) * value +
                          4 * t.slab_groups * static_cast<int64_t>(sizeof(A)) + 16;
  // Many channels leave room for fewer blocks.
  if (each > kFewest && scratch > ResidentShared(kNominal, each) / 2) return PlanColumns<T, V>(p, arrays, d, kFewest);
  const int64_t step_bytes = int64_t{arrays} * t.threads * V * sizeof(T);
  const int64_t sweeps = CeilDiv(t.rows, t.parallel_rows);
  const int64_t most = std::max<int64_t>(1, std::min(Resident(d, each), Resident(kNominal, each)) / t.column_blocks);
  const int64_t steps =
      StepsOfBlock(sweeps, step_bytes, scratch, t.team.units * t.column_blocks, std::min(sweeps, most), each);
  t.block_rows = steps * t.parallel_rows;
  t.team.size = static_cast<int>(CeilDiv(sweeps, steps)) * t.column_blocks;

  const int64_t fit = ((t.team.size == 1 ? d.shared_per_block : ResidentShared(d, each)) - scratch) / step_bytes;
  // Four runs if all is held, so that the first are at work while the last are on their way.
  const int64_t length = steps <= fit ? CeilDiv(steps, 4) : std::max<int64_t>(1, fit / 8);
  t.schedule = MakeSchedule(steps, length, fit);
  t.shared = t.schedule.Slots() * step_bytes + scratch;
  t.team.lag = static_cast<int>(t.schedule.Slots() * step_bytes / kBytesPerCycle);
  return t;
}

// A thread's place in a slab of channels-last data.
template <int V>
struct ColumnPlace {
  int64_t example, parameters;  // the latter: of the slab's first channel
  int first_channel, first_group;
  int64_t base, step;
  int count;  // of rows
  int length;
  int across, down;  // the thread's place in the block
  int first_column;  // of the block
  int element;       // of the slab's row: the first of this thread

  __device__ ColumnPlace(const ColumnTiling& t, int64_t unit) {
    const int rank = t.team.Rank();
    const int row_block = rank / t.column_blocks, column_block = rank - row_block * t.column_blocks;
    int slab;
    example = t.by_slabs.Div(static_cast<int>(unit), &slab);
    parameters = t.by_examples.Div(static_cast<int>(example)) * t.channels + int64_t{slab} * t.slab_channels;
    first_channel = slab * t.slab_channels;
    first_group = slab * t.slab_groups;
    down = threadIdx.x / t.block_columns;
    across = threadIdx.x - down * t.block_columns;
    first_column = column_block * t.block_columns;
    const int column = first_column + across;
    const bool column_exists = column < t.columns && down < t.parallel_rows;
    element = (column_exists ? column : 0) * V;
    const int64_t row = row_block * t.block_rows + down;
    const int64_t end = min(t.rows, (row_block + 1) * t.block_rows);
    count = column_exists && row < end ? t.by_parallel_rows.Div(static_cast<int>(end - row - 1)) + 1 : 0;
    base = example * t.example + int64_t{slab} * t.columns + column + row * t.row;
    step = int64_t{t.parallel_rows} * t.row;
    length = t.schedule.length;
  }

  // Of the slab, for element j of the thread's vectors.
  __device__ int Channel(const ColumnTiling& t, int j) const {
    int channel;
    t.period.Div(element + j, &channel);
    return channel;
  }

  __device__ Run At(int m) const {
    const int first = m * length;
    return {base + first * step, step, max(0, min(count - first, length))};
  }
};

struct RowTiling {
  Team team;
  Schedule schedule;
  int threads;
  int64_t shared;    // bytes of shared memory
  int span;          // 1 << span threads share a slab
  int lanes;         // 1 << lanes threads share a run
  int64_t examples;  // that share parameters
  int64_t plane;     // elements of a channel
  bool aligned;      // arrays begin with whole vectors
  int64_t pieces;    // runs per channel
  FastDiv by_pieces, by_groups, by_examples;
  int64_t piece;  // vectors of each but the last
  int64_t share;  // pieces of a slab that a block takes
  int64_t slabs;
  int64_t slab_channels, channels, groups;

  int64_t SlabGroups() const { return 1; }
};

template <class T, int V>
RowTiling PlanRows(const Problem& p, int arrays, const Device& d, int each = kResidentRows) {
  using A = Accumulator<T>;
  RowTiling t = {};
  t.examples = p.n;
  t.channels = p.channels, t.groups = p.groups;
  t.slab_channels = p.channels / p.groups;
  t.plane = p.spatial;
  t.aligned = true;
  // Vectors of a channel, wherever it begins.
  const int64_t row = CeilDiv(V - std::gcd<int64_t>(p.spatial, V) + p.spatial, V);
  t.slabs = p.batch * p.n * p.groups;
  // Of small arrays a thread takes one vector of each, of others it takes four at a time.
  const int64_t vectors = t.slab_channels * row * arrays;
  const int64_t few =
      std::clamp<int64_t>(t.slabs * vectors / (Resident(kNominal, kResidentRows) * kThreads), arrays, 4);
  t.span = std::min(FloorLog2(kThreads), FloorLog2(std::max<int64_t>(1, vectors / few)));
  t.threads = t.span <= 5 ? kThreads : 1 << t.span;
  const int long_runs = FloorLog2(std::max<int64_t>(1, row / 4)), short_runs = std::min(3, CeilLog2(row));
  t.lanes = std::min({5, t.span, few > arrays ? long_runs : std::max(long_runs, short_runs)});
  t.team.units = CeilDiv(t.slabs, t.threads >> t.span);

  // The longest run that wastes few slots, fewer where two arrays share them; short enough for blocks to be full.
  const int64_t step_bytes = int64_t{arrays} * t.threads * V * sizeof(T);
  const int64_t parallel = 1 << (t.span - t.lanes);
  const int64_t longest = std::clamp<int64_t>(kRunBytes / step_bytes, 1, 8);
  const auto slots = [&](int64_t k) { return k * CeilDiv(t.slab_channels * CeilDiv(row, k << t.lanes), parallel); };
  int64_t length = 1, fewest = slots(1);
  for (int64_t k = 2; k <= longest; ++k) fewest = std::min(fewest, slots(k));
  for (int64_t k = 2; k <= longest; ++k)
    if (slots(k) <= fewest + fewest / (arrays == 1 ? 8 : 32)) length = k;
  t.pieces = CeilDiv(row, length << t.lanes);
  t.by_pieces = FastDiv(t.pieces), t.by_groups = FastDiv(p.groups), t.by_examples = FastDiv(p.n);
  t.piece = CeilDiv(row, t.pieces);
  length = CeilDiv(t.piece, 1 << t.lanes);

  // The backward pass also has two sums for each piece.
  const int64_t pieces = t.slab_channels * t.pieces, rounds = CeilDiv(pieces, parallel);
  const int64_t kReduction = 2 * (arrays == 1 ? sizeof(double) : sizeof(A)) * kThreads;
  const int64_t round_bytes = length * step_bytes + (arrays == 1 ? 0 : 2 * sizeof(A) * (t.threads >> t.lanes));
  const int64_t most =
      t.span == FloorLog2(kThreads) ? std::min({rounds, Resident(d, each), Resident(kNominal, each)}) : 1;
  const int64_t steps = StepsOfBlock(rounds, round_bytes, kReduction, t.slabs, most, each);
  t.share = std::min(pieces, steps * parallel);
  t.team.size = static_cast<int>(CeilDiv(pieces, t.share));
  // A large team meets faster if its blocks are fewer.
  if (t.team.size > kLargeTeam && each > kResident) return PlanRows<T, V>(p, arrays, d, kResident);

  const int64_t sums = arrays == 1 ? 0 : 2 * sizeof(A) * t.share * (t.threads >> t.span);
  const int64_t shared = t.team.size == 1 ? d.shared_per_block : ResidentShared(d, each);
  t.schedule = MakeSchedule(steps * length, length, (shared - kReduction - sums) / step_bytes);
  t.shared = t.schedule.Slots() * step_bytes + kReduction + sums;
  t.team.lag = static_cast<int>(t.schedule.Slots() * step_bytes / kBytesPerCycle);
  return t;
}

// A thread's place in a slab of channels-first data; runs are ragged where channels do not begin with whole vectors.
template <int V, bool kRagged>
struct RowPlace {
  const RowTiling& t;
  int unit, example;
  int channels;            // those before the slab's first, in its example
  int parameters;          // of that channel
  int first, end;          // pieces first..end-1 are this block's
  int in_slab, lane, row;  // among the slab's threads; the run's lanes; the runs side by side
  int parallel;
  int64_t element;  // the slab's first

  __device__ RowPlace(const RowTiling& t, int first_unit) : t(t) {
    in_slab = threadIdx.x & ((1 << t.span) - 1);
    unit = first_unit + (threadIdx.x >> t.span);
    lane = in_slab & ((1 << t.lanes) - 1);
    row = in_slab >> t.lanes;
    parallel = 1 << (t.span - t.lanes);
    int group;
    example = t.by_groups.Div(unit, &group);
    channels = group * static_cast<int>(t.slab_channels);
    parameters = t.by_examples.Div(example) * static_cast<int>(t.channels) + channels;
    element = int64_t{unit} * t.slab_channels * t.plane;
    first = t.team.Rank() * static_cast<int>(t.share);
    end = unit < t.slabs ? min(first + static_cast<int>(t.share), static_cast<int>(t.slab_channels * t.pieces)) : first;
  }

  __device__ int Piece(int m) const { return first + row + m * parallel; }
  __device__ int Channel(int piece) const { return t.by_pieces.Div(piece); }

  __device__ Run At(int m) const {
    const int piece = Piece(m);
    int part;
    const int channel = t.by_pieces.Div(piece, &part);
    const int64_t begin = element + channel * t.plane, end_element = begin + t.plane, offset = part * t.piece;
    const int64_t first_vector = begin / V, vectors = kRagged ? (end_element - 1) / V + 1 - first_vector : t.plane / V;
    const int left = static_cast<int>(min(t.piece, vectors - offset)) - lane;
    const int count = piece < end && left > 0 ? ((left - 1) >> t.lanes) + 1 : 0;
    Run run = {first_vector + offset + lane, 1 << t.lanes, count};
    if constexpr (kRagged) {
      constexpr int64_t kFar = 1 << 20;  // more elements than a run reaches
      run.begin = static_cast<int>(max(begin - run.base * V, -kFar));
      run.end = static_cast<int>(min(end_element - run.base * V, kFar));
    }
    return run;
  }
};

}  // namespace jaxdnn::group_norm
