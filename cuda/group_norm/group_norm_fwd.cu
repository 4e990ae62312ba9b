// Group normalization: y = f((x - mean) * rstd * scale + bias), mean and deviation over the positions and channels of
// a group.
//
// Bound by memory: one read and one write. A block, or a team of blocks that meet in between, holds a slab of whole
// groups in shared memory: the first visit makes the moments, the second writes the result (tiling.cuh says which
// thread takes what, tile.cuh how the slab is held, moments.cuh how moments are merged).
#include "cuda/common/dtype.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/columns.cuh"
#include "cuda/group_norm/moments.cuh"
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
  Moments<A>* partial;  // [units, blocks of a team, groups of a slab]
  A epsilon;
};

// y = f((x - mean) * slope + offset), where slope = rstd * scale, and offset holds the rest of the mean.
template <class A>
struct Affine {
  A mean, slope, offset;

  Affine() = default;
  __device__ Affine(const Statistics<A>& s, A scale, A bias)
      : mean(s.mean), slope(s.rstd * scale), offset(bias - s.rest * slope) {}
  __device__ A operator()(A x) const { return (x - mean) * slope + offset; }
};

// The moments of a group from those of the team's blocks, by the lanes of a warp.
template <class A>
__device__ Moments<A> MergeBlocks(const Moments<A>* partial, int blocks, int stride) {
  Moments<A> m[1] = {{A(0), A(0), A(0)}};
  for (int i = threadIdx.x % 32; i < blocks; i += 32) {
    const Moments<A>* p = partial + int64_t{i} * stride;
    m[0] = Merge{}(m[0], Moments<A>{__ldcg(&p->n), __ldcg(&p->mean), __ldcg(&p->squares)});
  }
  Reduce(m, Merge{}, {0, 5}, static_cast<Moments<A>*>(nullptr));
  return m[0];
}

