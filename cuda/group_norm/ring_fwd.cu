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
};

// Channels first; a slab is one group.
template <class F, class T, int V>
__global__ void __launch_bounds__(kRingThreads, 1)
    RingForwardKernel(const __grid_constant__ RingTiling t, const __grid_constant__ RingOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  using Vector = Vec<T, V>;
  constexpr int D = kDepth<1>, kWarps = kVisitors / 32, kChunk = D * kVisitors;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RingBarriers barriers;
  auto* ring = reinterpret_cast<Vector*>(shared);
  auto* scratch = reinterpret_cast<Moments*>(ring + t.stages * kChunk);  // of each warp
  auto* known = reinterpret_cast<Statistics<A>*>(scratch + kWarps);      // two units'
  auto* table = reinterpret_cast<Affine<A>*>(known + 2);                 // their channels'
  if constexpr (!hopper::kAvailable) return;

  if (threadIdx.x == 0) InitBarriers(&barriers, t.stages, 32);
  __syncthreads();

  const int64_t first = t.team.First(), step = t.team.Step();
  const bool alone = t.team.size == 1;
  const Share share(t, kChunk);
  const Part part = PartOfThread();
  if (part == kCopy) {
    const Vector* in[1] = {o.x};
    if (threadIdx.x % 32 == 0) CopyShares<1>(t, in, nullptr, ring, &barriers);
    return;
  }

  const auto letters_of = [&](int64_t unit) { return o.letters + unit * (t.team.size + 1); };
  if (part == kGather || (part == kTake && alone)) return;
  if (part == kSend || part == kTake) {
    const int lane = threadIdx.x % 32;
    int round = 0;
    for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
      const RingUnit u(t, unit);
      const int buffer = round & 1;
      const T pivot = o.x[unit * t.slab].v[0];
      const auto tell = [&](int, const Moments& m) {
        known[buffer] = Statistics<A>(m, o.inverse, static_cast<A>(pivot), o.epsilon);
      };
      const bool takes = part == kTake || alone;
      if (takes) hopper::WaitBarrier(SharedAddress(&barriers.known_free[buffer]), (round >> 1 & 1) ^ 1);
      if (part == kSend) {
        hopper::WaitBarrier(SharedAddress(&barriers.summed), round & 1);
        Moments sum[1] = {scratch[lane % kWarps]};
        Reduce(sum, AddPairs{}, {0, 3}, static_cast<Moments*>(nullptr));
        if (lane == 0) {
          if (alone)
            tell(0, sum[0]);
          else
            letters_of(unit)[t.team.Rank()].Write(sum[0]);
        }
        hopper::Arrive(SharedAddress(&barriers.sums_free));
      } else {
        Take(t, letters_of(unit), tell);
      }
      if (!takes) continue;
      __syncwarp();
      for (int c = lane; c < t.slab_channels; c += 32)
        table[buffer * t.slab_channels + c] =
            Affine<A>(known[buffer], o.scale[u.first_channel + c], o.bias[u.first_channel + c]);
      hopper::Arrive(SharedAddress(&barriers.known[buffer]));
      __syncwarp();
    }
    return;
  }

  const int thread = threadIdx.x % kVisitors;
  Turn turn;
  int round = 0;
  if (part == kSum) {
    for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
      constexpr int kParts = V < 4 ? V : 4;
      Shifted<A> own[kParts] = {};
      const T pivot = o.x[unit * t.slab].v[0];  // Asked for here, needed where the sums are made.
      int count = 0;
      for (int i = 0; i < share.chunks; ++i) {
        const int n = min(kChunk, share.count - i * kChunk);
        hopper::WaitBarrier(SharedAddress(&barriers.full[turn.place]), turn.parity);
        const Vector* from = ring + turn.place * kChunk + thread;
        if (i == 0 && thread < n) {
#pragma unroll
          for (int j = 0; j < kParts; ++j) own[j].first = static_cast<A>(from->v[0]);
        }
#pragma unroll
        for (int k = 0; k < D; ++k) {
          if (k * kVisitors + thread >= n) continue;
          A x[V];
          Widen<T, V>(*reinterpret_cast<const Packed<T, V>*>(from + k * kVisitors), x);
#pragma unroll
          for (int j = 0; j < V; ++j) own[j % kParts].Add(x[j]);
          ++count;
        }
        if (i < share.streamed) Release(&barriers, turn.place);
        turn.Skip(1, t.stages);
      }
      turn.Skip(share.streamed, t.stages);

      Shifted<A> all = own[0];
#pragma unroll
      for (int j = 1; j < kParts; ++j) all.sum += own[j].sum, all.squares += own[j].squares;
      Moments moments[1] = {count > 0 ? all.About(static_cast<A>(pivot), V * count) : Moments{}};
      Reduce(moments, AddPairs{}, {0, 5}, static_cast<Moments*>(nullptr));
      hopper::WaitBarrier(SharedAddress(&barriers.sums_free), round & 1 ^ 1);
      if (thread % 32 == 0) scratch[thread / 32] = moments[0];
      hopper::Arrive(SharedAddress(&barriers.summed));
      // A place's parity tells neighbouring uses apart, not those before: those skipped must be over.
      if (share.streamed > 0) hopper::WaitBarrier(SharedAddress(&barriers.known_free[round & 1]), round >> 1 & 1);
    }
    return;
  }

  for (int64_t unit = first; unit < t.team.units; unit += step, ++round) {
    const int buffer = round & 1;
    hopper::WaitBarrier(SharedAddress(&barriers.known[buffer]), round >> 1 & 1);
    turn.Skip(share.streamed, t.stages);
    for (int i = 0; i < share.chunks; ++i) {
      const int which = share.Again(i);
      const int n = min(kChunk, share.count - which * kChunk);
      const int64_t at = share.begin + which * kChunk + thread;
      hopper::WaitBarrier(SharedAddress(&barriers.full[turn.place]), turn.parity);
      const Vector* from = ring + turn.place * kChunk + thread;
#pragma unroll
      for (int k = 0; k < D; ++k) {
        if (k * kVisitors + thread >= n) continue;
        const Affine<A> affine = table[buffer * t.slab_channels + t.row.Div(static_cast<int>(at) + k * kVisitors)];
        A x[V];
        Widen<T, V>(*reinterpret_cast<const Packed<T, V>*>(from + k * kVisitors), x);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = affine(x[j]);
        f.Forward(x);
        Write<T, V>(o.y + unit * t.slab + at + k * kVisitors, x);
      }
      Release(&barriers, turn.place);
      turn.Skip(1, t.stages);
    }
    if (t.team.Rank() == 0 && thread == 0) o.statistics[unit] = known[buffer];
    hopper::Arrive(SharedAddress(&barriers.known_free[buffer]));
  }
}

constexpr RingBytes kForwardBytes = {sizeof(Moments), 0, 2 * sizeof(Affine<float>), 2 * sizeof(Statistics<float>),
                                     false};

// Channels last, where blocks exchange many sums, rings are no faster than blocks that hold their shares (tile.cuh).
std::optional<RingTiling> PlanForward(const Problem& p) {
  return p.channels_last ? std::nullopt : PlanRing(p, 1, kForwardBytes);
}

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
    return LaunchTeams(RingForwardKernel<decltype(f), T, kLength>, t->team, kRingThreads, t->shared, stream, *t, o, f);
  });
}

}  // namespace jaxdnn::group_norm
