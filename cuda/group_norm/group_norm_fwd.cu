// Group normalization: y = f((x - mean) * rstd * scale + bias), mean and deviation over the positions and channels of
// a group.
//
// Bound by memory: one read and one write. A block, or a team of blocks that meet in between, holds a slab of whole
// groups in shared memory: the first visit makes the moments, the second writes the result (tiling.cuh says which
// thread takes what, tile.cuh how the slab is held, moments.cuh how moments are made).
#include "cuda/common/dtype.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/columns.cuh"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/ring.h"
#include "cuda/group_norm/small.h"
#include "cuda/group_norm/tiling.cuh"
#include "cuda/group_norm/visit.cuh"

namespace jaxdnn::group_norm {
namespace {

template <class T, int V>
struct Operands {
  using A = Accumulator<T>;
  const Vec<T, V>* x;
  const A *scale, *bias;
  Vec<T, V>* y;
  A* statistics;
  Letter<Moments>* partial;  // [units, blocks of a team, groups of a slab]
  A epsilon;
  double inverse;  // of the elements of a group
};

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResident) ColumnKernel(ColumnTiling t, Operands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<1, T, V> tile = {t.schedule, tile_memory + threadIdx.x, {o.x}};
  auto* sums = reinterpret_cast<Moments*>(tile_memory + t.schedule.Slots() * blockDim.x);
  auto* scratch = sums + t.slab_channels;
  auto* statistics = reinterpret_cast<Statistics<A>*>(scratch + (t.parallel_rows + 1) / 2 * t.block_columns * V);
  A* pivots = reinterpret_cast<A*>(statistics + t.slab_groups);

  t.team.Stagger();
  tile.Start(ColumnPlace<V>(t, t.team.First()));
  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const ColumnPlace<V> place(t, unit);
    const T* first_row = reinterpret_cast<const T*>(o.x + place.example * t.example) + place.first_channel;
    // Asked for here, stored where it has come.
    T pivot = {};
    if (threadIdx.x < t.slab_groups) pivot = first_row[threadIdx.x * t.group_channels.divisor];

    Shifted<A> own[V] = {};
    tile.FirstVisit(place, [&](int m, const Run& run, int slot) {
      if (m == 0 && run.count > 0) {
        A x[V];
        tile.Read(0, slot, x);
#pragma unroll
        for (int j = 0; j < V; ++j) own[j].first = x[j];
      }
#pragma unroll 2
      for (int k = 0; k < run.count; ++k) {
        A x[V];
        tile.Read(0, slot + k, x);
#pragma unroll
        for (int j = 0; j < V; ++j) own[j].Add(x[j]);
      }
    });
    if (threadIdx.x < t.slab_groups) pivots[threadIdx.x] = static_cast<A>(pivot);
    for (int g = threadIdx.x + blockDim.x; g < t.slab_groups; g += blockDim.x)
      pivots[g] = static_cast<A>(first_row[g * t.group_channels.divisor]);
    __syncthreads();

    Moments total[V];
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] = own[j].About(pivots[t.group_channels.Div(place.Channel(t, j))], place.count);
    SumChannels(t, place, total, AddPairs{}, scratch, sums);
    Letter<Moments>* partial = o.partial + unit * (t.team.size + 1) * t.slab_groups;
    const auto take = [&](int g, const Moments& m) {
      statistics[g] = Statistics<A>(m, o.inverse, pivots[g], o.epsilon);
    };
    ForEachGroup<Moments>(
        t, AddPairs{}, [&](int c) { return sums[c]; },
        [&](int g, const Moments& m) {
          if (t.team.size > 1)
            partial[t.team.Rank() * t.slab_groups + g].Write(m);
          else
            take(g, m);
        });
    A scale[V], bias[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int64_t parameter = place.parameters + place.Channel(t, j);
      scale[j] = o.scale[parameter], bias[j] = o.bias[parameter];
    }
    if (t.team.size > 1) {
      const auto merge = [&](const Letter<Moments>* p, int span) {
        return AddBlocks(p, t.team.size, t.slab_groups, span);
      };
      t.team.Exchange(partial, t.slab_groups, merge, take);
    }
    __syncthreads();

    if (t.team.Rank() == 0) {
      const A* from = reinterpret_cast<const A*>(statistics);
      A* to = o.statistics + (place.example * t.groups + place.first_group) * kStatistics;
      for (int i = threadIdx.x; i < t.slab_groups * kStatistics; i += blockDim.x) to[i] = from[i];
    }
    Affine<A> affine[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      affine[j] = Affine<A>(statistics[t.group_channels.Div(place.Channel(t, j))], scale[j], bias[j]);
    }
    const int64_t next = unit + t.team.Step();
    tile.SecondVisit(
        place, next < t.team.units, [&] { return ColumnPlace<V>(t, next); },
        [&](int m, const Run& run, int slot) {
#pragma unroll 2
          for (int k = 0; k < run.count; ++k) {
            A x[V];
            tile.Read(0, slot + k, x);
#pragma unroll
            for (int j = 0; j < V; ++j) x[j] = affine[j](x[j]);
            f.Forward(x);
            Write<T, V>(o.y + run.base + k * run.step, x);
          }
        });
    __syncthreads();  // The next unit's sums and statistics go where these were.
  }
}

