// The block-level matrix product under the Hopper kernels: two threads fill a ring of stages in shared memory through
// the TMA unit, and two warpgroups multiply them with wgmma, taking tiles in turn. Loads run ahead into the next tile,
// and while one warpgroup stores its tile the other multiplies the next.
//
// A stage holds a line of 128 bytes, 64 terms of the reduction or 32 of floats, for every row and column. Its barrier
// `full` counts the bytes that the unit has written, `empty` the warps that are done with it. A warpgroup has a third,
// `turn`, where the other one arrives when it has issued a tile's products: who waits for a stage must not be more than
// a round ahead of it, since barriers tell only odd phases from even ones.
#pragma once

#include <algorithm>

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/conv/tensor_map.h"
#include "cuda/conv/wgmma_plan.h"

namespace jaxdnn::conv {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kProducers = 2;  // threads that load, of a warp each
constexpr int kPatchers = 2;   // warps that replace some of what was loaded (wgmma_patch.cuh)
constexpr int kMaxStages = 8;

// Forward the filter of floats goes through registers (wgmma_held.cuh), or is copied first, `kCopied`. Where sums do
// not leave through shared memory there are no slabs, and more stages. Of three products a term a stage has both
// operands twice: their large parts, and the rests.
template <class In_, int kRows_, int kColumns_, bool kCopied_ = false, bool kSlabs = true,
          bool kWholeLines = !kSlabs || (kRows_ * kColumns_ > 128 * 160), bool kTripled_ = false>
struct WgmmaTile {
  using In = In_;
  static constexpr bool kCopied = kCopied_, kTripled = kTripled_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kLine = kLineBytes / sizeof(In), kDepth = kLine;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kBlocks = kRows / 64;     // rows of one wgmma
  static constexpr int kPart = 64;               // rows that a block of a cluster finishes, at least
  static constexpr int kSlab = 64 * kLineBytes;  // bytes: 64 rows, or columns, of a stage
  // So large that both warpgroups compute it together, with half of the rows each.
  static constexpr bool kLarge = kRows * kColumns > 128 * 160;
  // Of MN-major operands whole lines of columns are loaded.
  static constexpr int kBytesA = kRows * kLineBytes,
                       kBytesB = (kWholeLines ? (kColumns + kLine - 1) / kLine * kLine : kColumns) * kLineBytes,
                       kRests = kBytesA + kBytesB, kStageBytes = (kTripled ? 2 : 1) * kRests;
  // Sums wait in two slabs of each warpgroup to be stored, to pixels whose numbers stand there too.
  static constexpr int kStoreBytes = kSlabs ? kConsumers * 2 * kSlab : 0,
                       kPixelBytes = kSlabs ? kConsumers * kRows * 4 : 0, kBarrierBytes = kMaxStages * 24 + 16;
  // Beside them as many stages as fit.
  static constexpr int kMoreBytes = kStoreBytes + kPixelBytes + kBarrierBytes;
  static constexpr int kStages = std::min(kMaxStages, ((227 << 10) - kMoreBytes) / kStageBytes);
  static constexpr int kSharedBytes = kStages * kStageBytes + kMoreBytes;
  using Sums = float[kBlocks][kColumns / 2];
};

// Of which a block has one column of tiles, whose filter stays in shared memory, all steps of it. Stages bring the
// other operand alone, which leaves room for twice the slabs: where sums are of few steps, it is stores that take long.
template <class In>
struct KeptTile : WgmmaTile<In, 128, 128> {
  using Tile = WgmmaTile<In, 128, 128>;
  static constexpr int kStageBytes = Tile::kBytesA, kKeptBytes = kMostKeptSteps * Tile::kBytesB;
  static constexpr int kStoreBytes = 2 * Tile::kStoreBytes, kMoreBytes = Tile::kMoreBytes + Tile::kStoreBytes;
  static constexpr int kStages = ((227 << 10) - kMoreBytes - kKeptBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kKeptBytes + kMoreBytes;
};
template <class T>
constexpr bool kKeeps = false;
template <class In>
constexpr bool kKeeps<KeptTile<In>> = true;
template <class T>
constexpr int kSlabCount = kKeeps<T> ? 4 : 2;  // of a warpgroup
template <class T>
constexpr int kKeptBytes = 0;
template <class In>
constexpr int kKeptBytes<KeptTile<In>> = KeptTile<In>::kKeptBytes;

// A block's shared memory, which begins on a multiple of the swizzle's 1024 bytes: the stages, a filter that is kept,
// the slabs, the pixels, the barriers. And where a thread is in the stages' round.
template <class T>
struct Ring {
  uint32_t data;
  int stage = 0;
  uint32_t parity = 0;
  int more = 0;  // stages of a tile that come after its products

