// Cubes of three cells a side: local response normalization within a channel of a volume.
//
// A block takes a tile of the last two dimensions and 32 bytes of the inner one, and marches through the planes of
// the first. Planes come to shared memory some steps before they are due, with what the tile's windows reach around it.
// A thread owns two neighbours of the inner dimension in kRows rows of a column: it sums across the columns, then down
// the rows, and the sums of the last planes lie in its registers. The cotangent exchanges its terms r by way of shared
// memory too, and sums them likewise one step later, so that one barrier a step will do. So every element is read once,
// but for what tiles overlap by, and nothing goes to memory but results.
//
// Bound by instructions: about 65 for each element of a cotangent, of which tiles of large planes take some nearly
// twice.
#include <algorithm>
#include <climits>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/lrn/paths.h"
#include "cuda/lrn/response.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int H = 1, W = 2 * H + 1;                        // a window's reach and its side
constexpr int kPair = 2, kRows = 4, kOwn = kRows * kPair;  // elements of a thread in a plane
constexpr int kSharedBytes = 99 << 10;                     // of a block on every device since sm_80
constexpr int kMultiprocessors = 132;

template <Map kMap, class T>
struct Cube {
  using Unit = Packed<T, kPair>;
  using Term = Vec<float, kPair>;
  static constexpr bool kCotangent = kMap == Map::kCotangent;
  static constexpr int kLanes = 32 / sizeof(Unit);
  // Rows and columns around its results where a tile has terms.
  static constexpr int kHalo = kCotangent ? H : 0;
  // Planes that a result sees, and planes from an element's arrival to its result.
  static constexpr int kSight = H + kHalo, kLag = kCotangent ? 2 * H + 1 : H;
  static constexpr int kAhead = 2;  // planes whose loads are in flight
  static constexpr int kRing = kLag + 1 + kAhead;
  static constexpr int kThreads = kCotangent ? 224 : 256, kResident = 2;
  // Columns of a tile at most, and units of a row with what windows reach: known beforehand, it costs no addresses.
  static constexpr int kColumns = kCotangent ? 24 : 16, kPitch = (kColumns + 2 * H) * kLanes;
  // Units that are copied together, and such pieces of a row.
  static constexpr int kPiece = 16 / sizeof(Unit), kPieces = kPitch / kPiece;
  static constexpr int kUnitBytes = kRing * sizeof(Unit) + (kCotangent ? 2 * sizeof(Term) : 0);
};

struct Tiling {
  int depth, height, width;
  int64_t inner;
  int columns, patches;  // a tile's columns and its rows by kRows, those of the halo included
  int units;             // of a tile with what windows reach
  int chunk;             // planes of a block's results
  int64_t blocks;
  FastDiv by_lane_column, by_slice, by_across, by_down, by_chunk;
};

// Sums of the last W planes, without differences: partial[i] holds those of the last W - 1 - i.
struct Trailing {
  float partial[W - 1][kOwn] = {};

  __device__ void Add(const float (&plane)[kOwn], float (&sum)[kOwn]) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      sum[j] = partial[0][j] + plane[j];
#pragma unroll
      for (int i = 1; i < W - 1; ++i) partial[i - 1][j] = partial[i][j] + plane[j];
      partial[W - 2][j] = plane[j];
    }
  }
};

// Sums over the W rows and columns around each of a thread's elements, of squares or of the values as they are.
// `corner` is the first unit that they see.
template <class T, int kLanes, int kPitch, bool kSquares, class Unit>
__device__ void SumPlane(const Unit* corner, float (&sum)[kOwn]) {
  float row[kRows + W - 1][kPair];
#pragma unroll
  for (int i = 0; i < kRows + W - 1; ++i)
#pragma unroll
    for (int k = 0; k < W; ++k) {
      float value[kPair];
      Widen<T>(corner[i * kPitch + k * kLanes], value);
#pragma unroll
      for (int j = 0; j < kPair; ++j) {
        const float term = kSquares ? value[j] * value[j] : value[j];
        row[i][j] = k == 0 ? term : row[i][j] + term;
      }
    }
#pragma unroll
  for (int i = 0; i < kRows; i += 2)
#pragma unroll
    for (int j = 0; j < kPair; ++j) {
      float both = row[i + 1][j];
#pragma unroll
      for (int k = 2; k < W; ++k) both += row[i + k][j];
      sum[i * kPair + j] = row[i][j] + both;
      sum[(i + 1) * kPair + j] = both + row[i + W][j];
    }
}

