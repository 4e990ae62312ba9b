// Forward convolution and data gradient as an implicit matrix product on Hopper's tensor cores, for 16-bit floats, and
// for floats as TF32.
//
// Rows are positions of a phase, columns the result's channels, and a step of the reduction is a line of channels of
// one tap: one im2col load, and a box of the filter [taps, channels, features], which forward is MN-major and in the
// data gradient K-major. TF32 has no MN-major operands, so that forward it goes through registers (wgmma_held.cuh).
// What lies past the last channel is read as zeros, of the filter too.
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_held.cuh"
#include "cuda/conv/wgmma_team.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  CUtensorMap operand[kMaxMaps], filter, result;
  MappedPhase phase[kMaxMaps];
  int phases, first_tile[kMaxMaps + 1];  // of each phase, in tiles of rows
  int tiles, column_tiles, columns;
  int lines;  // of channels
  int team;   // blocks that share a tile
  int window[kRank], out[kRank];
  int images;
  bool scattered;  // the rows of a phase are not neighbours in the result
  bool boxes;      // the sums are stored as they are, in the operands' type
  Epilogue epilogue;
};

// A tile of the grid.
struct Place {
  int phase, column, row;

  template <class T>
  __device__ Place(const Params& p, int tile, T) : phase(0) {
    const int row_tile = tile / p.column_tiles;
    column = (tile - row_tile * p.column_tiles) * T::kColumns;
    while (row_tile >= p.first_tile[phase + 1]) ++phase;
    row = (row_tile - p.first_tile[phase]) * T::kRows;
  }
};

// The image of a row, and its position there.
__device__ int Split(const MappedPhase& f, int row, int (&position)[kRank]) {
  const int plane = f.positions[1] * f.positions[2], image = row / (f.positions[0] * plane);
  int pixel = row - image * f.positions[0] * plane;
  position[0] = pixel / plane;
  pixel -= position[0] * plane;
  position[1] = pixel / f.positions[2];
  position[2] = pixel - position[1] * f.positions[2];
  return image;
}

// Where a row is in the result, in pixels; -1 past the last.
__device__ int ResultPixel(const Params& p, const MappedPhase& f, int row) {
  if (row >= f.rows) return -1;
  if (!p.scattered) return row;
  int at[kRank];
  int pixel = Split(f, row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) pixel = pixel * p.out[d] + f.first[d] + at[d] * f.period[d];
  return pixel;
}

// Whether the filter goes through registers.
template <class T, bool kForward>
constexpr bool kHeld = kForward && sizeof(typename T::In) == 4;

// Of a stage: a box of lines of features forward, the last of which may be half empty, or of channels.
template <class T, bool kForward>
constexpr int kLoadedBytes = T::kBytesA + (kForward ? T::kBytesB : T::kColumns * kLineBytes);

template <class T, bool kForward>
__device__ void LoadFilter(const Params& p, const Ring<T>& ring, int column, int line, int tap) {
  const uint32_t to = ring.Data() + T::kBytesA;
  if constexpr (kForward) {
#pragma unroll
    for (int slab = 0; slab * T::kLine < T::kColumns; ++slab)
      hopper::LoadBox(to + slab * T::kLine * kLineBytes, &p.filter, ring.Full(), column + slab * T::kLine,
                      line * T::kLine, tap);
  } else {
    hopper::LoadBox(to, &p.filter, ring.Full(), line * T::kLine, column, tap);
  }
}

