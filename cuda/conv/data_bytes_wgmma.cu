// Forward convolution of 8-bit integers and floats as an implicit matrix product on Hopper's tensor cores, at twice the
// rate of 16-bit floats.
//
// Rows are positions of a phase and columns features, as in data_wgmma.cu, and a step is a line of 128 channels of one
// tap, loaded by the TMA unit. wgmma takes bytes K-major alone, so a first kernel writes the filter as [taps, features,
// channels]; and a second one the operand, if its pixels are no whole 16 bytes. Two warpgroups share every stage, 64
// rows each.
//
// Integers are exact. The products of 8-bit floats are added by the tensor cores with some 13 bits behind the binary
// point of the largest, so that the sum of a step goes to registers of its own and is added to the others in float.
#include <algorithm>

#include "cuda/common/hopper_bytes.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/bytes_pack.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/tensor_map.h"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_place.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  CUtensorMap operand[kMaxMaps], filter;
  WgmmaPhase phase[kMaxMaps];
  int first_tile[kMaxMaps + 1];  // of each phase, in tiles of rows
  int tiles, columns;
  WgmmaRow in_row;
  FastDiv run;     // lines of channels: all
  bool scattered;  // the rows of a phase are not neighbours in the result
  int window[kRank], out[kRank];
  bool whole_runs;  // of four columns
  DType result_type;
  Float8Kinds e5m2;
  Epilogue epilogue;
};

template <class Sum_, int kColumns_>
struct BytesTile {
  using Sum = Sum_;
  static constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kRows = 64 * kConsumers, kColumns = kColumns_, kLine = kLineBytes;
  static constexpr int kBytesA = kRows * kLine, kStageBytes = kBytesA + kColumns * kLine;
  // Sums of 16 rows and 32 columns wait in each warp's slab to be stored.
  static constexpr int kSlab = 16 * 32 * 4, kSlabBytes = kConsumers * 4 * kSlab, kBarrierBytes = 128;
  static constexpr int kFactorBytes = kConsumers * kColumns * int(sizeof(ColumnFactors));
  static constexpr int kMoreBytes = kSlabBytes + kBarrierBytes + kFactorBytes;
  static constexpr int kStages = std::min(8, ((227 << 10) - kMoreBytes) / kStageBytes);
  static constexpr int kSharedBytes = kStages * kStageBytes + kMoreBytes;
};

// A block's shared memory, and where a thread is in the stages' round.
template <class T>
struct BytesRing : hopper::RingPlace {
  uint32_t data;

  __device__ explicit BytesRing(const void* shared) : data(SharedAddress(shared)) {}
  __device__ uint32_t Data() const { return data + stage * T::kStageBytes; }
  __device__ uint32_t Slab(int warp) const { return data + T::kStages * T::kStageBytes + warp * T::kSlab; }
  __device__ uint32_t Full(int s) const { return data + T::kStages * T::kStageBytes + T::kSlabBytes + 16 * s; }
  __device__ uint32_t Empty(int s) const { return Full(s) + 8; }
  static __device__ ColumnFactors* Factors(unsigned char* shared, int warpgroup) {
    return reinterpret_cast<ColumnFactors*>(shared + T::kSharedBytes - T::kFactorBytes) + warpgroup * T::kColumns;
  }
  __device__ void Next() { RingPlace::Next(T::kStages); }
  __device__ void Init() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < T::kStages; ++s) {
        hopper::InitBarrier(Full(s), 2);
        hopper::InitBarrier(Empty(s), T::kConsumers * T::kWarpgroup / 32);
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

template <class T>
__device__ void BeginStage(const BytesRing<T>& ring, int bytes) {
  hopper::WaitBarrier(ring.Empty(ring.stage), ring.parity ^ 1);
  hopper::ArriveExpecting(ring.Full(ring.stage), bytes);
}

// One thread loads pixels and another the filter.
template <class T, int kDimensions>
__device__ void ProducePixels(const Params& p, BytesRing<T> ring) {
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    int at[kRank];
    const int image = FirstPixel(f, place.row, at);
    ForEachStep(p, f, 0, f.steps, [&](int line, int, const int (&offset)[kRank]) {
      BeginStage(ring, T::kBytesA);
      hopper::LoadPixels<kDimensions>(ring.Data(), &p.operand[place.phase], ring.Full(ring.stage), line * T::kLine, at,
                                      image, offset);
      ring.Next();
    });
  }
}

template <class T>
__device__ void ProduceFilter(const Params& p, BytesRing<T> ring) {
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    ForEachStep(p, f, 0, f.steps, [&](int line, int tap, const int (&)[kRank]) {
      BeginStage(ring, T::kStageBytes - T::kBytesA);
      hopper::LoadBox(ring.Data() + T::kBytesA, &p.filter, ring.Full(ring.stage), line * T::kLine, place.column,
                      tap + place.tap);
      ring.Next();
    });
  }
}

template <class T>
__device__ __forceinline__ void Release(const BytesRing<T>& ring, int stage) {
  if (threadIdx.x % 32 == 0) hopper::Arrive(ring.Empty(stage));
}