template <class S, bool kThreeQuarters, class T>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    CubeKernel(const __grid_constant__ Tiling tiling, Response<T, kThreeQuarters> response, const T* __restrict__ x,
               const T* __restrict__ t, T* __restrict__ out) {
  using Unit = typename S::Unit;
  using Term = typename S::Term;
  constexpr int kLanes = S::kLanes, kHalo = S::kHalo, kPitch = S::kPitch, kPiece = S::kPiece, kPieces = S::kPieces;
  extern __shared__ uint4 shared_bytes[];
  Unit* const planes = reinterpret_cast<Unit*>(shared_bytes);
  Term* const terms = reinterpret_cast<Term*>(planes + S::kRing * tiling.units);

  int slice, across, down, chunk;
  const int64_t outer = tiling.by_chunk.Div(
      tiling.by_down.Div(tiling.by_across.Div(tiling.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &across),
                         &down),
      &chunk);
  const int first = chunk * tiling.chunk, last = min(tiling.depth, first + tiling.chunk);
  const int begin = max(first - S::kSight, 0);
  const int64_t row_size = tiling.width * tiling.inner, plane_size = tiling.height * row_size;
  // Where the tile with its surroundings begins.
  const int top = down * (tiling.patches * kRows - 2 * kHalo) - S::kSight;
  const int left = across * (tiling.columns - 2 * kHalo) - S::kSight;
  const int64_t channel = slice * int64_t{kLanes * kPair};
  const int64_t corner = ((outer * tiling.depth * tiling.height + top) * tiling.width + left) * tiling.inner + channel;

  // What the thread copies: pieces of one column.
  const int piece = static_cast<int>(threadIdx.x) % kPieces, copy_row = static_cast<int>(threadIdx.x) / kPieces;
  const int copy_step = static_cast<int>(blockDim.x) / kPieces;
  const int copy_column = piece / (kLanes / kPiece), copy_at = piece % (kLanes / kPiece) * kPiece * kPair;
  const bool copies = left + copy_column >= 0 && left + copy_column < tiling.width && channel + copy_at < tiling.inner;
  const bool needed = copy_row < copy_step && copy_column < tiling.columns + 2 * H;
  const int copy_end = needed ? top + tiling.patches * kRows + 2 * H : INT_MIN;
  const T* source = x + corner + begin * plane_size + copy_row * row_size + copy_column * tiling.inner + copy_at;
  const auto load = [&](int plane, int slot) {
    const int rows = copies && plane < tiling.depth ? tiling.height : 0;
    const T* from = source;
    uint4* to = reinterpret_cast<uint4*>(planes + slot * tiling.units + copy_row * kPitch) + piece;
    for (int row = top + copy_row; row < copy_end; row += copy_step) {
      const bool exists = static_cast<unsigned>(row) < static_cast<unsigned>(rows);
      CopyAsyncOrZero(to, reinterpret_cast<const uint4*>(exists ? from : x), exists);
      from += copy_step * row_size;
      to += copy_step * kPieces;
    }
    CommitAsync();
    source += plane_size;
  };

  // What it computes.
  int lane_column;
  const int patch = tiling.by_lane_column.Div(static_cast<int>(threadIdx.x), &lane_column);
  const int tile_row = patch * kRows, row = top + H + tile_row, column = left + H + lane_column / kLanes;
  const bool computes = patch < tiling.patches;
  const bool column_exists =
      computes && column >= 0 && column < tiling.width && channel + lane_column % kLanes * kPair < tiling.inner;
  const bool column_counts = lane_column / kLanes >= kHalo && lane_column / kLanes < tiling.columns - kHalo;
  bool exists[kRows], counts[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    exists[i] = column_exists && row + i >= 0 && row + i < tiling.height;
    counts[i] = exists[i] && column_counts && tile_row + i >= kHalo && tile_row + i < tiling.patches * kRows - kHalo;
  }
  const int window = (computes ? tile_row : 0) * kPitch + lane_column, own = window + H * (kPitch + kLanes);
  int64_t mine = corner + begin * plane_size + (tile_row + H) * row_size + H * tiling.inner +
                 lane_column / kLanes * tiling.inner + lane_column % kLanes * kPair;

  const auto widen_own = [&](int slot, float (&wide)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float pair[kPair];
      Widen<T>(planes[slot * tiling.units + own + i * kPitch], pair);
#pragma unroll
      for (int j = 0; j < kPair; ++j) wide[i * kPair + j] = pair[j];
    }
  };
  const auto store = [&](int64_t at, const float (&wide)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float pair[kPair] = {wide[i * kPair], wide[i * kPair + 1]};
      if (counts[i]) StorePacked<T, kPair>(out + at + i * row_size, Narrow<T, kPair>(pair));
    }
  };
  // The slot of the plane that came `back` steps before that in `slot`.
  const auto before = [](int slot, int back) { return slot >= back ? slot - back : slot - back + S::kRing; };

  Trailing energy, pull;
  float scaled[H + 1][kOwn];  // D^-beta g of the last planes
  for (int i = 0; i < S::kAhead; ++i) load(begin + i, i);
  // Of the windows that a plane completes, the cotangent at their centres: loaded a step ahead. The thread's part of
  // the plane is at `at`.
  Unit next_g[kRows];
  const auto load_g = [&](int plane, int64_t at) {
    if constexpr (S::kCotangent) {
      const T* const from = t + at - H * plane_size;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        next_g[i] = {};
        if (plane >= H && plane - H < tiling.depth && exists[i])
          next_g[i] = *reinterpret_cast<const Unit*>(from + i * row_size);
      }
    }
  };
  load_g(begin, mine);
  int slot = 0, turn = 0;
  for (int plane = begin; plane < last + S::kLag; ++plane) {
    const int centre = plane - H;
    const bool centre_exists = centre >= 0 && centre < tiling.depth;
    Unit g[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) g[i] = next_g[i];
    load_g(plane + 1, mine + plane_size);
    WaitAsync<S::kAhead - 1>();
    __syncthreads();
    load(plane + S::kAhead, before(slot, S::kRing - S::kAhead));

    if constexpr (S::kCotangent) {
      float in_plane[kOwn], sum[kOwn], own_x[kOwn], result[kOwn];
      SumPlane<float, kLanes, kPitch, false>(terms + (turn ^ 1) * tiling.units + window, in_plane);
      pull.Add(in_plane, sum);
      widen_own(before(slot, S::kLag), own_x);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) result[j] = scaled[0][j] - own_x[j] * sum[j];
      if (plane - S::kLag >= first) store(mine - S::kLag * plane_size, result);
    }

    float in_plane[kOwn], divisor[kOwn], own_x[kOwn], gain[kOwn], rate[kOwn], result[kOwn];
    SumPlane<T, kLanes, kPitch, true>(planes + slot * tiling.units + window, in_plane);
    energy.Add(in_plane, divisor);
    widen_own(before(slot, H), own_x);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) divisor[j] = response.Divisor(divisor[j]);
    response.GainsAndRates(divisor, gain, rate);
    if constexpr (!S::kCotangent) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) result[j] = own_x[j] * gain[j];
      if (centre >= first) store(mine - H * plane_size, result);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float pair[kPair];
        Term r;
        Widen<T>(g[i], pair);
