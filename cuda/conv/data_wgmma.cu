// Forward convolution and data gradient as an implicit matrix product on Hopper's tensor cores, for 16-bit floats, and
// for floats as TF32.
//
// Rows are positions of a phase, columns the result's channels, and a step of the reduction is a line of channels of
// one tap: one im2col load, and a box of the filter [taps, channels, features], which forward is MN-major and in the
// data gradient K-major. TF32 has no MN-major operands, so that forward it goes through registers (wgmma_held.cuh), or
// a first kernel makes a copy [taps, features, channels]. What lies past the last channel is read as zeros, of the
// filter too.
//
// For nearly all of float32's bits three products of TF32 are added up: of the operands' large parts, and of each one's
// with the other's rest. Then the first kernel splits the filter, and two warps split the pixels of every stage.
#include "cuda/conv/nominal.h"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_across.cuh"
#include "cuda/conv/wgmma_finish.cuh"
#include "cuda/conv/wgmma_split.cuh"

namespace jaxdnn::conv {
namespace {

// Whether the filter goes through registers.
template <class T, bool kForward>
constexpr bool kHeld = kForward && sizeof(typename T::In) == 4 && !T::kCopied;

// Whether its boxes are lines of features: the last of a tile may be half empty.
template <class T, bool kForward>
constexpr bool kOfFeatures = kForward && !T::kCopied;
template <class T, bool kForward>
constexpr int kFilterBytes = (T::kTripled ? 2 : 1) * (kOfFeatures<T, kForward> ? T::kBytesB : T::kColumns * kLineBytes);

// Whether a tile ends with half a line, or begins with one, which is multiplied last. A box that is as wide as a line
// is filled up with zeros, so that nothing is loaded that the next tile has.
template <class T, bool kForward>
constexpr bool kHalved = kOfFeatures<T, kForward> && T::kColumns % T::kLine != 0;

// What a tile loads of the filter: boxes of features of one tap, whose tap and first column there these are where the
// tile's columns are of several taps; or lines of channels, from these on.
template <class T, bool kForward>
struct FilterPlace {
  static constexpr int kBoxes = kOfFeatures<T, kForward> && !kHalved<T, kForward> ? T::kColumns / T::kLine : 1;
  int tap[kBoxes], column[kBoxes];
  int channel, in_group;

  __device__ FilterPlace(const WgmmaParams& p, const WgmmaPlace& place) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      tap[i] = 0, column[i] = place.column + i * T::kLine;
      if (p.in_row.taps) tap[i] = p.in_row.columns.Div(column[i], &column[i]);
    }
    channel = p.group.Div(place.column, &in_group) * p.group_channels;
  }
};

// Of a step's line of channels, to shared memory, where this barrier waits for it. `tap` is to be added to that of a
// place.
template <class T, bool kForward>
__device__ void LoadFilter(const WgmmaParams& p, const WgmmaPlace& place, const FilterPlace<T, kForward>& filter,
                           int line, int tap, uint32_t to, uint32_t full) {
  if constexpr (kHalved<T, kForward>) {
    constexpr int kLines = T::kColumns / T::kLine;
#pragma unroll
    for (int slab = 0; slab < kLines; ++slab)
      hopper::LoadBox(to + slab * T::kSlab, &p.filter, full, place.Column<T>(slab * T::kLine), line * T::kLine, tap);
    const int column = place.Column<T>(kLines * T::kLine);
    if (p.halved)
      hopper::LoadBox(to + kLines * T::kSlab, &p.halves, full, {0, column / (T::kLine / 2), line * T::kLine, tap, 0});
    else
      hopper::LoadBox(to + kLines * T::kSlab, &p.filter, full, column, line * T::kLine, tap);
  } else if constexpr (kOfFeatures<T, kForward>) {
#pragma unroll
    for (int i = 0; i < filter.kBoxes; ++i)
      hopper::LoadBox(to + i * T::kLine * kLineBytes, &p.filter, full, filter.column[i], line * T::kLine,
                      filter.tap[i] + tap);
  } else {
    const int channel = filter.channel + line * T::kLine;
    hopper::LoadBox(to, &p.filter, full, channel, filter.in_group, tap);
    if constexpr (T::kTripled)
      hopper::LoadBox(to + T::kRests, &p.filter, full, channel, filter.in_group, tap + p.rest_plane);
  }
}

