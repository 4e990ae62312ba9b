// Tiles that the blocks of a cluster compute together, each a share of the reduction: where there are fewer tiles than
// multiprocessors, of many steps. A part of a tile's sums is 16 of every thread's. Each block finishes as many parts:
// the others write theirs into its shared memory, behind the ring's stages, and it adds them in the blocks' order.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

// A block's share of the steps of its cluster's tiles.
struct Share {
  int size, rank;

  __device__ explicit Share(int size) : size(size), rank(size == 1 ? 0 : blockIdx.x % size) {}
  __device__ int First(int steps) const { return size == 1 ? 0 : int(int64_t{steps} * rank / size); }
  __device__ int Last(int steps) const { return size == 1 ? steps : int(int64_t{steps} * (rank + 1) / size); }
};

// Stages that are left to the ring of one of so many blocks.
template <class T>
__device__ int TeamStages(int size) {
  constexpr int kMore = T::kRows * T::kColumns * 4 - T::kStoreBytes;
  return size == 1 || kMore <= 0 ? T::kStages : T::kStages - (kMore + T::kStageBytes - 1) / T::kStageBytes;
}

// All threads of the block, before the ring's barriers are published; the others' memory is not written before they do.
template <class T>
__device__ void InitTeams(const Ring<T>& ring, int size) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kConsumers; ++i) {
    hopper::InitBarrier(ring.Sent(i), max(1, (size - 1) * kWarpgroup / 32));
    asm volatile("st.shared.u32 [%0], 0;" ::"r"(ring.Taken(i)) : "memory");
  }
}

// Of threads with so many sums. One is for both warpgroups, which take tiles in turn, or each has its own.
template <class T, int kSums>
class Team {
 public:
  static constexpr int kPart = 16, kParts = kSums / kPart;
  // Or there are too few registers, or stages.
  static constexpr bool kMayShare = T::kRows <= 128 && T::kColumns <= 128;

  __device__ Team(const Ring<T>& ring, const Share& share, int number = 0)
      : ring_(ring), share_(share), number_(number) {}

  // Calls finish(number, part) for the parts that this block finishes, by the threads of the warpgroup whose tile it
  // is; `last` is whether the cluster has no more of them. Parts are cut from the arrays of sums one after the other,
  // or take as much of each where they are spread.
  template <bool kSpread, int kArrays, int kN, class F>
  __device__ void Finish(float (&sums)[kArrays][kN], bool last, const F& finish) {
    if constexpr (kMayShare)
      if (share_.size > 1) Exchange<kSpread>(sums, last);
#pragma unroll 1
    for (int i = 0; i < Parts(); ++i) {
      float part[kPart];
#pragma unroll
      for (int k = 0; k < kPart; ++k) part[k] = Sum<kSpread>(sums, k);
      finish(share_.rank * Parts() + i, part);
      RotatePart<kSpread>(sums);
    }
  }
  // On to the block's next tile.
  __device__ void Next() { ++round_; }

 private:
  __device__ int Parts() const { return kParts / share_.size; }  // that this block finishes
  // Of the thread's first four sums of a part.
  __device__ uint32_t Place(int part) const {
    return ring_.data + ring_.stages * T::kStageBytes + number_ * kSums * kWarpgroup * 4 +
           (part * kPart / 4 * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }

  // Every warp counts in every block that it has taken what was sent. Warpgroups may be two tiles apart: of a barrier's
  // phases they could not tell which one has ended.
  __device__ void ShowTaken() const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    FenceCluster();
#pragma unroll 1
    for (int block = 0; block < share_.size; ++block) CountRemote(RemoteAddress(ring_.Taken(number_), block));
  }
  __device__ void WaitUntilTaken() const {
    if (threadIdx.x % 32 == 0)
      while (static_cast<int>(LoadCount(ring_.Taken(number_)) - round_ * share_.size * (kWarpgroup / 32)) < 0) {
      }
    __syncwarp();
  }

  // Of the parts in turn.
  template <bool kSpread, int kArrays, int kN>
  static __device__ float& Sum(float (&sums)[kArrays][kN], int i) {
    constexpr int kShare = kPart / kArrays;
    return kSpread ? sums[i % kPart / kShare][i / kPart * kShare + i % kShare] : sums[i / kN][i % kN];
  }
  template <bool kSpread, int kArrays, int kN>
  static __device__ void RotatePart(float (&sums)[kArrays][kN]) {
#pragma unroll
    for (int i = 0; i + kPart < kArrays * kN; ++i) Sum<kSpread>(sums, i) = Sum<kSpread>(sums, i + kPart);
  }

  // Sends the others their parts, and adds what they send to this block's, which it moves to the front.
  template <bool kSpread, int kArrays, int kN>
  __device__ void Exchange(float (&sums)[kArrays][kN], bool last) {
    if (!met_) ClusterWait();
    met_ = true;
    WaitUntilTaken();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int owner = part / Parts();
      if (owner == share_.rank) continue;
      const int from = share_.rank < owner ? share_.rank : share_.rank - 1;
      const uint32_t to = RemoteAddress(Place(from * Parts() + part - owner * Parts()), owner);
#pragma unroll
      for (int k = 0; k < kPart; k += 4)
        StoreRemote(to + k * kWarpgroup * 4,
                    {Sum<kSpread>(sums, part * kPart + k), Sum<kSpread>(sums, part * kPart + k + 1),
                     Sum<kSpread>(sums, part * kPart + k + 2), Sum<kSpread>(sums, part * kPart + k + 3)});
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      FenceCluster();
      for (int block = 0; block < share_.size; ++block)
        if (block != share_.rank) ArriveRemote(RemoteAddress(ring_.Sent(number_), block));
    }
#pragma unroll 1
    for (int i = 0; i < share_.rank * Parts(); ++i) RotatePart<kSpread>(sums);
    WaitForCluster(ring_.Sent(number_), round_ & 1);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= Parts()) break;
#pragma unroll 1
      for (int other = 0; other < share_.size - 1; ++other)
#pragma unroll
        for (int k = 0; k < kPart; k += 4) {
          float v[4];
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                       : "r"(Place(other * Parts() + part) + k * kWarpgroup * 4)
                       : "memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) Sum<kSpread>(sums, part * kPart + k + i) += v[i];
        }
    }
    if (!last) ShowTaken();
  }

  const Ring<T>& ring_;
  const Share& share_;
  int number_;
  uint32_t round_ = 0;
  bool met_ = false;
};

}  // namespace jaxdnn::conv
