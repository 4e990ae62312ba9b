// Forward convolution and data gradient as an implicit matrix product on Hopper's tensor cores, for 16-bit floats, and
// for floats as TF32.
//
// Rows are positions of a phase, columns the result's channels, and a step of the reduction is a line of channels of
// one tap: one im2col load, and a box of the filter [taps, channels, features], which forward is MN-major and in the
// data gradient K-major. TF32 has no MN-major operands, so forward reads a copy [taps, features, channels] that a first
// kernel makes. What lies past the last channel is read as zeros, of the filter too.
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  CUtensorMap operand[kMaxMaps], filter, result;
  MappedPhase phase[kMaxMaps];
  int phases, first_tile[kMaxMaps + 1];  // of each phase, in tiles of rows
  int tiles, column_tiles, columns;
  int lines;  // of channels
  int window[kRank], out[kRank];
  int images;
  bool scattered;  // the rows of a phase are not neighbours in the result
  Epilogue epilogue;
};

// A tile of the grid.
struct Place {
  int phase, column;
  int64_t row;

  template <class T>
  __device__ Place(const Params& p, int tile, T) : phase(0) {
    const int row_tile = tile / p.column_tiles;
    column = (tile - row_tile * p.column_tiles) * T::kColumns;
    while (row_tile >= p.first_tile[phase + 1]) ++phase;
    row = int64_t{row_tile - p.first_tile[phase]} * T::kRows;
  }
};

// The image of a row, and its position there.
__device__ int64_t Split(const MappedPhase& f, int64_t row, int (&position)[kRank]) {
  const int plane = f.positions[1] * f.positions[2];
  const int64_t image = row / (f.positions[0] * plane);
  int pixel = static_cast<int>(row - image * f.positions[0] * plane);
  position[0] = pixel / plane;
  pixel -= position[0] * plane;
  position[1] = pixel / f.positions[2];
  position[2] = pixel - position[1] * f.positions[2];
  return image;
}

// Where a row is in the result, in pixels; -1 past the last.
__device__ int64_t ResultPixel(const Params& p, const MappedPhase& f, int64_t row) {
  if (row >= f.rows) return -1;
  int at[kRank];
  int64_t pixel = Split(f, row, at);
#pragma unroll
  for (int d = 0; d < kRank; ++d) pixel = pixel * p.out[d] + f.first[d] + at[d] * f.period[d];
  return pixel;
}

// Whether the filter's columns are what lies next to each other.
template <class T, bool kForward>
constexpr bool kColumnsFirst = kForward && sizeof(typename T::In) == 2;

template <class T, bool kForward>
__device__ void LoadFilter(const Params& p, const Ring<T>& ring, int column, int line, int tap) {
  const uint32_t to = ring.Data() + T::kBytesA;
  if constexpr (kColumnsFirst<T, kForward>) {
#pragma unroll
    for (int slab = 0; slab < T::kColumns / 64; ++slab)
      hopper::LoadBox(to + slab * T::kSlab, &p.filter, ring.Full(), column + slab * 64, line * T::kLine, tap);
  } else {
    hopper::LoadBox(to, &p.filter, ring.Full(), line * T::kLine, column, tap);
  }
}

template <class T, bool kForward, int kDimensions>
__device__ void Produce(const Params& p, Ring<T> ring) {
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Place place(p, tile, T());
    const MappedPhase& f = p.phase[place.phase];
    int at[kRank], tap[kRank], offset[kRank];
    const int image = static_cast<int>(Split(f, place.row, at));
#pragma unroll
    for (int d = 0; d < kRank; ++d) at[d] = f.map.lower[d] + at[d] * f.map.step[d];
    if (f.tap_count == 0) {
      // Past the last image and tap there are zeros.
      BeginStage(ring);
      offset[0] = offset[1] = offset[2] = 0;
      hopper::LoadPixels<kDimensions>(ring.Data(), &p.operand[place.phase], ring.Full(), 0, at, p.images, offset);
      LoadFilter<T, kForward>(p, ring, place.column, 0, p.window[0] * p.window[1] * p.window[2]);
      ring.Next();
    }
    for (tap[0] = 0; tap[0] < f.taps[0]; ++tap[0])
      for (tap[1] = 0; tap[1] < f.taps[1]; ++tap[1])
        for (tap[2] = 0; tap[2] < f.taps[2]; ++tap[2]) {
          int number = 0;
#pragma unroll
          for (int d = 0; d < kRank; ++d) {
            offset[d] = (f.reversed[d] ? f.taps[d] - 1 - tap[d] : tap[d]) * f.distance[d];
            number = number * p.window[d] + f.first_tap[d] + tap[d] * f.tap_period[d];
          }
          for (int line = 0; line < p.lines; ++line) {
            BeginStage(ring);
            hopper::LoadPixels<kDimensions>(ring.Data(), &p.operand[place.phase], ring.Full(), line * T::kLine, at,
                                            image, offset);
            LoadFilter<T, kForward>(p, ring, place.column, line, number);
            ring.Next();
          }
        }
  }
}

