// Filter gradient on Hopper's tensor cores, for 16-bit floats.
//
// The result's rows are units of 64 channels of one tap, so that a tile's rows may belong to several taps, which read
// the same pixels of y. A step of the reduction is 64 pixels: of x one im2col load for every unit, at its tap's offset,
// and of y a box of pixels. Both are MN-major: channels are what lies next to each other. The pixels are cut into
// slices, as filter.cuh says.
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

struct Place {
  int column, unit, split, steps;
  int64_t first_pixel;

  template <class T>
  __device__ Place(const Params& p, int tile, T) {
    const int row_tile = tile / p.column_tiles;
    column = (tile - row_tile * p.column_tiles) * T::kColumns;
    split = row_tile / p.row_tiles;
    unit = (row_tile - split * p.row_tiles) * (T::kRows / 64);
    const int64_t first_step = int64_t{split} * p.slice_steps;
    steps = static_cast<int>(min(int64_t{p.slice_steps}, p.steps - first_step));
    first_pixel = first_step * T::kDepth;
  }
};

template <class T, int kDimensions>
__device__ void Produce(const Params& p, Ring<T> ring) {
  constexpr int kUnits = T::kRows / 64;
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
      BeginStage(ring);
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        hopper::LoadPixels<kDimensions>(ring.Data() + u * T::kSlab, &p.x, ring.Full(), channel[u], at, image,
                                        offset[u]);
#pragma unroll
      for (int slab = 0; slab < T::kColumns / 64; ++slab)
        hopper::LoadBox(ring.Data() + T::kBytesA + slab * T::kSlab, &p.y, ring.Full(), place.column + slab * 64,
                        static_cast<int>(pixel), 0);
      ring.Next();
    }
  }
}

template <class T, class Out>
__device__ void Consume(const Params& p, Ring<T> ring, int warpgroup, Out* out) {
  int whose = 0;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, whose ^= 1) {
    const Place place(p, tile, T());
    if (whose != warpgroup) {
      ring.Skip(place.steps);
      continue;
    }
    typename T::Sums sums;
    MultiplyStages<T, true, true>(ring, place.steps, warpgroup, sums);
    StoreSums<T>(sums, out + place.split * p.result_size + place.column, p.columns - place.column,
                 [&](int row) -> int64_t {
                   const int unit = place.unit + row / 64, tap = unit / p.lines;
                   const int channel = (unit - tap * p.lines) * T::kLine + row % 64;
                   if (unit >= p.units || channel >= p.channels) return -1;
                   return (int64_t{tap} * p.channels + channel) * p.columns;
                 });
  }
}

template <class T, class Out, int kDimensions>
__global__ void __launch_bounds__(T::kThreads, 1) FilterWgmmaKernel(const __grid_constant__ Params p, Out* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring<T> ring(shared);
    ring.Init();
    RunRoles<T>([&] { Produce<T, kDimensions>(p, ring); }, [&](int warpgroup) { Consume<T>(p, ring, warpgroup, out); });
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
  q.row_tiles = int(CeilDiv(q.units, T::kRows / 64));
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
  if (e == cudaSuccess) e = EncodeBoxes(&q.y, p.in, y, {p.features, pixels, 1}, {T::kLine, T::kDepth, 1});
  if (e != cudaSuccess) return e;

  const auto with_result = [&](auto* result) {
    return VisitDimensions(q.phase.map.dimensions, [&](auto dimensions) {
      const auto kernel = FilterWgmmaKernel<T, std::remove_pointer_t<decltype(result)>, decltype(dimensions)::value>;
      return LaunchPersistent<T>(kernel, q.tiles, stream, q, result);
    });
  };
  if (splits == 1) return p.out == p.in ? with_result(static_cast<In*>(out)) : with_result(static_cast<float*>(out));
  auto* partial = static_cast<float*>(workspace);
  if (e = with_result(partial); e != cudaSuccess) return e;
  return p.out == p.in ? SumSlices(partial, static_cast<In*>(out), q.result_size, splits, stream)
                       : SumSlices(partial, static_cast<float*>(out), q.result_size, splits, stream);
}

}  // namespace

cudaError_t LaunchFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                              void* workspace, cudaStream_t stream) {
  return VisitWgmmaTile<false>(p, config, [&](auto tile) {
    return LaunchTile<typename decltype(tile)::type>(p, config, x, y, out, workspace, stream);
  });
}

}  // namespace jaxdnn::conv