template <class T, bool kForward, int kDimensions>
__device__ void Produce(const Params& p, Ring<T> ring) {
  hopper::PrefetchMap(&p.operand[0]);
  hopper::PrefetchMap(&p.filter);
  for (int tile = blockIdx.x / p.team; tile < p.tiles; tile += gridDim.x / p.team) {
    const Place place(p, tile, T());
    const MappedPhase& f = p.phase[place.phase];
    int at[kRank], offset[kRank] = {};
    const int image = Split(f, place.row, at);
#pragma unroll
    for (int d = 0; d < kRank; ++d) at[d] = f.map.lower[d] + at[d] * f.map.step[d];
    if (f.tap_count == 0) {
      // Past the last image and tap there are zeros.
      BeginStage(ring, kLoadedBytes<T, kForward>);
      hopper::LoadPixels<kDimensions>(ring.Data(), &p.operand[place.phase], ring.Full(), 0, at, p.images, offset);
      LoadFilter<T, kForward>(p, ring, place.column, 0, p.window[0] * p.window[1] * p.window[2]);
      ring.Next();
      continue;
    }
    const Share share(f.tap_count * p.lines, p.team);
    int step = share.first, tap[kRank] = {}, line = 0;
    if (step > 0) {
      int rest = step / p.lines;
      line = step - rest * p.lines;
#pragma unroll
      for (int d = kRank - 1; d >= 0; --d) tap[d] = rest % f.taps[d], rest /= f.taps[d];
    }
    while (step < share.end) {
      int number = 0;
#pragma unroll
      for (int d = 0; d < kRank; ++d) {
        offset[d] = (f.reversed[d] ? f.taps[d] - 1 - tap[d] : tap[d]) * f.distance[d];
        number = number * p.window[d] + f.first_tap[d] + tap[d] * f.tap_period[d];
      }
      for (; line < p.lines && step < share.end; ++line, ++step) {
        BeginStage(ring, kLoadedBytes<T, kForward>);
        hopper::LoadPixels<kDimensions>(ring.Data(), &p.operand[place.phase], ring.Full(), line * T::kLine, at, image,
                                        offset);
        LoadFilter<T, kForward>(p, ring, place.column, line, number);
        ring.Next();
      }
      line = 0;
      if (++tap[2] < f.taps[2]) continue;
      tap[2] = 0;
      if (++tap[1] < f.taps[1]) continue;
      tap[1] = 0;
      ++tap[0];
    }
  }
}

// The tile's rows in the result, in pixels, by the threads of a warpgroup.
template <class T>
__device__ void FindPixels(const Params& p, const MappedPhase& f, const Place& place, int warpgroup, int* pixels) {
  hopper::SyncWarpgroup(1 + warpgroup);  // the last tile's are read
  for (int i = threadIdx.x % kWarpgroup; i < T::kRows; i += kWarpgroup) pixels[i] = ResultPixel(p, f, place.row + i);
}

// Stores the sums in the operands' type: by TMA, or a phase's positions one by one.
template <class T>
__device__ void StoreBoxes(const Params& p, const MappedPhase& f, const Ring<T>& ring, int warpgroup,
                           const Place& place, const typename T::Sums& sums, typename T::In* out, int* pixels,
                           int& turn) {
  const int thread = threadIdx.x % kWarpgroup;
  if (p.scattered || T::kColumns % T::kLine != 0) FindPixels<T>(p, f, place, warpgroup, pixels);
  StoreSlabs<T>(ring.Slabs(), warpgroup, sums, turn, [&](int row, int column, uint32_t slab) {
    if (!p.scattered && column + T::kLine <= T::kColumns) {
      hopper::ShowSharedToTma();
      hopper::SyncWarpgroup(1 + warpgroup);
      if (thread == 0) {
        hopper::StoreBox(&p.result, slab, place.column + column, place.row + row);
        hopper::CommitStores();
      }
      return;
    }
    hopper::SyncWarpgroup(1 + warpgroup);
    const int chunk = thread % 8, in_tile = column + chunk * kVecLength<typename T::In>, first = place.column + in_tile;
    if (first >= p.columns || in_tile >= T::kColumns) return;
#pragma unroll
    for (int line = thread / 8; line < 64; line += kWarpgroup / 8) {
      const int pixel = pixels[row + line];
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(slab + line * kLineBytes + ((chunk ^ (line % 8)) << 4)));
      if (pixel >= 0) *reinterpret_cast<uint4*>(out + int64_t{pixel} * p.columns + first) = v;
    }
  });
}

