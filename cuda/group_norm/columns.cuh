// Reductions over a block's share of channels-last data: down its columns, then over the channels of a group.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/tiling.cuh"

namespace jaxdnn::group_norm {

// scratch[e] = op over the block's threads of the value for element e of its columns; v[j] is the thread's for its
// element j. A fixed tree: each time, the lower half of the threads' rows takes in the upper.
template <int V, class Value, class Op>
__device__ void ReduceColumns(const ColumnTiling& t, const ColumnPlace<V>& place, Value (&v)[V], Op op,
                              Value* scratch) {
  const int plane = (t.parallel_rows + 1) / 2 * t.block_columns;
  for (int rows = t.parallel_rows; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (place.down >= half && place.down < rows) {
#pragma unroll
      for (int j = 0; j < V; ++j) scratch[j * plane + (place.down - half) * t.block_columns + place.across] = v[j];
    }
    __syncthreads();
    if (place.down + half < rows) {
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] = op(v[j], scratch[j * plane + place.down * t.block_columns + place.across]);
    }
    __syncthreads();
    rows = half;
  }
  if (place.down == 0) {
#pragma unroll
    for (int j = 0; j < V; ++j) scratch[place.across * V + j] = v[j];
  }
  __syncthreads();
}

// Calls f(value) for what ReduceColumns left of a channel of the slab: once, unless rows are several positions.
template <int V, class Value, class F>
__device__ void ForEachElement(const ColumnTiling& t, const ColumnPlace<V>& place, const Value* scratch, int channel,
                               F&& f) {
  const int begin = place.first_column * V, end = min(place.first_column + t.block_columns, t.columns) * V;
  const int period = t.period.divisor;
  for (int e = channel; e < end; e += period)
    if (e >= begin) f(scratch[e - begin]);
}

// Calls f(group, lanes, lane) with 1 << lanes neighbouring threads for each group of a slab, those of the last warps
// with groups that do not exist.
template <class F>
__device__ void ForEachGroup(const ColumnTiling& t, F&& f) {
  const int lane = threadIdx.x & ((1 << t.group_lanes) - 1);
  for (int first = 0; first < t.slab_groups; first += blockDim.x >> t.group_lanes)
    f(first + static_cast<int>(threadIdx.x >> t.group_lanes), t.group_lanes, lane);
}

}  // namespace jaxdnn::group_norm
