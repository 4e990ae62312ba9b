// Filter gradient on Hopper's tensor cores.
//
// The result's rows are units of a line of channels of one tap, so that a tile's rows may belong to several taps, which
// read the same pixels of y. A step of the reduction is as many pixels as a line has channels: of x one im2col load for
// every unit, at its tap's offset, and of y a box of pixels. Both are MN-major: channels are what lies next to each
// other. The pixels are cut into slices, as filter.cuh says.
//
// wgmma takes MN-major operands of 16 bits only. Of floats it gets x from registers, which can be read from shared
// memory in any order, and y from the workspace, where another kernel has left it K-major.
#include "cuda/conv/filter.cuh"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  CUtensorMap x, y;
  MappedPhase phase;
  Box positions;
  int units, lines, tiles, row_tiles, column_tiles;  // lines of channels
  int channels, columns;
  int slice_steps;
  int64_t steps;        // of all slices
  int64_t result_size;  // elements of the whole result
};

template <class T>
constexpr bool kFloats = sizeof(typename T::In) == 4;

// Bytes of a unit in a stage, of so many rows.
template <class T>
constexpr int kUnitBytes = T::kDepth * kLineBytes;

// With yt[k][i] = y[pixel][k], of every eight pixels the even ones first: so terms l % 4 and l % 4 + 4 of x, which one
// thread has, are two neighbouring pixels, and the threads of a warp meet in no bank. Zeros after the last pixel.
constexpr int kSide = 32;
__global__ void __launch_bounds__(256) TransposeKernel(const float* y, float* yt, int64_t pixels, int features) {
  __shared__ float tile[kSide][kSide + 1];
  const int64_t pixel = blockIdx.x * int64_t{kSide};
  const int feature = blockIdx.y * kSide, lane = threadIdx.x % kSide, warp = threadIdx.x / kSide;
  const int64_t pitch = gridDim.x * int64_t{kSide};
  for (int i = warp; i < kSide; i += 256 / kSide)
    tile[i][lane] = pixel + i < pixels && feature + lane < features ? y[(pixel + i) * features + feature + lane] : 0;
  __syncthreads();
  const int from = lane / 8 * 8 + lane % 4 * 2 + lane % 8 / 4;
  for (int i = warp; i < kSide && feature + i < features; i += 256 / kSide)
    yt[(feature + i) * pitch + pixel + lane] = tile[from][i];
}

struct Place {
  int column, unit, split, steps;
  int64_t first_pixel;

  template <class T>
  __device__ Place(const Params& p, int tile, T) {
    const int row_tile = tile / p.column_tiles;
    column = (tile - row_tile * p.column_tiles) * T::kColumns;
    split = row_tile / p.row_tiles;
    unit = (row_tile - split * p.row_tiles) * (T::kRows / T::kLine);
    const int64_t first_step = int64_t{split} * p.slice_steps;
    steps = static_cast<int>(min(int64_t{p.slice_steps}, p.steps - first_step));
    first_pixel = first_step * T::kDepth;
  }
};

// One thread loads x, another y: the first asks for a box for every unit.
template <class T, int kDimensions>
__device__ void ProduceX(const Params& p, Ring<T> ring) {
  constexpr int kUnits = T::kRows / T::kLine;
  const MappedPhase& f = p.phase;
  const int pixels = f.positions[0] * f.positions[1] * f.positions[2];
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Place place(p, tile, T());
    int channel[kUnits], offset[kUnits][kRank];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      // Past the last unit it is loaded again, and not stored.
      const int unit = min(place.unit + u, p.units - 1), tap = unit / p.lines, in_plane = tap % (f.taps[1] * f.taps[2]);
      channel[u] = (unit - tap * p.lines) * T::kLine;
      offset[u][0] = tap / (f.taps[1] * f.taps[2]) * f.distance[0];
      offset[u][1] = in_plane / f.taps[2] * f.distance[1];
      offset[u][2] = in_plane % f.taps[2] * f.distance[2];
    }
    int64_t pixel = place.first_pixel;
    int image = static_cast<int>(pixel / pixels), in_image = static_cast<int>(pixel - int64_t{image} * pixels);
    for (int step = 0; step < place.steps; ++step, pixel += T::kDepth, in_image += T::kDepth) {
      while (in_image >= pixels) in_image -= pixels, ++image;
      int at[kRank];
      p.positions.Split(in_image, at);
#pragma unroll
      for (int d = 0; d < kRank; ++d) at[d] = f.map.lower[d] + at[d] * f.map.step[d];
      BeginStage(ring, T::kBytesA);
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        hopper::LoadPixels<kDimensions>(ring.Data() + u * kUnitBytes<T>, &p.x, ring.Full(), channel[u], at, image,
                                        offset[u]);
      ring.Next();
    }
  }
}

