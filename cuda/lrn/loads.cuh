// How rows come to march.cuh's shared memory: a thread brings its own strips, or pieces that are whichever thread's.
// `S` is a March.
#pragma once

#include <cstdint>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/lrn/strips.cuh"
#include "cuda/lrn/tiles.cuh"

namespace jaxdnn::lrn {

// In a kernel every pointer lies as many rows in front of its array as the array's rows come after those of x to load.
template <class T>
struct MarchArrays {
  const T *x, *m, *t;  // no means without kMeans; t is the cotangent
  T *out, *dm;
  int64_t m_from_x = 0, t_from_x = 0;  // in bytes, of such pointers
};

// Brings an array's strips to shared memory, zeros where nothing exists. Copies run while the thread goes on; a unit
// that is too small for one waits in registers for kHeld rows.
template <class S, class T>
struct Loader {
  using Unit = Packed<T, S::N>;
  using Place = Strip<S::N, T>;
  static constexpr bool kHolds = sizeof(Unit) < 4;
  static constexpr int kHeld = 3;
  Place held[kHeld];

  // A row for the place `to`; the one that came kHeld rows before it is for the place `due`, if there was one.
  __device__ void Load(Unit* to, Unit* due, const T* from, int64_t step, int row, const int (&limit)[2]) {
    const bool exists[2] = {Within(row, limit[0]), Within(row, limit[1])};
    if constexpr (kHolds) {
      if (due) WriteStrip<Place, S::kApart>(due, held[0]);
#pragma unroll
      for (int i = 1; i < kHeld; ++i) held[i - 1] = held[i];
      held[kHeld - 1] = {};
#pragma unroll
      for (int u = 0; u < 2; ++u)
        if (exists[u]) held[kHeld - 1].unit[u] = *reinterpret_cast<const Unit*>(Shift(from, u * step));
    } else if constexpr (S::kAcross) {
      CopyAsyncOrZero(reinterpret_cast<Place*>(to), reinterpret_cast<const Place*>(from), exists[0]);
    } else {
#pragma unroll
      for (int u = 0; u < 2; ++u)
        CopyAsyncOrZero(to + u * S::kApart, reinterpret_cast<const Unit*>(Shift(from, u * step)), exists[u]);
    }
  }
};

// The thread's pieces of all arrays. The first units of all strips are as many pieces as the second. Of two units each,
// that is a piece of every array for every thread; of four, one of x for one half of the block, which then bring the
// means, if there is a cotangent too, and one of another array for the other.
template <class S, class T>
struct PieceLoader {
  using Unit = Packed<T, S::N>;
  static constexpr int kPiece = S::kPieces ? S::kPiece : 2;
  static constexpr bool kHalves = kPiece == 4;
  const T* from = nullptr;  // of the next row
  int at = 0, limit = 0;    // the place in rows of shared memory, and the rows that exist
  int lag = 0;              // rows that what it brings first comes late by

  __device__ PieceLoader(const Tiles& tiles, const BlockPlace& block, int margin, int row, const MarchArrays<T>& in) {
    if constexpr (S::kPieces) {
      const int each = static_cast<int>(blockDim.x) / kPiece, part = static_cast<int>(threadIdx.x) / each;
      const int lane = (static_cast<int>(threadIdx.x) - part * each) * kPiece;
      LanePlace place(tiles, block, lane);
      place.unit += part % 2;
      lag = part >= 2 ? S::H : 0;
      at = margin + lane + part % 2 * S::kPitch;
      limit = place.Exists(tiles) ? tiles.height : 0;
      from = Shift(lag == 0 ? in.x : in.t, place.Bytes(tiles, sizeof(Unit)) + row * tiles.row);
    }
  }

  // To rows of shared memory: x its row `row`, and the others theirs that is due with it.
  __device__ void Load(Unit* x, Unit* t, Unit* m, int row, const Tiles& tiles, const MarchArrays<T>& in) {
    const int late = row - S::H;
    if constexpr (kHalves) {
      static_assert(S::kCotangent, "the other half of the block brings the cotangent");
      Copy(lag > 0 ? t : x, from, row - lag);
      if (S::kMeans && lag == 0) Copy(m, Shift(from, in.m_from_x), late);
    } else {
      Copy(x, from, row);
      if constexpr (S::kCotangent) Copy(t, Shift(from, in.t_from_x), late);
      if constexpr (S::kMeans) Copy(m, Shift(from, in.m_from_x), late);
    }
    from = Shift(from, tiles.row);
  }

  __device__ void Copy(Unit* to, const T* from, int row) const {
    CopyAsyncPart(reinterpret_cast<uint4*>(to + at), reinterpret_cast<const uint4*>(from), Within(row, limit) ? 16 : 0);
  }
};

}  // namespace jaxdnn::lrn
