// The block-level product's transpose: the result's columns are wgmma's rows, and its rows wgmma's columns, which there
// may be any multiple of 8 of. So a tile may have as many rows as make all multiprocessors equal parts of a layer. The
// two warpgroups multiply every stage together, 64 of the tile's 128 columns each. Floats are multiplied so forward,
// where the filter goes through registers and sums are stored as they are (wgmma_held.cuh).
#pragma once

#include "cuda/conv/data_wgmma.cuh"

namespace jaxdnn::conv {

template <class In_, int kRows_>
struct AcrossTile {
  using In = In_;
  static constexpr bool kCopied = false, kTripled = false, kLarge = false;
  static constexpr int kRows = kRows_, kColumns = 128, kLine = kLineBytes / sizeof(In), kDepth = kLine;
  static constexpr int kPart = 16;  // rows that a block of a cluster finishes, at least
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kSlab = 64 * kLineBytes;  // bytes of a warpgroup's columns in a stage
  static constexpr int kBytesA = kRows * kLineBytes, kBytesB = kConsumers * kSlab, kStageBytes = kBytesA + kBytesB;
  // All sums of a warpgroup wait to be stored, a line of its columns for each row.
  static constexpr int kOut = sizeof(In) == 2 ? kRows * kLineBytes : 0, kStoreBytes = kConsumers * kOut,
                       kPixelBytes = kConsumers * kRows * 4, kBarrierBytes = kMaxStages * 24 + 16;
  static constexpr int kMoreBytes = kStoreBytes + kPixelBytes + kBarrierBytes;
  static constexpr int kStages = std::min(kMaxStages, ((227 << 10) - kMoreBytes) / kStageBytes);
  static constexpr int kSharedBytes = kStages * kStageBytes + kMoreBytes;
  using Sums = float[1][kRows / 2];
  static_assert(kRows % 16 == 0);
};

// What a warpgroup has of it.
template <int kRows_>
struct AcrossPart {
  static constexpr int kRows = kRows_, kColumns = 64;
};

template <class In, int kRows>
constexpr bool kIsAcross<AcrossTile<In, kRows>> = true;

// sums = (A B)^T over the ring's next `steps` stages, at least one. The filter's terms lie next to each other, or its
// columns where transposed.
template <class T, bool kTransposed>
__device__ void MultiplyAcross(Ring<T>& ring, int steps, int warpgroup, typename T::Sums& sums) {
  constexpr int kStep = (kTransposed ? 16 * kLineBytes : 32) >> 4;
  int last = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(ring.Full(), ring.parity);
    const uint64_t columns = hopper::Descriptor(ring.Data() + T::kBytesA + warpgroup * T::kSlab, T::kSlab);
    const uint64_t rows = hopper::Descriptor(ring.Data(), T::kSlab);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kLineBytes / 32; ++k)
      hopper::Multiply<typename T::In, T::kRows, kTransposed, false>(sums[0], columns + k * kStep, rows + k * (32 >> 4),
                                                                     step > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<1>();
    if (step > 0) Release(ring, last);
    last = ring.stage;
    ring.Next();
  }
  EndProducts(ring, last, sums);
}

// Stores the sums as they are, by TMA, or a phase's positions one by one.
template <class T>
__device__ void StoreAcross(const WgmmaParams& p, const WgmmaPhase& f, const Ring<T>& ring, int warpgroup,
                            const WgmmaPlace& place, const typename T::Sums& sums, typename T::In* out,
                            const int* pixels) {
  using In = typename T::In;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int column = place.column + warpgroup * T::kLine;
  const uint32_t lines = ring.Slabs() + warpgroup * T::kOut;
  if (thread == 0) hopper::WaitForStoreReads<0>();
  hopper::SyncWarpgroup(1 + warpgroup);
#pragma unroll
  for (int first = 0; first < T::kRows; first += 16) {
    const float* v = &sums[0][first / 2];
    const uint32_t words[4] = {Pack<In>(v[0], v[1]), Pack<In>(v[2], v[3]), Pack<In>(v[4], v[5]), Pack<In>(v[6], v[7])};
    const int row = first + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    hopper::StoreTransposed(lines + row * kLineBytes + ((chunk ^ (row % 8)) << 4), words);
  }
  if (!p.scattered || p.columns_of_pixels) {
    hopper::ShowSharedToTma();
    hopper::SyncWarpgroup(1 + warpgroup);
    if (thread == 0) {
      StoreColumn(p, f, lines, place, column, 0);
      hopper::CommitStores();
    }
    return;
  }
  hopper::SyncWarpgroup(1 + warpgroup);
  StoreLines<T::kRows>(p, lines, pixels, out, column, p.columns);
}

// Calls f with the TypeTag of the tile.
template <class F>
cudaError_t VisitAcrossTile(const Problem& p, const Config& config, F&& f) {
  const auto with_type = [&](auto in) {
    using In = typename decltype(in)::type;
    switch (config.tile) {
      case Tile::kWgmma96Across:
        return f(TypeTag<AcrossTile<In, 96>>());
      case Tile::kWgmma160Across:
        return f(TypeTag<AcrossTile<In, 160>>());
      case Tile::kWgmma192Across:
        return f(TypeTag<AcrossTile<In, 192>>());
      case Tile::kWgmma208Across:
        return f(TypeTag<AcrossTile<In, 208>>());
      default:
        return cudaErrorInvalidValue;
    }
  };
  if (p.in == DType::kF32)
    return config.tile == Tile::kWgmma192Across ? f(TypeTag<AcrossTile<float, 192>>()) : cudaErrorInvalidValue;
  return p.in == DType::kBF16 ? with_type(TypeTag<__nv_bfloat16>()) : with_type(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