// Stores the sums through the epilogue, 64 rows and 32 columns at a time, in floats through shared memory. The loop is
// not unrolled, since it holds the code of every activation.
template <class T, class Out>
__device__ void StoreFinished(const Params& p, const MappedPhase& f, const Ring<T>& ring, int warpgroup,
                              const Place& place, typename T::Sums& sums, Out* out, int* pixels, int& turn) {
  constexpr int kAcross = T::kColumns / 32, kRounds = 64 * 8 / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int chunk = thread % 8, line = thread / 8;  // of what it stores: 4 columns of every 16th row
  // Rows of four chunks that warps store together, and of eight that they load together, meet in no bank.
  const auto place_of = [](int row, int chunk) {
    return row * kLineBytes + ((chunk ^ (row % 4 * 2 + row / 4 % 2)) << 4);
  };
  FindPixels<T>(p, f, place, warpgroup, pixels);
  hopper::SyncWarpgroup(1 + warpgroup);
#pragma unroll 1
  for (int part = 0; part < T::kBlocks * kAcross; ++part, turn ^= 1) {
    const int row = part / kAcross * 64, column = place.column + part % kAcross * 32 + chunk * 4;
    const uint32_t slab = ring.Slabs() + (warpgroup * 2 + turn) * T::kSlab;
    // What comes from far away first.
    Vec<Out, 4> residual[kRounds];
    if (p.epilogue.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int pixel = pixels[row + line + 16 * i];
        if (pixel >= 0 && column < p.columns)
          residual[i] = *reinterpret_cast<const Vec<Out, 4>*>(static_cast<const Out*>(p.epilogue.residual) +
                                                              int64_t{pixel} * p.columns + column);
      }
    }
    float (&all)[T::kBlocks * T::kColumns / 2] = reinterpret_cast<float (&)[T::kBlocks * T::kColumns / 2]>(sums);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        hopper::StorePair(slab + place_of(16 * warp + lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8,
                          all[4 * j + 2 * half], all[4 * j + 2 * half + 1]);
    Rotate<16>(all);
    hopper::SyncWarpgroup(1 + warpgroup);
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      const int at = line + 16 * i;
      const int pixel = pixels[row + at];
      if (pixel >= 0 && column < p.columns) {
        float v[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(slab + place_of(at, chunk)));
        Add<Out>(v, p.epilogue.bias, column);
        if (p.epilogue.residual != nullptr) {
#pragma unroll
          for (int k = 0; k < 4; ++k) v[k] += static_cast<float>(residual[0].v[k]);
        }
        Activate<Out>(v, p.epilogue.activation);
        *reinterpret_cast<Vec<Out, 4>*>(out + int64_t{pixel} * p.columns + column) = Round<Out>(v);
      }
      Rotate<1>(residual);
    }
  }
}

// Stores the sums of a product whose filter went through registers, in which they lie as the result has them.
template <class T>
__device__ void StoreHeld(const Params& p, const MappedPhase& f, int warpgroup, const Place& place,
                          typename Held<T>::Sums& sums, float* out, int* pixels) {
  using H = Held<T>;
  using Columns = Vec<float, H::kVector>;
  const int column = place.column + H::Column();
  FindPixels<T>(p, f, place, warpgroup, pixels);
  hopper::SyncWarpgroup(1 + warpgroup);
  if (column >= p.columns) return;
  if (p.boxes) {
#pragma unroll
    for (int i = 0; i < T::kRows / 4; ++i) {
      if (i % 2 == 0) asm volatile("" ::: "memory");  // or all rows' pixels are loaded first, into too many registers
      const int pixel = pixels[H::Row(i)];
      if (pixel >= 0) *reinterpret_cast<Columns*>(out + int64_t{pixel} * p.columns + column) = H::Get(sums, i);
    }
    return;
  }
  // Four rows at a time, in a loop that holds the code of every activation.
  constexpr int kEach = 4, kShare = kEach * H::kVector / H::kBlocks;  // of every block of columns' sums
  using Block = float[H::kRowBlocks * H::kRows / 2];
#pragma unroll 1
  for (int i = 0; i < T::kRows / 4; i += kEach) {
    Columns v[kEach], residual[kEach];
    // What comes from far away first.
    if (p.epilogue.residual != nullptr) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int pixel = pixels[H::Row(i + k)];
        if (pixel >= 0)
          residual[k] = *reinterpret_cast<const Columns*>(static_cast<const float*>(p.epilogue.residual) +
                                                          int64_t{pixel} * p.columns + column);
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = H::Get(sums, k);
#pragma unroll
    for (auto& block : sums) Rotate<kShare>(reinterpret_cast<Block&>(block));
#pragma unroll 1
    for (int k = 0; k < kEach; ++k) {
      const int pixel = pixels[H::Row(i + k)];
      if (pixel >= 0) {
        Add<float>(v[0].v, p.epilogue.bias, column);
        if (p.epilogue.residual != nullptr) {
#pragma unroll
          for (int n = 0; n < H::kVector; ++n) v[0].v[n] += residual[0].v[n];
        }
        Activate<float>(v[0].v, p.epilogue.activation);
        *reinterpret_cast<Columns*>(out + int64_t{pixel} * p.columns + column) = v[0];
      }
      Rotate<1>(v);
      Rotate<1>(residual);
    }
  }
}

