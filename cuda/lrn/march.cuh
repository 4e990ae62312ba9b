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
// Bound by instructions, most of which are the curve's and the sums', by shared memory, and by the steps' latency. What
// visits of a column cost is why pieces go past the first cache: there each takes a line, and what shared memory leaves
// of it holds few.
//
// What did not pay for the cotangent, at 56x56: sums down before across, which spare a strip its neighbours' elements
// but pass floats through shared memory (5x5 in bfloat16 60 to 62 us, in float32 91 to 117, 7x7 67 to 87, some
// registers spilled; as fast where lanes lie across); a branch for D^-3/4 in 16-bit types (60 to 65 us); D^-beta g and
// a row's sums in shared memory for three blocks instead of two (60 to 77); blocks of 448 threads for 5x5 (60 to 65)
// and 7x7 (67 to 72); two rows in flight instead of four for 3x3 (up to 12% slower, forward as well).
#pragma once

#include <cfloat>
#include <climits>

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/shared_bytes.cuh"
#include "cuda/lrn/loads.cuh"
#include "cuda/lrn/paths.h"
#include "cuda/lrn/response.cuh"
#include "cuda/lrn/strips.cuh"
#include "cuda/lrn/tiles.cuh"

namespace jaxdnn::lrn {

template <Map kMap, bool kHasMeans, int kH, int kN, bool kIsAcross, class T, bool kIsWide = false>
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
  static constexpr int kAhead = 4;                // rows whose loads are in flight
  // Rows that are unrolled, so that a row's place in a ring is known: W, or two times that where it is faster, by up to
  // 6%. The rings have so many parts of U rows.
  static constexpr int U = H == 1 && N > 1 && !kAcross && !kMeans ? 2 * W : W;
  static constexpr int kParts = std::max((kLag + kAhead) / U + 1, 2), kOwnParts = kAhead / U + 1;
  static constexpr bool kFew = sizeof(T) == 2;
  // Whether what copies bring is dealt out in pieces of 16 bytes, whichever thread needs them, and past the first
  // cache, of which each visit would take a whole line; and how many units a piece has.
  static constexpr int kPiece = 16 / sizeof(Packed<T, N>);
  static constexpr bool kPieces =
      !kAcross && N > 1 && (kCotangent ? kFew || (kMeans && H < 3) : kFew && !kMeans && H == 1);
  // Whether D^-beta g and sums of one term's rows wait in shared memory, for twice the warps.
  static constexpr bool kStash = kCotangent && kMeans && !kAcross && kFew;
  // A warp has rows of its own where lanes lie across, and so waits for no other. Elsewhere a block should hold a row:
  // of 56 columns all that fit, 8 or 16 slices of it.
  static constexpr int kThreads = kAcross ? 32 : kIsWide ? 448 : kCotangent && !kMeans && H == 3 ? 224 : 256;
  // Blocks on a multiprocessor, as registers allow.
  static constexpr int kAcrossWarps = kCotangent && kMeans  ? (H == 3 ? 8
                                                               : kFew ? 16
                                                                      : 12)
                                      : !kFew || kMeans     ? 16
                                      : kCotangent && H < 3 ? (H == 1 ? 24 : 20)
                                      : kCotangent          ? 16
                                                            : 20;
  static constexpr int kResident = kAcross                                 ? kAcrossWarps
                                   : kCotangent && kMeans                  ? (kFew && H < 3 ? 2 : 1)
                                   : kFew && !kMeans && H == 1 && !kIsWide ? 3
                                                                           : 2;
  // Bytes of a column that a block should visit at once.
  static constexpr int kVisit = kFew || (kCotangent && H > 1) ? 64 : 128;
  static constexpr int kPitch = kThreads + (kAcross ? 0 : 2 * kMargin * kMaxSlices);
  // From a strip's first unit to its second in shared memory, in units.
  static constexpr int kApart = kPieces ? kPitch : 1, kTermsApart = kPieces && H == 1 ? kPitch : 1;

