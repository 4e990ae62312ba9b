// Sums over a block's share of channels-last data: for each channel, then for each group.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/moments.cuh"
#include "cuda/group_norm/tiling.cuh"

namespace jaxdnn::group_norm {

// sums[c] = the sum over the block's threads of the values for channel c of the slab; v[j] is the thread's for its
// element j. First the lower half of the threads' rows takes in the upper; what is left is summed by a few lanes for
// each channel, in a fixed order. Channels that the block does not have sum to nothing.
template <int V, class Value, class Op>
__device__ void SumChannels(const ColumnTiling& t, const ColumnPlace<V>& place, Value (&v)[V], Op op, Value* scratch,
                            Value* sums) {
  const int half = (t.parallel_rows + 1) / 2, plane = half * t.block_columns;
  if (place.down >= half && place.down < t.parallel_rows) {
#pragma unroll
    for (int j = 0; j < V; ++j) scratch[j * plane + (place.down - half) * t.block_columns + place.across] = v[j];
  }
  __syncthreads();
  if (place.down < half) {
    const bool paired = place.down + half < t.parallel_rows;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      Value* mine = scratch + j * plane + place.down * t.block_columns + place.across;
      *mine = paired ? op(v[j], *mine) : v[j];
    }
  }
  __syncthreads();

  const int lanes = 1 << t.channel_lanes, lane = threadIdx.x & (lanes - 1);
  const int begin = place.first_column * V, end = min(place.first_column + t.block_columns, t.columns) * V;
  const int period = t.period.divisor;
#pragma unroll 1
  for (int first = 0; first < t.slab_channels; first += blockDim.x >> t.channel_lanes) {
    const int channel = first + static_cast<int>(threadIdx.x >> t.channel_lanes);
    Value sum[1] = {};
    if (channel < t.slab_channels) {
      // More than once only where rows are several positions.
      for (int e = channel; e < end; e += period) {
        if (e < begin) continue;
        const Value* column = scratch + (e - begin) % V * plane + (e - begin) / V;
#pragma unroll 4
        for (int row = lane; row < half; row += lanes) sum[0] = op(sum[0], column[row * t.block_columns]);
      }
    }
    Reduce(sum, op, {0, t.channel_lanes}, static_cast<Value*>(nullptr));
    if (channel < t.slab_channels && lane == 0) sums[channel] = sum[0];
  }
  __syncthreads();
}

// Calls f(group, sum over the group's channels c of value(c)) by one thread for each group of the slab.
template <class Value, class Op, class Of, class F>
__device__ void ForEachGroup(const ColumnTiling& t, Op op, Of&& value, F&& f) {
  const int lanes = 1 << t.group_lanes, lane = threadIdx.x & (lanes - 1);
  const int size = t.group_channels.divisor;
#pragma unroll 1
  for (int first = 0; first < t.slab_groups; first += blockDim.x >> t.group_lanes) {
    const int group = first + static_cast<int>(threadIdx.x >> t.group_lanes);
    Value sum[1] = {};
    if (group < t.slab_groups) {
      for (int c = group * size + lane; c < (group + 1) * size; c += lanes) sum[0] = op(sum[0], value(c));
    }
    Reduce(sum, op, {0, t.group_lanes}, static_cast<Value*>(nullptr));
    if (group < t.slab_groups && lane == 0) f(group, sum[0]);
  }
}

}  // namespace jaxdnn::group_norm