// The moments of a group of the slab in this block, from those of its channels.
template <int V, class A>
__device__ Moments<A> GroupMoments(const ColumnTiling& t, const ColumnPlace<V>& place, const Moments<A>* scratch,
                                   int group, int lanes, int lane) {
  const int size = t.group_channels.divisor;
  const auto for_each = [&](auto&& f) {
    if (group < t.slab_groups)
      for (int c = lane; c < size; c += 1 << lanes) ForEachElement(t, place, scratch, group * size + c, f);
  };
  A sum[2] = {};
  for_each([&](const Moments<A>& m) { sum[0] += m.n, sum[1] += m.n * m.mean; });
  Reduce(sum, Add{}, {0, lanes}, static_cast<A*>(nullptr));
  const A n = sum[0], mean = n > A(0) ? sum[1] / n : A(0);
  A squares[1] = {};
  for_each([&](const Moments<A>& m) { squares[0] += m.squares + m.n * ((m.mean - mean) * (m.mean - mean)); });
  Reduce(squares, Add{}, {0, lanes}, static_cast<A*>(nullptr));
  return {n, mean, squares[0]};
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResident) ColumnKernel(ColumnTiling t, Operands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<1, T, V> tile = {t.schedule, tile_memory + threadIdx.x, {o.x}};
  auto* statistics = reinterpret_cast<Statistics<A>*>(tile_memory + t.schedule.Slots() * blockDim.x);
  auto* scratch = reinterpret_cast<Moments<A>*>(statistics + t.slab_groups);

  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const ColumnPlace<V> place(t, unit);
    const T* pivots = reinterpret_cast<const T*>(o.x + place.example * t.example) + place.first_channel;
    const auto pivot = [&](int group) { return static_cast<A>(pivots[group * t.group_channels.divisor]); };

    Shifted<A> own[V];
#pragma unroll
    for (int j = 0; j < V; ++j) own[j].Start(A(0));
    tile.FirstVisit(place, [&](int m, int slot) {
      const int count = place.At(m).count;
      if (m == 0 && count > 0) {
        const Vec<T, V> v = *tile.Slot(0, slot);
#pragma unroll
        for (int j = 0; j < V; ++j) own[j].Start(static_cast<A>(v.v[j]));
      }
      for (int k = 0; k < count; ++k) {
        const Vec<T, V> v = *tile.Slot(0, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j) own[j].Add(static_cast<A>(v.v[j]));
      }
    });

    const A n = static_cast<A>(place.count), inverse = place.count > 0 ? A(1) / n : A(0);
    Moments<A> column[V];
    int channel[V], group[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      t.period.Div(place.element + j, &channel[j]);
      group[j] = t.group_channels.Div(channel[j]);
      column[j] = own[j].Finish(n, inverse, pivot(group[j]));
    }
    ReduceColumns(t, place, column, Merge{}, scratch);

    Moments<A>* partial = o.partial + (unit * t.team.size + t.team.Rank()) * t.slab_groups;
    ForEachGroup(t, [&](int g, int lanes, int lane) {
      const Moments<A> m = GroupMoments(t, place, scratch, g, lanes, lane);
      if (g >= t.slab_groups || lane != 0) return;
      if (t.team.size > 1)
        partial[g] = m;
      else
        statistics[g] = Statistics<A>(m, pivot(g), o.epsilon);
    });
    if (t.team.size > 1) {
      t.team.Meet(unit);
      const Moments<A>* first = o.partial + unit * t.team.size * t.slab_groups;
      for (int g = threadIdx.x / 32; g < t.slab_groups; g += blockDim.x / 32) {
        const Moments<A> m = MergeBlocks(first + g, t.team.size, t.slab_groups);
        if (threadIdx.x % 32 == 0) statistics[g] = Statistics<A>(m, pivot(g), o.epsilon);
      }
    }
    __syncthreads();

    if (t.team.Rank() == 0) {
      const A* from = reinterpret_cast<const A*>(statistics);
      A* to = o.statistics + (place.example * t.groups + place.first_group) * kStatistics;
      for (int i = threadIdx.x; i < t.slab_groups * kStatistics; i += blockDim.x) to[i] = from[i];
    }
    const int64_t parameters = place.example / t.examples * t.channels + place.first_channel;
    Affine<A> affine[V];
#pragma unroll
    for (int j = 0; j < V; ++j)
      affine[j] = Affine<A>(statistics[group[j]], o.scale[parameters + channel[j]], o.bias[parameters + channel[j]]);
    tile.SecondVisit(place, [&](int m, int slot) {
      const Run run = place.At(m);
      for (int k = 0; k < run.count; ++k) {
        Vec<T, V> v = *tile.Slot(0, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j) v.v[j] = static_cast<T>(f.Forward(affine[j](static_cast<A>(v.v[j]))));
        o.y[run.base + k * run.step] = v;
      }
    });
    __syncthreads();  // The next unit's sums and statistics go where these were.
  }
}

