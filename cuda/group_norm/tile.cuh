// A thread's share of a slab, kept in shared memory between the two visits that a normalization pays to every element.
//
// A thread visits its vectors in runs. It copies the first `held` runs to slots of its own, asynchronously and all at
// once, so that as many bytes are in flight as shared memory has; only the thread that copied a vector reads it, so no
// barrier is needed. Runs beyond those stream through further slots, on both visits; the second visit takes them in
// reverse, since the last read are still in the L2 cache.
#pragma once

#include <cstdint>

#include "cuda/common/async_copy.cuh"
#include "cuda/common/vec.cuh"

namespace jaxdnn::group_norm {

struct Schedule {
  int runs;  // of a thread, each of up to `length` vectors
  int length;
  int held;      // runs that stay in shared memory
  int streamed;  // runs that share the slots after those, 0 if all are held

  __host__ __device__ int Slots() const { return length * (held + streamed); }
};

// The vectors of a run: base + k * step for k < count.
struct Run {
  int64_t base, step;
  int count;
};

// kArrays arrays of the same shape, read side by side.
template <int kArrays, class T, int V>
struct Tile {
  using Vector = Vec<T, V>;
  Schedule schedule;
  Vector* slots;  // this thread's; the next is blockDim.x away
  const Vector* in[kArrays];

  __device__ Vector* Slot(int array, int slot) const {
    return slots + (array * (schedule.held + schedule.streamed) * schedule.length + slot) * blockDim.x;
  }

  // The first slot of run m.
  __device__ int SlotOf(int m) const {
    const int h = schedule.held;
    return schedule.length * (m < h ? m : h + (m - h) % schedule.streamed);
  }

  __device__ void Copy(const Run& run, int slot) const {
    for (int k = 0; k < run.count; ++k)
#pragma unroll
      for (int a = 0; a < kArrays; ++a) CopyAsync(Slot(a, slot + k), in[a] + run.base + k * run.step);
  }

  template <class Place>
  __device__ void CopyRuns(const Place& place, int begin, int end) const {
    for (int m = begin; m < end; ++m) Copy(place.At(m), SlotOf(m));
    CommitAsync();
  }

  // Calls visit(m, slot) for every run, in order. The copies of the held runs are waited for in halves.
  template <class Place, class Visit>
  __device__ void FirstVisit(const Place& place, Visit&& visit) const {
    const Schedule& s = schedule;
    const int half = s.held / 2;
    CopyRuns(place, 0, half);
    CopyRuns(place, half, s.held);
    WaitAsync<1>();
    for (int m = 0; m < half; ++m) visit(m, m * s.length);
    WaitAsync<0>();
    for (int m = half; m < s.held; ++m) visit(m, m * s.length);
    for (int begin = s.held; begin < s.runs; begin += s.streamed) {
      const int end = min(begin + s.streamed, s.runs);
      CopyRuns(place, begin, end);
      WaitAsync<0>();
      for (int m = begin; m < end; ++m) visit(m, SlotOf(m));
    }
  }

  // Once more, the streamed runs in reverse and then the held.
  template <class Place, class Visit>
  __device__ void SecondVisit(const Place& place, Visit&& visit) const {
    const Schedule& s = schedule;
    if (s.runs > s.held) {
      const int last = s.held + (s.runs - s.held - 1) / s.streamed * s.streamed;
      for (int begin = last; begin >= s.held; begin -= s.streamed) {
        const int end = min(begin + s.streamed, s.runs);
        if (begin != last) {
          CopyRuns(place, begin, end);
          WaitAsync<0>();
        }
        for (int m = begin; m < end; ++m) visit(m, SlotOf(m));
      }
    }
    for (int m = 0; m < s.held; ++m) visit(m, m * s.length);
  }
};

}  // namespace jaxdnn::group_norm