  // A strip's elements are N pairs of neighbours across. Of the q-th pair: the i-th element that its sums see, where
  // the second of the pair sees 1, ..., W; the pair's elements; and how far that is from the strip's first column.
  static constexpr __host__ __device__ int Seen(int q, int i) {
    return kAcross ? kReach * N - H + 2 * q + i : i * N + q;
  }
  static constexpr __host__ __device__ int Own(int q, int side) { return kAcross ? 2 * q + side : side * N + q; }
  static constexpr __host__ __device__ int Column(int q, int i) { return (kAcross ? 2 * q : 0) + i - H; }
};

// What a block holds in shared memory: the rows of x that windows still need and those on their way, the rows of the
// others on their way, which no other thread reads, and the terms of two rows, which take turns, so that one barrier
// each will do. Threads' strips lie beside each other, and zeros beyond the outermost.
template <class S, class T>
struct Exchange {
  using A = Accumulator<T>;
  static constexpr int kTerms = S::kAcross ? 0 : S::kTerms;  // others come from lanes
  // Pieces lie in all arrays alike.
  static constexpr int kOwn = 2 * (S::kPieces ? S::kPitch : S::kThreads);
  alignas(16) Packed<T, S::N> x[S::kParts * S::U][2 * S::kPitch];
  alignas(16) Vec<A, S::N> terms[2][kTerms > 0 ? kTerms : 1][kTerms > 0 ? 2 * S::kPitch : 1];
  alignas(16) Packed<T, S::N> t[S::kCotangent ? S::kOwnParts * S::U : 1][S::kCotangent ? kOwn : 1];
  alignas(16) Packed<T, S::N> m[S::kMeans ? S::kOwnParts * S::U : 1][S::kMeans ? kOwn : 1];
  Terms<S::N, A> scaled[S::kStash ? S::W : 1][S::kStash ? S::kThreads : 1];
  Terms<S::N, A> before[S::kStash ? S::W - 1 : 1][S::kStash ? S::kThreads : 1];
};

// Rows of shared memory, kPitch apart: kParts times the U that are unrolled at a time.
template <int kParts, int U, int kPitch, class Unit>
struct Ring {
  static_assert(kParts <= 3);
  Unit *now, *next, *last;  // of which there may be fewer

  __device__ explicit Ring(Unit* rows)
      : now(rows), next(rows + 1 % kParts * U * kPitch), last(rows + (kParts - 1) * U * kPitch) {}
  // The row that lies `i` from the first of those.
  __device__ Unit* At(int i) const {
    const int part = (i + kParts * U) / U % kParts;
    return (part == 0 ? now : part == 1 ? next : last) + (i + U) % U * kPitch;
  }
  // Goes on to the next U.
  __device__ void Turn() {
    Unit* const first = now;
    now = next;
    next = kParts == 2 ? first : last;
    last = first;
  }
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

  const BlockPlace block(tiles, static_cast<int>(blockIdx.x));
  const LanePlace at(tiles, block, lane);
  const int first = block.chunk * tiles.chunk, last = min(tiles.height, first + tiles.chunk);
  const bool exists = at.Exists(tiles), second = exists && at.unit + 1 < tiles.units;
  const int limit[2] = {exists ? tiles.height : 0, second ? tiles.height : 0};
  const bool results = exists && (block.span == 0 || at.strip >= tiles.origin) &&
                       (block.span == tiles.spans - 1 || at.strip < tiles.columns - tiles.origin);
  const int from[2] = {results ? first : INT_MAX, results && second ? first : INT_MAX};

  // What lies beyond the outermost lanes is zero, and so is what lies in front of the first row.
  for (int i = lane; i < S::kParts * U * 2 * S::kPitch; i += blockDim.x) shared.x[0][i] = {};
  for (int i = lane; i < 2 * Exchange<S, T>::kTerms * 2 * S::kPitch; i += blockDim.x) shared.terms[0][0][i] = {};
  __syncthreads();