template <class T, bool kForward>
__device__ void ProduceFilter(const WgmmaParams& p, Ring<T> ring) {
  int kept = 0;
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    const WgmmaPlace place = PlaceOf<T>(p, tile);
    const WgmmaPhase& f = p.phase[place.phase];
    const FilterPlace<T, kForward> filter(p, place);
    const int first_tap = f.steps == 0 ? p.planes : place.tap;
    int moves = p.in_row.taps ? 0 : -1;
    asm volatile("" : "+r"(moves));  // or it is looked up for each step
    const Share share(max(1, f.steps), p.team);
    const auto load = [&](int line, int tap, const int (&)[kRank]) {
      if constexpr (kKeeps<T>) {
        hopper::ArriveExpecting(ring.Between(kept), kFilterBytes<T, kForward>);
        LoadFilter<T, kForward>(p, place, filter, line, (first_tap + tap) & moves, ring.Kept(kept), ring.Between(kept));
        ++kept;
      } else {
        BeginStage(ring, kFilterBytes<T, kForward>);
        LoadFilter<T, kForward>(p, place, filter, line, (first_tap + tap) & moves, ring.Data() + T::kBytesA,
                                ring.Full());
        ring.Next();
      }
    };
    ForEachStep(p, f, share.first, share.end, load);
    if constexpr (kKeeps<T>) return;  // of all tiles of the column
    PassResidual(p, ring);
  }
}

// By one of the warps that patch stages, half of the rows.
template <class T>
__device__ void PatchStages(const WgmmaParams& p, Ring<T> ring, int warp) {
  using Rows = PatchedRows<T::kRows / kPatchers>;
  const int first = warp * Rows::kRows;
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    const WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    Rows rows;
#pragma unroll
    for (int j = 0; j < Rows::kEach; ++j) {
      const int row = first + Rows::Row(j);
      rows.image[j] = FirstPixel(f, place.row + row, rows.at[j]);
      if (f.steps == 0 || Rows::Row(j) >= Rows::kRows || place.row + row >= f.rows) rows.image[j] = -1;
    }
    typename Rows::Found found = {-1};
    const auto patch = [&](int line, int, const int (&offset)[kRank]) {
      if (found.rows < 0 || line == 0) found = rows.Find(p.patches.edges, offset);
      hopper::WaitBarrier(ring.Between(ring.stage), ring.parity);
      Rows::Load(p.patches, found, ring.Data() + first * kLineBytes, line * T::kLine, ring.Full());
      ring.Next();
    };
    const Share share(max(1, f.steps), p.team);
    ForEachStep(p, f, share.first, share.end, patch);
  }
}

template <class T>
__device__ void SplitStages(const WgmmaParams& p, Ring<T> ring, int warp) {
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    const int steps = max(1, p.phase[WgmmaPlace(p, tile, T()).phase].steps);
    for (int step = 0; step < steps; ++step, ring.Next()) SplitStage(ring, warp);
    ring.Skip(p.residual_lines);
  }
}

// Whether blocks may share a tile: leaving all sums to each other, or sending them.
template <class T>
constexpr bool kLeaves = !T::kCopied && !kKeeps<T> && T::kRows <= 128 && T::kColumns <= 128;
template <class T>
constexpr bool kSends = T::kColumns == 160 && !T::kLarge;

