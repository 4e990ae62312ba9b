// The forward pass through the ring (ring.cuh).
#include "cuda/group_norm/ring_plan.cuh"

namespace jaxdnn::group_norm {
namespace {

template <class T, int V>
struct RingOperands {
  using A = Accumulator<T>;
  const Vec<T, V>* x;
  const A *scale, *bias;
  Vec<T, V>* y;
  Statistics<A>* statistics;
  Letter<Moments>* letters;
  A epsilon;
  double inverse;
  CUtensorMap map;
};

template <bool kColumns, class F, class T, int V>
__global__ void __launch_bounds__(kRingThreads, 1)
    RingForwardKernel(const __grid_constant__ RingTiling t, const __grid_constant__ RingOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  using Vector = Vec<T, V>;
  constexpr int D = kDepth<1>, kWarps = kVisitors / 32;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RingBarriers barriers;
  const int side = kColumns ? t.side : kVisitors, chunk = D * side;
  auto* ring = reinterpret_cast<Vector*>(shared);
  auto* scratch = reinterpret_cast<Moments*>(ring + t.stages * chunk);
  auto* known = reinterpret_cast<Statistics<A>*>(scratch + t.sums);               // two units'
  auto* summed_pivots = reinterpret_cast<A*>(known + 2 * t.slab_groups);          // the same, of who sums
  auto* table = reinterpret_cast<Affine<A>*>(summed_pivots + 2 * t.slab_groups);  // channels first: the share's, twice
  if constexpr (!hopper::kAvailable) return;

  const bool alone = t.team.size == 1;
  if (threadIdx.x == 0) InitBarriers(&barriers, t.stages, kColumns && alone ? kVisitors : 32);
  __syncthreads();

  const int64_t first = t.team.First(), step = t.team.Step();
  const Share share(t, chunk);
  const int lead = kColumns ? 0 : share.FirstChannel<V>(t), channels = kColumns ? 0 : share.Channels<V>(t);
  const Part part = PartOfThread();
  if (part == kCopy) {
    const Vector* in[1] = {o.x};
    if (threadIdx.x % 32 == 0) CopyShares<1>(t, in, &o.map, ring, &barriers);
    return;
  }

  const auto letters_of = [&](int64_t unit) { return o.letters + unit * (t.team.size + 1) * t.slab_groups; };
  // Group g's pivot is its first value.
  const auto pivot_of = [&](int64_t unit, int g) {
    return reinterpret_cast<const T*>(o.x + t.Base(unit))[kColumns ? g * t.group_channels.divisor : 0];
  };
  const auto tell = [&](int buffer, int g, A pivot, const Moments& m) {
    known[buffer * t.slab_groups + g] = Statistics<A>(m, o.inverse, pivot, o.epsilon);
  };
  if (part > kApply) {
    if (part == kSend ? kColumns : alone || (part == kGather && t.direct)) return;
    const bool sends = part == kSend, gathers = part == kGather;
    const int lane = threadIdx.x % 32;
    int round = 0;
    for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
      const RingUnit u(t, unit, lead);
      const int buffer = round & 1;
      const bool takes = !(sends || gathers) || alone;
      const T pivot = sends ? pivot_of(unit, 0) : T();
      if (takes) hopper::WaitBarrier(SharedAddress(&barriers.known_free[buffer]), (round >> 1 & 1) ^ 1);
      // The scale and the bias wait where the map will be.
      if (!kColumns && takes)
        for (int c = lane; c < channels; c += 32) {
          Affine<A>& affine = table[buffer * t.share_channels + c];
          affine.slope = o.scale[u.first_channel + c], affine.offset = o.bias[u.first_channel + c];
        }
      if (sends) {
        hopper::WaitBarrier(SharedAddress(&barriers.summed), round & 1);
        Moments sum[1] = {scratch[lane % kWarps]};
        Reduce(sum, AddPairs{}, {0, 3}, static_cast<Moments*>(nullptr));
        if (lane == 0) {
          if (alone)
            tell(buffer, 0, static_cast<A>(pivot), sum[0]);
          else
            letters_of(unit)[t.team.Rank()].Write(sum[0]);
        }
        hopper::Arrive(SharedAddress(&barriers.sums_free));
      } else if (gathers) {
        Gather(t, letters_of(unit));
      } else {
        Take(
            t, letters_of(unit), [&](int g) { return pivot_of(unit, g); },
            [&](int g, const Moments& m, T pivot) { tell(buffer, g, static_cast<A>(pivot), m); });
      }
      if (!takes) continue;
      __syncwarp();
      if constexpr (!kColumns) {
        for (int c = lane; c < channels; c += 32) {
          Affine<A>& affine = table[buffer * t.share_channels + c];
          affine = Affine<A>(known[buffer], affine.slope, affine.offset);
        }
      }
      hopper::Arrive(SharedAddress(&barriers.known[buffer]));
      __syncwarp();
    }
    return;
  }