// sums = A B over the ring's next `steps` stages, of this warpgroup's rows.
template <class T>
__device__ void MultiplyBytes(const Params&, BytesRing<T>& ring, int steps, int warpgroup,
                              int (&sums)[T::kColumns / 2]) {
  int last = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(ring.Full(ring.stage), ring.parity);
    const uint64_t a = hopper::Descriptor(ring.Data() + warpgroup * 64 * T::kLine, 0);
    const uint64_t b = hopper::Descriptor(ring.Data() + T::kBytesA, 0);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < T::kLine / 32; ++k)
      hopper::MultiplyIntegers<T::kColumns>(sums, a + k * 2, b + k * 2, step > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<1>();
    if (step > 0) Release(ring, last);
    last = ring.stage;
    ring.Next();
  }
  hopper::WaitForProducts<0>();
  if (steps > 0) Release(ring, last);
  hopper::Settle(sums);
}

template <class T>
__device__ void MultiplyBytes(const Params& p, BytesRing<T>& ring, int steps, int warpgroup,
                              float (&sums)[T::kColumns / 2]) {
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(ring.Full(ring.stage), ring.parity);
    const uint64_t a = hopper::Descriptor(ring.Data() + warpgroup * 64 * T::kLine, 0);
    const uint64_t b = hopper::Descriptor(ring.Data() + T::kBytesA, 0);
    float part[T::kColumns / 2];
    const auto multiply = [&](auto e5m2_a, auto e5m2_b) {
      hopper::BeginProducts();
#pragma unroll
      for (int k = 0; k < T::kLine / 32; ++k)
        hopper::MultiplyFloats8<decltype(e5m2_a)::value, decltype(e5m2_b)::value, T::kColumns>(part, a + k * 2,
                                                                                               b + k * 2, k > 0);
      hopper::CommitProducts();
      hopper::WaitForSums(part);
    };
    if (p.e5m2.a) {
      p.e5m2.b ? multiply(std::true_type(), std::true_type()) : multiply(std::true_type(), std::false_type());
    } else {
      p.e5m2.b ? multiply(std::false_type(), std::true_type()) : multiply(std::false_type(), std::false_type());
    }
    Release(ring, ring.stage);
    ring.Next();
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) sums[i] += part[i];
  }
}

// Stores a warp's 16 rows, 32 columns at a time, through its slab. The loop is not unrolled, since it holds the code of
// every activation, and takes the sums from registers that rotate.
template <class T>
__device__ void StoreBytes(const Params& p, uint32_t slab, const WgmmaPlace& place, int first_row,
                           typename T::Sum (&sums)[T::kColumns / 2], const ColumnFactors* factors, void* out) {
  using Sum = typename T::Sum;
  constexpr int kRounds = 4, kLanes = 8;  // lanes store a row's 32 columns
  const WgmmaPhase& f = p.phase[place.phase];
  const int lane = threadIdx.x % 32, chunk = lane % kLanes;
  // Neither the stores of eight rows by two columns nor the loads of four rows meet in a bank.
  const auto place_of = [](int row, int chunk) { return row * 128 + ((chunk ^ (row % 4 * 2 + row / 4 % 2)) << 4); };
  int pixels[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    pixels[i] = ResultPixel(p, f, place, first_row + lane / kLanes + 4 * i, p.scattered);
#pragma unroll 1
  for (int part = 0; part < T::kColumns / 32; ++part) {
    const int column = place.column + part * 32 + chunk * 4;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[2];
        memcpy(words, &sums[4 * j + 2 * half], sizeof(words));
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(
                         slab + place_of(lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8),
                     "r"(words[0]), "r"(words[1])
                     : "memory");
      }
    Rotate<16>(sums);
    __syncwarp();
    const BytesEpilogue epilogue(p.result_type, p.epilogue, [&](int i) { return factors[part * 32 + chunk * 4 + i]; });
    const auto take = [&](int i) {
      uint32_t words[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(slab + place_of(lane / kLanes + 4 * i, chunk)));
      Vec<Sum, 4> four;
      memcpy(&four, words, sizeof(four));
      return four;
    };
    // Around, so that the next 32 columns find them in their order.
    const auto next_pixel = [&] {
      const int pixel = pixels[0];
      pixels[0] = pixels[1], pixels[1] = pixels[2], pixels[2] = pixels[3], pixels[3] = pixel;
      return pixel;
    };
    if (p.whole_runs) {
      epilogue.ForRows(out, [&](const auto& store, auto unroll) {
#pragma unroll decltype(unroll)::value
        for (int i = 0; i < kRounds; ++i)
          if (const int pixel = next_pixel(); pixel >= 0 && column < p.columns)
            store(take(i), int64_t{pixel} * p.columns + column);
      });
    } else {
#pragma unroll 1
      for (int i = 0; i < kRounds; ++i) {
        const int pixel = next_pixel(), count = pixel < 0 ? 0 : min(4, p.columns - column);
        Vec<Sum, 4> four = take(i);
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
          epilogue.StoreAny(Vec<Sum, 1>{four.v[0]}, j, out, int64_t{pixel} * p.columns + column + j);
          Rotate<1>(four.v);
        }
      }
    }
  }
}

