// The gradient of group normalization: with p the pre-activation, xhat = (x - mean) * rstd and dp = dy f'(p),
//
//   dbias = sum(dp)   dscale = sum(dp xhat)   dx = rstd (q - mean(q) - xhat mean(q xhat))   q = dp scale
//
// where the means are those of a group: they follow from the sums of each channel, weighted by its scale.
//
// Bound by memory: two reads and one write. Slabs of x and dy are held as in the forward pass; every block leaves its
// part of dscale and dbias in a row of the workspace, and the rows are added up in a fixed order.
#include "cuda/common/column_sum.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/columns.cuh"
#include "cuda/group_norm/visit.cuh"

namespace jaxdnn::group_norm {
namespace {

// Two sums: of q and q xhat, or while they are made of dp and dp (x - mean).
template <class A>
struct Sums {
  A plain, weighted;
};

struct AddSums {
  template <class A>
  __device__ Sums<A> operator()(const Sums<A>& a, const Sums<A>& b) const {
    return {a.plain + b.plain, a.weighted + b.weighted};
  }
};

template <class T, int V>
struct Operands {
  using A = Accumulator<T>;
  const Vec<T, V>*dy, *x;
  const A *scale, *bias;
  const Statistics<A>* statistics;
  Vec<T, V>* dx;
  A *dscale, *dbias;  // [examples, blocks of a team, channels]
  Sums<A>* partial;   // [units, blocks of a team, groups of a slab]
  A count;            // elements of a group
};

// dx = dp * slope + (x - mean) * tilt + shift, for dp = dy f'((x - mean) * slope + offset).
template <class A>
struct Gradient {
  A mean, slope, offset, tilt, shift;

  Gradient() = default;
  __device__ Gradient(const Statistics<A>& s, A scale, A bias)
      : mean(s.mean), slope(s.rstd * scale), offset(bias - s.rest * slope) {}

