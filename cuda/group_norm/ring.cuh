// Slabs that stream through a ring in shared memory, on Hopper.
//
// A block has a multiprocessor to itself, and its warps have four roles, which run ahead of each other as far as the
// ring allows: one thread copies chunks of the block's shares in; some warps sum them; a few meet the other blocks of
// the team; the others apply the result, and give the places back. While one unit's sums travel, the next unit is on
// its way into what is left of the ring, and the one before on its way out: memory is at work all the time.
//
// Chunks are contiguous in memory, where channels last a block takes whole rows, and channels first, where it takes
// pieces of a group. Channels last they may also be boxes, rows of some groups' channels, which the TMA unit gathers. A
// share that the ring cannot hold has its first chunks summed as they stream by; they are copied once more after the
// meeting, the last first, while the L2 cache may have them.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "cuda/common/convert.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/group_norm.h"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/team.cuh"

namespace jaxdnn::group_norm {

constexpr int kMaxStages = 16;
// Threads that sum, and as many that apply. Of the warps after those, one sends the block's sums where channels are
// first, one adds up those of the team that are this block's to add up, one takes in the results, and one copies. More
// warps that ask for letters would make these later.
constexpr int kVisitors = 256;
enum Part { kSum, kApply, kSend, kGather, kTake, kCopy };
constexpr int kRingThreads = 2 * kVisitors + 4 * 32;

__device__ inline Part PartOfThread() {
  const int warp = threadIdx.x / 32 - 2 * kVisitors / 32;
  return warp >= 0 ? static_cast<Part>(kSend + warp) : threadIdx.x >= kVisitors ? kApply : kSum;
}

// Vectors of a chunk that a thread visits, of each array.
template <int kArrays>
constexpr int kDepth = kArrays == 1 ? 4 : 2;

struct RingTiling {
  Team team;
  int64_t slab, share;  // vectors of a slab, and those of them that a block takes
  int side;             // vectors that a role's threads visit side by side; channels last, whole rows
  int stages;           // chunks that the ring holds
  int depth;            // chunks that are on their way at once: more would only make letters wait
  int kept;             // the most chunks of a share that stay from one visit to the other
  int columns;          // channels last: vectors of a slab's row
  int row_vectors;      // of the array's
  int stride;           // vectors from those visited side by side to the next
  int64_t example;      // vectors of an example
  bool last;            // channels are
  bool boxes;           // slabs are some of the channels
  bool direct;          // every block reads the letters of all others itself
  int half;             // channels last: half of the rows that are visited at once
  int64_t shared;
  FastDiv plane;     // channels first: elements of a channel
  bool split;        // channels first: they need not begin where a warp's vectors do, nor where a vector does
  FastDiv by_slabs;  // of an example
  FastDiv group_channels;
  int slab_channels, slab_groups, channels, groups;
  int share_channels;  // channels first: the most that a block meets
  int slots;           // channels last: the most groups that a vector's elements belong to
  bool early;          // channels last: groups are summed before channels, which then have time while letters travel
  int sums;            // pairs that the threads leave for each other

  int64_t SlabGroups() const { return slab_groups; }
  // The unit's first vector.
  __device__ int64_t Base(int64_t unit) const {
    if (!boxes) return unit * slab;
    int part;
    const int at = by_slabs.Div(static_cast<int>(unit), &part);
    return at * example + part * columns;
  }
  // As many teams as fit the multiprocessors that plans are made for.
  int Blocks() const {
    return static_cast<int>(std::min<int64_t>(team.units, kNominal.multiprocessors / team.size)) * team.size;
  }
};

// The barriers of a block, at addresses in shared memory.
struct RingBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t summed, sums_free, known[2], known_free[2];
};

__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// The next place of the ring, and the parity of its use.
struct Turn {
  int place = 0;
  uint32_t parity = 0;

  __device__ void Skip(int n, int stages) {
    for (place += n; place >= stages; place -= stages) parity ^= 1;
  }
};

