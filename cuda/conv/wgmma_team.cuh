// A tile that the blocks of a cluster compute together, each a share of the reduction: where there are fewer tiles than
// multiprocessors, or few more. Each block finishes as many parts of the tile's sums, 16 of every thread; the others
// send it theirs, which it adds in their order. What arrives lies where the ring's last stages were.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

template <class T>
class Team {
 public:
  static constexpr int kPart = 16, kParts = T::kRows * T::kColumns / kWarpgroup / kPart;

  // Stages that are left to a block's ring.
  static __device__ int Stages(int size) { return size == 1 ? T::kStages : T::kStages - kTaken; }

  __device__ Team(const Ring<T>& ring, int size)
      : size_(size),
        rank_(size == 1 ? 0 : blockIdx.x % size),
        parts_(kParts / size),
        space_(ring.data + ring.stages * T::kStageBytes),
        sent_(ring.More(0)),
        taken_(ring.More(1)) {}

  // All threads of the block, before the ring's barriers are published.
  __device__ void Init() const {
    if (size_ > 1 && threadIdx.x == 0) {
      hopper::InitBarrier(sent_, 1);
      hopper::InitBarrier(taken_, size_ * kWarps);
    }
  }
  // All threads of the cluster: before the others' memory is written, and before it ends.
  __device__ void Meet() const {
    if (size_ > 1) ClusterArrive(), ClusterWait();
  }

  // Of the tile's steps those of this block.
  __device__ int FirstStep(int steps) const { return size_ == 1 ? 0 : int(int64_t{steps} * rank_ / size_); }
  __device__ int LastStep(int steps) const { return size_ == 1 ? steps : int(int64_t{steps} * (rank_ + 1) / size_); }

  // Calls finish(number, part) with the parts that this block finishes, by the threads of the warpgroup whose tile it
  // is. The sums' arrays follow each other, or parts have the same share of each, `kShared`.
  template <bool kShared, int kArrays, int kN, class F>
  __device__ void Finish(float (&sums)[kArrays][kN], const F& finish) {
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
    if (size_ > 1) ShowTaken();
  }
  // On to the block's next tile.
  __device__ void Next() {
    round_ ^= 1;
    first_ = false;
  }

 private:
  static constexpr int kWarps = kWarpgroup / 32, kTaken = 2;
  static_assert(kTaken * T::kStageBytes >= T::kRows * T::kColumns * 4 * 7 / 8 || T::kRows == 256);

  static __device__ int Thread() { return threadIdx.x % kWarpgroup; }
  __device__ uint32_t Place(int part, int quarter) const {
    return space_ + ((part * 4 + quarter) * kWarpgroup + Thread()) * 16;
  }

  __device__ void ShowTaken() const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    FenceCluster();
#pragma unroll 1
    for (int block = 0; block < size_; ++block) ArriveRemote(RemoteAddress(taken_, block));
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
  __device__ void Exchange(float (&sums)[kArrays][kN]) const {
    if (!first_) WaitForCluster(taken_, round_ ^ 1);
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
    WaitForCluster(sent_, round_);
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
  bool first_ = true;
};

}  // namespace jaxdnn::conv
