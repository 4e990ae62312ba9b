// What Hopper's kernels of few channels share: how four warps bring strips of x to shared memory, as filled_plan.h says
// they lie there, for two warpgroups that multiply, and where pieces are.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/conv/filled_plan.h"
#include "cuda/conv/wgmma_tile.cuh"

namespace jaxdnn::conv {

struct FilledParams;

// Of one of the shapes; and of a volume, whose windows have planes, or not.
template <class In_, int kShape, bool kVolume_>
struct FilledTile {
  using In = In_;
  static constexpr bool kVolume = kVolume_;
  static constexpr FilledShape kThis = kFilledShapes[kShape];
  static constexpr int kLines = kThis.lines, kStride = kThis.stride, kTiles = kThis.tiles;
  static constexpr int kChunks = kThis.pixels * sizeof(In) / 4;            // of a line of the window
  static constexpr int kApart = kStride * sizeof(In) / 4;                  // parts of a line of a strip
  static constexpr int kLineTerms = kThis.pixels * FilledPlan::kChannels;  // of the sum
  static constexpr int kLineSteps = kChunks / 2;

  // wgmma's description of an operand in the strip: that of a unit's results for the window's first line.
  static __device__ uint64_t Windows(const FilledParams& q, uint32_t strip, int unit, bool transposed);
};

constexpr int kFilledMostStages = 8;
constexpr int kFilledBarrierBytes = kFilledMostStages * (16 + 4);  // and what a stage has of FilledRing

struct FilledParams {
  int lines, fours, pitch, planes;    // of a piece's strips, as in FilledPlan
  int units, line_units;              // of a piece, at most; and of a line
  int stages, stage_bytes, strip;     // and where in a stage its strip is
  int pieces, column_tiles, workers;  // blocks that share a column tile's pieces
  int front, lead;                    // pixels, and strides
  int channels, features;
  int x_height, x_width, height, width;  // of x and y
  int window_height, window_width, stride, pad_h, pad_w;
  int x_depth, stride_d, pad_d;  // of volumes
  FastDiv groups, bands, fours_div, column_div, lines_div, depth_div;

  // With stages that have `before` bytes before the strip and begin on multiples of `granule`, and `beside` bytes
  // beside all of them and their barriers.
  FilledParams(const Problem& p, const FilledPlan& plan, int before, int granule, int beside)
      : lines(plan.lines),
        fours(plan.fours),
        pitch(plan.pitch),
        planes(plan.planes),
        units(plan.units),
        line_units(plan.line_units),
        stage_bytes(int(CeilDiv(before + plan.StripBytes(), granule)) * granule),
        strip(before),
        pieces(int(plan.pieces)),
        column_tiles(plan.column_tiles),
        front(plan.front),
        lead(plan.lead),
        channels(int(p.channels)),
        features(int(p.features)),
        x_height(int(p.x[1])),
        x_width(int(p.x[2])),
        height(int(p.y[1])),
        width(int(p.y[2])),
        window_height(int(p.window[1])),
        window_width(int(p.window[2])),
        stride(int(p.stride[1])),
        pad_h(int(p.pad[1])),
        pad_w(int(p.pad[2])),
        x_depth(int(p.x[0])),
        stride_d(int(p.stride[0])),
        pad_d(int(p.pad[0])),
        groups(plan.groups),
        bands(plan.bands),
        fours_div(plan.fours),
        column_div(plan.column_tiles),
        lines_div(plan.lines),
        depth_div(p.y[0]) {
    stages = std::min(kFilledMostStages, ((227 << 10) - kFilledBarrierBytes - beside) / stage_bytes);
  }
  __host__ __device__ int SharedBytes() const { return stages * stage_bytes + kFilledBarrierBytes; }

  // Of a block's tiles of features, those that there are.
  template <class T>
  __device__ int Tiles(int first_feature) const {
    return T::kTiles == 1 ? 1 : min(T::kTiles, (features - first_feature - 1) / FilledPlan::kFeatures + 1);
  }
  // Rows of the filter that are a plane of the window.
  __device__ int PlaneRows() const { return window_height * window_width * channels; }
  // Of a term of the sum: the row of its plane, or -1 where it is none of the window's.
  template <class T>
  __device__ int FilterRow(int term) const {
    const int line = term / T::kLineTerms, channel = term % FilledPlan::kChannels;
    const int pixel = term % T::kLineTerms / FilledPlan::kChannels - front;
    const bool exists = line < window_height && static_cast<unsigned>(pixel) < static_cast<unsigned>(window_width) &&
                        channel < channels;
    return exists ? (line * window_width + pixel) * channels + channel : -1;
  }
};

template <class In, int kShape, bool kVolume>
__device__ uint64_t FilledTile<In, kShape, kVolume>::Windows(const FilledParams& q, uint32_t strip, int unit,
                                                             bool transposed) {
  return hopper::PlainDescriptor(strip + (unit * FilledPlan::kColumns + q.lead) * 16,
                                 kApart == 1 ? 16 : q.pitch / kApart, q.stride * q.pitch, transposed);
}

// The pieces of a worker, which are neighbours.
struct FilledShare {
  int first, end;