template <class F, class T, int V>
__global__ void __launch_bounds__(kThreads, kResident) RowKernel(RowTiling t, Operands<T, V> o, F f) {
  using A = Accumulator<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_memory = reinterpret_cast<Vec<T, V>*>(shared);
  const Tile<1, T, V> tile = {t.schedule, tile_memory + threadIdx.x, {o.x}};
  auto* scratch = reinterpret_cast<Moments<A>*>(tile_memory + t.schedule.Slots() * blockDim.x);

  for (int64_t unit = t.team.First(); unit < t.team.units; unit += t.team.Step()) {
    const RowPlace place(t, unit * (blockDim.x >> t.span));
    const A pivot = place.unit < t.slabs ? static_cast<A>(o.x[place.base].v[0]) : A(0);

    Shifted<A> own[V];
#pragma unroll
    for (int j = 0; j < V; ++j) own[j].Start(A(0));
    int64_t visited = 0;
    tile.FirstVisit(place, [&](int m, int slot) {
      const int count = place.At(m).count;
      if (visited == 0 && count > 0) {
        const Vec<T, V> v = *tile.Slot(0, slot);
#pragma unroll
        for (int j = 0; j < V; ++j) own[j].Start(static_cast<A>(v.v[j]));
      }
      visited += count;
      for (int k = 0; k < count; ++k) {
        const Vec<T, V> v = *tile.Slot(0, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j) own[j].Add(static_cast<A>(v.v[j]));
      }
    });

    const A n = static_cast<A>(visited), inverse = visited > 0 ? A(1) / n : A(0);
    Moments<A> moments[1] = {own[0].Finish(n, inverse, pivot)};
#pragma unroll
    for (int j = 1; j < V; ++j) moments[0] = Merge{}(moments[0], own[j].Finish(n, inverse, pivot));
    Reduce(moments, Merge{}, {0, t.span}, scratch);
    if (t.team.size > 1) {
      Moments<A>* partial = o.partial + unit * t.team.size;
      if (threadIdx.x == 0) partial[t.team.Rank()] = moments[0];
      t.team.Meet(unit);
      moments[0] = MergeBlocks(partial, t.team.size, 1);
    }
    const Statistics<A> statistics(moments[0], pivot, o.epsilon);
    if (t.team.Rank() == 0 && place.in_slab == 0 && place.unit < t.slabs)
      reinterpret_cast<Statistics<A>*>(o.statistics)[place.unit] = statistics;

    const int64_t example = place.unit / t.groups;
    const int64_t parameters = (example / t.examples * t.groups + place.unit - example * t.groups) * t.slab_channels;
    tile.SecondVisit(place, [&](int m, int slot) {
      const Run run = place.At(m);
      if (run.count == 0) return;
      const int64_t channel = parameters + place.Channel(place.Piece(m));
      const Affine<A> affine(statistics, o.scale[channel], o.bias[channel]);
      for (int k = 0; k < run.count; ++k) {
        Vec<T, V> v = *tile.Slot(0, slot + k);
#pragma unroll
        for (int j = 0; j < V; ++j) v.v[j] = static_cast<T>(f.Forward(affine(static_cast<A>(v.v[j]))));
        o.y[run.base + k * run.step] = v;
      }
    });
  }
}

}  // namespace

std::optional<int64_t> ForwardWorkspace(const Problem& p) {
  return MostBytes(p, 1, [](const auto& t, size_t word) { return ExchangeBytes(t.team, t.SlabGroups(), 3, word); });
}

cudaError_t Forward(const Problem& p, const void* x, const void* scale, const void* bias, void* y, void* statistics,
                    void* workspace, cudaStream_t stream) {
  return VisitTiling(p, 1, IsVectorAligned(x, y), [&](auto access, auto t, const Device& d) {
    using C = decltype(access);
    using T = typename C::Type;
    using A = Accumulator<T>;
    using V = Vec<T, C::V>;
    Operands<T, C::V> o = {static_cast<const V*>(x), static_cast<const A*>(scale), static_cast<const A*>(bias),
                           static_cast<V*>(y),       static_cast<A*>(statistics),  static_cast<Moments<A>*>(workspace),
                           static_cast<A>(p.epsilon)};
    if (cudaError_t e = t.team.Reset(o.partial + t.team.units * t.team.size * t.SlabGroups(), stream)) return e;
    return VisitActivation<T>(p.activation, [&](auto f) {
      using F = decltype(f);
      auto* kernel = [] {
        if constexpr (C::kColumns)
          return ColumnKernel<F, T, C::V>;
        else
          return RowKernel<F, T, C::V>;
      }();
      return LaunchTeams(kernel, t.Blocks(d), t.team.size, t.threads, t.shared, stream, t, o, f);
    });
  });
}

}  // namespace jaxdnn::group_norm
