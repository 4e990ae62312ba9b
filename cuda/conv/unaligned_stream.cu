// Forward convolution and data gradient of unaligned channels (see unaligned.cu) where all of the filter stays in
// shared memory: of up to 160 bytes of channels and 72 features.
//
// A block has a run of rows, and the pixels that they read are a run of memory, but for the padding. So each comes
// once: in pieces of 64 rows, by bulk copies of bytes as they lie in memory. A warpgroup shifts a piece's pixels to a
// ring of rows, every chunk of 16 bytes to where it belongs: chunks lie side by side row by row, so that a tap's
// operand is the ring from some rows later on. The ring's first piece is there twice, also behind the last one, so that
// no operand is cut. What padding modes read beyond an edge is no part of the run, and comes from memory element by
// element.
//
// Two warpgroups multiply 64 rows each in turns, so that one stores while the other's products run. What bounds them is
// shared memory: a product of 64 rows and 72 columns reads 4352 bytes in its 36 cycles.
#include "cuda/conv/unaligned.h"
#include "cuda/conv/unaligned_slabs.cuh"
#include "cuda/conv/unaligned_store.cuh"

namespace jaxdnn::conv {
namespace {

using Plan = UnalignedStreamPlan;
constexpr int kWarpgroup = 128, kConsumers = Plan::kWarpgroups, kUnit = Plan::kUnit, kColumns = UnalignedPlan::kColumns;
constexpr int kMultipliers = kConsumers * kWarpgroup, kShifters = kWarpgroup;
constexpr int kThreads = kMultipliers + kShifters + 2 * 32, kParts = kShifters / kUnit;  // threads that shift a row

struct StreamParams : UnalignedParams {
  int units, slots, ahead;  // of rows, in all; of the ring; that one of the result reads
  int row_bytes, piece_bytes;
};

// The operand's pixels [first, end) are in a piece, `shift` bytes from its beginning.
struct alignas(16) Run {
  int first, end, shift;
};

// The parts of a block's shared memory.
struct StreamShared {
  uint32_t ring, slabs, pieces, barriers;
  unsigned char* piece;
  int* results;  // the result's pixels, of the rows of each slot
  int piece_bytes;

  __device__ StreamShared(const StreamParams& q, unsigned char* shared)
      : ring(SharedAddress(shared)), piece_bytes(q.piece_bytes) {
    slabs = ring + q.strip_bytes;
    pieces = slabs + q.taps * q.slab_bytes;
    piece = shared + (pieces - ring);
    unsigned char* const next = piece + Plan::kPieces * q.piece_bytes;
    results = reinterpret_cast<int*>(next);
    barriers = SharedAddress(next) + q.slots * kUnit * int(sizeof(int));
  }
  // Behind a piece's bytes: what they are, and the pixel that each row reads.
  __device__ Run* RunOf(int i) const {
    return reinterpret_cast<Run*>(piece + (i + 1) * piece_bytes - sizeof(Run) - kUnit * sizeof(int));
  }
  __device__ int* PixelsOf(int i) const {
    return reinterpret_cast<int*>(piece + (i + 1) * piece_bytes - kUnit * sizeof(int));
  }
  // Barriers: for pieces that have come, and have been shifted; for slots of the ring that are there, and have been
  // multiplied; for the filter; and for whose turn it is to multiply.
  __device__ uint32_t PieceFull(int i) const { return barriers + 16 * i; }
  __device__ uint32_t PieceEmpty(int i) const { return PieceFull(i) + 8; }
  __device__ uint32_t SlotFull(int i) const { return PieceFull(Plan::kPieces + i); }
  __device__ uint32_t SlotEmpty(int i) const { return SlotFull(i) + 8; }
  __device__ uint32_t SlabsFull() const { return SlotFull(Plan::kMostSlots); }
  __device__ uint32_t Turn(int warpgroup) const { return SlabsFull() + 8 + 8 * warpgroup; }

  // All threads of the block, once.
  __device__ void Init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Plan::kPieces; ++i) {
        hopper::InitBarrier(PieceFull(i), 32);
        hopper::InitBarrier(PieceEmpty(i), kShifters);
      }
      for (int i = 0; i < Plan::kMostSlots; ++i) {
        hopper::InitBarrier(SlotFull(i), kShifters + 32);
        hopper::InitBarrier(SlotEmpty(i), kMultipliers);
      }
      hopper::InitBarrier(SlabsFull(), 1);
      for (int i = 0; i < kConsumers; ++i) hopper::InitBarrier(Turn(i), kWarpgroup / 32);
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

// The units that are the block's, and as many pieces as they read.
struct Share {
  int first, units, pieces;

