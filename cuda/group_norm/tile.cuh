// A thread's share of a slab, kept in shared memory between the two visits that a normalization pays to every element.
//
// A thread visits its vectors in runs. It copies them asynchronously to slots of its own, as many at once as there are
// slots, so that as many bytes are in flight as shared memory has; only the thread that copied a vector reads it, so no
// barrier is needed. The first runs stay; those that find no place stream through the last places, on both visits. The
// second visit begins with those, backwards, so that it finds what was read last in shared memory or in the L2 cache.
// As it is done with the runs that stayed, their places are filled for the next unit: memory is at work while the team
// exchanges sums.
#pragma once

#include <cstdint>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::group_norm {

// The most runs that stream at once.
constexpr int kMaxRing = 3;

struct Schedule {
  int runs;  // of a thread, each of up to `length` vectors
  int length;
  int held;   // runs that stay
  int ring;   // places for the runs that do not, 0 if all stay
  int slots;  // vectors that a thread has room for

  __host__ __device__ int Places() const { return held + ring; }
  __host__ __device__ int Slots() const { return slots; }
};

// What is wanted of a vector: its elements begin..end-1.
template <int V>
struct Wanted {
  int begin, end;

  __device__ bool Has(int j) const { return j >= begin && j < end; }
  __device__ bool Whole() const { return begin <= 0 && end >= V; }
  __device__ int Count() const { return min(end, V) - max(begin, 0); }
};

// The vectors of a run: base + k * step for k < count. A ragged run begins and ends within vectors: of the elements,
// counted from the first of the first vector, begin..end-1 are its own.
struct Run {
  int64_t base, step;
  int count;
  int begin, end;

  template <int V>
  __device__ Wanted<V> WantedOf(int k) const {
    const int first = k * static_cast<int>(step) * V;
    return {begin - first, end - first};
  }
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
    case 3:
      return WaitAsync<3>();
    case 4:
      return WaitAsync<4>();
    case 5:
      return WaitAsync<5>();
    case 6:
      return WaitAsync<6>();
    default:
      return WaitAsync<7>();
  }
}

// kArrays arrays of the same shape, read side by side. Of ragged runs nothing is read behind their ends, where the
// array may end, and arrays that are not aligned to vectors are copied by elements.
template <int kArrays, class T, int V, bool kRagged = false>
struct Tile {
  using Vector = Vec<T, V>;
  Schedule schedule;
  Vector* slots;  // this thread's; the next is blockDim.x away
  const Vector* in[kArrays];
  bool aligned = true;

  __device__ Vector* Slot(int array, int slot) const {
    return slots + (array * schedule.Slots() + slot) * static_cast<int>(blockDim.x);
  }

  // A slot's elements.
  __device__ void Read(int array, int slot, Accumulator<T> (&wide)[V]) const {
    Widen<T, V>(*reinterpret_cast<const Packed<T, V>*>(Slot(array, slot)), wide);
  }

  __device__ void CopyPart(Vector* to, const Vector* from, const Wanted<V>& part) const {
    if (aligned) {
      CopyAsyncPart(to, from, min(part.end, V) * static_cast<int>(sizeof(T)));
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (part.Has(j)) to->v[j] = reinterpret_cast<const T*>(from)[j];
    }
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
      for (int a = 0; a < kArrays; ++a) {
        Vector* to = Slot(a, slot + k);
        const Vector* from = in[a] + run.base + k * run.step;
        if constexpr (kRagged)
          CopyPart(to, from, run.WantedOf<V>(k));
        else
          CopyAsync(to, from);
      }
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

  // Once more: those that stream from the last to the first, then those that stayed, whose places are given to the runs
  // of the next unit, if there is one.
  template <class Place, class Next, class Visit>
  __device__ void SecondVisit(const Place& place, bool more, Next&& next_place, Visit&& visit) const {
    const int runs = schedule.runs;
    int next = runs - schedule.ring - 1;  // to be copied again, if it was not held
    int pending = 0;
#pragma unroll 1
    for (int m = runs - 1; m >= schedule.held; --m) {
      if (m < runs - schedule.ring) AwaitAllBut(--pending);
      visit(m, place.At(m), SlotOf(m));
      if (next >= schedule.held) {
        Copy(place, next--);
        ++pending;
      }
    }
    const Place coming = next_place();
#pragma unroll 1
    for (int m = 0; m < schedule.held; ++m) {
      visit(m, place.At(m), SlotOf(m));
      if (more) Copy(coming, m);
    }
    if (more)
#pragma unroll 1
      for (int m = schedule.held; m < schedule.Places(); ++m) Copy(coming, m);
  }
};

// Rounds elements and stores them, or those that are wanted.
template <class T, int V>
__device__ void Write(Vec<T, V>* to, const Accumulator<T> (&wide)[V]) {
  StorePacked<T, V>(reinterpret_cast<T*>(to), Narrow<T, V>(wide));
}
template <class T, int V>
__device__ void WritePart(Vec<T, V>* to, const Accumulator<T> (&wide)[V], const Wanted<V>& part, bool aligned) {
  if (aligned && part.Whole()) return Write<T, V>(to, wide);
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (part.Has(j)) reinterpret_cast<T*>(to)[j] = static_cast<T>(wide[j]);
}

}  // namespace jaxdnn::group_norm