  __device__ explicit Ring(const void* shared) : data(SharedAddress(shared)) {}
  __device__ uint32_t Data() const { return data + stage * T::kStageBytes; }
  __device__ uint32_t Full(int s) const { return Slabs() + T::kStoreBytes + T::kPixelBytes + 16 * s; }
  __device__ uint32_t Empty(int s) const { return Full(s) + 8; }
  __device__ uint32_t Turn(int warpgroup) const { return Full(kMaxStages) + 8 * warpgroup; }
  __device__ uint32_t Full() const { return Full(stage); }
  // Between loads and products, where something else comes: pixels that patches follow are there, or y is transposed,
  // or this step of the filter that is kept.
  __device__ uint32_t Between(int s) const { return Turn(kConsumers) + 8 * s; }
  __device__ uint32_t Kept(int step) const { return data + T::kStages * T::kStageBytes + step * T::kBytesB; }
  __device__ uint32_t Slabs() const { return data + T::kStages * T::kStageBytes + kKeptBytes<T>; }
  static __device__ int* Pixels(unsigned char* shared, int warpgroup) {
    return reinterpret_cast<int*>(shared + T::kStages * T::kStageBytes + kKeptBytes<T> + T::kStoreBytes) +
           warpgroup * T::kRows;
  }
  __device__ void Next() {
    if (++stage == T::kStages) stage = 0, parity ^= 1;
  }
  __device__ void Skip(int steps) {
    const int on = stage + steps, rounds = on / T::kStages;
    stage = on - rounds * T::kStages;
    parity ^= rounds & 1;
  }

