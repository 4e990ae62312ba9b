// Which problems go through rings (ring.cuh), and how they are cut.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/common/device_code.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/group_norm/ring.cuh"
#include "cuda/group_norm/visit.cuh"

namespace jaxdnn::group_norm {

// Bytes of what a block keeps beside the ring: of a thread's sums; of each channel; of each channel of a share where
// channels are first; of a group.
struct RingBytes {
  int sums, channel, share_channel, group;
  bool by_channel;  // channels first, warps sum each channel on its own
};

// Chunks on their way, of 16 KiB: what memory needs to be at work. The letters of a meeting wait behind them.
constexpr int kInFlight = 3;
// The fewest bytes of an array, of one that only the forward pass reads channels last, and channels first of a group,
// that are worth a ring.
constexpr int64_t kMinRingBytes = 16 << 20;
constexpr int64_t kMinForwardBytes = 24 << 20;
constexpr int64_t kMinGroupBytes = 32 << 10;
// The most groups of a slab that blocks exchange sums of, channels last; and, channels first, channels that a block's
// share of a group meets, for which there are tables.
constexpr int64_t kMostGroups = 64, kMostChannels = 64;
// The most that a box may have of channels, and of positions; the fewest bytes of its lines that memory takes well.
constexpr int64_t kMostBox = 256, kMinLineBytes = 128;
// What a meeting of many groups costs, as bytes that memory could have moved.
constexpr int64_t kMeetingBytes = 24 << 10;
// Letters of a meeting that every block may read itself.
constexpr int64_t kOwnLetters = 400;

// The blocks of a team. A round costs what a block moves, a meeting, which is longer where there are results of many
// groups to pass on, and what memory waits for it: the more, the larger a share is beside the ring. What the ring
// cannot hold is copied twice.
inline int RingTeam(const RingTiling& t, int64_t grain, int arrays, int64_t ring_bytes) {
  const int64_t meeting = t.columns > 1 ? kMeetingBytes : 12 << 10, grains = CeilDiv(t.slab, grain);
  int best = 1;
  int64_t least = INT64_MAX;
  for (int size = 1; size <= std::min<int64_t>(kNominal.multiprocessors, grains); ++size) {
    const int64_t bytes = CeilDiv(grains, size) * grain * 16 * arrays;
    const int64_t round = bytes + (size == 1 ? 0 : meeting) + std::max<int64_t>(0, bytes - ring_bytes * 3 / 10) / 3 +
                          std::max<int64_t>(0, bytes - ring_bytes);
    const int64_t cost = CeilDiv(t.team.units, kNominal.multiprocessors / size) * round;
    if (cost < least) best = size, least = cost;
  }
  return best;
}

// The same of slabs that are some of the channels, 0 if there is none. Of a unit no more than 13/20 of the ring are
// held: what is free is filled with the next while the team meets. Where elements take longer than memory, `busy`, few
// rounds are better than hidden meetings. Boxes are copied as a whole.
inline int SlabTeam(const RingTiling& t, int64_t chunk, int64_t chunk_bytes, bool busy) {
  const int64_t grains = t.slab / t.columns, held = (busy ? 16 : 13) * t.stages / 20;
  int best = 0;
  int64_t least = INT64_MAX;
  for (int size = 1; size <= std::min<int64_t>(kNominal.multiprocessors, grains); ++size) {
    const int64_t chunks = CeilDiv(CeilDiv(grains, size) * t.columns, chunk);
    const int64_t cost = CeilDiv(t.team.units, kNominal.multiprocessors / size) *
                         (chunks * chunk_bytes + (busy ? 2 : 1) * kMeetingBytes);
    if (chunks <= held && cost < least) best = size, least = cost;
  }
  return best;
}

// The plan for slabs of so many groups of an example.
inline std::optional<RingTiling> PlanSlabs(const Problem& p, int arrays, const RingBytes& bytes, int64_t groups) {
  const int64_t vector = p.dtype == DType::kF32 ? 4 : 8, group = p.channels / p.groups, width = groups * group;
  RingTiling t = {};
  const bool last = t.last = p.channels_last;
  if (last && (width % vector != 0 || width / vector > kVisitors || groups > kMostGroups)) return std::nullopt;
  t.boxes = last && groups < p.groups;
  t.columns = static_cast<int>(last ? width / vector : 1);
  t.row_vectors = static_cast<int>(last ? p.channels / vector : 1);
  t.channels = static_cast<int>(p.channels), t.groups = static_cast<int>(p.groups);
  t.slab_channels = static_cast<int>(width);
  t.slab_groups = static_cast<int>(groups);
  t.slab = width * p.spatial / vector;
  t.example = p.channels * p.spatial / vector;
  if (t.slab > (last ? INT32_MAX : 1 << 27)) return std::nullopt;  // Elements, too, have 32-bit numbers.
  t.plane = FastDiv(p.spatial);
  t.split = !last && p.spatial % (32 * vector) != 0;
  t.group_channels = FastDiv(group);
  t.by_slabs = FastDiv(p.groups / groups);
  t.team.units = p.n * p.groups / groups;
  const int depth = arrays == 1 ? kDepth<1> : kDepth<2>;
  int rows = kVisitors / t.columns;
  // The unit writes boxes to multiples of 128 bytes.
  while (t.boxes && rows > 1 && t.columns * rows * depth % 8 != 0) --rows;
  t.side = t.columns * rows;
  t.stride = last ? rows * t.row_vectors : t.side;
  t.half = (rows + 1) / 2;
  if (4 * t.side < 3 * kVisitors) return std::nullopt;
  if (t.boxes &&
      (width > kMostBox || rows * depth > kMostBox || t.side * depth % 8 != 0 || width / vector * 16 < kMinLineBytes))
    return std::nullopt;

  t.share_channels = static_cast<int>(last ? 0 : std::min(group, kMostChannels));
  t.slots = 1;
  for (int64_t c = 0; last && c < width; c += vector)
    t.slots = std::max(t.slots, static_cast<int>((c + vector - 1) / group - c / group) + 1);
  // The forward pass has so little else to do that sums of many groups in a vector take longer than memory.
  if (arrays == 1 && t.slots > 4) return std::nullopt;
  // Where an activation keeps the arithmetic busy, or vectors meet many groups, to sum channels alone is less work.
  t.early = last && arrays == 2 && p.activation == activation::Kind::kIdentity && 2 * t.slots <= vector;
  const int halves = static_cast<int>(t.half * t.columns * vector);
  t.sums = static_cast<int>(!last         ? kVisitors / 32 * (bytes.by_channel ? t.share_channels : 1)
                            : arrays == 1 ? t.slots * t.side
                            : t.early     ? std::max(t.slots * t.side, halves)
                                          : halves);
  const int64_t kept = int64_t{t.sums} * bytes.sums + p.channels * bytes.channel +
                       t.share_channels * bytes.share_channel + groups * bytes.group;
  const int64_t chunk_bytes = int64_t{16} * arrays * t.side * depth;
  constexpr int kBarrierBytes = 1024;
  t.stages =
      static_cast<int>(std::min<int64_t>(kMaxStages, (kNominal.shared_per_block - kBarrierBytes - kept) / chunk_bytes));
  if (t.stages < 2 * kInFlight) return std::nullopt;
  t.depth = kInFlight;
  t.kept = t.stages - 2;
  t.shared = t.stages * chunk_bytes + kept;
  const int64_t grain = last ? t.columns : 32, ring_bytes = t.stages * chunk_bytes;
  const bool busy = arrays == 2 && vector == 8 && p.activation == activation::Kind::kSilu;
  t.team.size = t.boxes ? SlabTeam(t, t.side * depth, chunk_bytes, busy) : RingTeam(t, grain, arrays, ring_bytes);
  // A slab that one block holds needs no meeting, and no ring.
  if (t.boxes && t.team.size <= 1) return std::nullopt;
  // Nor are rings the faster where large teams pass on the sums of so many groups.
  if (t.boxes && p.groups > kMostGroups && groups * t.team.size > 2 * kOwnLetters) return std::nullopt;
  t.share = CeilDiv(CeilDiv(t.slab, grain), t.team.size) * grain;
  // Wherever it begins.
  if (!last && std::min(group, (t.share * vector - 2) / p.spatial + 2) > t.share_channels) return std::nullopt;
  t.direct = groups * t.team.size <= kOwnLetters || groups == 1;
  // Far more than the ring holds is left to blocks that leave room for nothing else.
  if (t.share * 16 * arrays > ring_bytes * 3 / 2) return std::nullopt;
  // One round of long meetings has nothing to hide them behind.
  if (last && t.Blocks() == t.team.units * t.team.size) return std::nullopt;
  return t;
}

inline std::optional<RingTiling> PlanRing(const Problem& given, int arrays, const RingBytes& bytes) {
  const Problem p = Canonical(given);
  if (p.Empty() || p.dtype == DType::kF64 || p.batch != 1 || p.spatial == 1) return std::nullopt;
  const int64_t vector = p.dtype == DType::kF32 ? 4 : 8, group = p.channels / p.groups;
  const bool last = p.channels_last;
  if ((last ? p.channels : group * p.spatial) % vector != 0) return std::nullopt;
  if (p.n * p.spatial * p.channels / vector * 16 < (last && arrays == 1 ? kMinForwardBytes : kMinRingBytes))
    return std::nullopt;
  // Channels last, a thread keeps its column; channels first, a warp takes several vectors of a channel before it sums
  // over its lanes.
  if (!last &&
      (p.spatial / vector < (bytes.by_channel ? kVisitors : 32) || group * p.spatial / vector * 16 < kMinGroupBytes))
    return std::nullopt;
  // The fewest channels whose lines memory takes well: fewer blocks meet, with fewer sums.
  if (last) {
    int64_t groups = 1;
    while (groups < p.groups &&
           (p.groups % groups != 0 || groups * group % vector != 0 || groups * group / vector * 16 < kMinLineBytes))
      ++groups;
    if (groups < p.groups)
      if (const auto t = PlanSlabs(p, arrays, bytes, groups)) return t;
  }
  return PlanSlabs(p, arrays, bytes, last ? p.groups : 1);
}

// The boxes of an array's slabs.
inline cudaError_t EncodeSlabs(const Problem& p, const RingTiling& t, int depth, const void* data, CUtensorMap* map) {
  return EncodeBoxes(map, p.dtype, data, {p.channels, p.spatial, p.n}, {t.slab_channels, depth * t.side / t.columns, 1},
                     false, true);
}

// Whether the current device is what rings are written and planned for.
inline bool HasRings() {
  int device = 0, multiprocessors = 0;
  return HasHopperCode() && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
         multiprocessors == kNominal.multiprocessors;
}

// Calls f(TypeTag, activation) for a problem that rings take.
template <class F>
cudaError_t VisitRing(const Problem& p, F&& f) {
  return VisitSingleDType(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitActivation<T, true>(p.activation, [&](auto activation) { return f(type, activation); });
  });
}

}  // namespace jaxdnn::group_norm