  // The sums over the group are those of q and q xhat.
  __device__ void Finish(const Statistics<A>& s, const Sums<A>& group, A inverse) {
    tilt = -s.rstd * s.rstd * (group.weighted * inverse);
    shift = -s.rstd * (group.plain * inverse) - s.rest * tilt;
  }
  template <class F>
  __device__ A OfPreactivation(F f, A dy, A x) const {
    return activation::ApplySlope(dy, f.Derivative((x - mean) * slope + offset));
  }
  template <class F>
  __device__ void AddTo(Sums<A>& sums, F f, A dy, A x) const {
    const A dp = OfPreactivation(f, dy, x);
    sums.plain += dp;
    sums.weighted += dp * (x - mean);
  }
  template <class F>
  __device__ A OfInput(F f, A dy, A x) const {
    return OfPreactivation(f, dy, x) * slope + ((x - mean) * tilt + shift);
  }
};

// From sums over dp and dp (x - mean) to those over dp and dp xhat.
template <class A>
__device__ Sums<A> Normalized(const Sums<A>& sums, const Statistics<A>& s) {
  return {sums.plain, s.rstd * (sums.weighted - s.rest * sums.plain)};
}

// The sums of a group from those of the team's blocks, by the lanes of a warp.
template <class A>
__device__ Sums<A> AddBlocks(const Sums<A>* partial, int blocks, int stride) {
  Sums<A> sums[1] = {};
  for (int i = threadIdx.x % 32; i < blocks; i += 32) {
    const Sums<A>* p = partial + int64_t{i} * stride;
    sums[0] = AddSums{}(sums[0], Sums<A>{__ldcg(&p->plain), __ldcg(&p->weighted)});
  }
  Reduce(sums, AddSums{}, {0, 5}, static_cast<Sums<A>*>(nullptr));
  return sums[0];
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResident) ColumnKernel(ColumnTiling t, Operands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<2, T, V> tile = {t.schedule, tile_memory + threadIdx.x, {o.dy, o.x}};
  auto* group_sums = reinterpret_cast<Sums<A>*>(tile_memory + 2 * t.schedule.Slots() * blockDim.x);
  auto* scratch = group_sums + t.slab_groups;
  const A inverse = A(1) / o.count;

  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const ColumnPlace<V> place(t, unit);
    const Statistics<A>* statistics = o.statistics + place.example * t.groups + place.first_group;
    const int64_t parameters = place.example / t.examples * t.channels + place.first_channel;
    int group[V];
    Gradient<A> gradient[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      int channel;
      t.period.Div(place.element + j, &channel);
      group[j] = t.group_channels.Div(channel);
      gradient[j] = Gradient<A>(statistics[group[j]], o.scale[parameters + channel], o.bias[parameters + channel]);
    }

    Sums<A> column[V] = {};
    tile.FirstVisit(place, [&](int m, int slot) {
      const int count = place.At(m).count;
      for (int k = 0; k < count; ++k) {
        const Vec<T, V> dy = *tile.Slot(0, slot + k), x = *tile.Slot(1, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j) gradient[j].AddTo(column[j], f, static_cast<A>(dy.v[j]), static_cast<A>(x.v[j]));
      }
    });
    ReduceColumns(t, place, column, AddSums{}, scratch);

    const int64_t row = (place.example * t.team.size + t.team.Rank()) * t.channels + place.first_channel;
    Sums<A>* partial = o.partial + (unit * t.team.size + t.team.Rank()) * t.slab_groups;
    ForEachGroup(t, [&](int g, int lanes, int lane) {
      Sums<A> q[1] = {};
      const int size = t.group_channels.divisor;
      if (g < t.slab_groups)
        for (int c = g * size + lane; c < (g + 1) * size; c += 1 << lanes) {
          Sums<A> sums = {};
          ForEachElement(t, place, scratch, c, [&](const Sums<A>& e) { sums = AddSums{}(sums, e); });
          sums = Normalized(sums, statistics[g]);
          o.dscale[row + c] = sums.weighted;
          o.dbias[row + c] = sums.plain;
          const A scale = o.scale[parameters + c];
          q[0] = AddSums{}(q[0], Sums<A>{scale * sums.plain, scale * sums.weighted});
        }
      Reduce(q, AddSums{}, {0, lanes}, static_cast<Sums<A>*>(nullptr));
      if (g < t.slab_groups && lane == 0) (t.team.size > 1 ? partial : group_sums)[g] = q[0];
    });
    if (t.team.size > 1) {
      t.team.Meet(unit);
      const Sums<A>* first = o.partial + unit * t.team.size * t.slab_groups;
      for (int g = threadIdx.x / 32; g < t.slab_groups; g += blockDim.x / 32) {
        const Sums<A> sums = AddBlocks(first + g, t.team.size, t.slab_groups);
        if (threadIdx.x % 32 == 0) group_sums[g] = sums;
      }
    }
    __syncthreads();

#pragma unroll
    for (int j = 0; j < V; ++j) gradient[j].Finish(statistics[group[j]], group_sums[group[j]], inverse);
    tile.SecondVisit(place, [&](int m, int slot) {
      const Run run = place.At(m);
      for (int k = 0; k < run.count; ++k) {
        Vec<T, V> dy = *tile.Slot(0, slot + k);
        const Vec<T, V> x = *tile.Slot(1, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j)
          dy.v[j] = static_cast<T>(gradient[j].OfInput(f, static_cast<A>(dy.v[j]), static_cast<A>(x.v[j])));
        o.dx[run.base + k * run.step] = dy;
      }
    });
    __syncthreads();  // The next unit's sums go where these were.
  }
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResident) RowKernel(RowTiling t, Operands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<2, T, V> tile = {t.schedule, tile_memory + threadIdx.x, {o.dy, o.x}};
  auto* scratch = reinterpret_cast<Sums<A>*>(tile_memory + 2 * t.schedule.Slots() * blockDim.x);
  const A inverse = A(1) / o.count;

  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const RowPlace place(t, unit * (blockDim.x >> t.span));
    auto* piece_sums = scratch + kThreads + (threadIdx.x >> t.span) * t.share;  // of the slab's pieces in this block
    const bool exists = place.unit < t.slabs;
    const Statistics<A> statistics = exists ? o.statistics[place.unit] : Statistics<A>{};
    const int64_t example = place.unit / t.groups;
    const int64_t first_channel = (place.unit - example * t.groups) * t.slab_channels;
    const int64_t parameters = example / t.examples * t.channels + first_channel;

    tile.FirstVisit(place, [&](int m, int slot) {
      const int count = place.At(m).count;
      const int64_t piece = place.Piece(m);
      Sums<A> sums[V] = {};
      if (count > 0) {
        const int64_t channel = parameters + place.Channel(piece);
        const Gradient<A> gradient(statistics, o.scale[channel], o.bias[channel]);
        for (int k = 0; k < count; ++k) {
          const Vec<T, V> dy = *tile.Slot(0, slot + k), x = *tile.Slot(1, slot + k);
#pragma unroll
          for (int j = 0; j < V; ++j) gradient.AddTo(sums[j], f, static_cast<A>(dy.v[j]), static_cast<A>(x.v[j]));
        }
      }
      Sums<A> all[1] = {sums[0]};
#pragma unroll
      for (int j = 1; j < V; ++j) all[0] = AddSums{}(all[0], sums[j]);
      Reduce(all, AddSums{}, {0, t.lanes}, static_cast<Sums<A>*>(nullptr));
      if (place.lane == 0 && piece < place.end) piece_sums[piece - place.first] = all[0];
    });
    __syncthreads();

    Sums<A> q[1] = {};
    const int64_t row = (example * t.team.size + t.team.Rank()) * t.channels + first_channel;
    if (exists)
      for (int64_t c = place.in_slab; c < t.slab_channels; c += 1 << t.span) {
        Sums<A> sums = {};
        const int64_t begin = max(c * t.pieces, place.first), end = min((c + 1) * t.pieces, place.end);
        for (int64_t piece = begin; piece < end; ++piece) sums = AddSums{}(sums, piece_sums[piece - place.first]);
        sums = Normalized(sums, statistics);
        o.dscale[row + c] = sums.weighted;
        o.dbias[row + c] = sums.plain;
        const A scale = o.scale[parameters + c];
        q[0] = AddSums{}(q[0], Sums<A>{scale * sums.plain, scale * sums.weighted});
      }
    Reduce(q, AddSums{}, {0, t.span}, scratch);
    if (t.team.size > 1) {
      Sums<A>* partial = o.partial + unit * t.team.size;
      if (threadIdx.x == 0) partial[t.team.Rank()] = q[0];
      t.team.Meet(unit);
      q[0] = AddBlocks(partial, t.team.size, 1);
    }

    tile.SecondVisit(place, [&](int m, int slot) {
      const Run run = place.At(m);
      if (run.count == 0) return;
      const int64_t channel = parameters + place.Channel(place.Piece(m));
      Gradient<A> gradient(statistics, o.scale[channel], o.bias[channel]);
      gradient.Finish(statistics, q[0], inverse);
      for (int k = 0; k < run.count; ++k) {
        Vec<T, V> dy = *tile.Slot(0, slot + k);
        const Vec<T, V> x = *tile.Slot(1, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j)
          dy.v[j] = static_cast<T>(gradient.OfInput(f, static_cast<A>(dy.v[j]), static_cast<A>(x.v[j])));
        o.dx[run.base + k * run.step] = dy;
      }
    });
    __syncthreads();  // The next unit's pieces go where these were.
  }
}

}  // namespace