template <class T>
__device__ void ProduceY(const Params& p, Ring<T> ring) {
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Place place(p, tile, T());
    int pixel = static_cast<int>(place.first_pixel);
    for (int step = 0; step < place.steps; ++step, pixel += T::kDepth) {
      BeginStage(ring, T::kBytesB);
#pragma unroll
      for (int slab = 0; slab < T::kColumns / 64; ++slab) {
        const int column = place.column + slab * 64;
        hopper::LoadBox(ring.Data() + T::kBytesA + slab * T::kSlab, &p.y, ring.Full(), kFloats<T> ? pixel : column,
                        kFloats<T> ? column : pixel, 0);
      }
      ring.Next();
    }
  }
}

// Where in the result a row of the tile begins, or -1 for no row.
template <class T>
__device__ int64_t RowOf(const Params& p, const Place& place, int row) {
  const int unit = place.unit + row / T::kLine, tap = unit / p.lines;
  const int channel = (unit - tap * p.lines) * T::kLine + row % T::kLine;
  if (unit >= p.units || channel >= p.channels) return -1;
  return (int64_t{tap} * p.channels + channel) * p.columns;
}

// What a warpgroup has of a tile of floats, whose every stage both take together: while one loads its rows, the other's
// products run on.
template <class T>
using HalfTile = WgmmaTile<typename T::In, T::kRows / 2, T::kColumns>;

// sums = A B over the ring's next `steps` stages, at least one, with the rows of A in registers.
template <class T>
__device__ void MultiplyHeldStages(Ring<T>& ring, int steps, int warpgroup, typename HalfTile<T>::Sums& sums) {
  constexpr int kBlocks = HalfTile<T>::kBlocks;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
  // Where in the stage the thread's four elements of the first eight pixels are: two channels of two pixels.
  uint32_t place[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = (16 * warp + lane / 4 + 8 * (i % 2)) % T::kLine, pixel = lane % 4 * 2 + i / 2;
    place[i] = warpgroup * kBlocks * T::kSlab + 16 * warp / T::kLine * kUnitBytes<T> + pixel * kLineBytes +
               ((channel / 4 ^ pixel) << 4) + channel % 4 * 4;
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    hopper::WaitBarrier(ring.Full(), ring.parity);
    uint32_t a[kBlocks][4][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          asm volatile("ld.shared.b32 %0, [%1];"
                       : "=r"(a[m][k][i])
                       : "r"(ring.Data() + place[i] + m * T::kSlab + k * 8 * kLineBytes)
                       : "memory");
    const uint64_t b = hopper::Descriptor(ring.Data() + T::kBytesA, T::kSlab);
    hopper::BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < kBlocks; ++m)
        hopper::MultiplyHeld<T::kColumns>(sums[m], a[m][k], b + k * (32 >> 4), step > 0 || k > 0);
    hopper::CommitProducts();
    hopper::WaitForProducts<0>();
#pragma unroll
    for (auto& block : sums)
#pragma unroll
      for (float& each : block) asm volatile("" : "+f"(each));
    if (lane == 0) hopper::Arrive(ring.Empty(ring.stage));
    ring.Next();
  }
}

template <class T, class Out>
__device__ void ConsumeTogether(const Params& p, Ring<T> ring, int warpgroup, Out* out) {
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Place place(p, tile, T());
    typename HalfTile<T>::Sums sums;
    MultiplyHeldStages<T>(ring, place.steps, warpgroup, sums);
    StoreSums<HalfTile<T>>(sums, out + place.split * p.result_size + place.column, p.columns - place.column,
                           [&](int row) { return RowOf<T>(p, place, row + warpgroup * HalfTile<T>::kRows); });
  }
}