// Rounds the sums and stores them: by TMA, or a phase's positions one by one.
template <class T>
__device__ void StoreRounded(const Params& p, const MappedPhase& f, const Ring<T>& ring, int warpgroup,
                             const Place& place, const typename T::Sums& sums, typename T::In* out, int64_t* pixels,
                             int& turn) {
  const int thread = threadIdx.x % kWarpgroup;
  if (p.scattered) {
    hopper::SyncWarpgroup(1 + warpgroup);  // the last tile's are read
    for (int i = thread; i < T::kRows; i += kWarpgroup) pixels[i] = ResultPixel(p, f, place.row + i);
  }
  StoreSlabs<T>(ring.Slabs(), warpgroup, sums, turn, [&](int row, int column, uint32_t slab) {
    if (!p.scattered) {
      hopper::ShowSharedToTma();
      hopper::SyncWarpgroup(1 + warpgroup);
      if (thread == 0) {
        hopper::StoreBox(&p.result, slab, place.column + column, static_cast<int>(place.row + row));
        hopper::CommitStores();
      }
      return;
    }
    hopper::SyncWarpgroup(1 + warpgroup);
    const int chunk = thread % 8;
    if (place.column + column + chunk * 8 >= p.columns) return;
#pragma unroll
    for (int line = thread / 8; line < 64; line += kWarpgroup / 8) {
      const int64_t pixel = pixels[row + line];
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(slab + line * kLineBytes + ((chunk ^ (line % 8)) << 4)));
      if (pixel >= 0) *reinterpret_cast<uint4*>(out + pixel * p.columns + place.column + column + chunk * 8) = v;
    }
  });
}

// Stores the sums through the epilogue, 64 rows and 32 columns at a time, in floats through shared memory. The loop is
// not unrolled, since it holds the code of every activation.
template <class T, class Out>
__device__ void StoreFinished(const Params& p, const MappedPhase& f, const Ring<T>& ring, int warpgroup,
                              const Place& place, typename T::Sums& sums, Out* out, int64_t* pixels, int& turn) {
  constexpr int kAcross = T::kColumns / 32, kRounds = 64 * 8 / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int chunk = thread % 8, line = thread / 8;  // of what it stores: 4 columns of every 16th row
  // Rows of four chunks that warps store together, and of eight that they load together, meet in no bank.
  const auto place_of = [](int row, int chunk) {
    return row * kLineBytes + ((chunk ^ (row % 4 * 2 + row / 4 % 2)) << 4);
  };
  hopper::SyncWarpgroup(1 + warpgroup);  // the last tile's are read
  for (int i = thread; i < T::kRows; i += kWarpgroup) pixels[i] = ResultPixel(p, f, place.row + i);
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
        const int64_t pixel = pixels[row + line + 16 * i];
        if (pixel >= 0 && column < p.columns)
          residual[i] = *reinterpret_cast<const Vec<Out, 4>*>(static_cast<const Out*>(p.epilogue.residual) +
                                                              pixel * p.columns + column);
      }
    }
    float (&all)[T::kBlocks * T::kColumns / 2] = reinterpret_cast<float (&)[T::kBlocks * T::kColumns / 2]>(sums);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                         slab + place_of(16 * warp + lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8),
                     "f"(all[4 * j + 2 * half]), "f"(all[4 * j + 2 * half + 1])
                     : "memory");
    Rotate<16>(all);
    hopper::SyncWarpgroup(1 + warpgroup);
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      const int at = line + 16 * i;
      const int64_t pixel = pixels[row + at];
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
        *reinterpret_cast<Vec<Out, 4>*>(out + pixel * p.columns + column) = Round<Out>(v);
      }
      Rotate<1>(residual);
    }
  }
}

