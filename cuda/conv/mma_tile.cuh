// The block-level matrix product of the tensor-core kernels: a ring of shared-memory stages that asynchronous copies
// fill, and warps that multiply what has arrived.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "cuda/common/dtype.cuh"
#include "cuda/common/float8.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// A block computes kRows x kColumns sums with kWarpsDown x kWarpsAcross warps.
template <class In_, Direction kDirection, int kRows_, int kColumns_, int kWarpsDown, int kWarpsAcross_, int kBlocks_,
          int kProducts_ = 1, int kDepth_ = MmaDepth(kDirection, sizeof(In_))>
struct MmaTile {
  using In = In_;
  using Sum = std::conditional_t<std::is_integral_v<In>, int, float>;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kWarpsAcross = kWarpsAcross_;
  static constexpr int kDepth = kDepth_;  // terms of the reduction in a stage
  static constexpr int kStages = kDepth * sizeof(In) > 64 ? 3 : 4;
  static constexpr int kProducts = kProducts_;  // for a term: 3 of floats are nearly exact
  static constexpr int kBlocks = kBlocks_;      // that share a multiprocessor: as many as keep their sums in registers
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kWarpRows = kRows / kWarpsDown, kWarpColumns = kColumns / kWarpsAcross;
  using Sums = Sum[kWarpRows / 16][kWarpColumns / 8][4];

  // First row and column of this warp's sums.
  static __device__ int Row() { return threadIdx.x / 32 / kWarpsAcross * kWarpRows; }
  static __device__ int Column() { return threadIdx.x / 32 % kWarpsAcross * kWarpColumns; }
  // Of sum k of a thread's block j of columns. Bytes of two columns come out of a matrix load together, so that two
  // blocks have the even and the odd ones of 16.
  static __device__ int Column(int j, int k) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(In) == 1) return Column() + 16 * (j / 2) + 4 * (lane % 4) + 2 * (k % 2) + j % 2;
    return Column() + 8 * j + 2 * (lane % 4) + k % 2;
  }
};

// Elements of 16 bytes.
template <class In>
constexpr int kChunk = 16 / sizeof(In);

// An operand of one stage: kExtent rows (or columns) by kDepth terms, in lines along whichever of the two is contiguous
// in memory. 16-byte chunks of a line are exchanged among each other, line by line in another way, so that neither the
// copies nor the eight lines of a matrix load meet in a bank; nor, where floats are read one by one, a warp's four
// lines of two chunks.
template <class In_, int kExtent_, int kDepth, bool kDepthContiguous>
struct OperandTile {
  using In = In_;
  static constexpr int kExtent = kExtent_;
  static constexpr bool kAlongDepth = kDepthContiguous;
  static constexpr int kLines = kDepthContiguous ? kExtent : kDepth;
  static constexpr int kChunks = (kDepthContiguous ? kDepth : kExtent) / kChunk<In>;
  static constexpr int kBytes = kLines * kChunks * 16;
  static constexpr bool kOneByOne = sizeof(In) == 4 && !kDepthContiguous;
  static constexpr bool kPaired = sizeof(In) == 1 && !kDepthContiguous;
  static constexpr int kLinesPeriod = kOneByOne ? 4 : kPaired ? 16 : 8;  // of the exchange

  // Of 16 lines of bytes the first two of every four come first: what a lane gets of two matrices, transposed, is then
  // four lines that follow each other.
  static __device__ int Offset(int line, int chunk) {
    return Place(kPaired ? (line & ~15) | (line >> 1 & 6) | (line & 2) << 2 | (line & 1) : line, chunk);
  }
  static __device__ int Place(int line, int chunk) {
    constexpr int kPeriod = kChunks < 8 ? kChunks : 8;
    static_assert(!kOneByOne || kPeriod == 8);
    const int exchange = kOneByOne ? 2 * (line % 4) : line / (8 / kPeriod) % kPeriod;
    return (line * kChunks + (chunk ^ exchange)) * 16;
  }
};

// How a thread of kThreads fills such a tile: always the same chunk, of kCount lines.
template <class Tile, int kThreads>
struct Share {
  static constexpr int kCount = Tile::kLines * Tile::kChunks / kThreads;
  static constexpr int kLinesApart = kThreads / Tile::kChunks;
  static_assert(kCount * kLinesApart == Tile::kLines && kLinesApart % Tile::kLinesPeriod == 0);