// Where a unit's parameters and statistics are: those of the slab's channel `lead` and of its first group.
struct RingUnit {
  int example, first_channel;
  int64_t first_group;

  __device__ RingUnit(const RingTiling& t, int64_t unit, int lead = 0) {
    int slab;
    example = t.by_slabs.Div(static_cast<int>(unit), &slab);
    first_channel = slab * t.slab_channels + lead;
    first_group = int64_t{example} * t.groups + slab * t.slab_groups;
  }
};

// A block's share of a unit, in chunks.
struct Share {
  int64_t begin;
  int count, chunks, streamed;

  __device__ Share(const RingTiling& t, int chunk) {
    begin = t.team.Rank() * t.share;
    count = static_cast<int>(max(int64_t{0}, min(t.share, t.slab - begin)));
    chunks = (count + chunk - 1) / chunk;
    streamed = chunks > t.stages ? chunks - t.kept : 0;
  }
  // Channels first: of the slab's channels, the first that it meets, and how many.
  template <int V>
  __device__ int FirstChannel(const RingTiling& t) const {
    return count > 0 ? t.plane.Div(static_cast<int>(begin) * V) : 0;
  }
  template <int V>
  __device__ int Channels(const RingTiling& t) const {
    return count > 0 ? t.plane.Div((static_cast<int>(begin) + count) * V - 1) - FirstChannel<V>(t) + 1 : 0;
  }
  // Where in the unit thread `mine` of those that visit begins.
  template <bool kColumns>
  __device__ int64_t Start(const RingTiling& t, int mine) const {
    if (!kColumns) return begin + mine;
    const int down = mine / t.columns;
    return (begin / t.columns + down) * t.row_vectors + mine - down * t.columns;
  }
  // Of the second visit: those that stayed, then the others from the last to the first.
  __device__ int Again(int i) const { return i < chunks - streamed ? streamed + i : chunks - 1 - i; }
};

// The part of the thread that copies; `maps` are of the arrays, if slabs are some of the channels.
template <int kArrays, class Vector>
__device__ void CopyShares(const RingTiling& t, const Vector* const (&in)[kArrays], const CUtensorMap* maps,
                           Vector* ring, RingBarriers* barriers) {
  const int chunk = kDepth<kArrays> * t.side;
  const Share share(t, chunk);
  Turn turn, landed;
  int64_t begun = 0;
  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const int64_t base = unit * t.slab + share.begin;
    const RingUnit u(t, unit);
    for (int i = 0; i < share.chunks + share.streamed; ++i) {
      const int which = i < share.chunks ? i : share.streamed - 1 - (i - share.chunks);
      const int n = t.boxes ? chunk : min(chunk, share.count - which * chunk);
      const uint32_t full = SharedAddress(&barriers->full[turn.place]);
      hopper::WaitBarrier(SharedAddress(&barriers->empty[turn.place]), turn.parity ^ 1);
      if (++begun > t.depth) {
        hopper::WaitBarrier(SharedAddress(&barriers->full[landed.place]), landed.parity);
        landed.Skip(1, t.stages);
      }
      hopper::ArriveExpecting(full, kArrays * n * static_cast<int>(sizeof(Vector)));
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        const uint32_t to = SharedAddress(ring + (turn.place * kArrays + a) * chunk);
        if (t.boxes)
          hopper::LoadBox(to, &maps[a], full, u.first_channel,
                          static_cast<int>(share.begin + which * chunk) / t.columns, u.example);
        else
          hopper::CopyBulk(to, in[a] + base + which * chunk, n * static_cast<int>(sizeof(Vector)), full);
      }
      turn.Skip(1, t.stages);
    }
  }
}

// A warp's threads have done with what they read of a place. Reads must be over, not only begun, when the copy that
// comes next writes there: those behind stores that wait for memory take long.
__device__ inline void Release(RingBarriers* barriers, int place) {
  hopper::ShowSharedToTma();
  __syncwarp();
  if (threadIdx.x % 32 == 0) hopper::Arrive(SharedAddress(&barriers->empty[place]));
}