template <class T, class Out>
__device__ void Consume(const Params& p, Ring<T> ring, int warpgroup, Out* out) {
  int number = 0;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, ++number) {
    const Place place(p, tile, T());
    if (number % 2 != warpgroup) {
      ring.Skip(place.steps);
      continue;
    }
    typename T::Sums sums;
    MultiplyStages<T, true, true>(ring, place.steps, number, sums);
    StoreSums<T>(sums, out + place.split * p.result_size + place.column, p.columns - place.column,
                 [&](int row) { return RowOf<T>(p, place, row); });
  }
}

template <class T, class Out>
__global__ void __launch_bounds__(T::kThreads, 1) FilterWgmmaKernel(const __grid_constant__ Params p, Out* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring<T> ring(shared);
    ring.Init(kFloats<T> ? kConsumers : 1);
    RunRoles<T>(
        [&](int which) {
          if (which == 1) return ProduceY<T>(p, ring);
          hopper::VisitDimensions(p.phase.map.dimensions, [&](auto d) { ProduceX<T, decltype(d)::value>(p, ring); });
        },
        [&](int warpgroup) {
          if constexpr (kFloats<T>)
            ConsumeTogether<T>(p, ring, warpgroup, out);
          else
            Consume<T>(p, ring, warpgroup, out);
        });
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const Config& config, const void* x, const void* y, void* out, void* workspace,
                       cudaStream_t stream) {
  using In = typename T::In;
  Params q = {};
  MappedPhase phases[kMaxMaps];
  if (MapPhases(p, phases) != 1) return cudaErrorInvalidValue;
  q.phase = phases[0];
  q.lines = int(CeilDiv(p.channels, T::kLine));
  q.units = int(p.Taps()) * q.lines;
  q.row_tiles = int(CeilDiv(q.units, T::kRows / T::kLine));
  q.column_tiles = int(CeilDiv(p.features, T::kColumns));
  q.channels = int(p.channels);
  q.columns = int(p.features);
  const int64_t pixels = p.images * p.YPixels();
  q.steps = CeilDiv(pixels, T::kDepth);
  q.slice_steps = int(CeilDiv(q.steps, config.splits));
  const int splits = int(CeilDiv(q.steps, q.slice_steps));
  q.tiles = splits * q.row_tiles * q.column_tiles;
  q.positions = Box(q.phase.positions);
  q.result_size = p.FilterSize();
  cudaError_t e = EncodePixels(&q.x, p.in, x, p.images, p.x, p.channels, q.phase.map, T::kDepth);
  auto* partial = static_cast<float*>(workspace);
  if constexpr (kFloats<T>) {
    const int64_t pitch = q.steps * T::kDepth;
    auto* yt = partial;
    partial += pitch * p.features;
    static_assert(T::kDepth == kSide);
    TransposeKernel<<<dim3(q.steps, CeilDiv(p.features, kSide)), 256, 0, stream>>>(static_cast<const float*>(y), yt,
                                                                                   pixels, int(p.features));
    if (e == cudaSuccess) e = cudaPeekAtLastError();
    if (e == cudaSuccess) e = EncodeBoxes(&q.y, p.in, yt, {pitch, p.features, 1}, {T::kLine, 64, 1});
  } else if (e == cudaSuccess) {
    e = EncodeBoxes(&q.y, p.in, y, {p.features, pixels, 1}, {T::kLine, T::kDepth, 1});
  }
  if (e != cudaSuccess) return e;

  const auto with_result = [&](auto* result) {
    return LaunchPersistent<T>(FilterWgmmaKernel<T, std::remove_pointer_t<decltype(result)>>, q.tiles, 1, stream, q,
                               result);
  };
  if (!UsesWorkspace(p, splits))
    return p.out == p.in ? with_result(static_cast<In*>(out)) : with_result(static_cast<float*>(out));
  if (e = with_result(partial); e != cudaSuccess) return e;
  return SumSlices<In>(p, partial, splits, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                              void* workspace, cudaStream_t stream) {
  return VisitWgmmaTile<true>(p, config, [&](auto tile) {
    using T = typename decltype(tile)::type;
    // The two warpgroups share the rows of floats: 64 each, since 128 are too many registers.
    if constexpr (T::kCopied || T::kColumns == 160 || (kFloats<T> && T::kRows != 128))
      return cudaErrorInvalidValue;
    else
      return LaunchTile<T>(p, config, x, y, out, workspace, stream);
  });
}

}  // namespace jaxdnn::conv