  static __device__ int Chunk() { return threadIdx.x % Tile::kChunks; }
  static __device__ int Line() { return threadIdx.x / Tile::kChunks; }
  // From the place of the first line to that of line j.
  static __device__ constexpr int Step(int j) { return j * kLinesApart * Tile::kChunks * 16; }
};

// The blocks of a warp's part of such a tile, 16 rows (or columns) by two chunks of the depth, as operands of Mma:
// `kExtent` rows (or columns) from `first` on. What the exchange of chunks makes of an address is worked out once. A's
// four matrices of 8 by a chunk come down first, B's along the depth first: that is how Mma wants their registers next
// to each other.
template <class Tile, int kExtent, int kDepth, bool kDepthFirst>
struct Fragments {
  static constexpr bool kDepthContiguous = Tile::kAlongDepth;
  static constexpr int kTerms = 2 * kChunk<typename Tile::In>;
  int offset[kDepthContiguous ? kDepth / kTerms : kExtent / (Tile::kOneByOne ? 8 : 16)];

  __device__ explicit Fragments(int first) {
    const int lane = threadIdx.x % 32, along = lane % 8;
    const int e_half = kDepthFirst ? lane / 16 : lane / 8 % 2, d_half = kDepthFirst ? lane / 8 % 2 : lane / 16;
    if constexpr (kDepthContiguous) {
#pragma unroll
      for (int d = 0; d < kDepth / kTerms; ++d) offset[d] = Tile::Offset(first + 8 * e_half + along, 2 * d + d_half);
    } else if constexpr (Tile::kOneByOne) {
#pragma unroll
      for (int i = 0; i < kExtent / 8; ++i)
        offset[i] = Tile::Offset(lane % 4, first / 4 + 2 * i + lane / 16) + lane / 4 % 4 * 4;
    } else if constexpr (Tile::kPaired) {
#pragma unroll
      for (int i = 0; i < kExtent / 16; ++i) offset[i] = Tile::Place(lane, first / 16 + i);
    } else {
#pragma unroll
      for (int i = 0; i < kExtent / 16; ++i) offset[i] = Tile::Offset(8 * d_half + along, first / 8 + 2 * i + e_half);
    }
  }

  // Block i of the extent and d of the depth.
  __device__ void Load(uint32_t (&r)[4], uint32_t tile, int i, int d) const {
    constexpr int kLine = Tile::kChunks * 16;
    if constexpr (kDepthContiguous) {
      LoadMatrices<false>(r, tile + offset[d] + i * 16 * kLine);
    } else if constexpr (Tile::kOneByOne) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e_half = kDepthFirst ? j / 2 : j % 2, d_half = kDepthFirst ? j % 2 : j / 2;
        r[j] = LoadWord(tile + offset[2 * i + e_half] + (2 * d + d_half) * 4 * kLine);
      }
    } else if constexpr (Tile::kPaired) {
      uint32_t pairs[4];  // of columns, for two terms each
      LoadMatrices<true>(pairs, tile + offset[i] + d * 32 * kLine);
#pragma unroll
      for (int j = 0; j < 4; ++j) r[j] = __byte_perm(pairs[j % 2 * 2], pairs[j % 2 * 2 + 1], j < 2 ? 0x6420 : 0x7531);
    } else {
      LoadMatrices<true>(r, tile + offset[i] + d * 16 * kLine);
    }
  }
};

// Copies kVec elements into the stage, or zeros where they are not `valid`; then `global` is not read. Fewer than four
// bytes have no asynchronous copy.
template <int kVec, class In>
__device__ void CopyElements(uint32_t shared, const In* global, bool valid) {
  if constexpr (kVec * sizeof(In) == 2) {
    const unsigned short bits = valid ? *reinterpret_cast<const unsigned short*>(global) : 0;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(shared), "h"(bits) : "memory");
  } else if constexpr (kVec * sizeof(In) == 1) {
    const unsigned short bits = valid ? *reinterpret_cast<const unsigned char*>(global) : 0;
    asm volatile("st.shared.b8 [%0], %1;" ::"r"(shared), "h"(bits) : "memory");
  } else {
    CopyAsync<kVec * sizeof(In)>(shared, global, valid);
  }
}

