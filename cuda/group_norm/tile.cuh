// A thread's share of a slab, kept in shared memory between the two visits that a normalization pays to every element.
//
// A thread visits its vectors in runs. It copies them asynchronously to slots of its own, as many at once as there are
// slots, so that as many bytes are in flight as shared memory has; only the thread that copied a vector reads it, so no
// barrier is needed. The first runs stay; those that find no place stream through the last places, on both visits. The
// second visit goes backwards, so that it finds what was read last in shared memory or in the L2 cache.
#pragma once

#include <cstdint>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::group_norm {

// The most groups of copies of a thread that are waited for one by one, and the most runs that stream at once.
constexpr int kMaxRing = 4;

struct Schedule {
  int runs;  // of a thread, each of up to `length` vectors
  int length;
  int held;  // runs that stay
  int ring;  // places for the runs that do not, 0 if all stay

  __host__ __device__ int Places() const { return held + ring; }
  __host__ __device__ int Slots() const { return length * Places(); }
};

// The vectors of a run: base + k * step for k < count.
struct Run {
  int64_t base, step;
  int count;
};

// Waits until at most `pending` of this thread's groups of copies are under way, or fewer.
__device__ inline void AwaitAllBut(int pending) {
  switch (pending) {
    case 0:
      return WaitAsync<0>();
    case 1:
      return WaitAsync<1>();
    case 2:
      return WaitAsync<2>();
    default:
      return WaitAsync<3>();
  }
}

// kArrays arrays of the same shape, read side by side.
template <int kArrays, class T, int V>
struct Tile {
  using Vector = Vec<T, V>;
  Schedule schedule;
  Vector* slots;  // this thread's; the next is blockDim.x away
  const Vector* in[kArrays];

  __device__ Vector* Slot(int array, int slot) const {
    return slots + (array * schedule.Slots() + slot) * static_cast<int>(blockDim.x);
  }

  // The first slot of run m.
  __device__ int SlotOf(int m) const {
    return schedule.length * (m < schedule.held ? m : schedule.held + (m - schedule.held) % schedule.ring);
  }

  // Starts the copies of a run, as one group.
  template <class Place>
  __device__ void Copy(const Place& place, int m) const {
    const Run run = place.At(m);
    const int slot = SlotOf(m);
#pragma unroll 2
    for (int k = 0; k < run.count; ++k)
#pragma unroll
      for (int a = 0; a < kArrays; ++a) CopyAsync(Slot(a, slot + k), in[a] + run.base + k * run.step);
    CommitAsync();
  }

  // Starts the copies of as many runs as there are places.
  template <class Place>
  __device__ void Start(const Place& place) const {
#pragma unroll 1
    for (int m = 0; m < schedule.Places(); ++m) Copy(place, m);
  }

  // Calls visit(m, run, slot) for every run, in order.
  template <class Place, class Visit>
  __device__ void FirstVisit(const Place& place, Visit&& visit) const {
    const int runs = schedule.runs;
    int copied = schedule.Places();
#pragma unroll 1
    for (int m = 0; m < runs; ++m) {
      AwaitAllBut(copied - 1 - m);
      visit(m, place.At(m), SlotOf(m));
      if (m >= schedule.held && copied < runs) Copy(place, copied++);
    }
  }

  // Once more, from the last run to the first.
  template <class Place, class Visit>
  __device__ void SecondVisit(const Place& place, Visit&& visit) const {
    const int runs = schedule.runs;
    int next = runs - schedule.ring - 1;  // to be copied again, if it was not held
    int pending = 0;
#pragma unroll 1
    for (int m = runs - 1; m >= 0; --m) {
      if (m >= schedule.held && m < runs - schedule.ring) AwaitAllBut(--pending);
      visit(m, place.At(m), SlotOf(m));
      if (next >= schedule.held) {
        Copy(place, next--);
        ++pending;
      }
    }
  }
};

}  // namespace jaxdnn::group_norm
