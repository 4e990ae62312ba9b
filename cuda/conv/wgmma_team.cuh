// A tile that the blocks of a cluster compute together, each a share of the reduction: where there are fewer tiles than
// multiprocessors, or few more. Each block finishes as many parts of the tile's sums, 16 of every thread; the others
// send it theirs, which it adds in their order. What arrives lies behind the ring's stages: where the last one and the
// slabs were.
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
__device__ void InitTeams(const Ring<T>& ring) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kConsumers; ++i) {
    hopper::InitBarrier(ring.Sent(i), 1);
    asm volatile("st.shared.u32 [%0], 0;" ::"r"(ring.Taken(i)) : "memory");
  }
}

// Of threads with so many sums. One is for both warpgroups, which take tiles in turn, or each has its own.
template <class T, int kSums>
class Team {
 public:
  static constexpr int kPart = 16, kParts = kSums / kPart;

  __device__ Team(const Ring<T>& ring, const Share& share, int number = 0)
      : size_(share.size),
        rank_(share.rank),
        parts_(kParts / share.size),
        space_(ring.data + ring.stages * T::kStageBytes + number * kSums * kWarpgroup * 4),
        sent_(ring.Sent(number)),
        taken_(ring.Taken(number)) {}

  // Calls finish(number, part) with the parts that this block finishes, by the threads of the warpgroup whose tile it
  // is, the cluster's `last` or not. The sums' arrays follow each other, or parts have the same share of each,
  // `kShared`.
  template <bool kShared, int kArrays, int kN, class F>
  __device__ void Finish(float (&sums)[kArrays][kN], bool last, const F& finish) {
    if (size_ > 1) Exchange<kShared>(sums);
#pragma unroll 1
    for (int i = 0; i < parts_; ++i) {
      float part[kPart];
#pragma unroll
      for (int k = 0; k < kPart; ++k) part[k] = Sum<kShared>(sums, k);
#pragma unroll 1
      for (int other = 0; other < size_ - 1; ++other) AddSent(other * parts_ + i, part);
      finish(rank_ * parts_ + i, part);
      RotatePart<kShared>(sums);
    }
    if (size_ > 1 && !last) ShowTaken();
  }
  // On to the block's next tile.
  __device__ void Next() { ++round_; }

 private:
  static __device__ int Thread() { return threadIdx.x % kWarpgroup; }
  __device__ uint32_t Place(int part, int quarter) const {
    return space_ + ((part * 4 + quarter) * kWarpgroup + Thread()) * 16;
  }

  // Every warp counts in every block that it has taken what was sent. Warpgroups may be two tiles apart: of a barrier's
  // phases they could not tell which one has ended.
  __device__ void ShowTaken() const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    FenceCluster();
#pragma unroll 1
    for (int block = 0; block < size_; ++block) CountRemote(RemoteAddress(taken_, block));
  }
  __device__ void WaitUntilTaken() const {
    if (threadIdx.x % 32 == 0)
      while (static_cast<int>(LoadCount(taken_) - round_ * size_ * (kWarpgroup / 32)) < 0) {
      }
    __syncwarp();
  }

  // Of the parts in turn.
  template <bool kShared, int kArrays, int kN>
  static __device__ float& Sum(float (&sums)[kArrays][kN], int i) {
    constexpr int kShare = kPart / kArrays;
    return kShared ? sums[i % kPart / kShare][i / kPart * kShare + i % kShare] : sums[i / kN][i % kN];
  }
  template <bool kShared, int kArrays, int kN>
  static __device__ void RotatePart(float (&sums)[kArrays][kN]) {
#pragma unroll
    for (int i = 0; i + kPart < kArrays * kN; ++i) Sum<kShared>(sums, i) = Sum<kShared>(sums, i + kPart);
  }

  // Sends the others their parts, waits for theirs, and moves this block's to the front.
  template <bool kShared, int kArrays, int kN>
  __device__ void Exchange(float (&sums)[kArrays][kN]) {
    if (!met_) ClusterWait();
    met_ = true;
    WaitUntilTaken();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int owner = part / parts_;
      if (owner == rank_) continue;
      const int from = rank_ < owner ? rank_ : rank_ - 1;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const auto sum = [&](int k) { return Sum<kShared>(sums, part * kPart + 4 * q + k); };
        SendRemote(RemoteAddress(Place(from * parts_ + part - owner * parts_, q), owner),
                   make_float4(sum(0), sum(1), sum(2), sum(3)), RemoteAddress(sent_, owner));
      }
    }
    if (Thread() == 0) hopper::ArriveExpecting(sent_, (size_ - 1) * parts_ * kPart * kWarpgroup * 4);
#pragma unroll 1
    for (int i = 0; i < rank_ * parts_; ++i) RotatePart<kShared>(sums);
    WaitForCluster(sent_, round_ & 1);
  }
  __device__ void AddSent(int part, float (&sums)[kPart]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float v[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(Place(part, q))
                   : "memory");
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[4 * q + k] += v[k];
    }
  }

  int size_, rank_, parts_;
  uint32_t space_, sent_, taken_, round_ = 0;
  bool met_ = false;
};

}  // namespace jaxdnn::conv
