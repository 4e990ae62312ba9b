// The block-level matrix product of the tensor-core kernels: a ring of shared-memory stages that asynchronous copies
// fill, and warps that multiply what has arrived.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "cuda/common/dtype.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// A block computes kRows x kColumns sums with kWarpsDown x kWarpsAcross warps.
template <class In, int kRows_, int kColumns_, int kWarpsDown, int kWarpsAcross_>
struct MmaTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kWarpsAcross = kWarpsAcross_;
  static constexpr int kDepth = kMmaDepth;  // terms of the reduction in a stage
  static constexpr int kStages = 4;
  // That share a multiprocessor: as many as keep their sums in registers.
  static constexpr int kBlocks = kRows_ * kColumns_ > 128 * 64 ? 2 : 3;
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kWarpRows = kRows / kWarpsDown, kWarpColumns = kColumns / kWarpsAcross;
  using Sums = float[kWarpRows / 16][kWarpColumns / 8][4];

  // First row and column of this warp's sums.
  static __device__ int Row() { return threadIdx.x / 32 / kWarpsAcross * kWarpRows; }
  static __device__ int Column() { return threadIdx.x / 32 % kWarpsAcross * kWarpColumns; }
};

// An operand of one stage: kExtent rows (or columns) by kDepth terms, in lines along whichever of the two is contiguous
// in memory. 16-byte chunks of a line are exchanged among each other, line by line in another way, so that neither the
// copies nor the eight lines of a matrix load meet in a bank.
template <int kExtent_, int kDepth, bool kDepthContiguous>
struct OperandTile {
  static constexpr int kExtent = kExtent_;
  static constexpr int kLines = kDepthContiguous ? kExtent : kDepth;
  static constexpr int kChunks = (kDepthContiguous ? kDepth : kExtent) / 8;
  static constexpr int kBytes = kLines * kChunks * 16;

  static __device__ int Offset(int line, int chunk) {
    constexpr int kPeriod = kChunks < 8 ? kChunks : 8;
    return (line * kChunks + (chunk ^ (line / (8 / kPeriod) % kPeriod))) * 16;
  }

  // The 16x16 block at row (or column) `e` and term `d`, as an operand of Mma.
  static __device__ void Load(uint32_t (&r)[4], uint32_t tile, int e, int d) {
    const int lane = threadIdx.x % 32, along = lane % 8, e_half = lane / 8 % 2, d_half = lane / 16;
    if constexpr (kDepthContiguous) {
      LoadMatrices<false>(r, tile + Offset(e + 8 * e_half + along, d / 8 + d_half));
    } else {
      LoadMatrices<true>(r, tile + Offset(d + 8 * d_half + along, e / 8 + e_half));
    }
  }
};

// Copies kVec elements into the stage, or zeros where they are not `valid`; then `global` is not read. One element has
// no asynchronous copy.
template <int kVec, class In>
__device__ void CopyElements(uint32_t shared, const In* global, bool valid) {
  if constexpr (kVec == 1) {
    const unsigned short bits = valid ? *reinterpret_cast<const unsigned short*>(global) : 0;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(shared), "h"(bits) : "memory");
  } else {
    CopyAsync<2 * kVec>(shared, global, valid);
  }
}

// sums += A B over `steps` stages. load_a(step, address) begins the copies of that step's operand into the stage at
// `address`, with LoadA::Tile its layout.
template <class In, class T, class LoadA, class LoadB>
__device__ void MultiplyPipelined(uint32_t ring, int steps, const LoadA& load_a, const LoadB& load_b,
                                  typename T::Sums& sums) {
  using TileA = typename LoadA::Tile;
  using TileB = typename LoadB::Tile;
  constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t stage = ring + step % T::kStages * kStageBytes;
      load_a(step, stage);
      load_b(step, stage + TileA::kBytes);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int step = 0; step < T::kStages - 1; ++step) {
    __syncthreads();  // between any two steps: a loader may prepare the next one in shared memory
    load(step);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<T::kStages - 2>();
    // This step's copies of every thread are here, and the stage that is filled next was last read before.
    __syncthreads();
    load(step + T::kStages - 1);
    const uint32_t a = ring + step % T::kStages * kStageBytes, b = a + TileA::kBytes;
#pragma unroll
    for (int d = 0; d < T::kDepth; d += 16) {
      uint32_t fragment_a[T::kWarpRows / 16][4], fragment_b[T::kWarpColumns / 16][4];
#pragma unroll
      for (int i = 0; i < T::kWarpRows / 16; ++i) TileA::Load(fragment_a[i], a, T::Row() + 16 * i, d);
#pragma unroll
      for (int j = 0; j < T::kWarpColumns / 16; ++j) TileB::Load(fragment_b[j], b, T::Column() + 16 * j, d);
#pragma unroll
      for (int i = 0; i < T::kWarpRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < T::kWarpColumns / 16; ++j) {
          Mma<In>(sums[i][2 * j], fragment_a[i], fragment_b[j][0], fragment_b[j][2]);
          Mma<In>(sums[i][2 * j + 1], fragment_a[i], fragment_b[j][1], fragment_b[j][3]);
        }
      }
    }
  }
  WaitForCopies<0>();
  __syncthreads();
}