  __device__ explicit Share(const StreamParams& q) {
    first = static_cast<int>(int64_t{q.units} * blockIdx.x / gridDim.x);
    units = static_cast<int>(int64_t{q.units} * (blockIdx.x + 1) / gridDim.x) - first;
    pieces = units + q.ahead - 1;
  }
};

// Has the pixels of each piece copied, by one warp.
template <class In>
__device__ void BringPieces(const StreamParams& q, const StreamShared& shared, const Share& share,
                            const AlignedArray<In>& in) {
  const int lane = threadIdx.x % 32;
  hopper::RingPlace turn;
  for (int piece = 0; piece < share.pieces; ++piece) {
    int first = INT_MAX, last = -1, pixels[kUnit / 32];
#pragma unroll
    for (int i = 0; i < kUnit / 32; ++i) {
      bool own;
      pixels[i] = OperandPixel(q, (share.first + piece) * kUnit + 32 * i + lane, 0, &own);
      if (own) first = min(first, pixels[i]), last = max(last, pixels[i]);
    }
    first = __reduce_min_sync(~0u, first), last = __reduce_max_sync(~0u, last);
    hopper::WaitBarrier(shared.PieceEmpty(turn.stage), turn.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kUnit / 32; ++i) shared.PixelsOf(turn.stage)[32 * i + lane] = pixels[i];
    const char* const from = reinterpret_cast<const char*>(in.begin + int64_t{first} * q.channels);
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
    const uint32_t to = shared.pieces + turn.stage * q.piece_bytes;
    int bytes = last < 0 ? 0 : (shift + (last + 1 - first) * q.row_bytes + 15) / 16 * 16;
    if (bytes > 0 && from - shift + bytes > reinterpret_cast<const char*>(in.end)) {
      bytes -= 16;  // what is left of the array behind its last whole chunk comes at once
      const In* const rest = reinterpret_cast<const In*>(from - shift + bytes) + lane;
      if (rest < in.end) StoreElement(to + bytes + lane * int(sizeof(In)), *rest);
    }
    // Each lane for what it has stored.
    if (lane > 0) {
      hopper::Arrive(shared.PieceFull(turn.stage));
    } else {
      *shared.RunOf(turn.stage) = {first, last + 1, shift};
      hopper::ArriveExpecting(shared.PieceFull(turn.stage), bytes);
      if (bytes > 0) hopper::CopyBulk(to, from - shift, bytes, shared.PieceFull(turn.stage));
    }
    __syncwarp();
    turn.Next(Plan::kPieces);
  }
}

// Looks up where rows of the result are stored, by one warp.
__device__ void FindResults(const StreamParams& q, const StreamShared& shared, const Share& share) {
  const int lane = threadIdx.x % 32;
  hopper::RingPlace turn;
  for (int piece = 0; piece < share.pieces; ++piece) {
    int pixels[kUnit / 32];
#pragma unroll
    for (int i = 0; i < kUnit / 32; ++i) pixels[i] = ResultPixel(q, (share.first + piece) * kUnit + 32 * i + lane);
    hopper::WaitBarrier(shared.SlotEmpty(turn.stage), turn.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kUnit / 32; ++i) shared.results[turn.stage * kUnit + 32 * i + lane] = pixels[i];
    hopper::Arrive(shared.SlotFull(turn.stage));
    turn.Next(q.slots);
  }
}

// The chunks of a row that are a thread's.
template <class In, int kChunks>
struct RowPart {
  uint32_t words[4 * kChunks];

