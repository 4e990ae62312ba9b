// The two linear maps that differentiate group normalization. With p the
// pre-activation and xhat = (x - mean) * rstd,
//
//   pullback  dp = dy f'(p),  q = dp scale:       dx = rstd (q - mean(q) - xhat
//   mean(q xhat))
//             dbias = sum(dp),  dscale = sum(dp xhat)
//   tangent   ty = f'(p) (rstd scale (t - mean(t) - xhat mean(t xhat)) + xhat
//   tscale + tbias)
//
// where the means are those of a group. Both visit their two inputs twice, for
// two sums and then for the result. The sums are made channel by channel: the
// pullback weights them with scale, and keeps them for dscale and dbias.
//
// Bound by memory: two reads and one write. Slabs of both inputs are held as in
// the forward pass.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/columns.cuh"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/visit.cuh"

namespace jaxdnn::group_norm {

enum class Map { kPullback, kTangent };

// Two sums: of w and w xhat, where w is dp or t; while they are made, of w and w (x - mean).
template <class A>
using Sums = Pair<A>;

template <class A>
__device__ Sums<A> Times(const Sums<A>& sums, A factor) {
  return {sums.first * factor, sums.second * factor};
}

template <class T, int V>
struct MapOperands {
  using A = Accumulator<T>;
  const Vec<T, V>*in, *x;  // dy or t
  const A *scale, *bias;
  const A *tscale, *tbias;  // of the tangent
  const Statistics<A>* statistics;
  Vec<T, V>* out;            // dx or ty
  A *dscale, *dbias;         // of the pullback, those of each block: [examples, blocks of a team, channels]
  Letter<Sums<A>>* partial;  // [units, blocks of a team, groups of a slab]
  A count;                   // elements of a group
};

template <class A>
A GroupSize(const Problem& p) {
  return static_cast<A>(p.channels / p.groups) * static_cast<A>(p.spatial);
}

// What a group adds to its channels' pullbacks: the means are those of rstd w and w xhat.
template <class A>
struct Slant {
  A tilt, shift;

  Slant() = default;
  __device__ Slant(const Statistics<A>& s, const Sums<A>& means)
      : tilt(-s.rstd * s.rstd * means.second), shift(-means.first - s.rest * tilt) {}
};

// A channel's map: with u = (x - mean) * tilt + shift and p = (x - mean) *
// slope + offset,
//   dx = dy f'(p) slope + u,   ty = f'(p) (t slope + u).
template <Map kMap, class A>
struct Linear {
  A mean, slope, offset, tilt, shift;

  Linear() = default;
  __device__ Linear(const Statistics<A>& s, A scale, A bias)
      : mean(s.mean), slope(s.rstd * scale), offset(bias - s.rest * slope) {}

  // The means are those of w and w xhat over the group; the tangents are those
  // of the channel's parameters, or 0.
  __device__ void Finish(const Statistics<A>& s, const Sums<A>& means, A tscale, A tbias) {
    const A lead = kMap == Map::kPullback ? s.rstd : slope;
    tilt = s.rstd * (tscale - lead * means.second);
    shift = tbias - lead * means.first - s.rest * tilt;
  }
  __device__ void Take(const Slant<A>& slant) { tilt = slant.tilt, shift = slant.shift; }
  // The pre-activation.
  __device__ A Input(A x) const { return (x - mean) * slope + offset; }
  __device__ void AddTo(Sums<A>& sums, A w, A x) const {
    sums.first += w;
    sums.second += w * (x - mean);
  }
  __device__ A Apply(A w, A x) const { return w * slope + ((x - mean) * tilt + shift); }
};

// The first visit to a vector: of(j) is the map of its element j, and sums(j) what that is added to.
template <Map kMap, class F, class A, int V, class Of, class To>
__device__ void AddVector(F f, A (&in)[V], const A (&x)[V], Of&& of, To&& sums) {
  if constexpr (kMap == Map::kPullback) {
    A p[V];
#pragma unroll
    for (int j = 0; j < V; ++j) p[j] = of(j).Input(x[j]);
    f.TimesDerivative(in, p);
  }
#pragma unroll
  for (int j = 0; j < V; ++j) of(j).AddTo(sums(j), in[j], x[j]);
}

// The second visit, which leaves the result in `in`.
template <Map kMap, class F, class A, int V, class Of>
__device__ void MapVector(F f, A (&in)[V], const A (&x)[V], Of&& of) {
  A p[V];
#pragma unroll
  for (int j = 0; j < V; ++j) p[j] = of(j).Input(x[j]);
  if constexpr (kMap == Map::kPullback) f.TimesDerivative(in, p);
#pragma unroll
  for (int j = 0; j < V; ++j) in[j] = of(j).Apply(in[j], x[j]);
  if constexpr (kMap == Map::kTangent) f.TimesDerivative(in, p);
}

// From the sums of w and w (x - mean) to those of w and w xhat.
template <class A>
__device__ Sums<A> Normalized(const Sums<A>& sums, const Statistics<A>& s) {
  return {sums.first, s.rstd * (sums.second - s.rest * sums.first)};
}

// Where the pullback keeps what the block has of a slab's channels.
template <class A>
struct ChannelSums {
  A *dscale, *dbias;