// `knowing` threads say what is known of a unit.
__device__ inline void InitBarriers(RingBarriers* b, int stages, int knowing) {
  for (int i = 0; i < stages; ++i) {
    hopper::InitBarrier(SharedAddress(&b->full[i]), 1);
    hopper::InitBarrier(SharedAddress(&b->empty[i]), kVisitors / 32);
  }
  hopper::InitBarrier(SharedAddress(&b->summed), kVisitors);
  hopper::InitBarrier(SharedAddress(&b->sums_free), 32);
  for (int i = 0; i < 2; ++i) {
    hopper::InitBarrier(SharedAddress(&b->known[i]), knowing);
    hopper::InitBarrier(SharedAddress(&b->known_free[i]), kVisitors);
  }
  hopper::PublishBarriers();
}

// The threads that sum, alone.
__device__ inline void SyncSumming() { asm volatile("bar.sync 1, %0;" ::"n"(kVisitors) : "memory"); }

// The binary logarithm of the lanes, of `threads`, that work for one of so many groups.
__device__ inline int SpanOf(int groups, int threads) {
  int span = 5;
  while (span > 0 && groups << span > threads) --span;
  return span;
}

// Calls f(g, sum over the channels c of group g of the slab of value(g, c)), by the threads that sum.
template <class Value, class Of, class F>
__device__ void ForEachGroup(const RingTiling& t, int thread, Of&& value, F&& f) {
  const int groups = t.slab_groups, size = t.group_channels.divisor;
  const int span = SpanOf(groups, kVisitors), part = thread & ((1 << span) - 1);
  for (int first = 0; first < groups; first += kVisitors >> span) {
    const int g = first + (thread >> span);
    Value sum[1] = {};
    if (g < groups)
      for (int c = g * size + part; c < (g + 1) * size; c += 1 << span) sum[0] = AddPairs{}(sum[0], value(g, c));
    Reduce(sum, AddPairs{}, {0, span}, static_cast<Value*>(nullptr));
    if (g < groups && part == 0) f(g, sum[0]);
  }
}

// Which of the groups that a vector's elements belong to, counted from its first element's, is that of element j: four
// bits for each.
struct Slots {
  uint32_t bits = 0;

  // Of column `across` of a slab.
  template <int V>
  static __device__ Slots Of(const RingTiling& t, int across) {
    Slots slots;
    const int first = t.group_channels.Div(across * V);
#pragma unroll
    for (int j = 1; j < V; ++j) slots.bits |= (t.group_channels.Div(across * V + j) - first) << 4 * j;
    return slots;
  }
  __device__ int operator[](int j) const { return bits >> 4 * j & 15; }
};

// Channels last, by the threads that sum, all of them: calls f(g, sum) for each group g of the slab, in one thread
// each, with the sum of what the threads have for it; of(slot) is what this one has for a group of its elements.
template <int V, class Value, class Of, class F>
__device__ void SumGroups(const RingTiling& t, int thread, Value* scratch, Of&& of, F&& f) {
  SyncSumming();  // Earlier sums may still be read.
  if (thread < t.side)
    for (int slot = 0; slot < t.slots; ++slot) scratch[slot * t.side + thread] = of(slot);
  SyncSumming();
  const int groups = t.slab_groups, size = t.group_channels.divisor, rows = t.side / t.columns;
  const int span = SpanOf(groups, kVisitors), lanes = 1 << span, lane = thread & (lanes - 1);
  for (int first = 0; first < groups; first += kVisitors >> span) {
    const int g = first + (thread >> span);
    Value sum[1] = {};
    if (g < groups) {
      const int begin = g * size / V, columns = ((g + 1) * size - 1) / V + 1 - begin;
#pragma unroll 4
      for (int i = lane; i < columns * rows; i += lanes) {
        const int row = i / columns, column = begin + i - row * columns;
        const int slot = g - t.group_channels.Div(column * V);
        sum[0] = AddPairs{}(sum[0], scratch[slot * t.side + row * t.columns + column]);
      }
    }
    Reduce(sum, AddPairs{}, {0, span}, static_cast<Value*>(nullptr));
    if (g < groups && lane == 0) f(g, sum[0]);
  }
}

