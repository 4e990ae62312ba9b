// Normalization over square boxes of W = 2 H + 1 cells in two dimensions: local response normalization within a
// channel, and divisive normalization.
//
// A thread owns a strip of two units of a row, and marches down the rows. A unit is N neighbours of the inner
// dimension, and units are neighbours across; or inner is 1, and a unit is N neighbours across itself (kAcross). Rows
// come to shared memory some steps before they are due, by copies that take no registers, and stay until the last
// window that needs them is complete. What a box reaches on either side comes from there too; where a warp has whole
// rows, from its lanes. Sums are taken across first, and then down. The cotangent exchanges in the same step the row of
// its terms that the step before has completed, and sums them likewise. So every element is read once, but for the rows
// and columns where blocks overlap.
//
// Bound by instructions, most of which are the curve's and the sums', and by the steps' latency.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>

#include "cuda/common/convert.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/shared_bytes.cuh"
#include "cuda/lrn/paths.h"
#include "cuda/lrn/response.cuh"
#include "cuda/lrn/strips.cuh"

namespace jaxdnn::lrn {

constexpr int kMaxSlices = 16;
constexpr int kMaxChunks = 8;
constexpr int kMultiprocessors = 132;

// A block takes `slices` neighbouring vectors of each of `columns` strips of each of `groups` planes. A plane's strips
// are all there, behind empty ones that separate it from its neighbour; or they are some, which overlap with other
// blocks' by what the outermost cannot sum.
struct Tiles {
  int64_t outer, plane, row, step;  // planes; bytes of a plane, of a row, and from a unit to the next
  int64_t vectors;                  // of a column
  int height, width;                // width in columns
  int units;                        // of a row
  int groups, columns, slices;
  int origin;  // strips that a block's neighbour has results for
  int64_t slice_tiles;
  int spans, chunks, chunk;
  FastDiv by_slice_tile, by_span, by_chunk, by_slice, by_column;

  int Threads() const { return static_cast<int>(CeilDiv(groups * columns * slices, 32)) * 32; }
  int64_t Blocks() const { return CeilDiv(outer, groups) * chunks * spans * slice_tiles; }
};

// In a kernel every pointer lies as many rows in front of its array as the array's rows come after those of x to load.
template <class T>
struct MarchArrays {
  const T *x, *m, *t;  // no means without kMeans; t is the cotangent
  T *out, *dm;
};

template <Map kMap, bool kHasMeans, int kH, int kN, bool kIsAcross, class T>
struct March {
  static constexpr int H = kH, N = kN, W = 2 * H + 1, E = 2 * N;
  static constexpr bool kMeans = kHasMeans, kAcross = kIsAcross, kCotangent = kMap == Map::kCotangent;
  // Squares of 16-bit deviations are summed as S(x²) - 2 m S(x) + n m²: where these nearly cancel, numbers are of the
  // same magnitude, and float holds sums of products of their 8 bits exactly.
  static constexpr bool kPivot = kMeans && sizeof(T) > 2;
  // Terms that the cotangent sums over windows: r, and r m.
  static constexpr int kTerms = !kCotangent ? 0 : kMeans ? 2 : 1;
  // Rows from an element's arrival to its result, and rows and columns that a result sees.
  static constexpr int kLag = kCotangent ? W : H, kSight = kCotangent ? 2 * H : H;
  // Units that a sum reaches on either side, and strips that have them.
  static constexpr int kReach = kAcross ? (H + N - 1) / N : H, kMargin = (kReach + 1) / 2;
  static constexpr int L = (2 * kReach + 2) * N;  // elements that a strip's sums see
  // Rows that are unrolled, so that a row's place in a ring is known: a multiple of W, with room for those to come.
  static constexpr int U = H == 1 ? 2 * W : W;
  static constexpr int kAhead = 4;  // rows whose loads are in flight
  // Warps on a multiprocessor, as registers allow.
  static constexpr bool kFew = sizeof(T) == 2;
  static constexpr int kWarps = kCotangent && kMeans          ? (!kAcross || H == 3 ? 8
                                                                 : kFew             ? 16
                                                                                    : 12)
                                : !kAcross || !kFew || kMeans ? 16
                                : kCotangent && H < 3         ? (H == 1 ? 24 : 20)
                                : kCotangent                  ? 16
                                                              : 20;
  // A warp has rows of its own where lanes lie across, and so waits for no other. Elsewhere a block should hold a row.
  static constexpr int kThreads = kAcross ? 32 : kCotangent && !kMeans && kFew && H == 3 ? 512 : 256;
  // Bytes of a column that a block should visit at once.
  static constexpr int kVisit = kFew || (kCotangent && H > 1) ? 64 : 128;
  static constexpr int kPitch = kThreads + (kAcross ? 0 : 2 * kMargin * kMaxSlices);
  static constexpr int kResident = kWarps * 32 / kThreads;

