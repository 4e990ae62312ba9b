// Filter gradient on Hopper's tensor cores.
//
// The result's rows are units of a line of channels of one tap, so that a tile's rows may belong to several taps, which
// read the same pixels of y. A step of the reduction is as many pixels as a line has channels: of x one im2col load for
// every unit, at its tap's offset, and of y a box of pixels. Both are MN-major: channels are what lies next to each
// other. The pixels are cut into slices, as filter.cuh says.
//
// wgmma takes MN-major operands of 16 bits only. Of floats it gets x from registers (wgmma_held.cuh), and y when warps
// have transposed what came of it.
#include "cuda/conv/filter.cuh"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_held.cuh"
#include "cuda/conv/wgmma_team.cuh"

namespace jaxdnn::conv {
namespace {

struct Params {
  CUtensorMap x, y;
  MappedPhase phase;
  Box positions;
  int units, lines, tiles, row_tiles, column_tiles;  // lines of channels
  int channels, columns;
  int slice_steps;
  int team;             // blocks that share a tile
  int64_t steps;        // of all slices
  int64_t result_size;  // elements of the whole result
};

template <class T>
constexpr bool kFloats = sizeof(typename T::In) == 4;

// Bytes of a unit in a stage, or of a line of y's channels.
template <class T>
constexpr int kUnitBytes = T::kDepth * kLineBytes;

// A block's share of a tile.
struct Place {
  int column, unit, split, steps;
  int64_t first_pixel;

  template <class T>
  __device__ Place(const Params& p, const Share& share, int tile, T) {
    const int row_tile = tile / p.column_tiles;
    column = (tile - row_tile * p.column_tiles) * T::kColumns;
    split = row_tile / p.row_tiles;
    unit = (row_tile - split * p.row_tiles) * (T::kRows / T::kLine);
    const int64_t first_step = int64_t{split} * p.slice_steps;
    // One for each block at least, past the last pixel if need be.
    const int all = static_cast<int>(max(int64_t{p.team}, min(int64_t{p.slice_steps}, p.steps - first_step)));
    steps = share.Last(all) - share.First(all);
    first_pixel = (first_step + share.First(all)) * T::kDepth;
  }
};

template <class T, int kDimensions>
__device__ void Produce(const Params& p, Ring<T> ring, const Share& share) {
  hopper::PrefetchMap(&p.x);
  hopper::PrefetchMap(&p.y);
  constexpr int kUnits = T::kRows / T::kLine;
  const MappedPhase& f = p.phase;
  const int pixels = f.positions[0] * f.positions[1] * f.positions[2];
  for (int tile = blockIdx.x / p.team; tile < p.tiles; tile += gridDim.x / p.team) {
    const Place place(p, share, tile, T());
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
        hopper::LoadPixels<kDimensions>(ring.Data() + u * kUnitBytes<T>, &p.x, ring.Full(), channel[u], at, image,
                                        offset[u]);
#pragma unroll
      for (int slab = 0; slab < T::kColumns / T::kLine; ++slab)
        hopper::LoadBox(ring.Data() + T::kBytesA + slab * kUnitBytes<T>, &p.y, ring.Full(),
                        place.column + slab * T::kLine, static_cast<int>(pixel), 0);
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

// Stores a part of the sums, 64 rows by 32 columns, in slice `split` of the result: row(block, half) is the tile's row
// that a thread has in a half of wgmma's rows.
template <class T, class Out, class Row>
__device__ void StorePart(const Params& p, const Place& place, int part, const float (&sums)[16], Out* out,
                          const Row& row) {
  constexpr int kAcross = T::kColumns / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t offset = RowOf<T>(p, place, row(part / kAcross, half));
    if (offset < 0) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = place.column + part % kAcross * 32 + 8 * j + 2 * (threadIdx.x % 4);
      if (column < p.columns)
        *reinterpret_cast<Vec<Out, 2>*>(out + place.split * p.result_size + offset + column) = {
            static_cast<Out>(sums[4 * j + 2 * half]), static_cast<Out>(sums[4 * j + 2 * half + 1])};
    }
  }
}

// Transposes 32 lines of 32 floats, both swizzled, by a warp: in pieces of 4 lines by 4 floats, of which each eight
// threads take those that meet in no bank, neither as they were nor as they become.
__device__ inline void TransposeLines(uint32_t lines) {
  const int lane = threadIdx.x % 32, across = lane % 8;
  const auto place = [=](int line, int chunk) { return lines + line * kLineBytes + ((chunk ^ (line % 8)) << 4); };
  uint32_t v[2][4][4];
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const int down = across ^ (lane / 8 + 4 * piece);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[piece][i][0]), "=r"(v[piece][i][1]), "=r"(v[piece][i][2]), "=r"(v[piece][i][3])
                   : "r"(place(4 * down + i, across))
                   : "memory");
  }
  __syncwarp();
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const int down = across ^ (lane / 8 + 4 * piece);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(4 * across + i, down)), "r"(v[piece][0][i]),
                   "r"(v[piece][1][i]), "r"(v[piece][2][i]), "r"(v[piece][3][i])
                   : "memory");
  }
}

// Makes y's lines of channels of every stage lines of pixels; the warps take them in turn.
template <class T>
constexpr int kLines = T::kColumns / T::kLine;
template <class T>
__device__ void TransposeStages(const Params& p, Ring<T> ring, const Share& share, int warp) {
  int turn = 0;
  for (int tile = blockIdx.x / p.team; tile < p.tiles; tile += gridDim.x / p.team) {
    const Place place(p, share, tile, T());
    for (int step = 0; step < place.steps; ++step, ring.Next())
#pragma unroll 1
      for (int line = 0; line < kLines<T>; ++line, turn = turn + 1 == kHelpers ? 0 : turn + 1) {
        if (turn != warp) continue;
        hopper::WaitBarrier(ring.Full(), ring.parity);
        TransposeLines(ring.Data() + T::kBytesA + line * kUnitBytes<T>);
        hopper::ShowSharedToTma();
        __syncwarp();
        if (threadIdx.x % 32 == 0) hopper::Arrive(ring.Ready(ring.stage));
      }
  }
}