#pragma unroll
        for (int j = 0; j < kPair; ++j) {
          const int at = i * kPair + j;
#pragma unroll
          for (int k = 0; k < H; ++k) scaled[k][at] = scaled[k + 1][at];
          scaled[H][at] = pair[j] * gain[at];
          // Beyond the borders the rate may be infinite.
          r.v[j] = centre_exists && exists[i] ? rate[at] * (own_x[at] * scaled[H][at]) : 0.f;
        }
        if (computes) terms[turn * tiling.units + own + i * kPitch] = r;
      }
      turn ^= 1;
    }
    slot = slot + 1 < S::kRing ? slot + 1 : 0;
    mine += plane_size;
  }
}

// The tiling that takes the device the least time, in steps of a thread.
template <class S>
Tiling Tile(const Problem& p) {
  Tiling best = {};
  int64_t least = INT64_MAX;
  const int64_t slices = CeilDiv(p.inner, S::kLanes * kPair);
  constexpr int kWidest = S::kColumns - 2 * S::kHalo;
  const int64_t fewest = CeilDiv(p.extent[2], kWidest);
  for (int64_t wanted = fewest; wanted < fewest + 4; ++wanted) {
    Tiling t = {p.extent[0], p.extent[1], p.extent[2], p.inner};
    t.columns = static_cast<int>(CeilDiv(t.width, wanted)) + 2 * S::kHalo;
    constexpr int kRoom = (kSharedBytes / (S::kPitch * S::kUnitBytes) - 2 * H) / kRows;
    const int most = std::min(kRoom, S::kThreads / (t.columns * S::kLanes)) * kRows - 2 * S::kHalo;
    const int64_t across = CeilDiv(t.width, t.columns - 2 * S::kHalo), down = CeilDiv(t.height, most);
    t.patches = static_cast<int>(CeilDiv(CeilDiv(t.height, down) + 2 * S::kHalo, kRows));
    t.units = (t.patches * kRows + 2 * H) * S::kPitch;
    for (int chunks = 1; chunks <= 8; chunks *= 2) {
      t.chunk = static_cast<int>(CeilDiv(t.depth, chunks));
      t.blocks = p.outer * slices * across * down * CeilDiv(t.depth, t.chunk);
      const int64_t waves = CeilDiv(t.blocks, kMultiprocessors * S::kResident);
      const int64_t steps = waves * (t.chunk + S::kLag + (chunks > 1 ? S::kSight : 0));
      // An element to compute takes as long as two to copy, or longer.
      const int64_t time = steps * (2 * t.columns * t.patches * kRows + t.units / S::kPitch * (t.columns + 2 * H));
      if (time >= least) continue;
      least = time;
      best = t;
      best.by_slice = FastDiv(slices), best.by_across = FastDiv(across), best.by_down = FastDiv(down);
    }
  }
  best.by_lane_column = FastDiv(best.columns * S::kLanes);
  best.by_chunk = FastDiv(CeilDiv(best.depth, best.chunk));
  return best;
}

