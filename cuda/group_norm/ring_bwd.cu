// The pullback through the ring (ring.cuh): maps.cuh has the formulas.
//
// A block adds up dscale and dbias over all of its units, and leaves one row of them.
#include "cuda/common/column_sum.cuh"
#include "cuda/group_norm/maps.cuh"
#include "cuda/group_norm/ring_plan.cuh"

namespace jaxdnn::group_norm {
namespace {

template <class T, int V>
struct RingMapOperands {
  using A = Accumulator<T>;
  const Vec<T, V>*in, *x;
  const A *scale, *bias;
  const Statistics<A>* statistics;
  Vec<T, V>* out;
  A *dscale, *dbias;  // rows of channels, of each block
  Letter<Sums<A>>* letters;
  A inverse;  // of the elements of a group
  CUtensorMap maps[2];
};

// The sums that channels first, a warp has of the share's channels.
template <class A>
struct WarpSums {
  Sums<A>* row;
  int channel = -1;
  int end = 0;  // of its elements, in the slab
  Sums<A> own = {};

  __device__ void Flush() {
    if (channel < 0) return;
    Sums<A> all[1] = {own};
    Reduce(all, AddPairs{}, {0, 5}, static_cast<Sums<A>*>(nullptr));
    if (threadIdx.x % 32 == 0) row[channel] = all[0];
    own = {};
  }
};

template <bool kColumns, class F, class T, int V>
__global__ void __launch_bounds__(kRingThreads, 1)
    RingBackwardKernel(const __grid_constant__ RingTiling t, const __grid_constant__ RingMapOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  using Vector = Vec<T, V>;
  using Pullback = Linear<Map::kPullback, A>;
  constexpr int D = kDepth<2>, kWarps = kVisitors / 32;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RingBarriers barriers;
  const int side = kColumns ? t.side : kVisitors, chunk = D * side;
  auto* ring = reinterpret_cast<Vector*>(shared);
  auto* scratch = reinterpret_cast<Sums<A>*>(ring + 2 * t.stages * chunk);
  auto* known = reinterpret_cast<Slant<A>*>(scratch + t.sums);                            // two units'
  auto* summed_statistics = reinterpret_cast<Statistics<A>*>(known + 2 * t.slab_groups);  // the same, of who sums
  auto* kept = reinterpret_cast<Sums<A>*>(summed_statistics + 2 * t.slab_groups);  // what the block has of each channel
  // Channels last: the channels' scales; channels first: the maps of the share's channels, twice.
  auto* scales = reinterpret_cast<A*>(kept + t.channels);
  auto* table = reinterpret_cast<Pullback*>(kept + t.channels);
  if constexpr (!hopper::kAvailable) return;

  if (threadIdx.x == 0) InitBarriers(&barriers, t.stages, kColumns && t.team.size == 1 ? kVisitors : 32);
  __syncthreads();

  const int64_t first = t.team.First(), step = t.team.Step();
  const Share share(t, chunk);
  const int lead = kColumns ? 0 : share.FirstChannel<V>(t), channels = kColumns ? 0 : share.Channels<V>(t);
  const Part part = PartOfThread();
  if (part == kCopy) {
    const Vector* in[2] = {o.in, o.x};
    if (threadIdx.x % 32 == 0) CopyShares<2>(t, in, o.maps, ring, &barriers);
    return;
  }

  const auto letters_of = [&](int64_t unit) { return o.letters + unit * (t.team.size + 1) * t.slab_groups; };
  const auto tell = [&](int buffer, int g, const Statistics<A>& statistics, const Sums<A>& sum) {
    known[buffer * t.slab_groups + g] = Slant<A>(statistics, Times(sum, o.inverse));
  };
  // Leaves the sums of the channels: by threads of number `thread` of `threads`, which made them.
  const auto leave = [&](int thread, int threads) {
    for (int c = thread; c < t.channels; c += threads) {
      o.dscale[int64_t{blockIdx.x} * t.channels + c] = kept[c].second;
      o.dbias[int64_t{blockIdx.x} * t.channels + c] = kept[c].first;
    }
  };
  if (part > kApply) {
    const bool alone = t.team.size == 1;
    if (part == kSend ? kColumns : alone || (part == kGather && t.direct)) return;
    const bool sends = part == kSend, gathers = part == kGather;
    const int lane = threadIdx.x % 32;
    if (sends)
      for (int c = lane; c < t.channels; c += 32) kept[c] = {};
    __syncwarp();
    int round = 0;
    for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
      const RingUnit u(t, unit, lead);
      const int buffer = round & 1;
      const Statistics<A> statistics = o.statistics[u.first_group];
      const bool takes = !(sends || gathers) || alone;
      if (takes) hopper::WaitBarrier(SharedAddress(&barriers.known_free[buffer]), (round >> 1 & 1) ^ 1);
      if (!kColumns && takes)
        for (int c = lane; c < channels; c += 32)
          table[buffer * t.share_channels + c] =
              Pullback(statistics, o.scale[u.first_channel + c], o.bias[u.first_channel + c]);
      if (sends) {
        hopper::WaitBarrier(SharedAddress(&barriers.summed), round & 1);
        Sums<A> all[1] = {};
        for (int c = lane; c < channels; c += 32) {
          Sums<A> sum = scratch[c];
          for (int w = 1; w < kWarps; ++w) sum = AddPairs{}(sum, scratch[w * t.share_channels + c]);
          sum = Normalized(sum, statistics);
          const int channel = u.first_channel + c;
          kept[channel] = AddPairs{}(kept[channel], sum);
          all[0] = AddPairs{}(all[0], Times(sum, o.scale[channel]));
        }
        Reduce(all, AddPairs{}, {0, 5}, static_cast<Sums<A>*>(nullptr));
        all[0].first *= statistics.rstd;
        if (lane == 0) {
          if (alone)
            tell(buffer, 0, statistics, all[0]);
          else
            letters_of(unit)[t.team.Rank()].Write(all[0]);
        }
        hopper::Arrive(SharedAddress(&barriers.sums_free));
        __syncwarp();  // The next unit's channels may be other lanes'.
      } else if (gathers) {
        Gather(t, letters_of(unit));
      } else {
        Take(
            t, letters_of(unit), [&](int g) { return o.statistics[u.first_group + g]; },
            [&](int g, const Sums<A>& sum, const Statistics<A>& s) { tell(buffer, g, s, sum); });
      }
      if (!takes) continue;
      __syncwarp();
      if constexpr (!kColumns) {
        for (int c = lane; c < channels; c += 32) table[buffer * t.share_channels + c].Take(known[buffer]);
      }
      hopper::Arrive(SharedAddress(&barriers.known[buffer]));
      __syncwarp();
    }
    if (sends) leave(lane, 32);
    return;
  }