  __device__ void Clear() {
#pragma unroll
    for (uint32_t& word : words) word = 0;
  }
  // From shared memory, where they begin anywhere. What is behind them is masked.
  __device__ void Load(uint32_t from, const uint32_t (&mask)[4 * kChunks]) {
    const int over = from % 4;
    uint32_t next = LoadWord(from - over);
#pragma unroll
    for (int i = 0; i < 4 * kChunks; ++i) {
      const uint32_t word = next;
      if (sizeof(In) == 2 || i + 1 < 4 * kChunks) next = LoadWord(from - over + 4 * i + 4);
      words[i] = (sizeof(In) == 2 ? __funnelshift_r(word, next, over * 8) : word) & mask[i];
    }
  }
  // From memory, one by one.
  __device__ void Fetch(const In* from, int bytes) {
    Clear();
    FetchElements<4 * kChunks>(from, bytes, words);
  }
  __device__ uint32_t (&Chunk(int i))[4] { return reinterpret_cast<uint32_t (&)[4]>(words[4 * i]); }
};

template <class In>
__device__ __forceinline__ void StoreTwice(uint32_t (&chunk)[4], uint32_t to, uint32_t mirror) {
  if constexpr (sizeof(In) == 4) RoundToTf32(chunk);
  StoreChunk(to, chunk[0], chunk[1], chunk[2], chunk[3]);
  if (mirror != 0) StoreChunk(to + mirror, chunk[0], chunk[1], chunk[2], chunk[3]);
}

// Shifts the rows of each piece to their places, by a warpgroup: a thread has half of a row's chunks.
template <int kSteps, class In>
__device__ void ShiftPieces(const StreamParams& q, const StreamShared& shared, const Share& share,
                            const AlignedArray<In>& in) {
  constexpr int kAll = 2 * kSteps, kChunks = (kAll + kParts - 1) / kParts;
  const int thread = threadIdx.x - kMultipliers, mine = thread % kUnit, own = thread / kUnit * kChunks;
  const int begin = own * 16, bytes = max(0, min(q.row_bytes - begin, kChunks * 16));
  uint32_t mask[4 * kChunks];
  MaskWords(bytes, mask);
  const bool aligned = q.row_bytes % 16 == 0;
  // Neighbours read such chunks that they meet in no bank.
  const int turned = q.row_bytes % 32 == 0 ? mine : 0;
  hopper::RingPlace from, to;
  for (int piece = 0; piece < share.pieces; ++piece) {
    hopper::WaitBarrier(shared.PieceFull(from.stage), from.parity);
    const Run run = *shared.RunOf(from.stage);
    const int pixel = shared.PixelsOf(from.stage)[mine];
    hopper::WaitBarrier(shared.SlotEmpty(to.stage), to.parity ^ 1);
    const uint32_t row = shared.pieces + from.stage * q.piece_bytes + run.shift + (pixel - run.first) * q.row_bytes;
    const uint32_t place = shared.ring + (to.stage * kUnit + mine) * 16;
    const uint32_t mirror = to.stage == 0 ? q.slots * kUnit * 16 : 0;
    const bool is_here = run.first <= pixel && pixel < run.end;
    if (aligned && (is_here || pixel < 0)) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (own + i >= kAll) break;
        const int chunk = (own + i + turned) % kAll;
        uint32_t v[4] = {};
        if (is_here && chunk * 16 < q.row_bytes) hopper::LoadWords(v, row + chunk * 16);
        StoreTwice<In>(v, place + chunk * q.pixels * 16, mirror);
      }
    } else {
      RowPart<In, kChunks> part;
      if (is_here)
        part.Load(row + begin, mask);
      else if (pixel >= 0)
        part.Fetch(in.begin + int64_t{pixel} * q.channels + begin / int(sizeof(In)), bytes);
      else
        part.Clear();
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        if (own + i < kAll) StoreTwice<In>(part.Chunk(i), place + (own + i) * q.pixels * 16, mirror);
    }
    // Reads must be over when the next copy writes there, and what was written be seen by wgmma.
    hopper::ShowSharedToTma();
    hopper::Arrive(shared.PieceEmpty(from.stage));
    hopper::Arrive(shared.SlotFull(to.stage));
    from.Next(Plan::kPieces);
    to.Next(q.slots);
  }
}

// Begins the sums of 64 rows, whose operand begins at row `first` of the ring.
template <int kSteps, class In>
__device__ __forceinline__ void BeginUnit(const StreamParams& q, const StreamShared& shared, int first,
                                          float (&sums)[kColumns / 2]) {
  // A row is 16 bytes, which is what descriptors count in.
  const uint64_t ring = hopper::PlainDescriptor(shared.ring, q.pixels * 16, 128, false);
  const uint64_t slabs = hopper::PlainDescriptor(shared.slabs, kColumns * 16, 128, false);
  const uint32_t ring_high = ring >> 32, slabs_high = slabs >> 32;
  const auto at = [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; };
  const int step_a = 2 * q.pixels, step_b = 2 * kColumns, slab = q.slab_bytes / 16;
  const int next_line = q.line_step - q.window_width * q.dilation[2];
  const int rows = q.slots * kUnit;
  uint32_t b = static_cast<uint32_t>(slabs);
  int row = first, column = 0;
#pragma unroll 1
  for (int tap = 0; tap < q.taps; ++tap) {
    const uint32_t a = static_cast<uint32_t>(ring) + (row < rows ? row : row - rows);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      hopper::Multiply<In, kColumns, false, false>(sums, at(a + k * step_a, ring_high), at(b + k * step_b, slabs_high),
                                                   true);
    hopper::CommitProducts();
    hopper::WaitForProducts<1>();
    b += slab;
    row += q.dilation[2];
    if (++column == q.window_width) column = 0, row += next_line;
  }
}