  // Cells of a window in its row, where all columns exist.
  const int column = at.unit * (S::kAcross ? N : 1);
  A across[E];
#pragma unroll
  for (int q = 0; q < N; ++q)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int own = column + S::Column(q, H + side);
      across[S::Own(q, side)] = static_cast<A>(min(own + H, tiles.width - 1) - max(own - H, 0) + 1);
    }

  // The strip's place in the next row to load.
  const int begin = max(first - S::kSight, 0);
  int64_t place = at.Bytes(tiles, sizeof(Unit)) + begin * tiles.row;
  // Where the thread's strip is in a row of shared memory.
  const int strip_at = (margin + lane) * (S::kApart == 1 ? 2 : 1);
  const int own_at = S::kPieces ? strip_at : 2 * lane, terms_at = (margin + lane) * (S::kTermsApart == 1 ? 2 : 1);
  Ring<S::kParts, U, 2 * S::kPitch, Unit> x_rows(shared.x[0] + strip_at);
  // Where it is in the half of the others' rings that the rows are in, and in the other.
  int t_half = own_at, t_other = own_at + (S::kOwnParts - 1) * U * Exchange<S, T>::kOwn;
  const auto own_row = [&](auto& ring, int i) {
    return ring[(i + U) % U] + (S::kOwnParts == 1 ? own_at : (i + 2 * U) / U % 2 == 0 ? t_half : t_other);
  };
  const auto read = [](const Unit* p) { return ReadStrip<Strip<N, T>, S::kApart>(p); };
  Loader<S, T> x_loader, t_loader, m_loader;
  PieceLoader<S, T> pieces(tiles, block, margin, begin, in);
  const auto load = [&](int i, int row, bool starts) {
    if (S::kPieces && tiles.pieces) {
      pieces.Load(x_rows.At(i) - strip_at, own_row(shared.t, i) - own_at, own_row(shared.m, i) - own_at, row, tiles,
                  in);
    } else {
      const int due = i - Loader<S, T>::kHeld;
      const auto next = [&](Loader<S, T>& loader, Unit* to, Unit* due, const T* from, int row) {
        loader.Load(to, starts ? nullptr : due, Shift(from, place), tiles.step, row, limit);
      };
      next(x_loader, x_rows.At(i), x_rows.At(due), in.x, row);
      if constexpr (kCotangent) next(t_loader, own_row(shared.t, i), own_row(shared.t, due), in.t, row - H);
      if constexpr (kMeans) next(m_loader, own_row(shared.m, i), own_row(shared.m, due), in.m, row - H);
    }
    CommitAsync();
  };

  // D^-beta g of the last rows, and the terms of the row in front.
  A scaled[S::kStash ? 1 : W][E], term[kTerms > 0 ? kTerms : 1][E] = {};
  Running<S, A> energy, values, pull[kTerms > 0 ? kTerms : 1];
  SharedRunning<S, A> shared_pull(shared.before[0] + (S::kStash ? lane : 0));
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
        if constexpr (!S::kAcross)
          WriteStrip<Terms<N, A>, S::kTermsApart>(shared.terms[turn][k] + terms_at, own_terms[k]);
      }
      WaitAsync<kAhead - 1>();
      if constexpr (!S::kAcross) __syncthreads();
      load(i + kAhead, row + kAhead, false);

      if constexpr (kCotangent) {
        A box[kTerms][E], x[E], result[E];
#pragma unroll
        for (int k = 0; k < kTerms; ++k) {
          A e[L], sum[E];
          Gather<S, S::kTermsApart>(own_terms[k], shared.terms[turn][k] + terms_at, tiles.slices,
                                    [&](int at, const Term& v) {
#pragma unroll
                                      for (int j = 0; j < N; ++j) e[at * N + j] = v.v[j];
                                    });
          SumAcross<S>(e, sum);
          if (S::kStash && k == 1)
            shared_pull.Add(i % W, sum, box[k]);
          else
            pull[k].Add(i % W, sum, box[k]);
        }
        WidenStrip<N, T>(read(x_rows.At(i - W)), x);
        Terms<N, A> stash;
        if constexpr (S::kStash) stash = shared.scaled[i % W][lane];
#pragma unroll
        for (int j = 0; j < E; ++j) {
          const A own = S::kStash ? stash.unit[j / N].v[j % N] : scaled[S::kStash ? 0 : i % W][j];
          const A rest = kMeans ? own + box[kTerms - 1][j] : own;
          result[j] = rest - x[j] * box[0][j];
        }
        StoreStrip<S, T>(Shift(in.out, place), tiles.step, row - S::kLag, from, result);
      }

      A e[L], energies[E], sum[E], drift[E], x[E], m[E], t[E];
      Gather<S, S::kApart>(read(x_rows.At(i)), x_rows.At(i), tiles.slices, [&](int at, const Unit& v) {
        A wide[N];
        Widen<T>(v, wide);
#pragma unroll
        for (int j = 0; j < N; ++j) e[at * N + j] = wide[j];
      });
      WidenStrip<N, T>(read(x_rows.At(i - H)), x);
      if constexpr (kMeans) WidenStrip<N, T>(read(own_row(shared.m, i)), m);
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
      if constexpr (kCotangent) WidenStrip<N, T>(read(own_row(shared.t, i)), t);
      A result[E], gain[E], rate[E];
      Terms<N, A> stash;