  const bool applies = part == kApply;
  const int thread = threadIdx.x - (applies ? kVisitors : 0);
  const bool visits = thread < side;
  const int mine = min(thread, side - 1);  // Threads to spare read what another does, and leave it.
  const int across = kColumns ? thread % t.columns : 0;
  const auto map_of = [&](const RingUnit& u, int c) {
    return Pullback(o.statistics[u.first_group + (kColumns ? t.group_channels.Div(c) : 0)],
                    o.scale[u.first_channel + c], o.bias[u.first_channel + c]);
  };
  const auto widen = [&](const Vector* from, A(&wide)[V]) {
    Widen<T, V>(*reinterpret_cast<const Packed<T, V>*>(from), wide);
  };
  Turn turn;
  if (!applies) {
    if constexpr (kColumns)
      for (int c = thread; c < t.channels; c += kVisitors) kept[c] = {}, scales[c] = o.scale[c];
    const Slots slots = kColumns ? Slots::Of<V>(t, across) : Slots();
    int round = 0;
    for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
      const RingUnit u(t, unit, lead);
      Pullback map[kColumns ? V : 1];
      Sums<A> own[kColumns ? V : 1] = {};
      WarpSums<A> warp = {scratch + (thread / 32) * t.share_channels};
      if constexpr (kColumns) {
#pragma unroll
        for (int j = 0; j < V; ++j) map[j] = map_of(u, across * V + j);
        // What of them is read two units before was behind a barrier since.
        for (int g = thread; g < t.slab_groups; g += kVisitors)
          summed_statistics[(round & 1) * t.slab_groups + g] = o.statistics[u.first_group + g];
      } else {
        hopper::WaitBarrier(SharedAddress(&barriers.sums_free), round & 1 ^ 1);
        for (int c = thread % 32; c < channels; c += 32) warp.row[c] = {};
        __syncwarp();
      }
      const auto take_channel = [&](int channel) {
        warp.Flush();
        warp.channel = channel - lead, warp.end = (channel + 1) * static_cast<int>(t.plane.divisor);
        map[0] = map_of(u, warp.channel);
      };
      const auto add = [&](A(&in)[V], const A(&x)[V]) {
        AddVector<Map::kPullback>(
            f, in, x, [&](int j) -> auto& { return map[kColumns ? j : 0]; },
            [&](int j) -> auto& { return kColumns ? own[j] : warp.own; });
      };
      const auto sum_chunk = [&](auto split, int i) {
        constexpr bool kSplit = decltype(split)::value;
        const int n = min(chunk, share.count - i * chunk);
        hopper::WaitBarrier(SharedAddress(&barriers.full[turn.place]), turn.parity);
        const Vector* from = ring + 2 * turn.place * chunk;
#pragma unroll
        for (int k = 0; k < D; ++k) {
          // Channels first, the vectors of a warp are neighbours, so that they are of few channels, and this its first.
          const int first_mine = kColumns ? k * side + mine : (thread / 32 * D + k) * 32;
          if (first_mine >= n) continue;
          const int at = kColumns ? first_mine : first_mine + thread % 32;
          // Of the slab, the elements that the warp's vectors have.
          const int row = (static_cast<int>(share.begin) + i * chunk + first_mine) * V, row_end = row + 32 * V;
          if constexpr (!kColumns && !kSplit)
            if (row >= warp.end) take_channel(t.plane.Div(row));
          A in[V], x[V];
          widen(from + at, in);
          widen(from + chunk + at, x);
          if (!kSplit || row_end <= warp.end) {
            add(in, x);
            continue;
          }
          // They end one channel or more, or begin one.
          const int element = row + thread % 32 * V, plane = t.plane.divisor;
          for (int channel = t.plane.Div(row);; ++channel) {
            if (channel - lead != warp.channel) take_channel(channel);
            const Wanted<V> of_channel = {warp.end - plane - element, warp.end - element};
            A dy[V], xs[V];
#pragma unroll
            for (int j = 0; j < V; ++j) {
              const bool has = of_channel.Has(j);
              dy[j] = has ? in[j] : A(0), xs[j] = has ? x[j] : map[0].mean;  // which adds nothing
            }
            add(dy, xs);
            if (warp.end >= min(row_end, static_cast<int>(t.slab) * V)) break;
          }
        }
      };
      for (int i = 0; i < share.chunks; ++i) {
        if (!kColumns && t.split)
          sum_chunk(std::bool_constant<!kColumns>(), i);
        else
          sum_chunk(std::false_type(), i);
        if (i < share.streamed) Release(&barriers, turn.place);
        turn.Skip(1, t.stages);
      }
      turn.Skip(share.streamed, t.stages);

      if constexpr (kColumns) {
        const bool alone = t.team.size == 1;
        const int buffer = round & 1;
        if (alone) hopper::WaitBarrier(SharedAddress(&barriers.known_free[buffer]), (round >> 1 & 1) ^ 1);
        const Statistics<A>* statistics = summed_statistics + buffer * t.slab_groups;
        const auto of_slot = [&](int slot) {
          Sums<A> sum = {};
#pragma unroll
          for (int j = 0; j < V; ++j)
            if (slots[j] == slot) sum = AddPairs{}(sum, Times(own[j], map[j].slope));
          const int g = min(t.group_channels.Div(across * V) + slot, t.slab_groups - 1);
          return Sums<A>{sum.first, sum.second - statistics[g].rest * sum.first};
        };
        const auto of_channel = [&](int g, int c) {
          const Sums<A> sum = Normalized(ChannelSum<V>(t, scratch, c), statistics[g]);
          const int channel = u.first_channel + c;
          kept[channel] = AddPairs{}(kept[channel], sum);
          return Sums<A>{statistics[g].rstd * scales[channel] * sum.first, scales[channel] * sum.second};
        };
        const auto send = [&](int g, const Sums<A>& sum) {
          if (alone)
            tell(buffer, g, statistics[g], sum);
          else
            letters_of(unit)[t.team.Rank() * t.slab_groups + g].Write(sum);
        };
        if (t.early) {
          SumGroups<V, Sums<A>>(t, thread, scratch, of_slot, send);
          if (alone) hopper::Arrive(SharedAddress(&barriers.known[buffer]));
        }
        SumHalves(t, thread, own, scratch);
        if (t.early) {
          for (int c = thread; c < t.slab_channels; c += kVisitors) of_channel(t.group_channels.Div(c), c);
        } else {
          ForEachGroup<Sums<A>>(t, thread, of_channel, send);
          if (alone) hopper::Arrive(SharedAddress(&barriers.known[buffer]));
        }
      } else {
        warp.Flush();
        hopper::Arrive(SharedAddress(&barriers.summed));
      }
      // A place's parity tells neighbouring uses apart, not those before: those skipped must be over.
      if (share.streamed > 0) hopper::WaitBarrier(SharedAddress(&barriers.known_free[round & 1]), round >> 1 & 1);
    }
    if constexpr (kColumns) {
      SyncSumming();
      leave(thread, kVisitors);
    }
    return;
  }