std::optional<int64_t> BackwardWorkspace(const Problem& p) {
  return MostBytes(p, 2, [&](const auto& t, size_t word) {
    return 2 * p.batch * p.n * t.team.size * p.channels * word + ExchangeBytes(t.team, t.SlabGroups(), 2, word);
  });
}

cudaError_t Backward(const Problem& p, const void* dy, const void* x, const void* scale, const void* bias,
                     const void* statistics, void* dx, void* dscale, void* dbias, void* workspace,
                     cudaStream_t stream) {
  if (p.Empty()) {
    // Sums over nothing.
    const size_t bytes = p.batch * p.channels * (p.dtype == DType::kF64 ? sizeof(double) : sizeof(float));
    if (bytes == 0) return cudaSuccess;
    if (cudaError_t e = cudaMemsetAsync(dscale, 0, bytes, stream)) return e;
    return cudaMemsetAsync(dbias, 0, bytes, stream);
  }
  return VisitTiling(p, 2, IsVectorAligned(dy, x, dx), [&](auto access, auto t, const Device& d) {
    using C = decltype(access);
    using T = typename C::Type;
    using A = Accumulator<T>;
    using V = Vec<T, C::V>;
    const int64_t rows = p.n * t.team.size, parameters = p.batch * rows * p.channels;
    A* scales = static_cast<A*>(workspace);
    auto* partial = reinterpret_cast<Sums<A>*>(scales + 2 * parameters);
    const Operands<T, C::V> o = {static_cast<const V*>(dy),
                                 static_cast<const V*>(x),
                                 static_cast<const A*>(scale),
                                 static_cast<const A*>(bias),
                                 static_cast<const Statistics<A>*>(statistics),
                                 static_cast<V*>(dx),
                                 scales,
                                 scales + parameters,
                                 partial,
                                 static_cast<A>(p.channels / p.groups) * static_cast<A>(p.spatial)};
    if (cudaError_t e = t.team.Reset(partial + t.team.units * t.team.size * t.SlabGroups(), stream)) return e;
    const cudaError_t status = VisitActivation<T>(p.activation, [&](auto f) {
      using F = decltype(f);
      auto* kernel = [] {
        if constexpr (C::kColumns)
          return ColumnKernel<F, T, C::V>;
        else
          return RowKernel<F, T, C::V>;
      }();
      return LaunchTeams(kernel, t.Blocks(d), t.team.size, t.threads, t.shared, stream, t, o, f);
    });
    if (status != cudaSuccess) return status;
    if (cudaError_t e = SumRows(o.dscale, p.batch, rows, p.channels, static_cast<A*>(dscale), stream)) return e;
    return SumRows(o.dbias, p.batch, rows, p.channels, static_cast<A*>(dbias), stream);
  });
}

}  // namespace jaxdnn::group_norm