  // A strip's elements are N pairs of neighbours across. Of the q-th pair: the i-th element that its sums see, where
  // the second of the pair sees 1, ..., W; the pair's elements; and how far that is from the strip's first column.
  static constexpr __host__ __device__ int Seen(int q, int i) {
    return kAcross ? kReach * N - H + 2 * q + i : i * N + q;
  }
  static constexpr __host__ __device__ int Own(int q, int side) { return kAcross ? 2 * q + side : side * N + q; }
  static constexpr __host__ __device__ int Column(int q, int i) { return (kAcross ? 2 * q : 0) + i - H; }
};

// What a block holds in shared memory: the rows of x that windows still need and those on their way, the rows of the
// others on their way, which no other thread sees, and the terms of two rows, which take turns, so that one barrier
// each will do. Threads' strips lie beside each other, and zeros beyond the outermost.
template <class S, class T>
struct Exchange {
  static constexpr int kTerms = S::kAcross ? 0 : S::kTerms;  // others come from lanes
  Strip<S::N, T> x[2][S::U][S::kPitch];
  Terms<S::N, Accumulator<T>> terms[2][kTerms > 0 ? kTerms : 1][kTerms > 0 ? S::kPitch : 1];
  Strip<S::N, T> t[S::kCotangent ? S::U : 1][S::kCotangent ? S::kThreads : 1];
  Strip<S::N, T> m[S::kMeans ? S::U : 1][S::kMeans ? S::kThreads : 1];
};

template <class S, class T>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    MarchKernel(const __grid_constant__ Tiles tiles, Response<T> response, const __grid_constant__ MarchArrays<T> in) {
  using A = Accumulator<T>;
  using Unit = Packed<T, S::N>;
  using Term = Vec<A, S::N>;
  constexpr int H = S::H, N = S::N, W = S::W, U = S::U, E = S::E, L = S::L, kTerms = S::kTerms, kAhead = S::kAhead;
  constexpr bool kMeans = S::kMeans, kCotangent = S::kCotangent;
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<Exchange<S, T>*>(shared_bytes);
  const int lane = threadIdx.x, margin = S::kAcross ? 0 : S::kMargin * tiles.slices;

  int slice_tile, span, chunk, slice, strip;
  const int block = tiles.by_chunk.Div(
      tiles.by_span.Div(tiles.by_slice_tile.Div(static_cast<int>(blockIdx.x), &slice_tile), &span), &chunk);
  const int first = chunk * tiles.chunk, last = min(tiles.height, first + tiles.chunk);
  const int group = tiles.by_column.Div(tiles.by_slice.Div(lane, &slice), &strip);
  const int64_t outer = int64_t{block} * tiles.groups + group, vector = int64_t{slice_tile} * tiles.slices + slice;
  const int unit = 2 * (span * (tiles.columns - 2 * tiles.origin) + strip);  // the strip's first
  const bool exists = group < tiles.groups && outer < tiles.outer && vector < tiles.vectors && unit < tiles.units;
  const bool second = exists && unit + 1 < tiles.units;
  const int limit[2] = {exists ? tiles.height : 0, second ? tiles.height : 0};
  const bool results = exists && (span == 0 || strip >= tiles.origin) &&
                       (span == tiles.spans - 1 || strip < tiles.columns - tiles.origin);
  const int from[2] = {results ? first : INT_MAX, results && second ? first : INT_MAX};

  // What lies beyond the outermost lanes is zero, and so is what lies in front of the first row.
  for (int i = lane; i < 2 * U * S::kPitch; i += blockDim.x) shared.x[0][0][i] = {};
  for (int i = lane; i < 2 * Exchange<S, T>::kTerms * S::kPitch; i += blockDim.x) shared.terms[0][0][i] = {};
  __syncthreads();

  // Cells of a window in its row, where all columns exist.
  const int column = unit * (S::kAcross ? N : 1);
  A across[E];
#pragma unroll
  for (int q = 0; q < N; ++q)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int at = column + S::Column(q, H + side);
      across[S::Own(q, side)] = static_cast<A>(min(at + H, tiles.width - 1) - max(at - H, 0) + 1);
    }