#pragma unroll
      for (int j = 0; j < E; ++j) energies[j] = response.Divisor(energies[j]);
      response.GainsAndRates(energies, gain, rate);
#pragma unroll
      for (int j = 0; j < E; ++j) {
        if constexpr (!kCotangent) {
          result[j] = x[j] * gain[j];
        } else {
          const A product = t[j] * gain[j];
          if constexpr (S::kStash)
            stash.unit[j / N].v[j % N] = product;
          else
            scaled[(i + H + 1) % W][j] = product;
          // Beyond the borders the rate may be infinite.
          term[0][j] = Within(centre, limit[S::kAcross ? 0 : j / N]) ? rate[j] * (x[j] * product) : A(0);
          if constexpr (kMeans) {
            result[j] = term[0][j] * drift[j];
            term[kTerms - 1][j] = term[0][j] * m[j];
          }
        }
      }
      if constexpr (S::kStash) shared.scaled[(i + H + 1) % W][lane] = stash;
      if constexpr (!kCotangent) {
        StoreStrip<S, T>(Shift(in.out, place), tiles.step, centre, from, result);
      } else if constexpr (kMeans) {
        if (centre < last) StoreStrip<S, T>(Shift(in.dm, place), tiles.step, centre, from, result);
      }
      place += tiles.row;
    }
    x_rows.Turn();
    const int half = t_half;
    t_half = t_other;
    t_other = half;
  }
}

template <class S, class T>
cudaError_t LaunchMarch(const Problem& p, const MarchArrays<T>& arrays, cudaStream_t stream) {
  const Tiles tiles = Tile<S>(p, sizeof(T));
  const auto late = [&](auto* array, int rows) {
    return reinterpret_cast<decltype(array)>(reinterpret_cast<uintptr_t>(array) - rows * tiles.row);
  };
  MarchArrays<T> lagging = {arrays.x, late(arrays.m, S::H), late(arrays.t, S::H), late(arrays.out, S::kLag + S::kAhead),
                            late(arrays.dm, S::H + S::kAhead)};
  const auto from_x = [&](const T* array) {
    return reinterpret_cast<intptr_t>(array) - reinterpret_cast<intptr_t>(arrays.x);
  };
  lagging.m_from_x = from_x(lagging.m), lagging.t_from_x = from_x(lagging.t);
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
      if constexpr (kMap == Map::kCotangent && !kMeans && H == 1 && sizeof(T) == 2) {
        // A larger block, which visits more of a column or overlaps with none, where that leaves no multiprocessor
        // idle.
        using Widest = March<kMap, kMeans, H, kWide, false, T, true>;
        if (p.inner % kWide == 0 && CanShare(sizeof(Exchange<Widest, T>)) &&
            Tile<Widest>(p, sizeof(T)).time < Tile<Wide>(p, sizeof(T)).time)
          return LaunchMarch<Widest>(p, a, stream);
      }
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