// Stores the rows of a shared tile that are this block's.
template <class T, bool kForward, class Out>
__device__ void StoreShare(const Params& p, const MappedPhase& f, const Ring<T>& ring, const Place& place,
                           Out* out) {
  FinishShare<T>(ring.data, p.team, [&](int row, int from, float (&v)[4]) {
    const int pixel = ResultPixel(p, f, place.row + row);
    const int column = place.column + from;
    if (pixel < 0 || column >= p.columns) return;
    if constexpr (kForward) {
      Add<Out>(v, p.epilogue.bias, column);
      Add<Out>(v, p.epilogue.residual, int64_t{pixel} * p.columns + column);
      Activate<Out>(v, p.epilogue.activation);
    }
    *reinterpret_cast<Vec<Out, 4>*>(out + int64_t{pixel} * p.columns + column) = Round<Out>(v);
  });
}

// Large tiles are not shared.
template <class T>
constexpr bool kMayShare = T::kRows * T::kColumns <= 128 * 128;

template <class T, bool kForward>
__device__ void Consume(const Params& p, Ring<T> ring, int warpgroup, float* wide, typename T::In* out,
                        int* pixels) {
  constexpr bool kFloats = sizeof(typename T::In) == 4;
  using Sums = typename std::conditional_t<kHeld<T, kForward>, Held<T>, T>::Sums;
  int turn = 0, number = 0;
  for (int tile = blockIdx.x / p.team; tile < p.tiles; tile += gridDim.x / p.team, ++number) {
    const Place place(p, tile, T());
    const MappedPhase& f = p.phase[place.phase];
    const int steps = Share(max(1, f.tap_count * p.lines), p.team).Steps();
    if (number % 2 != warpgroup) {
      ring.Skip(steps);
      continue;
    }
    Sums sums;
    if constexpr (kHeld<T, kForward>)
      MultiplyHeldStages<T>(ring, steps, number, sums);
    else
      MultiplyStages<T, false, kForward>(ring, steps, number, sums);
    if (kMayShare<T> && p.team > 1) {
      hopper::SyncWarpgroup(1 + warpgroup);  // all warps are done with the stages
      if constexpr (kHeld<T, kForward>)
        LeaveHeldSums<T>(ring.data, sums);
      else
        LeaveSums<T>(ring.data, sums);
      if (kFloats || wide != nullptr)
        StoreShare<T, kForward>(p, f, ring, place, wide);
      else
        StoreShare<T, kForward>(p, f, ring, place, out);
      continue;
    }
    if constexpr (kHeld<T, kForward>) {
      StoreHeld<T>(p, f, warpgroup, place, sums, wide, pixels);
    } else if (p.boxes) {
      StoreBoxes<T>(p, f, ring, warpgroup, place, sums, out, pixels, turn);
    } else if constexpr (!kFloats && kForward) {
      if (wide != nullptr)
        StoreFinished<T>(p, f, ring, warpgroup, place, sums, wide, pixels, turn);
      else
        StoreFinished<T>(p, f, ring, warpgroup, place, sums, out, pixels, turn);
    } else if constexpr (!kFloats) {
      StoreSums<T>(sums, wide + place.column, p.columns - place.column, [&](int row) -> int64_t {
        const int64_t pixel = ResultPixel(p, f, place.row + row);
        return pixel < 0 ? -1 : pixel * p.columns;
      });
    }
  }
}