template <Map kMap, class T>
cudaError_t Launch(const Problem& p, const void* t, const void* x, void* out, cudaStream_t stream) {
  using S = Cube<kMap, T>;
  const Tiling tiling = Tile<S>(p);
  // A thread at least for each piece of a row to copy.
  const int threads = std::max(tiling.columns * tiling.patches * S::kLanes, S::kPieces);
  const Grid grid{tiling.blocks, static_cast<int>(CeilDiv(threads, 32)) * 32,
                  static_cast<size_t>(tiling.units) * S::kUnitBytes};
  const auto launch = [&](auto three_quarters) {
    constexpr bool kThreeQuarters = decltype(three_quarters)::value;
    return LaunchKernel(CubeKernel<S, kThreeQuarters, T>, grid, stream, tiling, Response<T, kThreeQuarters>(p),
                        static_cast<const T*>(x), static_cast<const T*>(t), static_cast<T*>(out));
  };
  return p.beta == 0.75 ? launch(std::true_type{}) : launch(std::false_type{});
}

template <class T>
cudaError_t LaunchType(Map map, const Problem& p, const void* t, const void* x, void* out, cudaStream_t stream) {
  return map == Map::kForward ? Launch<Map::kForward, T>(p, t, x, out, stream)
                              : Launch<Map::kCotangent, T>(p, t, x, out, stream);
}

}  // namespace

bool IsCube(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out) {
  const int item = dtype == DType::kF32 ? 4 : 2;
  bool three = map != Map::kTangent && (dtype == DType::kF32 || dtype == DType::kBF16);
  for (int d = 0; d < 3; ++d) three &= p.before[d] == H && p.after[d] == H;
  const auto aligned = [](const void* array) { return reinterpret_cast<uintptr_t>(array) % 16 == 0; };
  return three && p.inner * item % 16 == 0 && aligned(t) && aligned(x) && aligned(out);
}

cudaError_t LaunchCube(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                       cudaStream_t stream) {
  return dtype == DType::kF32 ? LaunchType<float>(map, p, t, x, out, stream)
                              : LaunchType<__nv_bfloat16>(map, p, t, x, out, stream);
}

}  // namespace jaxdnn::lrn