  const int64_t start = share.Start<kColumns>(t, mine);
  const int stride = kColumns ? t.stride : kVisitors;
  int round = 0;
  for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
    const RingUnit u(t, unit);
    const int buffer = round & 1;
    Pullback map[kColumns ? V : 1], next;
    if constexpr (kColumns) {
#pragma unroll
      for (int j = 0; j < V; ++j) map[j] = map_of(u, across * V + j);
    }
    hopper::WaitBarrier(SharedAddress(&barriers.known[buffer]), round >> 1 & 1);
    if constexpr (kColumns) {
#pragma unroll
      for (int j = 0; j < V; ++j) map[j].Take(known[buffer * t.slab_groups + t.group_channels.Div(across * V + j)]);
    }
    Vector* out = o.out + t.Base(unit) + start;
    turn.Skip(share.streamed, t.stages);
    const Pullback* maps = table + buffer * t.share_channels - lead;
    const auto apply_chunk = [&](auto split, int which) {
      const int n = min(chunk, share.count - which * chunk);
      hopper::WaitBarrier(SharedAddress(&barriers.full[turn.place]), turn.parity);
      const Vector* from = ring + 2 * turn.place * chunk + mine;
#pragma unroll
      for (int k = 0; k < D; ++k) {
        if (!visits || k * side + mine >= n) continue;
        int left = V;  // elements of the vector that are of its first channel
        if constexpr (!kColumns) {
          int at;
          const int channel = t.plane.Div((static_cast<int>(share.begin) + which * chunk + k * side + mine) * V, &at);
          map[0] = maps[channel];
          if constexpr (decltype(split)::value) left = t.plane.divisor - at;
          if (left < V) next = maps[channel + 1];
        }
        A in[V], x[V];
        widen(from + k * side, in);
        widen(from + chunk + k * side, x);
        if (left >= V)
          MapVector<Map::kPullback>(f, in, x, [&](int j) -> auto& { return map[kColumns ? j : 0]; });
        else
          MapVector<Map::kPullback>(f, in, x, [&](int j) { return j < left ? map[0] : next; });
        Write<T, V>(out + int64_t{which * D + k} * stride, in);
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
    hopper::Arrive(SharedAddress(&barriers.known_free[buffer]));
  }
}

constexpr RingBytes kBackwardBytes = {sizeof(Sums<float>), sizeof(Sums<float>) + sizeof(float),
                                      2 * sizeof(Linear<Map::kPullback, float>),
                                      2 * (sizeof(Slant<float>) + sizeof(Statistics<float>)), true};

}  // namespace