  // All threads of the block, once; a warp for every stage, since all wait for it. So many warpgroups take each stage,
  // and so many threads fill it, or come between.
  __device__ void Init(int takers = 1, int fillers = kProducers, int between = 1) const {
    static_assert(kConsumers <= T::kStages, "or turns would have no barriers");
    const int s = __shfl_sync(~0u, threadIdx.x / 32, 0);  // as in RunRoles
    if (threadIdx.x % 32 == 0 && s < max(T::kStages, kKeeps<T> ? kMostKeptSteps : 0)) {
      hopper::InitBarrier(Full(s), fillers);
      hopper::InitBarrier(Between(s), between);
      hopper::InitBarrier(Empty(s), takers * kWarpgroup / 32);
      if (s < kConsumers) hopper::InitBarrier(Turn(s), kWarpgroup / 32);
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

// A producer's turn: waits for a free stage and announces bytes at one of its barriers; the caller begins the loads,
// then calls Next.
template <class T>
__device__ void BeginStage(const Ring<T>& ring, int bytes, uint32_t barrier) {
  hopper::WaitBarrier(ring.Empty(ring.stage), ring.parity ^ 1);
  hopper::ArriveExpecting(barrier, bytes);
}
template <class T>
__device__ void BeginStage(const Ring<T>& ring, int bytes) {
  BeginStage(ring, bytes, ring.Full());
}

// Who multiplies says when a warp is done with a stage,
template <class T>
__device__ void Release(const Ring<T>& ring, int stage) {
  if (threadIdx.x % 32 == 0) hopper::Arrive(ring.Empty(stage));
}
// and with the one that the last products read, when the sums are there;
template <class T, class Sums>
__device__ void EndProducts(const Ring<T>& ring, int last, Sums& sums) {
  hopper::WaitForSums(sums);
  Release(ring, last);
}
// waits for its turn at the block's tile of this number, where the first needs no other's,
template <class T>
__device__ void BeginTurn(const Ring<T>& ring, int number) {
  const int warpgroup = number % 2;
  hopper::WaitBarrier(ring.Turn(warpgroup), (number / 2 + (warpgroup == 0)) % 2);
}
// and ends it when all products are issued, and the stages after them are there: then the other one is not more than a
// round ahead of any.
template <class T, class Sums>
__device__ void EndTurn(const Ring<T>& ring, int number, int last, Sums& sums) {
  Ring<T> after = ring;
  for (int i = 0; i < ring.more; ++i, after.Next()) hopper::WaitBarrier(after.Full(), after.parity);
  if (threadIdx.x % 32 == 0) hopper::Arrive(ring.Turn((number + 1) % 2));
  EndProducts(ring, last, sums);
}

// sums = A B over the ring's next `steps` stages, at least one, by the warpgroup whose turn it is at the block's tile
// of this number. Operands are K-major, or MN-major where transposed.
template <class T, bool kTransposedA, bool kTransposedB>
__device__ void MultiplyStages(Ring<T>& ring, int steps, int number, typename T::Sums& sums) {
  using In = typename T::In;
  // Of one wgmma: 32 bytes of every line, or 16 lines.
  constexpr int kStepA = (kTransposedA ? 16 * kLineBytes : 32) >> 4,
                kStepB = (kTransposedB ? 16 * kLineBytes : 32) >> 4;
  BeginTurn(ring, number);
  int last = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(T::kTripled ? ring.Between(ring.stage) : ring.Full(), ring.parity);
    if constexpr (kKeeps<T>) hopper::WaitBarrier(ring.Between(step), 0);
    const uint64_t a = hopper::Descriptor(ring.Data(), T::kSlab);
    const uint64_t b = hopper::Descriptor(kKeeps<T> ? ring.Kept(step) : ring.Data() + T::kBytesA, T::kSlab);
    constexpr int kRests = T::kRests >> 4;
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kLineBytes / 32; ++k)
#pragma unroll
      for (int m = 0; m < T::kBlocks; ++m) {
        const uint64_t rows = a + m * (T::kSlab >> 4) + k * kStepA, columns = b + k * kStepB;
        const auto multiply = [&](uint64_t of_a, uint64_t of_b, bool add) {
          hopper::Multiply<In, T::kColumns, kTransposedA, kTransposedB>(sums[m], of_a, of_b, add);
        };
        const bool add = step > 0 || k > 0;
        if constexpr (T::kTripled) {
          multiply(rows + kRests, columns, add);
          multiply(rows, columns + kRests, true);
        }
        multiply(rows, columns, T::kTripled || add);
      }
    hopper::CommitProducts();
    // One stage's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (step > 0) Release(ring, last);
    last = ring.stage;
    ring.Next();
  }
  EndTurn(ring, number, last, sums);
}

template <class T>
using HalfTile = WgmmaTile<typename T::In, T::kRows / 2, T::kColumns>;

// The same by both warpgroups, which take every stage, and some of the rows each, from this 64th on. What others than
// the TMA unit have gathered must be shown to wgmma first.
template <class T, bool kTransposedA, bool kTransposedB, bool kGathered = false, int kBlocks>
__device__ void MultiplyStagesTogether(Ring<T>& ring, int steps, int first, float (&sums)[kBlocks][T::kColumns / 2]) {
  constexpr int kStepA = (kTransposedA ? 16 * kLineBytes : 32) >> 4,
                kStepB = (kTransposedB ? 16 * kLineBytes : 32) >> 4;
  int last = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(ring.Full(), ring.parity);
    if constexpr (kGathered) hopper::ShowSharedToTma();
    const uint64_t a = hopper::Descriptor(ring.Data() + first * T::kSlab, T::kSlab);
    const uint64_t b = hopper::Descriptor(ring.Data() + T::kBytesA, T::kSlab);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
        hopper::Multiply<typename T::In, T::kColumns, kTransposedA, kTransposedB>(
            sums[m], a + m * (T::kSlab >> 4) + k * kStepA, b + k * kStepB, step > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<1>();
    if (step > 0) Release(ring, last);
    last = ring.stage;
    ring.Next();
  }
  EndProducts(ring, last, sums);
}

// Splits the block by role: produce(i) runs in each of the threads that fill the stages, consume(warpgroup) in the two
// that multiply, which take the block's first, third, ... tile and the others, help(i) in the warps that are left.
// Registers move from those that do not multiply to those that do.
template <int kThreads = kProducers, int kRegisters = 40, class Produce, class Consume, class Help>
__device__ void RunRoles(const Produce& produce, const Consume& consume, const Help& help) {
  // The same in all of a warp, as the compiler knows only so: what follows from it needs no vector registers then.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == kConsumers) {
    hopper::SetRegisters<kRegisters, false>();
    const int warp = threadIdx.x / 32 - kConsumers * kWarpgroup / 32;
    if (warp >= kThreads)
      help(warp - kThreads);
    else if (hopper::IsElected())
      produce(warp);
    __syncwarp();
  } else {
    hopper::SetRegisters<(504 - kRegisters) / 2, true>();
    consume(warpgroup);
    if (threadIdx.x % kWarpgroup == 0) hopper::WaitForStoreReads<0>();
  }
}
template <int kThreads = kProducers, int kRegisters = 40, class Produce, class Consume>
__device__ void RunRoles(const Produce& produce, const Consume& consume) {
  RunRoles<kThreads, kRegisters>(produce, consume, [](int) {});
}

// Launches one block a multiprocessor, or fewer, that go over the tiles together; or clusters that have one tile each.
template <class T, class... Params, class... Args>
cudaError_t LaunchPersistent(void (*kernel)(Params...), int64_t tiles, int cluster, cudaStream_t stream,
                             Args&&... args) {
  int device = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  const int64_t blocks = cluster > 1 ? tiles * cluster : std::min<int64_t>(tiles, multiprocessors);
  return LaunchKernel(kernel, Grid{blocks, T::kThreads, T::kSharedBytes, cluster}, stream, args...);
}

// Calls f with the TypeTag of the tile.
template <class F>
cudaError_t VisitWgmmaTile(const Problem& p, const Config& config, F&& f) {
  const auto with_type = [&](auto in) {
    using In = typename decltype(in)::type;
    switch (config.tile) {
      case Tile::kWgmma128x128:
        return f(TypeTag<WgmmaTile<In, 128, 128>>());
      case Tile::kWgmma256x64:
        return f(TypeTag<WgmmaTile<In, 256, 64>>());
      case Tile::kWgmma128x64:
        return f(TypeTag<WgmmaTile<In, 128, 64>>());
      case Tile::kWgmma64x128:
        return f(TypeTag<WgmmaTile<In, 64, 128>>());
      case Tile::kWgmma64x64:
        return f(TypeTag<WgmmaTile<In, 64, 64>>());
      case Tile::kWgmma128x160:
        return f(TypeTag<WgmmaTile<In, 128, 160, sizeof(In) == 4>>());
      case Tile::kWgmma128x128Copied:
        return f(TypeTag<WgmmaTile<In, 128, 128, true>>());
      case Tile::kWgmma256x160:
        if constexpr (sizeof(In) == 2) return f(TypeTag<WgmmaTile<In, 256, 160>>());
        return cudaErrorInvalidValue;
      case Tile::kWgmma128x256:
        if constexpr (sizeof(In) == 4) return f(TypeTag<WgmmaTile<In, 128, 256, true>>());
        return cudaErrorInvalidValue;
      default:
        return cudaErrorInvalidValue;
    }
  };
  if (p.Tripled()) {
    if (config.tile == Tile::kWgmma128x128) return f(TypeTag<WgmmaTile<float, 128, 128, true, true, false, true>>());
    if (config.tile == Tile::kWgmma128x64) return f(TypeTag<WgmmaTile<float, 128, 64, true, true, false, true>>());
    return cudaErrorInvalidValue;
  }
  if (p.in == DType::kF32) return with_type(TypeTag<float>());
  return p.in == DType::kBF16 ? with_type(TypeTag<__nv_bfloat16>()) : with_type(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