template <class T, bool kForward>
__device__ void Consume(const WgmmaParams& p, Ring<T> ring, int warpgroup, float* wide, typename T::In* out,
                        int* pixels) {
  constexpr bool kFloats = sizeof(typename T::In) == 4;
  using Own = std::conditional_t<T::kLarge, HalfTile<T>, T>;  // of a warpgroup
  using Sums = typename std::conditional_t<kHeld<T, kForward>, Held<T>, Own>::Sums;
  int turn = 0;
  if (kForward) ring.more = p.residual_lines;
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    __syncwarp();  // lanes whose columns do not exist have stored the last tile sooner
    WgmmaPlace place = PlaceOf<T>(p, tile);
    const WgmmaPhase& f = p.phase[place.phase];
    const int steps = Share(max(1, f.steps), p.team).Steps();
    if (!T::kLarge && number % 2 != warpgroup) {
      ring.Skip(steps + ring.more);
      continue;
    }
    Sums sums;
    if constexpr (kHeld<T, kForward>) {
      MultiplyHeldStages<T>(ring, steps, number, sums);
    } else if constexpr (T::kLarge) {
      MultiplyStagesTogether<T, false, kOfFeatures<T, kForward>>(ring, steps, warpgroup * Own::kBlocks, sums);
      place.row += warpgroup * Own::kRows;
    } else {
      MultiplyStages<T, false, kOfFeatures<T, kForward>>(ring, steps, number, sums);
    }
    if constexpr (kSends<T>) {
      if (p.team.divisor > 1)
        ExchangeSums<T>(ring.data, p.team.divisor, reinterpret_cast<float (&)[sizeof(sums) / 4]>(sums));
    }
    const Rows rows = kSends<T> ? OwnRows<T>(p.team) : Rows{0, Own::kRows};
    if (p.by_pixels) FindPixels<Own>(p, f, place, rows, warpgroup, pixels);
    if constexpr (kLeaves<T>) {
      if (p.team.divisor > 1) {
        // All warps are done with the stages, since all have found pixels.
        if constexpr (kHeld<T, kForward>)
          LeaveHeldSums<T>(ring.data, sums);
        else
          LeaveSums<T>(ring.data, sums);
        StoreShare<T, kForward>(p, ring, place, pixels, wide, out);
        continue;
      }
    }
    if constexpr (kHeld<T, kForward>) {
      if (!p.plain) FinishHeld<T>(p, ring, 0, place, pixels, sums);
      StoreHeld<T>(p, place, sums, wide, pixels);
    } else {
      if (kForward && !p.plain)
        FinishSums<Own>(p, ring, warpgroup, T::kLarge ? warpgroup * Own::kRows : 0, place, pixels, wide != nullptr,
                        sums);
      if (p.boxes) {
        StoreBoxes<Own>(p, f, ring.Slabs(), warpgroup, place, sums, rows, out, pixels, turn);
      } else if constexpr (!kFloats && !T::kLarge) {
        StoreSums<T>(sums, wide + place.column, p.columns - place.column,
                     [&](int row) -> int64_t { return pixels[row] < 0 ? -1 : int64_t{pixels[row]} * p.columns; });
      }
    }
  }
}

template <class T, bool kForward>
__device__ void ConsumeAcross(const WgmmaParams& p, Ring<T> ring, int warpgroup, typename T::In* out, int* pixels) {
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    __syncwarp();
    WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    const int steps = max(1, f.steps);
    if constexpr (kHeld<T, kForward>) {
      using Part = AcrossPart<T::kRows>;
      typename Held<Part>::Sums sums;
      const int part = warpgroup * T::kSlab, each = T::kStages * T::kStageBytes / kConsumers;
      EndProducts(ring, MultiplyHeldSteps<Part>(ring, Share(steps, p.team).Steps(), T::kBytesA + part, sums), sums);
      if (p.team.divisor > 1) ExchangeSums<T>(ring.data + warpgroup * each, p.team.divisor, sums[0]);
      place.column += warpgroup * Part::kColumns;
      FindPixels<Part>(p, f, place, OwnRows<T>(p.team), warpgroup, pixels);
      if (!p.plain) FinishHeld<Part>(p, ring, warpgroup * Part::kColumns, place, pixels, sums);
      StoreHeld<Part>(p, place, sums, out, pixels);
    } else {
      typename T::Sums sums;
      MultiplyAcross<T, kForward>(ring, steps, warpgroup, sums);
      if (p.by_pixels) FindPixels<T>(p, f, place, {0, T::kRows}, warpgroup, pixels);
      if (kForward && !p.plain) FinishAcross<T>(p, ring, warpgroup, place, pixels, sums);
      StoreAcross<T>(p, f, ring, warpgroup, place, sums, out, pixels);
    }
  }
}

// Where those who multiply leave registers for patches; and what a thread that does not multiply has of them.
template <class T, bool kForward>
constexpr bool kPatched = !T::kLarge && !T::kTripled && !kKeeps<T> && !kHalved<T, kForward> &&
                          !(kHeld<T, kForward> && T::kRows == 128 && T::kColumns == 128);