  // The strip's place in the next row to load.
  const int begin = max(first - S::kSight, 0);
  int64_t place = outer * tiles.plane + unit * tiles.step + vector * int64_t{sizeof(Unit)} + begin * tiles.row;
  // The strips of x of the half of the ring that the rows are in, and of the other.
  Strip<N, T>*x_half = shared.x[0][0] + margin + lane, *x_other = shared.x[1][0] + margin + lane;
  // The thread's strip of the row that lies `i` from the half's first.
  const auto x_strip = [&](int i) {
    return i < 0 ? x_other + (i + U) * S::kPitch : i < U ? x_half + i * S::kPitch : x_other + (i - U) * S::kPitch;
  };
  Loader<S, T> x_loader, t_loader, m_loader;
  const auto load = [&](int i, int row, bool starts) {
    using Place = Strip<N, T>;
    const int due = i - Loader<S, T>::kHeld;
    const auto next = [&](Loader<S, T>& loader, Place* to, Place* due, const T* from, int row) {
      loader.Load(to, starts ? nullptr : due, Shift(from, place), tiles.step, row, limit);
    };
    next(x_loader, x_strip(i), x_strip(due), in.x, row);
    if constexpr (kCotangent) next(t_loader, &shared.t[i % U][lane], &shared.t[(due + U) % U][lane], in.t, row - H);
    if constexpr (kMeans) next(m_loader, &shared.m[i % U][lane], &shared.m[(due + U) % U][lane], in.m, row - H);
    CommitAsync();
  };

  // D^-beta g of the last rows, and the terms of the row in front.
  A scaled[W][E], term[kTerms > 0 ? kTerms : 1][E] = {};
  Running<S, A> energy, values, pull[kTerms > 0 ? kTerms : 1];
  Pivoted<S, A> pivoted(column, tiles.width);
#pragma unroll
  for (int i = 0; i < kAhead; ++i, place += tiles.row) load(i, begin + i, i < Loader<S, T>::kHeld);
  bool turn = false;
  for (int rows = begin;; rows += U) {
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const int row = rows + i, centre = row - H;
      if (row >= last + S::kLag) return;
      turn = !turn;
      Terms<N, A> own_terms[kTerms > 0 ? kTerms : 1];
#pragma unroll
      for (int k = 0; k < kTerms; ++k) {
#pragma unroll
        for (int j = 0; j < E; ++j) own_terms[k].unit[j / N].v[j % N] = term[k][j];
        if constexpr (!S::kAcross) shared.terms[turn][k][margin + lane] = own_terms[k];
      }
      WaitAsync<kAhead - 1>();
      if constexpr (!S::kAcross) __syncthreads();
      load(i + kAhead, row + kAhead, false);

      if constexpr (kCotangent) {
        A box[kTerms][E], x[E], result[E];
#pragma unroll
        for (int k = 0; k < kTerms; ++k) {
          A e[L], sum[E];
          Gather<S>(own_terms[k], shared.terms[turn][k] + margin + lane, tiles.slices, [&](int at, const Term& v) {
#pragma unroll
            for (int j = 0; j < N; ++j) e[at * N + j] = v.v[j];
          });
          SumAcross<S>(e, sum);
          pull[k].Add(i % W, sum, box[k]);
        }
        WidenStrip<N, T>(*x_strip(i - W), x);
#pragma unroll
        for (int j = 0; j < E; ++j) {
          const A rest = kMeans ? scaled[i % W][j] + box[kTerms - 1][j] : scaled[i % W][j];
          result[j] = rest - x[j] * box[0][j];
        }
        StoreStrip<S, T>(Shift(in.out, place), tiles.step, row - S::kLag, from, result);
      }

      A e[L], energies[E], sum[E], drift[E], x[E], m[E], t[E];
      Gather<S>(*x_strip(i), x_strip(i), tiles.slices, [&](int at, const Unit& v) {
        A wide[N];
        Widen<T>(v, wide);
#pragma unroll
        for (int j = 0; j < N; ++j) e[at * N + j] = wide[j];
      });
      WidenStrip<N, T>(*x_strip(i - H), x);
      if constexpr (kMeans) WidenStrip<N, T>(shared.m[i][lane], m);
      A more[E];  // about the means
      if constexpr (S::kPivot) {
        pivoted.Add(i % W, e, energies);
        pivoted.Shift(i % W, m, across, [&](int o) { return Within(row - o, tiles.height); }, more, drift);
      } else {
        A squares[L];
#pragma unroll
        for (int j = 0; j < L; ++j) squares[j] = e[j] * e[j];
        SumAcross<S>(squares, sum);
        energy.Add(i % W, sum, energies);
        if constexpr (kMeans) {
          SumAcross<S>(e, sum);
          values.Add(i % W, sum, drift);
          const A down = static_cast<A>(min(row, tiles.height - 1) - max(centre - H, 0) + 1);
#pragma unroll
          for (int j = 0; j < E; ++j) {
            const A mean_sum = across[j] * down * m[j];
            more[j] = m[j] * (mean_sum - 2 * drift[j]);
            drift[j] -= mean_sum;
          }
        }
      }
      if constexpr (kMeans) {
        // What is infinite stays so, and an infinite deviation from an infinite mean is not a number.
#pragma unroll
        for (int j = 0; j < E; ++j) energies[j] += energies[j] <= FLT_MAX ? more[j] : m[j] - m[j];
      }
      if constexpr (kCotangent) WidenStrip<N, T>(shared.t[i][lane], t);
      A result[E], gain[E], rate[E];
#pragma unroll
      for (int j = 0; j < E; ++j) energies[j] = response.Divisor(energies[j]);
      response.GainsAndRates(energies, gain, rate);
#pragma unroll
      for (int j = 0; j < E; ++j) {
        if constexpr (!kCotangent) {
          result[j] = x[j] * gain[j];
        } else {
          const A product = t[j] * gain[j];
          scaled[(i + H + 1) % W][j] = product;
          // Beyond the borders the rate may be infinite.
          term[0][j] = Within(centre, limit[S::kAcross ? 0 : j / N]) ? rate[j] * (x[j] * product) : A(0);
          if constexpr (kMeans) {
            result[j] = term[0][j] * drift[j];
            term[kTerms - 1][j] = term[0][j] * m[j];
          }
        }
      }
      if constexpr (!kCotangent) {
        StoreStrip<S, T>(Shift(in.out, place), tiles.step, centre, from, result);
      } else if constexpr (kMeans) {
        if (centre < last) StoreStrip<S, T>(Shift(in.dm, place), tiles.step, centre, from, result);
      }
      place += tiles.row;
    }
    Strip<N, T>* const half = x_half;
    x_half = x_other;
    x_other = half;
  }
}