// sums += A B of 8-bit floats, widened. A register of four terms is one of the first half of a product's depth and one
// of the second, in both operands.
template <int kA, int kB>
__device__ __forceinline__ void MultiplyFloat8(const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4],
                                               const Float8Kinds& e5m2, float (&sums)[kA][2 * kB][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t wide_b[2 * kB][2];
#pragma unroll
    for (int j = 0; j < 2 * kB; ++j) {
      const uint32_t word = b[j / 2][j % 2 * 2 + half];
      wide_b[j][0] = WidenFloat8<false>(word, e5m2.b), wide_b[j][1] = WidenFloat8<true>(word, e5m2.b);
    }
#pragma unroll
    for (int i = 0; i < kA; ++i) {
      const uint32_t upper = a[i][2 * half], lower = a[i][2 * half + 1];  // rows
      const uint32_t wide_a[4] = {WidenFloat8<false>(upper, e5m2.a), WidenFloat8<false>(lower, e5m2.a),
                                  WidenFloat8<true>(upper, e5m2.a), WidenFloat8<true>(lower, e5m2.a)};
#pragma unroll
      for (int j = 0; j < 2 * kB; ++j) Mma<__half>(sums[i][j], wide_a, wide_b[j][0], wide_b[j][1]);
    }
  }
}

// sums += A B over the stage whose operands are at `a` and `b`, if it is `wanted`. meanwhile() is called once the first
// fragments are on their way.
template <class In, class T, class OfA, class OfB, class Meanwhile>
__device__ __forceinline__ void MultiplyStage(uint32_t a, uint32_t b, const OfA& of_a, const OfB& of_b,
                                              typename T::Sums& sums, const Float8Kinds& e5m2, bool wanted,
                                              const Meanwhile& meanwhile) {
  constexpr int kParts = T::kDepth / (2 * kChunk<In>);
  uint32_t fragment_a[2][T::kWarpRows / 16][4], fragment_b[2][T::kWarpColumns / 16][4];
  const auto fetch = [&](int d) {
#pragma unroll
    for (int i = 0; i < T::kWarpRows / 16; ++i) of_a.Load(fragment_a[d % 2][i], a, i, d);
#pragma unroll
    for (int j = 0; j < T::kWarpColumns / 16; ++j) of_b.Load(fragment_b[d % 2][j], b, j, d);
  };
  if (wanted) fetch(0);
  meanwhile();
  if (!wanted) return;
  const auto multiply = [&](const auto& a, const auto& b) {
#pragma unroll
    for (int i = 0; i < T::kWarpRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < T::kWarpColumns / 16; ++j) {
        Mma<In>(sums[i][2 * j], a[i], b[j][0], b[j][1]);
        Mma<In>(sums[i][2 * j + 1], a[i], b[j][2], b[j][3]);
      }
    }
  };
#pragma unroll
  for (int d = 0; d < kParts; ++d) {
    if (d + 1 < kParts) fetch(d + 1);
    auto& part_a = fragment_a[d % 2];
    auto& part_b = fragment_b[d % 2];
    if constexpr (T::kProducts == 3) {
      uint32_t rest_a[T::kWarpRows / 16][4], rest_b[T::kWarpColumns / 16][4];
#pragma unroll
      for (int i = 0; i < T::kWarpRows / 16; ++i) SplitTf32(part_a[i], rest_a[i]);
#pragma unroll
      for (int j = 0; j < T::kWarpColumns / 16; ++j) SplitTf32(part_b[j], rest_b[j]);
      multiply(rest_a, part_b);
      multiply(part_a, rest_b);
    } else if constexpr (sizeof(In) == 4) {
#pragma unroll
      for (int i = 0; i < T::kWarpRows / 16; ++i) RoundToTf32(part_a[i]);
#pragma unroll
      for (int j = 0; j < T::kWarpColumns / 16; ++j) RoundToTf32(part_b[j]);
    }
    if constexpr (std::is_same_v<In, Float8>) {
      MultiplyFloat8(part_a, part_b, e5m2, sums);
    } else {
      multiply(part_a, part_b);
    }
  }
}

// sums += A B over `steps` stages. load_a(step, address), called for one step after another, begins the copies of that
// step's operand into the stage at `address`, with LoadA::Tile its layout. Warps whose sums are not wanted only load.
template <class In, class T, class LoadA, class LoadB>
__device__ void MultiplyPipelined(uint32_t ring, int steps, LoadA& load_a, LoadB& load_b, typename T::Sums& sums,
                                  const Float8Kinds& e5m2 = {}, bool wanted = true) {
  using TileA = typename LoadA::Tile;
  using TileB = typename LoadB::Tile;
  constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  const Fragments<TileA, T::kWarpRows, T::kDepth, false> of_a(T::Row());
  const Fragments<TileB, T::kWarpColumns, T::kDepth, true> of_b(T::Column());
  // The first steps are none, and only begin copies.
#pragma unroll 1
  for (int step = 1 - T::kStages; step < steps; ++step) {
    WaitForCopies<T::kStages - 2>();
    // This step's copies of every thread are here, the stage that is filled next was last read before, and so was what
    // a loader prepares in shared memory.
    __syncthreads();
    const auto stage = [&](int step) { return ring + static_cast<unsigned>(step) % T::kStages * kStageBytes; };
    const int next = step + T::kStages - 1;
    const uint32_t now = stage(step + T::kStages);
    MultiplyStage<In, T>(now, now + TileA::kBytes, of_a, of_b, sums, e5m2, wanted && step >= 0, [&] {
      if (next < steps) {
        load_a(next, stage(next));
        load_b(next, stage(next) + TileA::kBytes);
      }
      CommitCopies();
    });
  }
  WaitForCopies<0>();
  __syncthreads();
}