template <class T, bool kForward>
constexpr int kRegistersOfFew = T::kTripled              ? 72
                                : !kPatched<T, kForward> ? 40
                                : T::kRows > 128         ? 72
                                                         : 56;

template <class T, bool kForward>
__global__ void __launch_bounds__(T::kThreads, 1)
    DataWgmmaKernel(const __grid_constant__ WgmmaParams p, float* wide, typename T::In* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring<T> ring(shared);
    constexpr int kLoaders = kKeeps<T> ? 1 : kProducers;  // of a stage; patchers stand in for that of pixels
    ring.Init(kIsAcross<T> || T::kLarge ? kConsumers : 1, p.patched ? kLoaders - 1 + kPatchers : kLoaders,
              T::kTripled ? kSplitters * 32 : 1);
    PrefetchMaps(p);
    RunRoles<kProducers, kRegistersOfFew<T, kForward>>(
        [&](int which) {
          if (which == 1) return ProduceFilter<T, kForward>(p, ring);
          hopper::VisitDimensions(p.phase[0].dimensions,
                                  [&](auto d) { ProducePixels<T, decltype(d)::value>(p, ring); });
        },
        [&](int warpgroup) {
          int* const pixels = Ring<T>::Pixels(shared, warpgroup);
          if constexpr (kIsAcross<T>)
            ConsumeAcross<T, kForward>(p, ring, warpgroup, out, pixels);
          else
            Consume<T, kForward>(p, ring, warpgroup, wide, out, pixels);
        },
        [&](int warp) {
          if constexpr (T::kTripled)
            SplitStages<T>(p, ring, warp);
          else if constexpr (kPatched<T, kForward>)
            if (p.patched) PatchStages<T>(p, ring, warp);
        });
  }
}

// out [taps, columns, rows] = in [taps, rows, columns], both multiples of 4: squares of 64, 16 bytes a thread. Or,
// where `rests` is not null, its parts.
constexpr int kSquare = 64;
__global__ void __launch_bounds__(256)
    TransposeKernel(const float* in, float* out, float* rests, int rows, int columns) {
  constexpr int kEach = kSquare / 16;
  __shared__ float square[kSquare][kSquare + 1];
  const int64_t tap = blockIdx.z * int64_t{rows} * columns;
  const int row = blockIdx.y * kSquare, column = blockIdx.x * kSquare, four = threadIdx.x % 16 * 4,
            line = threadIdx.x / 16;
  float4 v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int from = min(row + line + 16 * i, rows - 1);
    v[i] = *reinterpret_cast<const float4*>(in + tap + int64_t{from} * columns + min(column + four, columns - 4));
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float* const to = &square[line + 16 * i][four];
    to[0] = v[i].x, to[1] = v[i].y, to[2] = v[i].z, to[3] = v[i].w;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int to = line + 16 * i;
    if (column + to >= columns || row + four >= rows) continue;
    Words<float, 4> words, rest;
#pragma unroll
    for (int j = 0; j < 4; ++j) words.v[j] = __float_as_uint(square[four + j][to]);
    const int64_t at = tap + int64_t{column + to} * rows + row + four;
    if (rests != nullptr) {
      SplitTf32(words.v, rest.v);
      *reinterpret_cast<Words<float, 4>*>(rests + at) = rest;
    }
    *reinterpret_cast<Words<float, 4>*>(out + at) = words;
  }
}