  const bool applies = part == kApply;
  const int thread = threadIdx.x - (applies ? kVisitors : 0);
  const bool visits = thread < side;
  const int mine = min(thread, side - 1);  // Threads to spare read what another does, and leave it.
  const int across = kColumns ? thread % t.columns : 0;
  const auto group_of = [&](int j) { return kColumns ? t.group_channels.Div(across * V + j) : 0; };
  const auto widen = [&](const Vector* from, A(&wide)[V]) {
    Widen<T, V>(*reinterpret_cast<const Packed<T, V>*>(from), wide);
  };
  Turn turn;
  int round = 0;
  if (!applies) {
    const Slots slots = kColumns ? Slots::Of<V>(t, across) : Slots();
    for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
      const int buffer = round & 1;
      // What of them is read two units before was behind a barrier since.
      A* pivots = summed_pivots + buffer * t.slab_groups;
      if constexpr (kColumns)
        for (int g = thread; g < t.slab_groups; g += kVisitors) pivots[g] = static_cast<A>(pivot_of(unit, g));
      const T pivot = kColumns ? T() : pivot_of(unit, 0);  // Asked for here, needed where the sums are made.
      // Channels first, several sums, so that additions need not wait for each other.
      constexpr int kParts = kColumns || V < 4 ? V : 4;
      Shifted<A> own[kParts] = {};
      int count = 0;
      for (int i = 0; i < share.chunks; ++i) {
        const int n = min(chunk, share.count - i * chunk);
        hopper::WaitBarrier(SharedAddress(&barriers.full[turn.place]), turn.parity);
        const Vector* from = ring + turn.place * chunk + mine;
        if (i == 0 && mine < n) {
          A x[V];
          widen(from, x);
#pragma unroll
          for (int j = 0; j < kParts; ++j) own[j].first = j > 0 && slots[j] == slots[j - 1] ? own[j - 1].first : x[j];
        }
#pragma unroll
        for (int k = 0; k < D; ++k) {
          if (k * side + mine >= n) continue;
          A x[V];
          widen(from + k * side, x);
#pragma unroll
          for (int j = 0; j < V; ++j) own[j % kParts].Add(x[j]);
          ++count;
        }
        if (i < share.streamed) Release(&barriers, turn.place);
        turn.Skip(1, t.stages);
      }
      turn.Skip(share.streamed, t.stages);

      if constexpr (kColumns) {
        if (alone) hopper::WaitBarrier(SharedAddress(&barriers.known_free[buffer]), (round >> 1 & 1) ^ 1);
        const auto of_slot = [&](int slot) {
          Shifted<A> all = {};
          int terms = 0;
#pragma unroll
          for (int j = 0; j < V; ++j)
            if (slots[j] == slot)
              all = {own[j].first, all.sum + own[j].sum, all.squares + own[j].squares}, terms += count;
          return all.About(pivots[min(group_of(0) + slot, t.slab_groups - 1)], terms);
        };
        SumGroups<V, Moments>(t, thread, scratch, of_slot, [&](int g, const Moments& m) {
          if (alone)
            tell(buffer, g, pivots[g], m);
          else
            letters_of(unit)[t.team.Rank() * t.slab_groups + g].Write(m);
        });
        if (alone) hopper::Arrive(SharedAddress(&barriers.known[buffer]));
      } else {
        Shifted<A> all = own[0];
#pragma unroll
        for (int j = 1; j < kParts; ++j) all.sum += own[j].sum, all.squares += own[j].squares;
        Moments moments[1] = {count > 0 ? all.About(static_cast<A>(pivot), V * count) : Moments{}};
        Reduce(moments, AddPairs{}, {0, 5}, static_cast<Moments*>(nullptr));
        hopper::WaitBarrier(SharedAddress(&barriers.sums_free), round & 1 ^ 1);
        if (thread % 32 == 0) scratch[thread / 32] = moments[0];
        hopper::Arrive(SharedAddress(&barriers.summed));
      }
      // A place's parity tells neighbouring uses apart, not those before: those skipped must be over.
      if (share.streamed > 0) hopper::WaitBarrier(SharedAddress(&barriers.known_free[buffer]), round >> 1 & 1);
    }
    return;
  }

