// A tile that the blocks of a cluster compute together, each a share of the steps: where there are far fewer tiles than
// multiprocessors. Such a block has one tile. It leaves its sums where the ring's stages were, and finishes some of the
// tile's rows: it adds what all blocks have of them, in the blocks' order.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma_held.cuh"

namespace jaxdnn::conv {

// The steps of its cluster's tile that a block of `team` takes.
struct Share {
  int first, end;

  __device__ Share(int steps, const FastDiv& team) : Share(steps, team, blockIdx.x) {}
  __device__ Share(int steps, const FastDiv& team, int block) : first(0), end(steps) {
    if (team.divisor == 1) return;
    int rank;
    team.Div(block, &rank);
    first = team.Div(steps * rank);
    end = team.Div(steps * (rank + 1));
  }
  __device__ int Steps() const { return end - first; }
};

// Where four columns of a row are in the shared memory at `sums`.
template <class T>
__device__ uint32_t SumPlace(uint32_t sums, int row, int chunk) {
  return sums + row * T::kColumns * 4 + ((chunk ^ (row % 4 * 2 + row / 4 % 2)) << 4);
}

// Leaves a warpgroup's sums there, when the stages are no longer needed.
template <class T>
__device__ void LeaveSums(uint32_t at, const typename T::Sums& sums) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < T::kBlocks; ++m)
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        hopper::StorePair(
            SumPlace<T>(at, m * 64 + 16 * warp + lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8,
            sums[m][4 * j + 2 * half], sums[m][4 * j + 2 * half + 1]);
}
template <class T>
__device__ void LeaveHeldSums(uint32_t at, const typename Held<T>::Sums& sums) {
  using H = Held<T>;
#pragma unroll
  for (int i = 0; i < T::kRows / 4; ++i) {
    const auto v = H::Get(sums, i);
    const uint32_t to = SumPlace<T>(at, H::Row(i), H::Column() / 4) + H::Column() % 4 * 4;
#pragma unroll
    for (int k = 0; k < H::kVector; k += 2) hopper::StorePair(to + k * 4, v.v[k], v.v[k + 1]);
  }
}

// v[b] = the sums that all kSize blocks have of chunk `first` + b * kWarpgroup, in row-major order. So many loads of a
// thread are on their way at once.
constexpr int kLoads = 8;
template <int kSize, class T>
__device__ void AddSums(uint32_t sums, int first, Vec<float, 4> (&v)[kLoads / 2]) {
#pragma unroll
  for (int b = 0; b < kLoads / kSize; ++b) {
    const int at = first + b * kWarpgroup;
    float4 part[kSize];
#pragma unroll
    for (int rank = 0; rank < kSize; ++rank)
      part[rank] = LoadRemote(RemoteAddress(SumPlace<T>(sums, at / (T::kColumns / 4), at % (T::kColumns / 4)), rank));
    v[b] = {};
#pragma unroll
    for (const float4& each : part)
      v[b] = {v[b].v[0] + each.x, v[b].v[1] + each.y, v[b].v[2] + each.z, v[b].v[3] + each.w};
  }
}

// Calls finish(row, column, sums) with four columns of the rows that are this block's, by the warpgroup of every block
// that has left its sums.
template <class T, class F>
__device__ void FinishShare(uint32_t sums, int team, const F& finish) {
  constexpr int kChunks = T::kColumns / 4;
  const int each = kLoads / team, all = T::kRows * kChunks / team, begin = blockIdx.x % team * all;
  ClusterArrive();
  ClusterWait();
#pragma unroll 1
  for (int i = threadIdx.x % kWarpgroup; i < all; i += each * kWarpgroup) {
    Vec<float, 4> v[kLoads / 2];
    if (team == 2)
      AddSums<2, T>(sums, begin + i, v);
    else if (team == 4)
      AddSums<4, T>(sums, begin + i, v);
    else
      AddSums<8, T>(sums, begin + i, v);
#pragma unroll 1
    for (int b = 0; b < each; ++b) {
      const int at = begin + i + b * kWarpgroup;
      finish(at / kChunks, at % kChunks * 4, v[0].v);
      Rotate<1>(v);
    }
  }
  // Nobody leaves while others read its sums.
  __syncwarp();
  ClusterArriveRelaxed();
  ClusterWait();
}

}  // namespace jaxdnn::conv