  __device__ FilledShare(const FilledParams& q, int worker)
      : first(static_cast<int>(int64_t{q.pieces} * worker / q.workers)),
        end(static_cast<int>(int64_t{q.pieces} * (worker + 1) / q.workers)) {}
};

// A piece's image, or plane of a volume's result, its first result, and its units.
struct FilledPlace {
  int image, line, column, units;

  // The image of x, or plane, that the window's first plane meets, which may be outside; and that planes are of.
  __device__ int FirstPlane(const FilledParams& q, int* volume) const {
    int plane;
    *volume = q.depth_div.Div(image, &plane);
    return plane * q.stride_d - q.pad_d;
  }

  __device__ FilledPlace(const FilledParams& q, int piece) {
    int group;
    image = q.bands.Div(q.groups.Div(piece, &group), &line);
    line *= FilledPlan::kHeight;
    const int unit = q.groups.Div(group * q.line_units);
    column = unit * FilledPlan::kColumns;
    units = q.groups.Div((group + 1) * q.line_units) - unit;
  }
};

// The ring of stages, and where a thread is in its round.
struct FilledRing : hopper::RingPlace {
  const FilledParams& q;
  uint32_t data, barriers;
  int* not_finite;  // of each stage, the last piece of whose pixels some may be no finite numbers

  __device__ FilledRing(const FilledParams& q, unsigned char* shared)
      : q(q),
        data(SharedAddress(shared)),
        barriers(data + q.stages * q.stage_bytes),
        not_finite(reinterpret_cast<int*>(shared + q.stages * q.stage_bytes + kFilledMostStages * 16)) {}
  __device__ uint32_t Data() const { return data + stage * q.stage_bytes; }
  __device__ uint32_t Full() const { return barriers + 16 * stage; }
  __device__ uint32_t Empty() const { return Full() + 8; }
  __device__ int* NotFinite() const { return not_finite + stage; }
  __device__ void Next() { RingPlace::Next(q.stages); }
  // All threads of the block, once. So many arrive when a stage is full, and so many warpgroups take it.
  __device__ void Init(int fillers, int takers) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < q.stages; ++i) {
        hopper::InitBarrier(barriers + 16 * i, fillers);
        hopper::InitBarrier(barriers + 16 * i + 8, takers * kWarpgroup / 32);
        not_finite[i] = -1;
      }
      hopper::PublishBarriers();
    }
    __syncthreads();
  }
};

// Four pixels of x, as they lie in memory.
template <class In, int kChannels>
struct FourPixels {
  using Piece = std::conditional_t<kChannels * sizeof(In) == 6, uint2, uint4>;
  static constexpr int kPieces = 4 * kChannels * sizeof(In) / sizeof(Piece), kWords = kChannels * sizeof(In);
  static constexpr int kChunks = sizeof(In);  // that they fill

  Piece pieces[kPieces];

  // Written out, for the compiler moves ordinary loads to where they are used, and then waits for one after another.
  __device__ void Load(const In* from) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Piece* const piece = reinterpret_cast<const Piece*>(from) + i;
      uint32_t* const w = reinterpret_cast<uint32_t*>(pieces + i);
      if constexpr (sizeof(Piece) == 8)
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(piece) : "memory");
      else
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "l"(piece)
                     : "memory");
    }
  }
  // Whether some may be no finite numbers where they are multiplied.
  __device__ bool NotFinite() const {
    uint32_t words[kWords], all = 0;
    memcpy(words, pieces, sizeof(words));
    if constexpr (sizeof(In) == 4) {
      constexpr uint32_t kRoundedToInfinity = 0x7F7FF000;
#pragma unroll
      for (const uint32_t word : words) all = max(all, word & 0x7FFFFFFF);
      return all >= kRoundedToInfinity;
    } else {
      using Two = TwoOf<In>;
      const Two zero = BitCast<Two>(all);
      Two sums = zero;
#pragma unroll
      for (const uint32_t word : words) sums = __hfma2(BitCast<Two>(word), zero, sums);
      return (BitCast<uint32_t>(sums) & 0x7FFF7FFF) != 0;  // zeros may have signs
    }
  }
  // Calls store(i, words) for each chunk of them, or zeros.
  template <class StoreChunk>
  __device__ void ForChunks(bool valid, const StoreChunk& store) const {
    uint32_t words[kWords];
    memcpy(words, pieces, sizeof(words));
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t* const w = words + i * kWords / kChunks;
      uint32_t chunk[4];
      if constexpr (sizeof(In) == 4) {
#pragma unroll
        for (int k = 0; k < 4; ++k) chunk[k] = k < kChannels ? w[k] : 0;
        RoundToTf32(chunk);
      } else if constexpr (kChannels == 4) {
#pragma unroll
        for (int k = 0; k < 4; ++k) chunk[k] = w[k];
      } else {
        chunk[0] = w[0];
        chunk[1] = w[1] & 0xffff;
        chunk[2] = __byte_perm(w[1], w[2], 0x5432);
        chunk[3] = w[2] >> 16;
      }
#pragma unroll
      for (uint32_t& each : chunk) each = valid ? each : 0;
      store(i, chunk);
    }
  }
};