template <class S>
Tiles Tile(const Problem& p, int item) {
  constexpr int N = S::N;
  Tiles t = {};
  t.outer = p.outer * p.extent[0];
  t.height = p.extent[1];
  t.width = p.extent[2];
  t.row = p.extent[2] * p.inner * item;
  t.plane = t.height * t.row;
  t.units = S::kAcross ? t.width / N : t.width;
  t.step = (S::kAcross ? N : p.inner) * item;
  t.vectors = S::kAcross ? 1 : p.inner / N;
  const int64_t strips = CeilDiv(t.units, 2), whole = strips + S::kMargin;
  // With at least that many slices to a block; and the lanes that a plane takes.
  const auto cut = [&](int64_t least) {
    if (whole * least <= S::kThreads) {
      const int64_t most = std::min<int64_t>(t.vectors, kMaxSlices);
      t.columns = static_cast<int>(whole);
      t.slices = static_cast<int>(std::clamp<int64_t>(S::kThreads / whole, least, std::max(least, most)));
      t.groups = static_cast<int>(std::clamp<int64_t>(S::kThreads / (whole * t.slices), 1, t.outer));
      t.spans = 1;
      t.origin = 0;
    } else {
      t.slices = static_cast<int>(least);
      t.columns = S::kThreads / t.slices - (S::kAcross ? S::kMargin : 0);
      t.groups = 1;
      t.origin = static_cast<int>(CeilDiv(S::kSight, S::kAcross ? 2 * N : 2));
      t.spans = static_cast<int>(std::max<int64_t>(CeilDiv(strips - 2 * t.origin, t.columns - 2 * t.origin), 1));
    }
    t.slice_tiles = CeilDiv(t.vectors, t.slices);
    return t.slice_tiles * t.spans * S::kThreads / t.groups;
  };
  // Smaller visits cost memory its speed, unless the spans' overlap costs more.
  const int64_t visit =
      std::min<int64_t>(t.vectors, S::kAcross ? 1 : std::clamp<int64_t>(S::kVisit / (N * item), 1, kMaxSlices));
  const int64_t half = CeilDiv(visit, 2), lanes = cut(visit);
  if (16 * cut(half) > 15 * lanes) cut(visit);
  // Of the numbers of chunks, the one with which the device takes the fewest rows' time.
  int64_t best = INT64_MAX;
  for (int wanted = 1; wanted <= kMaxChunks; ++wanted) {
    Tiles tried = t;
    tried.chunk = static_cast<int>(CeilDiv(t.height, wanted));
    tried.chunks = static_cast<int>(CeilDiv(t.height, tried.chunk));
    const int64_t waves = CeilDiv(tried.Blocks(), kMultiprocessors * S::kResident);
    const int64_t rows = waves * (tried.chunk + S::kLag + (wanted > 1 ? S::kSight : 0));
    if (rows < best) best = rows, t.chunk = tried.chunk, t.chunks = tried.chunks;
  }
  t.by_slice_tile = FastDiv(t.slice_tiles), t.by_span = FastDiv(t.spans), t.by_chunk = FastDiv(t.chunks);
  t.by_slice = FastDiv(t.slices), t.by_column = FastDiv(t.columns);
  return t;
}