  const int64_t start = share.Start<kColumns>(t, mine);
  const int stride = kColumns ? t.stride : kVisitors;
  for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
    const RingUnit u(t, unit, lead);
    const int buffer = round & 1;
    const Statistics<A>* statistics = known + buffer * t.slab_groups;
    A scale[kColumns ? V : 1], bias[kColumns ? V : 1];
    if constexpr (kColumns) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int channel = u.first_channel + across * V + j;
        scale[j] = o.scale[channel], bias[j] = o.bias[channel];
      }
    }
    hopper::WaitBarrier(SharedAddress(&barriers.known[buffer]), round >> 1 & 1);
    Affine<A> affine[kColumns ? V : 1];
    if constexpr (kColumns) {
#pragma unroll
      for (int j = 0; j < V; ++j) affine[j] = Affine<A>(statistics[group_of(j)], scale[j], bias[j]);
    }
    Vector* out = o.y + t.Base(unit) + start;
    turn.Skip(share.streamed, t.stages);
    const Affine<A>* affines = table + buffer * t.share_channels - lead;
    const auto apply_chunk = [&](auto split, int which) {
      const int n = min(chunk, share.count - which * chunk);
      hopper::WaitBarrier(SharedAddress(&barriers.full[turn.place]), turn.parity);
      const Vector* from = ring + turn.place * chunk + mine;
      // Two at a time, of which the registers hold what it takes.
#pragma unroll(decltype(split)::value ? 2 : D)
      for (int k = 0; k < D; ++k) {
        if (!visits || k * side + mine >= n) continue;
        int left = V;  // elements of the vector that are of its first channel
        A next_slope = 0, next_offset = 0;
        if constexpr (!kColumns) {
          int at;
          const int channel = t.plane.Div((static_cast<int>(share.begin) + which * chunk + k * side + mine) * V, &at);
          affine[0] = affines[channel];
          if constexpr (decltype(split)::value) left = t.plane.divisor - at;
          if (left < V) next_slope = affines[channel + 1].slope, next_offset = affines[channel + 1].offset;
        }
        A x[V];
        widen(from + k * side, x);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          Affine<A> of = affine[kColumns ? j : 0];
          if (j >= left) of.slope = next_slope, of.offset = next_offset;
          x[j] = of(x[j]);
        }
        f.Forward(x);
        Write<T, V>(out + int64_t{which * D + k} * stride, x);
      }
    };
    for (int i = 0; i < share.chunks; ++i) {
      if (!kColumns && t.split)
        apply_chunk(std::bool_constant<!kColumns>(), share.Again(i));
      else
        apply_chunk(std::false_type(), share.Again(i));
      Release(&barriers, turn.place);
      turn.Skip(1, t.stages);
    }
    if (t.team.Rank() == 0)
      for (int g = thread; g < t.slab_groups; g += kVisitors) o.statistics[u.first_group + g] = statistics[g];
    hopper::Arrive(SharedAddress(&barriers.known_free[buffer]));
  }
}

constexpr RingBytes kForwardBytes = {sizeof(Moments), 0, 2 * sizeof(Affine<float>),
                                     2 * (sizeof(Statistics<float>) + sizeof(float)), false};

std::optional<RingTiling> PlanForward(const Problem& p) { return PlanRing(p, 1, kForwardBytes); }

}  // namespace

int64_t RingForwardWorkspace(const Problem& p) {
  const auto t = PlanForward(p);
  return t ? ExchangeBytes<Moments>(t->team, t->SlabGroups()) : 0;
}

std::optional<cudaError_t> RingForward(const Problem& p, const void* x, const void* scale, const void* bias, void* y,
                                       void* statistics, void* workspace, cudaStream_t stream) {
  const auto t = PlanForward(p);
  if (!t || !IsVectorAligned(x, y) || !HasRings()) return std::nullopt;
  return VisitRing(p, [&](auto type, auto f) {
    using T = typename decltype(type)::type;
    constexpr int kLength = kVecLength<T>;
    using A = Accumulator<T>;
    using V = Vec<T, kLength>;
    RingOperands<T, kLength> o = {};
    o.x = static_cast<const V*>(x), o.y = static_cast<V*>(y);
    o.scale = static_cast<const A*>(scale), o.bias = static_cast<const A*>(bias);
    o.statistics = static_cast<Statistics<A>*>(statistics);
    o.letters = static_cast<Letter<Moments>*>(workspace);
    o.epsilon = static_cast<A>(p.epsilon);
    o.inverse = 1.0 / static_cast<double>(p.channels / p.groups * p.spatial);
    if (cudaError_t e = t->team.Reset(o.letters, t->SlabGroups(), stream)) return e;
    if (t->boxes)
      if (cudaError_t e = EncodeSlabs(p, *t, kDepth<1>, x, &o.map)) return e;
    auto* kernel =
        t->last ? RingForwardKernel<true, decltype(f), T, kLength> : RingForwardKernel<false, decltype(f), T, kLength>;
    return LaunchTeams(kernel, t->team, kRingThreads, t->shared, stream, *t, o, f);
  });
}

}  // namespace jaxdnn::group_norm
