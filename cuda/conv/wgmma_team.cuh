// A tile that the blocks of a cluster compute together, each a share of the steps: where there are fewer tiles than
// multiprocessors. Such a block has one tile, and finishes some of the tile's rows: it adds what all blocks have of
// them, always in one order. Of large tiles, the others send it theirs, to where its ring's stages were. Of the rest,
// each leaves all sums there, and reads what it finishes.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma_held.cuh"
#include "cuda/conv/wgmma_store.cuh"

namespace jaxdnn::conv {

// The steps of its cluster's tile that a block of `team` takes.
struct Share {
  int first, end;

  __device__ Share(int steps, const FastDiv& team) : first(0), end(steps) {
    if (__builtin_expect(team.divisor == 1, true)) return;
    int rank;
    team.Div(blockIdx.x, &rank);
    first = team.Div(steps * rank);
    end = team.Div(steps * (rank + 1));
  }
  __device__ int Steps() const { return end - first; }
};

// The rows of the tile that a block of `team` finishes, in parts of T::kPart.
template <class T>
__device__ Rows OwnRows(const FastDiv& team) {
  constexpr int kParts = T::kRows / T::kPart;
  if (team.divisor == 1) return {0, T::kRows};
  int rank;
  team.Div(blockIdx.x, &rank);
  const auto first = [&](int rank) { return team.Div(rank * kParts + int(team.divisor) - 1) * T::kPart; };
  return {first(rank), first(rank + 1)};
}

// Adds to the sums of this block's rows, in the blocks' order, what the kSize blocks of the team have of them. The
// others' come through the shared memory at `at`, where no stage is needed any more by those who call this.
template <int kSize, class T, int kCount>
__device__ void ExchangeSums(uint32_t at, float (&sums)[kCount]) {
  constexpr int kParts = T::kRows / T::kPart, kFours = kCount / kParts / 4, kFourBytes = kWarpgroup * 16;
  // Two warpgroups may exchange at a time.
  static_assert((kParts + kSize - 1) / kSize * kSize * kFours * kFourBytes <= T::kStages * T::kStageBytes / kConsumers);
  const int rank = blockIdx.x % kSize;
  at += threadIdx.x % kWarpgroup * 16;
  // Where a block finds what another has left of a part.
  const auto place = [&](int part, int owner, int from) {
    return at + ((part - (owner * kParts + kSize - 1) / kSize) * kSize + from) * kFours * kFourBytes;
  };
  ClusterArrive();
  ClusterWait();  // nobody needs a stage
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int owner = part * kSize / kParts;
    if (owner == rank) continue;
    const uint32_t to = RemoteAddress(place(part, owner, rank), owner);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float* v = &sums[(part * kFours + i) * 4];
      StoreRemote(to + i * kFourBytes, {v[0], v[1], v[2], v[3]});
    }
  }
  ClusterArrive();
  ClusterWait();  // all sums are there
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part * kSize / kParts != rank) continue;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      float* v = &sums[(part * kFours + i) * 4];
      float sum[4] = {};
#pragma unroll
      for (int from = 0; from < kSize; ++from) {
        uint32_t words[4];
        hopper::LoadWords(words, place(part, rank, from) + i * kFourBytes);  // one's own are not there
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += from == rank ? v[k] : __uint_as_float(words[k]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = sum[k];
    }
  }
}
template <class T, int kCount>
__device__ void ExchangeSums(uint32_t at, int team, float (&sums)[kCount]) {
  if (team == 2) ExchangeSums<2, T>(at, sums);
  if constexpr (T::kRows / T::kPart > 2) {
    if (team == 3) ExchangeSums<3, T>(at, sums);
  }
}

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
  const int column = H::Column();
  const uint32_t first = SumPlace<T>(at, H::Row(0), column / 4) + column % 4 * 4;
#pragma unroll
  for (int i = 0; i < T::kRows / 4; ++i) {
    const auto v = H::Get(sums, i);
    // As SumPlace has it of the row after, and of each eighth.
    const uint32_t to = (i % 2 == 0 ? first : (first ^ 2 << 4) + T::kColumns * 4) + i / 2 * 8 * T::kColumns * 4;
    if constexpr (H::kVector == 4)
      hopper::StoreWords(to, reinterpret_cast<const uint32_t (&)[4]>(v));
    else
      hopper::StorePair(to, v.v[0], v.v[1]);
  }
}

// v[b] = the sums that all blocks of a team of two, four or eight have of chunk `first` + b * kWarpgroup, in row-major
// order: neighbours' sums, then those of pairs. So many loads of a thread are on their way at once.
constexpr int kLoads = 8;
template <class T>
__device__ void AddSums(uint32_t sums, int team, int first, Vec<float, 4> (&v)[kLoads]) {
  constexpr int kChunks = T::kColumns / 4;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int rank = i & (team - 1), b = team == 2 ? i / 2 : team == 4 ? i / 4 : 0, at = first + b * kWarpgroup;
    const float4 part = LoadRemote(RemoteAddress(SumPlace<T>(sums, at / kChunks, at % kChunks), rank));
    v[i] = {part.x, part.y, part.z, part.w};
  }
#pragma unroll
  for (int size = 2; size <= kLoads; size *= 2) {
    if (size > team) break;
#pragma unroll
    for (int i = 0; i < kLoads / size; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) v[i].v[k] = v[2 * i].v[k] + v[2 * i + 1].v[k];
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
    Vec<float, 4> v[kLoads];
    AddSums<T>(sums, team, begin + i, v);
#pragma unroll 1
    for (int b = 0; b < each; ++b) {
      const int at = begin + i + b * kWarpgroup;
      finish(at / kChunks, at % kChunks * 4, v[0].v);
      Rotate<1>(reinterpret_cast<Vec<float, 4>(&)[kLoads / 2]>(v));
    }
  }
  // Nobody leaves while others read its sums.
  __syncwarp();
  ClusterArriveRelaxed();
  ClusterWait();
}

}  // namespace jaxdnn::conv