// Dynamic shared memory of a kernel: the ring, and after it, in the same place, the sums.
template <class T, class LoadA, class LoadB>
constexpr int kSharedBytes =
    std::max(T::kStages * (LoadA::Tile::kBytes + LoadB::Tile::kBytes), 4 * T::kRows * (T::kColumns + 8));

// How many elements of lines of `n` can be moved together, from arrays that begin anywhere.
inline int AlignedRun(int64_t n, DType type, std::initializer_list<const void*> arrays) {
  int run = 16 / SizeOf(type);
  const auto aligned = [&](const void* a) { return reinterpret_cast<uintptr_t>(a) % (run * SizeOf(type)) == 0; };
  while (n % run != 0 || !std::all_of(arrays.begin(), arrays.end(), aligned)) run /= 2;
  return run;
}

inline bool IsChunk(int run, DType type) { return run * SizeOf(type) == 16; }

// Calls f with the TypeTag of the operands' type, and how many products of it make one of theirs.
template <class F>
cudaError_t VisitMmaType(const Problem& p, F&& f) {
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, 3> kThree;
  if (p.in == DType::kF32) return p.products == 3 ? f(TypeTag<float>(), kThree) : f(TypeTag<float>(), kOne);
  return p.in == DType::kBF16 ? f(TypeTag<__nv_bfloat16>(), kOne) : f(TypeTag<__half>(), kOne);
}

// Calls f with the direction, of the two that have the same kernels, as a type.
template <class F>
cudaError_t VisitDataDirection(const Problem& p, F&& f) {
  if (p.direction == Direction::kForward) return f(std::integral_constant<Direction, Direction::kForward>());
  return f(std::integral_constant<Direction, Direction::kDataGradient>());
}

// Calls f with the TypeTag of the tile, whether the product is dense and in whole chunks, and the TypeTag of the
// operands' type. `whole_operand` is whether the gathered operand is in whole chunks, and `whole_columns`, all others.
template <Direction kDirection, class F>
cudaError_t VisitMmaKernel(const Problem& p, const Config& config, bool whole_operand, bool whole_columns, F&& f) {
  const Dense dense = DenseOf(p);
  return VisitMmaType(p, [&](auto in, auto products) {
    using In = typename decltype(in)::type;
    constexpr int kProducts = decltype(products)::value;
    using Tile128x32 = TypeTag<MmaTile<In, kDirection, 128, 32, 4, 1, 3, kProducts>>;
    constexpr std::true_type kDense;
    constexpr std::false_type kSparse;
    if (dense.groups > 1 || dense.Folds() || !whole_operand || !whole_columns) {
      if constexpr (kProducts == 1)
        if (config.tile == Tile::kMma128x32 && whole_operand) return f(Tile128x32(), kSparse, in);
      return f(TypeTag<MmaTile<In, kDirection, 128, 64, 2, 2, 2, kProducts>>(), kSparse, in);
    }
    switch (config.tile) {
      case Tile::kMma128x128:
        if constexpr (kProducts == 1) return f(TypeTag<MmaTile<In, kDirection, 128, 128, 2, 2, 2>>(), kDense, in);
        return cudaErrorInvalidValue;
      case Tile::kMma128x64:
        return f(TypeTag<MmaTile<In, kDirection, 128, 64, 2, 2, kProducts == 1 ? 3 : 2, kProducts>>(), kDense, in);
      case Tile::kMma64x64:
        return f(TypeTag<MmaTile<In, kDirection, 64, 64, 2, 2, 3, kProducts>>(), kDense, in);
      case Tile::kMma128x32:
        if constexpr (kProducts == 1) return f(Tile128x32(), kDense, in);
        return cudaErrorInvalidValue;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxdnn::conv