// Fours of pixels that a thread brings at once, and where in the strip they go.
template <class T, int kChannels>
struct FilledBatch {
  using In = typename T::In;
  using Pixels = FourPixels<In, kChannels>;
  static constexpr int kFours = sizeof(In) == 4 ? 6 - kChannels : 8 - kChannels, kAll = kFours * kWarpgroup;

  Pixels pixels[kFours];
  bool exists[kFours], valid[kFours];  // in the strip, and in x
  int to[kFours];

  // From the thread's number `first` on, of those of a piece.
  __device__ void Load(const FilledParams& q, int piece, int first, int first_plane, const In* x) {
    const FilledPlace place(q, piece);
    const int first_line = place.line * q.stride - q.pad_h;
    const int first_pixel = T::kStride * (place.column - q.lead) - q.pad_w - q.front;
    const int plane_size = q.x_height * q.x_width * kChannels;
    int volume = place.image, plane = 0;
    if constexpr (T::kVolume) plane = place.FirstPlane(q, &volume) + first_plane;
    const In* const image = x + (T::kVolume ? volume * q.x_depth : volume) * plane_size;
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      int four;
      const int in_strip = q.fours_div.Div(first + k * kWarpgroup, &four);
      int line = in_strip, of_plane = 0;
      if constexpr (T::kVolume) of_plane = plane + q.lines_div.Div(in_strip, &line);
      line += first_line;
      const int pixel = first_pixel + 4 * four;
      exists[k] = in_strip < q.planes * q.lines;
      valid[k] = exists[k] && static_cast<unsigned>(line) < static_cast<unsigned>(q.x_height) &&
                 static_cast<unsigned>(pixel) < static_cast<unsigned>(q.x_width) &&
                 (!T::kVolume || static_cast<unsigned>(of_plane) < static_cast<unsigned>(q.x_depth));
      to[k] = in_strip * q.pitch + four * (Pixels::kChunks / T::kApart) * 16;
      pixels[k].Load(image + (valid[k] ? of_plane * plane_size + (line * q.x_width + pixel) * kChannels : 0));
    }
  }
  __device__ bool NotFinite() const {
    bool not_finite = false;
#pragma unroll
    for (const Pixels& each : pixels) not_finite |= each.NotFinite();
    return not_finite;
  }
  __device__ void Store(uint32_t strip, int part) const {
#pragma unroll
    for (int k = 0; k < kFours; ++k)
      if (exists[k])
        pixels[k].ForChunks(valid[k], [&](int i, const uint32_t (&chunk)[4]) {
          hopper::StoreWords(strip + to[k] + i % T::kApart * part + i / T::kApart * 16, chunk);
        });
  }
};

// By the threads of the last warpgroup: brings the strips of the worker's pieces, with zeros outside x, those of a
// volume of the window's planes from `first_plane` on. Before a piece's stage is filled, begin(place) is called. A
// batch is loaded while the one before is stored.
template <class T, int kChannels, class Begin>
__device__ void ProduceFilled(const FilledParams& q, FilledRing& ring, int worker, int first_plane,
                              const typename T::In* x, const Begin& begin) {
  using Batch = FilledBatch<T, kChannels>;
  const int thread = threadIdx.x % kWarpgroup, batches = (q.planes * q.lines * q.fours + Batch::kAll - 1) / Batch::kAll;
  const FilledShare share(q, worker);
  if (share.first == share.end) return;
  Batch next;
  next.Load(q, share.first, thread, first_plane, x);
#pragma unroll 1
  for (int piece = share.first; piece < share.end; ++piece, ring.Next()) {
#pragma unroll 1
    for (int i = 0; i < batches; ++i) {
      const Batch batch = next;
      const bool last = i + 1 == batches;
      if (!last || piece + 1 < share.end)
        next.Load(q, last ? piece + 1 : piece, last ? thread : thread + (i + 1) * Batch::kAll, first_plane, x);
      if (i == 0) {
        hopper::WaitBarrier(ring.Empty(), ring.parity ^ 1);
        begin(FilledPlace(q, piece));
      }
      if (T::kMarksNotFinite && batch.NotFinite()) *ring.NotFinite() = piece;
      batch.Store(ring.Data() + q.strip, q.pitch / T::kApart);
    }
    hopper::ShowSharedToTma();
    hopper::Arrive(ring.Full());
  }
}

// Gives the first warpgroups their number, and the others x to bring.
template <class T, class Begin, class Consume>
__device__ void RunFilled(const FilledParams& q, FilledRing& ring, int worker, int first_plane, const typename T::In* x,
                          const Begin& begin, const Consume& consume) {
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup < T::kTakers) {
    hopper::SetRegisters<T::kTakersRegisters, true>();
    return consume(warpgroup);
  }
  hopper::SetRegisters<T::kBringersRegisters, false>();
  if (q.channels == 3) {
    ProduceFilled<T, 3>(q, ring, worker, first_plane, x, begin);
  } else {
    ProduceFilled<T, 4>(q, ring, worker, first_plane, x, begin);
  }
}

}  // namespace jaxdnn::conv