template <class T>
__device__ void Consume(const Params& p, BytesRing<T> ring, int warpgroup, ColumnFactors* factors, void* out) {
  const int warp = threadIdx.x / 32, thread = threadIdx.x % T::kWarpgroup;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const WgmmaPlace place(p, tile, T());
    const int steps = p.phase[place.phase].steps;
    // What comes from far away first.
    const int column = thread < T::kColumns ? place.column + thread : p.columns;
    const ColumnFactors mine = LoadFactors(p.result_type, p.epilogue, column < p.columns ? column : -1);
    typename T::Sum sums[T::kColumns / 2];
    MultiplyBytes<T>(p, ring, steps, warpgroup, sums);
    if (steps == 0) {  // a phase that meets no tap
#pragma unroll
      for (auto& sum : sums) sum = 0;
    }
    hopper::SyncWarpgroup(1 + warpgroup);  // the last tile's are read
    if (thread < T::kColumns) factors[thread] = mine;
    hopper::SyncWarpgroup(1 + warpgroup);
    StoreBytes<T>(p, ring.Slab(warp), place, 16 * warp, sums, factors, out);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) DataBytesKernel(const __grid_constant__ Params p, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const BytesRing<T> ring(shared);
    ring.Init();
    const int warpgroup = threadIdx.x / T::kWarpgroup;
    if (warpgroup == T::kConsumers) {
      hopper::SetRegisters<40, false>();
      const int warp = threadIdx.x % T::kWarpgroup / 32;
      if (warp == 0 && hopper::IsElected())
        hopper::VisitDimensions(p.phase[0].dimensions, [&](auto d) { ProducePixels<T, decltype(d)::value>(p, ring); });
      else if (warp == 1 && hopper::IsElected())
        ProduceFilter<T>(p, ring);
      __syncwarp();
    } else {
      hopper::SetRegisters<232, true>();
      Consume<T>(p, ring, warpgroup, BytesRing<T>::Factors(shared, warpgroup), out);
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const void* x, const void* w, void* y, void* workspace,
                       const Epilogue& epilogue, cudaStream_t stream) {
  Params q = {};
  q.epilogue = epilogue;
  q.result_type = p.out;
  q.e5m2 = {p.in == DType::kE5M2, p.filter == DType::kE5M2};
  MappedPhase mapped[kMaxMaps];
  const int phases = MapPhases(p, mapped);
  if (phases == 0) return cudaErrorInvalidValue;
  q.columns = int(p.features);
  q.in_row = WgmmaRow(p.features, T::kColumns, mapped[0], false);
  q.scattered = phases > 1 || q.in_row.phases > 1;
  q.run = FastDiv(CeilDiv(p.channels, T::kLine));
  q.whole_runs = p.features % 4 == 0;
  const int64_t channels = CeilDiv(p.channels, 16) * 16;
  cudaError_t e = Pack(p, &x, &w, workspace, stream);
  for (int i = 0; i < phases; ++i) {
    q.phase[i] = WgmmaPhase(p, mapped[i], q.run.divisor);
    q.first_tile[i + 1] = q.first_tile[i] + int(CeilDiv(mapped[i].rows, T::kRows));
    if (e == cudaSuccess) e = EncodePixels(&q.operand[i], p.in, x, p.images, p.x, channels, mapped[i].map, T::kRows);
  }
  q.in_row.SetProblems(1, phases, q.first_tile[phases], 0, 0);
  q.tiles = q.first_tile[phases] * int(q.in_row.tiles.divisor);
  for (int d = 0; d < kRank; ++d) {
    q.window[d] = int(p.window[d]);
    q.out[d] = int(p.y[d]);
  }
  if (e == cudaSuccess)
    e = EncodeBoxes(&q.filter, p.in, w, {channels, p.features, p.Taps()}, {T::kLine, T::kColumns, 1});
  int device = 0, multiprocessors = 0;
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  const Grid blocks = {std::min(q.tiles, multiprocessors), T::kThreads, T::kSharedBytes};
  return LaunchKernel(DataBytesKernel<T>, blocks, stream, q, y);
}

}  // namespace

cudaError_t LaunchDataBytesWgmma(const Problem& p, const Config& config, const void* x, const void* w, void* y,
                                 void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  const auto with_sums = [&](auto sum) {
    using Sum = typename decltype(sum)::type;
    return (config.tile == Tile::kWgmma128x64
                ? LaunchTile<BytesTile<Sum, 64>>
                : LaunchTile<BytesTile<Sum, 128>>)(p, x, w, y, workspace, epilogue, stream);
  };
  return p.in == DType::kS8 ? with_sums(TypeTag<int>()) : with_sums(TypeTag<float>());
}

}  // namespace jaxdnn::conv