// Hands the block's sums out row by row: store(row, column, values) for runs of 8 columns. `scratch` is the ring.
template <class T, class Store>
__device__ void ForEachRun(float* scratch, const typename T::Sums& sums, const Store& store) {
  // A pitch that spreads the 8 rows and 4 pairs of columns of a store over the banks.
  constexpr int kPitch = T::kColumns + 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < T::kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < T::kWarpColumns / 8; ++j) {
      float* p = scratch + (T::Row() + 16 * i + lane / 4) * kPitch + T::Column() + 8 * j + 2 * (lane % 4);
      *reinterpret_cast<float2*>(p) = {sums[i][j][0], sums[i][j][1]};
      *reinterpret_cast<float2*>(p + 8 * kPitch) = {sums[i][j][2], sums[i][j][3]};
    }
  }
  __syncthreads();
  constexpr int kRuns = T::kColumns / 8;
  for (int run = threadIdx.x; run < T::kRows * kRuns; run += T::kThreads) {
    const float* p = scratch + run / kRuns * kPitch + run % kRuns * 8;
    float values[8];
    *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(p);
    *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(p + 4);
    store(run / kRuns, run % kRuns * 8, values);
  }
}
// Dynamic shared memory of a kernel: the ring, and after it, in the same place, the sums.
template <class T, class LoadA, class LoadB>
constexpr int kSharedBytes =
    std::max(T::kStages * (LoadA::Tile::kBytes + LoadB::Tile::kBytes), T::kRows*(T::kColumns + 8) * 4);

// Stores 8 sums, or those of them below `count`, at element `offset` of `out`: as float32 if `wide`, else as In.
template <int kVec, class In>
__device__ void StoreRun(void* out, bool wide, int64_t offset, const float (&values)[8], int count) {
  const auto store = [&](auto* to) {
    using Out = std::remove_pointer_t<decltype(to)>;
    constexpr int kMost = 16 / sizeof(Out), kN = kVec < kMost ? kVec : kMost;
#pragma unroll
    for (int i = 0; i < 8; i += kN) {
      if (i >= count) return;
      Vec<Out, kN> v;
#pragma unroll
      for (int j = 0; j < kN; ++j) v.v[j] = static_cast<Out>(values[i + j]);
      *reinterpret_cast<Vec<Out, kN>*>(to + i) = v;
    }
  };
  if (wide) {
    store(static_cast<float*>(out) + offset);
  } else {
    store(static_cast<In*>(out) + offset);
  }
}

// Calls f with the TypeTag of the tile, how many elements an access moves, and the TypeTag of the operands' type. Rows
// of channels that are no whole chunks, or begin anywhere, are copied element by element or two by two.
template <class F>
cudaError_t VisitMmaKernel(const Problem& p, const Config& config, std::initializer_list<const void*> arrays, F&& f) {
  const auto vectors = [&](int n) {
    return p.channels % n == 0 && p.features % n == 0 && std::all_of(arrays.begin(), arrays.end(), [&](const void* a) {
             return reinterpret_cast<uintptr_t>(a) % (2 * n) == 0;
           });
  };
  const auto with_type = [&](auto in) {
    using In = typename decltype(in)::type;
    if (!vectors(8)) {
      using Tile = TypeTag<MmaTile<In, 128, 64, 2, 2>>;
      return vectors(2) ? f(Tile(), std::integral_constant<int, 2>(), in)
                        : f(Tile(), std::integral_constant<int, 1>(), in);
    }
    constexpr std::integral_constant<int, 8> kVec;
    switch (config.tile) {
      case Tile::kMma128x128:
        return f(TypeTag<MmaTile<In, 128, 128, 2, 2>>(), kVec, in);
      case Tile::kMma128x64:
        return f(TypeTag<MmaTile<In, 128, 64, 2, 2>>(), kVec, in);
      case Tile::kMma64x64:
        return f(TypeTag<MmaTile<In, 64, 64, 2, 2>>(), kVec, in);
      case Tile::kMma128x32:
        return f(TypeTag<MmaTile<In, 128, 32, 4, 1>>(), kVec, in);
      default:
        return cudaErrorInvalidValue;
    }
  };
  return p.in == DType::kBF16 ? with_type(TypeTag<__nv_bfloat16>()) : with_type(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