template <class T, bool kForward>
__device__ void Consume(const Params& p, Ring<T> ring, int warpgroup, float* wide, typename T::In* out,
                        int64_t* pixels) {
  int turn = 0, whose = 0;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, whose ^= 1) {
    const Place place(p, tile, T());
    const MappedPhase& f = p.phase[place.phase];
    const int steps = max(1, f.tap_count * p.lines);
    if (whose != warpgroup) {
      ring.Skip(steps);
      continue;
    }
    typename T::Sums sums;
    MultiplyStages<T, false, kColumnsFirst<T, kForward>>(ring, steps, warpgroup, sums);
    if constexpr (kForward) {
      if (!IsNone(p.epilogue)) {
        if (sizeof(typename T::In) == 4 || wide != nullptr) {
          StoreFinished<T>(p, f, ring, warpgroup, place, sums, wide, pixels, turn);
        } else {
          StoreFinished<T>(p, f, ring, warpgroup, place, sums, out, pixels, turn);
        }
        continue;
      }
    }
    if (sizeof(typename T::In) == 4 || wide != nullptr) {
      StoreSums<T>(sums, wide + place.column, p.columns - place.column, [&](int row) -> int64_t {
        const int64_t pixel = ResultPixel(p, f, place.row + row);
        return pixel < 0 ? -1 : pixel * p.columns;
      });
      continue;
    }
    if constexpr (sizeof(typename T::In) == 2) StoreRounded<T>(p, f, ring, warpgroup, place, sums, out, pixels, turn);
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

// out [taps, columns, rows] = in [taps, rows, columns].
__global__ void TransposeKernel(const float* in, float* out, int rows, int columns) {
  constexpr int kSide = 32;
  __shared__ float tile[kSide][kSide + 1];
  const int64_t tap = blockIdx.z * int64_t{rows} * columns;
  const int row = blockIdx.y * kSide, column = blockIdx.x * kSide;
  for (int i = threadIdx.y; i < kSide; i += blockDim.y)
    if (row + i < rows && column + threadIdx.x < columns)
      tile[i][threadIdx.x] = in[tap + int64_t{row + i} * columns + column + threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.y; i < kSide; i += blockDim.y)
    if (column + i < columns && row + threadIdx.x < rows)
      out[tap + int64_t{column + i} * rows + row + threadIdx.x] = tile[threadIdx.x][i];
}

template <class T, bool kForward>
cudaError_t LaunchTile(const Problem& p, const void* operand, const void* filter, void* out, void* workspace,
                       const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t channels = kForward ? p.channels : p.features, columns = kForward ? p.features : p.channels;
  Params q = {};
  q.epilogue = epilogue;
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
  if constexpr (kForward && sizeof(typename T::In) == 4) {
    const dim3 grid(CeilDiv(p.features, 32), CeilDiv(p.channels, 32), p.Taps());
    TransposeKernel<<<grid, dim3(32, 8), 0, stream>>>(static_cast<const float*>(filter), static_cast<float*>(workspace),
                                                      int(p.channels), int(p.features));
    if (e == cudaSuccess) e = cudaPeekAtLastError();
    if (e == cudaSuccess)
      e = EncodeBoxes(&q.filter, p.in, workspace, {p.channels, p.features, p.Taps()}, {T::kLine, T::kColumns, 1});
  } else if (e == cudaSuccess) {
    e = EncodeBoxes(&q.filter, p.in, filter, {p.features, p.channels, p.Taps()},
                    {T::kLine, kForward ? T::kLine : T::kColumns, 1});
  }
  const bool wide = p.out == DType::kF32;
  if (e == cudaSuccess && !wide) e = EncodeBoxes(&q.result, p.in, out, {columns, GemmOf(p).rows}, {T::kLine, 64});
  if (e != cudaSuccess) return e;

  return VisitDimensions(q.phase[0].map.dimensions, [&](auto dimensions) {
    return LaunchPersistent<T>(DataWgmmaKernel<T, kForward, decltype(dimensions)::value>, q.tiles, stream, q,
                               wide ? static_cast<float*>(out) : nullptr, static_cast<typename T::In*>(out));
  });
}

}  // namespace

cudaError_t LaunchDataWgmma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  return VisitWgmmaTile<true>(p, config, [&](auto tile) {
    using T = typename decltype(tile)::type;
    return (p.direction == Direction::kForward ? LaunchTile<T, true> : LaunchTile<T, false>)(p, operand, filter, out,
                                                                                             workspace, epilogue,
                                                                                             stream);
  });
}

}  // namespace jaxdnn::conv