// The same for channels: leaves in `scratch`, planes [V][half][columns], the sums of every two rows of threads; v[j] is
// the thread's for its element j.
template <int V, class Value>
__device__ void SumHalves(const RingTiling& t, int thread, const Value (&v)[V], Value* scratch) {
  const int plane = t.half * t.columns, down = thread / t.columns;
  Value* mine = scratch + thread - (down < t.half ? 0 : plane);
  SyncSumming();  // Earlier sums may still be read.
  if (thread < t.side && down >= t.half) {
#pragma unroll
    for (int j = 0; j < V; ++j) mine[j * plane] = v[j];
  }
  SyncSumming();
  if (down < t.half) {
    const bool paired = thread + plane < t.side;
#pragma unroll
    for (int j = 0; j < V; ++j) mine[j * plane] = paired ? AddPairs{}(v[j], mine[j * plane]) : v[j];
  }
  SyncSumming();
}

// From there, the sum of channel c.
template <int V, class Value>
__device__ Value ChannelSum(const RingTiling& t, const Value* scratch, int c) {
  const Value* at = scratch + c % V * t.half * t.columns + c / V;
  Value sum = *at;
#pragma unroll 4
  for (int row = 1; row < t.half; ++row) sum = AddPairs{}(sum, at[row * t.columns]);
  return sum;
}

// Letters that a lane asks for at once, so that a warp has those of the largest team in one go.
constexpr int kAtOnce = (kNominal.multiprocessors + 31) / 32;

// Adds up the letters of those groups that are this block's, for all blocks. By one warp.
template <class Value>
__device__ void Gather(const RingTiling& t, Letter<Value>* letters) {
  const int groups = t.slab_groups, size = t.team.size;
  Letter<Value>* result = letters + int64_t{size} * groups;
  const int span = SpanOf((groups + size - 1) / size, 32);
  const int lane = threadIdx.x % 32, part = lane & ((1 << span) - 1);
  for (int first = t.team.Rank(); first < groups; first += size << (5 - span)) {
    const int g = first + size * (lane >> span);
    const Value sum = AddBlocks<kAtOnce>(letters + min(g, groups - 1), size, groups, span);
    if (g < groups && part == 0) result[g].Write(sum);
  }
}

// Calls take(g, sum, known(g)) with the team's sum for each group, in one thread each. What is known is asked for
// before the sums have come. By one warp.
template <class Value, class Known, class F>
__device__ void Take(const RingTiling& t, const Letter<Value>* letters, Known&& known, F&& take) {
  const int groups = t.slab_groups, lane = threadIdx.x % 32;
  if (t.direct) {
    const int span = SpanOf(groups, 32);
    for (int first = 0; first < groups; first += 32 >> span) {
      const int g = first + (lane >> span), column = min(g, groups - 1);
      const auto of_group = known(column);
      const Value sum = AddBlocks<kAtOnce>(letters + column, t.team.size, groups, span);
      if (g < groups && (lane & ((1 << span) - 1)) == 0) take(g, sum, of_group);
    }
    return;
  }
  const Letter<Value>* result = letters + int64_t{t.team.size} * groups;
  for (int first = 0; first < groups; first += 64) {
    const int g = first + lane, h = g + 32, one = min(g, groups - 1), other = min(h, groups - 1);
    const auto of_one = known(one), of_other = known(other);
    Value sum, sum_other;
    while (!(result[one].Read(&sum) & result[other].Read(&sum_other))) continue;
    if (g < groups) take(g, sum, of_one);
    if (h < groups) take(h, sum_other, of_other);
  }
}

}  // namespace jaxdnn::group_norm