  // `first`: of the example's channels, the slab's first.
  __device__ ChannelSums(const Team& team, A* dscale, A* dbias, int64_t example, int64_t channels, int64_t first) {
    const int64_t at = (example * team.size + team.Rank()) * channels + first;
    this->dscale = dscale + at;
    this->dbias = dbias + at;
  }
  __device__ void Put(int64_t c, const Sums<A>& sums) const { dscale[c] = sums.second, dbias[c] = sums.first; }
};

template <Map kMap, class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResident) MapColumnsKernel(ColumnTiling t, MapOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<2, T, V> tile = {t.schedule, tile_memory + threadIdx.x, {o.in, o.x}};
  auto* group_sums = reinterpret_cast<Sums<A>*>(tile_memory + 2 * t.schedule.Slots() * blockDim.x);
  auto* channel_sums = group_sums + t.slab_groups;
  auto* scratch = channel_sums + t.slab_channels;
  const A inverse = A(1) / o.count;

  t.team.Stagger();
  tile.Start(ColumnPlace<V>(t, t.team.First()));
  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const ColumnPlace<V> place(t, unit);
    const Statistics<A>* statistics = o.statistics + place.example * t.groups + place.first_group;
    Linear<kMap, A> map[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = place.Channel(t, j);
      const int64_t channel = place.parameters + c;
      map[j] = Linear<kMap, A>(statistics[t.group_channels.Div(c)], o.scale[channel], o.bias[channel]);
    }

    Sums<A> own[V] = {};
    tile.FirstVisit(place, [&](int m, const Run& run, int slot) {
#pragma unroll 2
      for (int k = 0; k < run.count; ++k) {
        A in[V], x[V];
        tile.Read(0, slot + k, in);
        tile.Read(1, slot + k, x);
        AddVector<kMap>(f, in, x, [&](int j) -> auto& { return map[j]; }, [&](int j) -> auto& { return own[j]; });
      }
    });
    SumChannels(t, place, own, AddPairs{}, scratch, channel_sums);

    const ChannelSums<A> kept(t.team, o.dscale, o.dbias, place.example, t.channels, place.first_channel);
    const auto of_channel = [&](int c) {
      const Sums<A> sums = Normalized(channel_sums[c], statistics[t.group_channels.Div(c)]);
      if constexpr (kMap == Map::kTangent) return sums;
      kept.Put(c, sums);
      return Times(sums, o.scale[place.parameters + c]);
    };
    Letter<Sums<A>>* partial = o.partial + unit * (t.team.size + 1) * t.slab_groups;
    ForEachGroup<Sums<A>>(t, AddPairs{}, of_channel, [&](int g, const Sums<A>& sums) {
      if (t.team.size > 1)
        partial[t.team.Rank() * t.slab_groups + g].Write(sums);
      else
        group_sums[g] = sums;
    });
    if (t.team.size > 1) {
      const auto merge = [&](const Letter<Sums<A>>* p, int span) {
        return AddBlocks(p, t.team.size, t.slab_groups, span);
      };
      t.team.Exchange(partial, t.slab_groups, merge, [&](int g, const Sums<A>& sums) { group_sums[g] = sums; });
    }
    __syncthreads();

#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = place.Channel(t, j), g = t.group_channels.Div(c);
      const int64_t channel = place.parameters + c;
      const A tscale = kMap == Map::kTangent ? o.tscale[channel] : A(0);
      const A tbias = kMap == Map::kTangent ? o.tbias[channel] : A(0);
      map[j].Finish(statistics[g], Times(group_sums[g], inverse), tscale, tbias);
    }
    const int64_t next = unit + t.team.Step();
    tile.SecondVisit(
        place, next < t.team.units, [&] { return ColumnPlace<V>(t, next); },
        [&](int m, const Run& run, int slot) {
#pragma unroll 2
          for (int k = 0; k < run.count; ++k) {
            A in[V], x[V];
            tile.Read(0, slot + k, in);
            tile.Read(1, slot + k, x);
            MapVector<kMap>(f, in, x, [&](int j) -> auto& { return map[j]; });
            Write<T, V>(o.out + run.base + k * run.step, in);
          }
        });
    __syncthreads();  // The next unit's sums go where these were.
  }
}