int64_t RingBackwardWorkspace(const Problem& p) {
  const auto t = PlanRing(p, 2, kBackwardBytes);
  if (!t) return 0;
  return ExchangeBytes<Sums<float>>(t->team, t->SlabGroups()) +
         2 * t->Blocks() * p.channels * static_cast<int64_t>(sizeof(float));
}

std::optional<cudaError_t> RingBackward(const Problem& p, const void* dy, const void* x, const void* scale,
                                        const void* bias, const void* statistics, void* dx, void* dscale, void* dbias,
                                        void* workspace, cudaStream_t stream) {
  const auto t = PlanRing(p, 2, kBackwardBytes);
  if (!t || !IsVectorAligned(dy, x, dx) || !HasRings()) return std::nullopt;
  return VisitRing(p, [&](auto type, auto f) {
    using T = typename decltype(type)::type;
    constexpr int kLength = kVecLength<T>;
    using A = Accumulator<T>;
    using V = Vec<T, kLength>;
    const int64_t rows = t->Blocks();
    RingMapOperands<T, kLength> o = {};
    o.in = static_cast<const V*>(dy), o.x = static_cast<const V*>(x), o.out = static_cast<V*>(dx);
    o.scale = static_cast<const A*>(scale), o.bias = static_cast<const A*>(bias);
    o.statistics = static_cast<const Statistics<A>*>(statistics);
    o.letters = static_cast<Letter<Sums<A>>*>(workspace);
    o.dscale = reinterpret_cast<A*>(o.letters + (t->team.size == 1 ? 0 : t->team.ExchangedRows() * t->SlabGroups()));
    o.dbias = o.dscale + rows * p.channels;
    o.inverse = A(1) / GroupSize<A>(p);
    if (cudaError_t e = t->team.Reset(o.letters, t->SlabGroups(), stream)) return e;
    if (t->boxes) {
      if (cudaError_t e = EncodeSlabs(p, *t, kDepth<2>, dy, &o.maps[0])) return e;
      if (cudaError_t e = EncodeSlabs(p, *t, kDepth<2>, x, &o.maps[1])) return e;
    }
    auto* kernel = t->last ? RingBackwardKernel<true, decltype(f), T, kLength>
                           : RingBackwardKernel<false, decltype(f), T, kLength>;
    if (cudaError_t e = LaunchTeams(kernel, t->team, kRingThreads, t->shared, stream, *t, o, f)) return e;
    return SumRows(o.dscale, 1, rows, p.channels, static_cast<A*>(dscale), static_cast<A*>(dbias), stream);
  });
}

}  // namespace jaxdnn::group_norm