template <class T, bool kForward, int kDimensions>
__global__ void __launch_bounds__(T::kThreads, 1)
    DataWgmmaKernel(const __grid_constant__ Params p, float* wide, typename T::In* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring<T> ring(shared);
    ring.Init();
    RunRoles<T>([&] { Produce<T, kForward, kDimensions>(p, ring); },
                [&](int warpgroup) {
                  Consume<T, kForward>(p, ring, warpgroup, wide, out, Ring<T>::Pixels(shared, warpgroup));
                });
  }
}

// Of tiles with a side of 160, that side is the columns of one product: those of the result, or held, its rows.
template <class T, bool kForward>
constexpr bool kTakes = T::kRows == 160 ? kHeld<T, kForward> : T::kColumns != 160 || !kHeld<T, kForward>;

template <class T, bool kForward>
cudaError_t LaunchTile(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                       const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t channels = kForward ? p.channels : p.features, columns = kForward ? p.features : p.channels;
  Params q = {};
  q.epilogue = epilogue;
  q.team = int(config.cluster);
  q.phases = MapPhases(p, q.phase);
  if (q.phases == 0) return cudaErrorInvalidValue;
  q.column_tiles = int(CeilDiv(columns, T::kColumns));
  q.columns = int(columns);
  q.lines = int(CeilDiv(channels, T::kLine));
  q.images = int(p.images);
  q.scattered = q.phases > 1;
  cudaError_t e = cudaSuccess;
  for (int i = 0; i < q.phases; ++i) {
    q.first_tile[i + 1] = q.first_tile[i] + int(CeilDiv(q.phase[i].rows, T::kRows));
    if (e == cudaSuccess)
      e = EncodePixels(&q.operand[i], p.in, operand, p.images, kForward ? p.x : p.y, channels, q.phase[i].map,
                       T::kRows);
  }
  q.tiles = q.first_tile[q.phases] * q.column_tiles;
  for (int d = 0; d < kRank; ++d) {
    q.window[d] = int(p.window[d]);
    q.out[d] = int(kForward ? p.y[d] : p.x[d]);
  }
  if (e == cudaSuccess)
    e = EncodeBoxes(&q.filter, p.in, filter, {p.features, p.channels, p.Taps()},
                    {T::kLine, kForward ? T::kLine : T::kColumns, 1});
  const bool wide = p.out == DType::kF32;
  q.boxes = p.out == p.in && IsNone(epilogue);
  if (e == cudaSuccess && q.boxes)
    e = EncodeBoxes(&q.result, p.in, out, {columns, GemmOf(p).rows}, {T::kLine, 64}, false);
  if (e != cudaSuccess) return e;

  return VisitDimensions(q.phase[0].map.dimensions, [&](auto dimensions) {
    return LaunchPersistent<T>(DataWgmmaKernel<T, kForward, decltype(dimensions)::value>, q.tiles, q.team, stream, q,
                               wide ? static_cast<float*>(out) : nullptr, static_cast<typename T::In*>(out));
  });
}

}  // namespace

cudaError_t LaunchDataWgmma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            const Epilogue& epilogue, cudaStream_t stream) {
  return VisitWgmmaTile<true>(p, config, [&](auto tile) {
    using T = typename decltype(tile)::type;
    if constexpr (kTakes<T, true>)
      if (p.direction == Direction::kForward) return LaunchTile<T, true>(p, config, operand, filter, out, epilogue, stream);
    if constexpr (kTakes<T, false>)
      if (p.direction == Direction::kDataGradient)
        return LaunchTile<T, false>(p, config, operand, filter, out, epilogue, stream);
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxdnn::conv