template <class T, bool kForward>
cudaError_t LaunchTile(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                       void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  constexpr bool kAsItIs = kOfFeatures<T, kForward>;
  if (HasFrame(p) && !kPatched<T, kForward>) return cudaErrorInvalidValue;
  // The boxes of a filter that is read as it is are lines of one tap.
  const bool may = !kAsItIs || (T::kColumns % T::kLine == 0 && p.features % T::kLine == 0);
  WgmmaParams q;
  cudaError_t e = SetParams<T>(p, config, epilogue, may, true, operand, out, &q);
  if (e == cudaSuccess && HasFrame(p)) e = MakePatches(p, operand, T::kLine, &q.patches);
  q.patched = HasFrame(p);
  // The filter is planes of taps, or one plane where those are columns of the product.
  if (q.in_row.taps && !kAsItIs) q.planes = 1;
  q.rest_plane = q.planes;
  if (T::kTripled) q.planes *= 2;
  const int64_t rows = kAsItIs || p.groups > 1 ? p.channels : q.columns, planes = q.planes;
  const int64_t features = p.groups * p.features;
  auto* const copy = static_cast<float*>(workspace);
  float* const rests = T::kTripled ? copy + p.FilterSize() : nullptr;
  if constexpr (kForward && T::kCopied) {
    const Grid grid = {CeilDiv(p.features, kSquare), 256, 0, 1, CeilDiv(p.channels, kSquare), p.batch * p.Taps()};
    if (e == cudaSuccess)
      e = LaunchKernel(TransposeKernel, grid, stream, static_cast<const float*>(filter), copy, rests, int(p.channels),
                       int(p.features));
    if (e == cudaSuccess)
      e = EncodeBoxes(&q.filter, p.in, copy, {p.channels, rows, planes}, {T::kLine, T::kColumns, 1});
  } else {
    if constexpr (T::kTripled) {
      if (e == cudaSuccess) e = LaunchSplit(static_cast<const float*>(filter), copy, rests, p.FilterSize(), stream);
      filter = copy;
    }
    if (e == cudaSuccess)
      e = EncodeBoxes(&q.filter, p.in, filter, {features, rows, planes},
                      {T::kLine, kForward ? T::kLine : T::kColumns, 1});
  }
  constexpr int kHalf = T::kLine / 2;
  q.halved = kHalved<T, kForward> && q.boxes && p.features % kHalf == 0;
  if (e == cudaSuccess && q.halved)
    e = EncodeBoxes(&q.halves, p.in, filter, {kHalf, features / kHalf, p.channels, planes, 1},
                    {T::kLine, 1, T::kLine, 1, 1});
  if (e != cudaSuccess) return e;
  float* const wide = p.out == DType::kF32 ? static_cast<float*>(out) : nullptr;
  auto* const narrow = static_cast<typename T::In*>(out);
  const auto kernel = DataWgmmaKernel<T, kForward>;
  if constexpr (kKeeps<T>) {
    // Every block's tiles are of one column.
    const int64_t columns = q.in_row.tiles.divisor, blocks = kMultiprocessors / columns * columns;
    return LaunchKernel(kernel, Grid{blocks, T::kThreads, T::kSharedBytes}, stream, q, wide, narrow);
  }
  return LaunchPersistent<T>(kernel, q.tiles, int(config.cluster), stream, q, wide, narrow);
}

}  // namespace

cudaError_t LaunchDataWgmma(const Problem& p, const Config& config, const void* operand, const void* filter, void* out,
                            void* workspace, const Epilogue& epilogue, cudaStream_t stream) {
  const auto launch = [&](auto tile) {
    using T = typename decltype(tile)::type;
    // Those that TakesWgmma says.
    constexpr bool kFloats = sizeof(typename T::In) == 4,
                   kCopiedAlone = T::kCopied && T::kColumns == 128 && !T::kTripled;
    // Forward, a stage has room for whole lines of features.
    using Forward = std::conditional_t<kHalved<T, true>,
                                       WgmmaTile<typename T::In, T::kRows, T::kColumns, T::kCopied, true, true>, T>;
    if constexpr (!kFloats && T::kRows == 128 && T::kColumns == 128)
      if (KeepsFilter(p, config)) {
        using Kept = KeptTile<typename T::In>;
        if (p.direction == Direction::kForward)
          return LaunchTile<Kept, true>(p, config, operand, filter, out, workspace, epilogue, stream);
        return LaunchTile<Kept, false>(p, config, operand, filter, out, workspace, epilogue, stream);
      }
    if constexpr (kFloats || !kCopiedAlone)
      if (p.direction == Direction::kForward)
        return LaunchTile<Forward, true>(p, config, operand, filter, out, workspace, epilogue, stream);
    constexpr bool kForwardAlone = kIsAcross<T> ? kFloats : T::kLarge && T::kColumns == 160;
    if constexpr (!kCopiedAlone && !kForwardAlone)
      if (p.direction == Direction::kDataGradient)
        return LaunchTile<T, false>(p, config, operand, filter, out, workspace, epilogue, stream);
    return cudaErrorInvalidValue;
  };
  return IsAcross(config.tile) ? VisitAcrossTile(p, config, launch) : VisitWgmmaTile(p, config, launch);
}

}  // namespace jaxdnn::conv