template <Map kMap, bool kRagged, class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResidentRows) MapRowsKernel(RowTiling t, MapOperands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<2, T, V, kRagged> tile = {t.schedule, tile_memory + threadIdx.x, {o.in, o.x}, t.aligned};
  auto* scratch = reinterpret_cast<Sums<A>*>(tile_memory + 2 * t.schedule.Slots() * blockDim.x);
  const A inverse = A(1) / o.count;

  const auto place_of = [&](int64_t unit) {
    return RowPlace<V, kRagged>(t, static_cast<int>(unit) * (blockDim.x >> t.span));
  };
  t.team.Stagger();
  tile.Start(place_of(t.team.First()));
  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const RowPlace<V, kRagged> place = place_of(unit);
    auto* piece_sums = scratch + kThreads + (threadIdx.x >> t.span) * t.share;  // of the slab's pieces in this block
    const bool exists = place.unit < t.slabs;
    const Statistics<A> statistics = exists ? o.statistics[place.unit] : Statistics<A>{};

    tile.FirstVisit(place, [&](int m, const Run& run, int slot) {
      const int piece = place.Piece(m);
      // Several sums, so that additions need not wait for each other.
      constexpr int kParts = V < 4 ? V : 4;
      Sums<A> sums[kParts] = {};
      if (run.count > 0) {
        const int64_t channel = place.parameters + place.Channel(piece);
        const Linear<kMap, A> map(statistics, o.scale[channel], o.bias[channel]);
#pragma unroll 2
        for (int k = 0; k < run.count; ++k) {
          A in[V], x[V];
          tile.Read(0, slot + k, in);
          tile.Read(1, slot + k, x);
          if constexpr (kRagged) {
            const Wanted<V> own = run.WantedOf<V>(k);
            if (!own.Whole())
#pragma unroll
              for (int j = 0; j < V; ++j) in[j] = own.Has(j) ? in[j] : A(0), x[j] = own.Has(j) ? x[j] : map.mean;
          }
          AddVector<kMap>(f, in, x, [&](int) { return map; }, [&](int j) -> auto& { return sums[j % kParts]; });
        }
      }
      Sums<A> all[1] = {sums[0]};
#pragma unroll
      for (int j = 1; j < kParts; ++j) all[0] = AddPairs{}(all[0], sums[j]);
      Reduce(all, AddPairs{}, {0, t.lanes}, static_cast<Sums<A>*>(nullptr));
      if (place.lane == 0 && piece < place.end) piece_sums[piece - place.first] = all[0];
    });
    __syncthreads();

    Sums<A> group[1] = {};
    const ChannelSums<A> kept(t.team, o.dscale, o.dbias, place.example, t.channels, place.channels);
    if (exists)
      for (int64_t c = place.in_slab; c < t.slab_channels; c += 1 << t.span) {
        Sums<A> sums = {};
        const int64_t begin = max(c * t.pieces, int64_t{place.first}),
                      end = min((c + 1) * t.pieces, int64_t{place.end});
        for (int64_t piece = begin; piece < end; ++piece) sums = AddPairs{}(sums, piece_sums[piece - place.first]);
        sums = Normalized(sums, statistics);
        if constexpr (kMap == Map::kPullback) {
          kept.Put(c, sums);
          sums = Times(sums, o.scale[place.parameters + c]);
        }
        group[0] = AddPairs{}(group[0], sums);
      }
    Reduce(group, AddPairs{}, {0, t.span}, scratch);
    if (t.team.size > 1) group[0] = ExchangeOne(t.team, o.partial + unit * (t.team.size + 1), group[0], scratch);

    const int64_t next = unit + t.team.Step();
    tile.SecondVisit(
        place, next < t.team.units, [&] { return place_of(next); },
        [&](int m, const Run& run, int slot) {
          if (run.count == 0) return;
          const int64_t channel = place.parameters + place.Channel(place.Piece(m));
          Linear<kMap, A> map(statistics, o.scale[channel], o.bias[channel]);
          const A tscale = kMap == Map::kTangent ? o.tscale[channel] : A(0);
          const A tbias = kMap == Map::kTangent ? o.tbias[channel] : A(0);
          map.Finish(statistics, Times(group[0], inverse), tscale, tbias);
#pragma unroll 2
          for (int k = 0; k < run.count; ++k) {
            A in[V], x[V];
            tile.Read(0, slot + k, in);
            tile.Read(1, slot + k, x);
            MapVector<kMap>(f, in, x, [&](int) { return map; });
            if constexpr (kRagged)
              WritePart<T, V>(o.out + run.base + k * run.step, in, run.WantedOf<V>(k), t.aligned);
            else
              Write<T, V>(o.out + run.base + k * run.step, in);
          }
        });
    __syncthreads();  // The next unit's pieces go where these were.
  }
}

// Launches a map of p's arrays as `t` spreads them; C is the Access.
template <Map kMap, class C, class Tiling>
cudaError_t LaunchMap(const Problem& p, const Tiling& t, const MapOperands<typename C::Type, C::V>& operands,
                      cudaStream_t stream) {
  using T = typename C::Type;
  return VisitActivation<T, (C::V > 1 && !C::kRagged && kMap == Map::kPullback)>(p.activation, [&](auto f) {
    using F = decltype(f);
    auto* kernel = [] {
      if constexpr (C::kColumns)
        return MapColumnsKernel<kMap, F, T, C::V>;
      else
        return MapRowsKernel<kMap, C::kRagged, F, T, C::V>;
    }();
    return LaunchTeams(kernel, t.team, t.threads, t.shared, stream, t, operands, f);
  });
}

}  // namespace jaxdnn::group_norm