template <class S, class T>
cudaError_t LaunchMarch(const Problem& p, const MarchArrays<T>& arrays, cudaStream_t stream) {
  const Tiles tiles = Tile<S>(p, sizeof(T));
  const auto late = [&](auto* array, int rows) {
    return reinterpret_cast<decltype(array)>(reinterpret_cast<uintptr_t>(array) - rows * tiles.row);
  };
  const MarchArrays<T> lagging = {arrays.x, late(arrays.m, S::H), late(arrays.t, S::H),
                                  late(arrays.out, S::kLag + S::kAhead), late(arrays.dm, S::H + S::kAhead)};
  const Grid grid{tiles.Blocks(), tiles.Threads(), sizeof(Exchange<S, T>)};
  return LaunchKernel(MarchKernel<S, T>, grid, stream, tiles, Response<T>(p), lagging);
}

// Whether LaunchBoxes takes the problem: odd square boxes of up to seven cells.
inline bool IsBoxes(const Problem& p, DType dtype) {
  const int reach = p.after[2];
  return (dtype == DType::kF32 || dtype == DType::kBF16) && p.before[0] == 0 && p.after[0] == 0 &&
         p.after[1] == reach && p.before[1] == reach && p.before[2] == reach && reach >= 1 && reach <= 3;
}

template <Map kMap, bool kMeans, int H, class T>
cudaError_t LaunchReach(const Problem& p, const MarchArrays<T>& a, cudaStream_t stream) {
  // As many neighbours as registers allow.
  constexpr bool kFew = kMap == Map::kForward && !kMeans && sizeof(T) == 2;
  constexpr bool kMany = kMap == Map::kCotangent && kMeans && sizeof(T) == 4 && H == 3;
  constexpr int kWide = kFew ? 4 : kMany ? 1 : 2;
  if constexpr (kWide > 1) {
    if (IsVectorAligned(a.x, a.m, a.t, a.out, a.dm)) {
      using Wide = March<kMap, kMeans, H, kWide, false, T>;
      if (p.inner % kWide == 0 && CanShare(sizeof(Exchange<Wide, T>))) return LaunchMarch<Wide>(p, a, stream);
      if (p.inner == 1 && p.extent[2] % 4 == 0) return LaunchMarch<March<kMap, kMeans, H, 2, true, T>>(p, a, stream);
    }
  }
  return LaunchMarch<March<kMap, kMeans, H, 1, false, T>>(p, a, stream);
}

template <Map kMap, bool kMeans, class T>
cudaError_t LaunchBoxes(const Problem& p, const MarchArrays<T>& a, cudaStream_t stream) {
  if (p.after[2] == 1) return LaunchReach<kMap, kMeans, 1>(p, a, stream);
  if (p.after[2] == 2) return LaunchReach<kMap, kMeans, 2>(p, a, stream);
  return LaunchReach<kMap, kMeans, 3>(p, a, stream);
}

}  // namespace jaxdnn::lrn