template <class In>
__device__ void MultiplyUnits(const StreamParams& q, const StreamShared& shared, const Share& share, void* out) {
  // By a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), warpgroup = warp / 4;
  hopper::RingPlace full, empty;
  int waited = 0, released = 0, slot = warpgroup;
  uint32_t turn = warpgroup == 0;
  const auto release = [&](int end) {
#pragma unroll 1
    for (; released < end; ++released) {
      hopper::Arrive(shared.SlotEmpty(empty.stage));
      empty.Next(q.slots);
    }
  };
  release(warpgroup);
  hopper::WaitBarrier(shared.SlabsFull(), 0);
  for (int unit = warpgroup; unit < share.units; unit += kConsumers) {
#pragma unroll 1
    for (; waited < unit + q.ahead; ++waited) {
      hopper::WaitBarrier(shared.SlotFull(full.stage), full.parity);
      full.Next(q.slots);
    }
    // All that its products do not need to wait for, before its turn.
    const int* const results = shared.results + slot * kUnit + warp % 4 * 16;
    const StorePlaces places([&](int i) { return results[i]; });
    float sums[kColumns / 2] = {};
    hopper::Settle(sums);
    hopper::VisitSteps<UnalignedPlan::kMostSteps>(q.steps, [&](auto steps) {
      hopper::WaitBarrier(shared.Turn(warpgroup), turn);
      BeginUnit<decltype(steps)::value, In>(q, shared, slot * kUnit, sums);
      ArriveWarp(shared.Turn((warpgroup + 1) % kConsumers));
      hopper::WaitForSums(sums);
    });
    turn ^= 1;
    // Those before this warpgroup's next unit, but none that it has not waited for.
    release(min(unit + kConsumers, waited));
    slot += kConsumers;
    if (slot >= q.slots) slot -= q.slots;
    StoreRowsAs<In>(q, places, 0, sums, out);
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads, 1)
    StreamKernel(const __grid_constant__ StreamParams q, AlignedArray<In> in, const unsigned char* slabs, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(128) unsigned char memory[];
    const StreamShared shared(q, memory);
    const Share share(q);
    shared.Init();
    if (threadIdx.x < kMultipliers) {
      MultiplyUnits<In>(q, shared, share, out);
    } else if (threadIdx.x < kMultipliers + kShifters) {
      hopper::VisitSteps<UnalignedPlan::kMostSteps>(
          q.steps, [&](auto steps) { ShiftPieces<decltype(steps)::value>(q, shared, share, in); });
    } else if (threadIdx.x < kMultipliers + kShifters + 32) {
      BringPieces(q, shared, share, in);
    } else {
      if (threadIdx.x % 32 == 0) {
        hopper::ArriveExpecting(shared.SlabsFull(), q.taps * q.slab_bytes);
        for (int i = 0; i < q.taps; ++i)
          hopper::CopyBulk(shared.slabs + i * q.slab_bytes, slabs + i * q.slab_bytes, q.slab_bytes, shared.SlabsFull());
      }
      __syncwarp();
      FindResults(q, shared, share);
    }
  }
}

}  // namespace

cudaError_t LaunchUnalignedStream(const Problem& problem, const UnalignedStreamPlan& plan, const void* operand,
                                  const void* filter, void* out, void* workspace, const Epilogue& epilogue,
                                  cudaStream_t stream) {
  const Problem p = AsForward(problem);
  StreamParams q = {};
  static_cast<UnalignedParams&>(q) = RowParams(problem, UnalignedRows(p));
  q.epilogue = epilogue;
  q.finish = !IsNone(epilogue);
  q.wide = p.out != p.in;
  q.columns = q.features = int(p.features);
  q.channels = int(p.channels);
  q.steps = plan.steps;
  q.slices = q.groups = 1;
  q.taps = int(p.Taps());
  q.tap_lines = int(p.window[1]);
  q.pixels = plan.RingRows();
  q.strip_bytes = plan.RingBytes();
  q.slab_bytes = plan.SlabBytes();
  q.units = int(plan.Units());
  q.slots = plan.slots;
  q.ahead = plan.ahead;
  q.row_bytes = int(p.channels * SizeOf(p.in));
  q.piece_bytes = plan.PieceBytes();

  int device = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  const Grid grid = {std::min<int64_t>(q.units, multiprocessors), kThreads, size_t(plan.SharedBytes())};
  return VisitSingleDType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    cudaError_t e = ArrangeFilter<In>(q, problem, filter, plan.FilterBytes(p), workspace, stream);
    if (e != cudaSuccess) return e;
    const auto* const begin = static_cast<const In*>(operand);
    const AlignedArray<In> array = {begin, begin + p.images * p.XPixels() * p.channels};
    return LaunchKernel(StreamKernel<In>, grid, stream, q, array, static_cast<const unsigned char*>(workspace), out);
  });
}

}  // namespace jaxdnn::conv