template <bool kRagged, class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResidentRows) RowKernel(RowTiling t, Operands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<1, T, V, kRagged> tile = {t.schedule, tile_memory + threadIdx.x, {o.x}, t.aligned};
  auto* scratch = reinterpret_cast<Moments*>(tile_memory + t.schedule.Slots() * blockDim.x);

  const auto place_of = [&](int64_t unit) {
    return RowPlace<V, kRagged>(t, static_cast<int>(unit) * (blockDim.x >> t.span));
  };
  t.team.Stagger();
  tile.Start(place_of(t.team.First()));
  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const RowPlace<V, kRagged> place = place_of(unit);
    const bool exists = place.unit < t.slabs;
    const A pivot = exists ? static_cast<A>(reinterpret_cast<const T*>(o.x)[place.element]) : A(0);

    // Those of the first run, asked for here: of small arrays there are no others.
    const int64_t first_channel = place.parameters + (place.Piece(0) < place.end ? place.Channel(place.Piece(0)) : 0);
    const A first_scale = exists ? o.scale[first_channel] : A(0), first_bias = exists ? o.bias[first_channel] : A(0);

    // Several sums, so that additions need not wait for each other.
    constexpr int kParts = V < 4 ? V : 4;
    Shifted<A> part[kParts] = {};
    int count = 0;
    tile.FirstVisit(place, [&](int m, const Run& run, int slot) {
      if (count == 0 && run.count > 0) {
        const A first = static_cast<A>(tile.Slot(0, slot)->v[kRagged ? max(run.begin, 0) : 0]);
#pragma unroll
        for (int j = 0; j < kParts; ++j) part[j].first = first;
      }
      count += V * run.count;
#pragma unroll 4
      for (int k = 0; k < run.count; ++k) {
        A x[V];
        tile.Read(0, slot + k, x);
        if constexpr (kRagged) {
          const Wanted<V> own = run.WantedOf<V>(k);
          if (!own.Whole()) {
            count -= V - own.Count();
#pragma unroll
            for (int j = 0; j < V; ++j) x[j] = own.Has(j) ? x[j] : part[0].first;  // which adds nothing
          }
        }
#pragma unroll
        for (int j = 0; j < V; ++j) part[j % kParts].Add(x[j]);
      }
    });
    Shifted<A> own = part[0];
#pragma unroll
    for (int j = 1; j < kParts; ++j) own.sum += part[j].sum, own.squares += part[j].squares;

    Moments moments[1] = {count > 0 ? own.About(pivot, count) : Moments{}};
    Reduce(moments, AddPairs{}, {0, t.span}, scratch);
    if (t.team.size > 1) moments[0] = ExchangeOne(t.team, o.partial + unit * (t.team.size + 1), moments[0], scratch);
    const Statistics<A> statistics(moments[0], o.inverse, pivot, o.epsilon);
    if (exists && t.team.Rank() == 0 && place.in_slab == 0)
      reinterpret_cast<Statistics<A>*>(o.statistics)[place.unit] = statistics;

    const int64_t next = unit + t.team.Step();
    tile.SecondVisit(
        place, next < t.team.units, [&] { return place_of(next); },
        [&](int m, const Run& run, int slot) {
          if (run.count == 0) return;
          const int64_t channel = place.parameters + place.Channel(place.Piece(m));
          const Affine<A> affine(statistics, m == 0 ? first_scale : o.scale[channel],
                                 m == 0 ? first_bias : o.bias[channel]);
#pragma unroll 4
          for (int k = 0; k < run.count; ++k) {
            A x[V];
            tile.Read(0, slot + k, x);
#pragma unroll
            for (int j = 0; j < V; ++j) x[j] = affine(x[j]);
            f.Forward(x);
            if constexpr (kRagged)
              WritePart<T, V>(o.y + run.base + k * run.step, x, run.WantedOf<V>(k), t.aligned);
            else
              Write<T, V>(o.y + run.base + k * run.step, x);
          }
        });
  }
}

}  // namespace

std::optional<int64_t> ForwardWorkspace(const Problem& p) {
  const auto bytes =
      MostBytes<1>(p, [](const auto& t, auto) { return ExchangeBytes<Moments>(t.team, t.SlabGroups()); });
  return bytes ? std::optional(std::max(*bytes, RingForwardWorkspace(p))) : bytes;
}

cudaError_t Forward(const Problem& p, const void* x, const void* scale, const void* bias, void* y, void* statistics,
                    void* workspace, cudaStream_t stream) {
  if (const auto e = SmallForward(p, x, scale, bias, y, statistics, stream)) return *e;
  if (const auto e = RingForward(p, x, scale, bias, y, statistics, workspace, stream)) return *e;
  return VisitTiling<1>(p, IsVectorAligned(x, y), [&](auto access, auto t) {
    using C = decltype(access);
    using T = typename C::Type;
    using A = Accumulator<T>;
    using V = Vec<T, C::V>;
    Operands<T, C::V> o = {static_cast<const V*>(x),    static_cast<const A*>(scale),
                           static_cast<const A*>(bias), static_cast<V*>(y),
                           static_cast<A*>(statistics), static_cast<Letter<Moments>*>(workspace),
                           static_cast<A>(p.epsilon),   1.0 / static_cast<double>(p.channels / p.groups * p.spatial)};
    if (cudaError_t e = t.team.Reset(o.partial, t.SlabGroups(), stream)) return e;
    return VisitActivation<T, false>(p.activation, [&](auto f) {
      using F = decltype(f);
      auto* kernel = [] {
        if constexpr (C::kColumns)
          return ColumnKernel<F, T, C::V>;
        else
          return RowKernel<C::kRagged, F, T, C::V>;
      }();
      return LaunchTeams(kernel, t.team, t.threads, t.shared, stream, t, o, f);
    });
  });
}

}  // namespace jaxdnn::group_norm