// Both warpgroups take every stage of floats together, half the rows each: while one loads its rows, the other's
// products run on.
template <class T, class Out>
__device__ void ConsumeTogether(const Params& p, Ring<T> ring, const Share& share, int warpgroup, Out* out) {
  constexpr int kRows = T::kRows / kConsumers;
  using H = Held<T::kColumns, kRows>;
  Team<T, kRows * T::kColumns / kWarpgroup> team(ring, share, warpgroup);
  for (int tile = blockIdx.x / p.team; tile < p.tiles; tile += gridDim.x / p.team) {
    const Place place(p, share, tile, T());
    const auto wait = [](const Ring<T>& at) {
      hopper::WaitBarrier(at.Full(), at.parity);
      hopper::WaitBarrier(at.Ready(at.stage), at.parity);
    };
    typename H::Sums sums;
    MultiplyHeldStages<H>(ring, place.steps, T::kBytesA, warpgroup * kRows * kLineBytes, wait, [] {}, sums);
    team.template Finish<false>(
        sums, tile + static_cast<int>(gridDim.x) / p.team >= p.tiles, [&](int part, const float (&v)[16]) {
          StorePart<T>(p, place, part, v, out,
                       [&](int m, int half) { return warpgroup * kRows + H::Column() + 2 * m + half; });
        });
    team.Next();
  }
}

template <class T, class Out>
__device__ void Consume(const Params& p, Ring<T> ring, const Share& share, int warpgroup, Out* out) {
  Team<T, T::kRows * T::kColumns / kWarpgroup> team(ring, share);
  int whose = 0;
  for (int tile = blockIdx.x / p.team; tile < p.tiles; tile += gridDim.x / p.team, whose ^= 1, team.Next()) {
    const Place place(p, share, tile, T());
    if (whose != warpgroup) {
      ring.Skip(place.steps);
      continue;
    }
    typename T::Sums sums;
    MultiplyStages<T, true, true>(ring, place.steps, warpgroup, sums);
    team.template Finish<false>(
        sums, tile + static_cast<int>(gridDim.x) / p.team >= p.tiles, [&](int part, const float (&v)[16]) {
          StorePart<T>(p, place, part, v, out, [&](int m, int half) {
            return m * 64 + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
          });
        });
  }
}

template <class T, class Out, int kDimensions>
__global__ void __launch_bounds__(T::kThreads, 1) FilterWgmmaKernel(const __grid_constant__ Params p, Out* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Share share(p.team);
    const Ring<T> ring(shared, TeamStages<T>(p.team));
    InitTeams(ring, p.team);
    ring.Init(kFloats<T> ? kConsumers : 1, kLines<T>);
    if (p.team > 1) ClusterArrive();
    RunRoles<kFloats<T> ? 96 : 40>([&] { Produce<T, kDimensions>(p, ring, share); },
                                   [&](int warp) {
                                     if constexpr (kFloats<T>) TransposeStages<T>(p, ring, share, warp);
                                   },
                                   [&](int warpgroup) {
                                     if constexpr (kFloats<T>)
                                       ConsumeTogether<T>(p, ring, share, warpgroup, out);
                                     else
                                       Consume<T>(p, ring, share, warpgroup, out);
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
  q.team = int(config.cluster);
  q.slice_steps = int(CeilDiv(q.steps, config.splits));
  const int splits = int(CeilDiv(q.steps, q.slice_steps));
  q.tiles = splits * q.row_tiles * q.column_tiles;
  q.positions = Box(q.phase.positions);
  q.result_size = p.FilterSize();
  cudaError_t e = EncodePixels(&q.x, p.in, x, p.images, p.x, p.channels, q.phase.map, T::kDepth);
  auto* partial = static_cast<float*>(workspace);
  if (e == cudaSuccess) e = EncodeBoxes(&q.y, MapType(p.in), y, {p.features, pixels, 1}, {T::kLine, T::kDepth, 1});
  if (e != cudaSuccess) return e;

  const auto with_result = [&](auto* result) {
    return VisitDimensions(q.phase.map.dimensions, [&](auto dimensions) {
      const auto kernel = FilterWgmmaKernel<T, std::remove_pointer_t<decltype(result)>, decltype(dimensions)::value>;
      return LaunchPersistent<T>(kernel, q.tiles, q.team, stream, q, result);
    });
  };
  if (splits == 1) return p.out == p.in ? with_result(static_cast<In*>(out)) : with_result(static_cast<float*>(out));
  if (e = with_result(partial); e != cudaSuccess) return e;
  return p.out == p.in ? SumSlices(partial, static_cast<In*>(out), q.result_size, splits, stream)
                       : SumSlices(partial, static_cast<float*>(out), q.result_size, splits, stream);
}

}  // namespace

cudaError_t LaunchFilterWgmma(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                              void* workspace, cudaStream_t stream) {
  return VisitWgmmaTile<true>(p, config, [&](auto tile) {
    using T = typename decltype(tile)::type;
    // The two warpgroups share the rows of floats: 64 each, since 128 are too many registers.
    if constexpr (T::kRows == 160 || T::kColumns == 160 || (kFloats<T> && T::kRows != 128))
      return cudaErrorInvalidValue;
    else
      return LaunchTile<T>(p, config, x, y, out, workspace, stream);
  });
}

}  // namespace jaxdnn::conv
