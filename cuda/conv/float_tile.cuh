// The block-level matrix product of the CUDA-core kernels for float32.
//
// While a block multiplies a step, cp.async brings the next. Lines of an operand are taken four numbers at a time, and
// where channels do not come in fours, the last of a pixel's are filled up with zeros.
//
// What bounds it is how many instructions a multiprocessor issues: nearly all must be products, and those that follow
// each other share an operand, which then is not read from the registers again.
#pragma once

#include "cuda/common/dtype.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/conv/conv.h"
#include "cuda/conv/four.cuh"
#include "cuda/conv/gemm_plan.h"

namespace jaxdnn::conv {

constexpr int kFloatDepth = SimtDepth(DType::kF32);

// Whether an operand's neighbours in memory are those along the depth (of a pixel's channels: K-major), or those of one
// depth (MN-major).
enum class Major { kDepth, kPosition };

// Four neighbours in memory, of which so many exist. Copies of none read nothing, wherever that is.
struct Found {
  const float* from;
  int count;
};

template <int kThreadRows_, int kThreadColumns_, bool kNarrow_ = false, bool kClusters_ = false, int kParts_ = 1>
struct FloatTile {
  static constexpr int kThreadRows = kThreadRows_, kThreadColumns = kThreadColumns_;  // of a thread's sums
  static constexpr bool kNarrow = kNarrow_;                                           // one column of threads
  // Where a device would have few blocks, the blocks of a cluster may share a tile's steps; and a block may have so
  // many times the threads, each part with steps and shared memory of its own.
  static constexpr bool kClusters = kClusters_;
  static constexpr int kParts = kParts_;
  static constexpr int kDepth = kFloatDepth, kThreads = 128, kAcross = kNarrow ? 1 : 8, kDown = kThreads / kAcross;
  static constexpr int kRows = kDown * kThreadRows, kColumns = kAcross * kThreadColumns;
  static constexpr bool kLarge = kNarrow || kThreadRows * kThreadColumns == 64;
  static constexpr int kBlockThreads = kParts * kThreads;
  static constexpr int kStages = kLarge || kParts > 1 ? 2 : 3;
  static constexpr int kBlocks = kParts > 1 ? 1 : kLarge ? 3 : 4;  // of a multiprocessor, as memory has room
  // How many steps of so many are summed by themselves, so that rounding errors grow with the terms of such a chunk and
  // with the number of chunks, not with all terms. Of many steps eight, since to add a chunk takes time.
  static __device__ int ChunkOf(int64_t steps) { return steps <= 16 ? 1 : steps <= 32 ? 2 : steps <= 64 ? 4 : 8; }
  static constexpr int kFours = kThreadRows * kThreadColumns / 4;

  // An operand's numbers of a step: lines of all depths of a row or column, which are read four depths at a time, or of
  // all rows or columns of a depth.
  template <int kExtent, Major kMajor>
  struct Lines {
    static constexpr bool kOfDepths = kMajor == Major::kDepth;
    float of[kOfDepths ? kExtent : kDepth][kOfDepths ? kDepth + 4 : kExtent];
    __device__ float* At(int k, int i) { return kOfDepths ? &of[i][k] : &of[k][i]; }
    __device__ Four Get(int k, int i) { return *reinterpret_cast<const Four*>(At(k, i)); }
  };

  // Whether lines of depths are turned on their way to shared memory. A multiprocessor's registers lie in two banks, of
  // even and odd numbers, and a product takes as many cycles as it has operands in one of them, but for those that are
  // also the last one's, at the same place. Fours are loaded to registers that begin with an even one: where both
  // operands are read in fours of depths, all rows and columns of a depth are in one bank. Smaller tiles' steps are too
  // short to wait for what is turned.
  static __host__ __device__ constexpr bool Turns(Major a, Major b) {
    return kThreadRows * kThreadColumns == 64 && a == Major::kDepth && b == Major::kDepth;
  }

  template <Major kMajorA, Major kMajorB>
  struct Shared {
    static constexpr bool kTurns = Turns(kMajorA, kMajorB);
    // As they lie here.
    static constexpr Major kRowsOf = kTurns ? Major::kPosition : kMajorA,
                           kColumnsOf = kTurns ? Major::kPosition : kMajorB;
    Lines<kRows, kRowsOf> a[kStages];
    Lines<kColumns, kColumnsOf> b[kStages];
    Four sums[kFours][kThreads];  // of whole chunks
  };

  static __device__ int Thread() { return kParts == 1 ? threadIdx.x : threadIdx.x % kThreads; }
  static __device__ int Part() { return kParts == 1 ? 0 : threadIdx.x / kThreads; }
  // Of the part.
  static __device__ void Sync() {
    if constexpr (kParts == 1)
      __syncthreads();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(1 + Part()), "n"(kThreads) : "memory");
  }

  // A warp has 8 x 4 threads and a block 2 x 2 warps; or all threads are rows'. What a warp reads at once lies side by
  // side: fours of a depth, or rows. Of the lanes' numbers bits 1 to 3 are rows, bits 0 and 4 are columns. Where lines
  // are turned, bits of these places change with the depth, by a `swap` that is a multiple of 8 below 32.
  template <Major kOf>
  static __device__ int Row(int i, int swap = 0) {
    constexpr int kLanes = kNarrow ? 32 : 8;
    const int warp = Thread() / 32 % (kNarrow ? 4 : 2), lane = kNarrow ? Thread() % 32 : Thread() / 2 % 8;
    return warp * kLanes * kThreadRows +
           (kOf == Major::kDepth ? i * kLanes + lane : i / 4 * 4 * kLanes + (lane * 4 ^ swap) + i % 4);
  }
  static __device__ int Column(int four, int swap = 0) {
    if (kNarrow) return four * 4;
    return Thread() / 64 * 4 * kThreadColumns + (four * 16 ^ (swap & 16)) +
           (Thread() / 16 % 2 * 8 + Thread() % 2 * 4 ^ (swap & 8));
  }
};

// Those of a product that a block computes, and how many it has. Before `runs_end`, of `run` steps from a multiple of
// `run` on, all but the first follow the one before in memory.
struct Steps {
  int first, count;
  int64_t all;
  int run = 0, runs_end = 0;
};

// Brings the steps of an operand, one after the other, to lines of kExtent numbers. element(k, i) says where the four
// neighbours lie whose first is of depth k and of number i of the tile; element.Prepare(step) comes before, with a
// barrier between. Where steps follow each other in memory, element.Advance() is how far apart.
//
// What is to be turned goes through registers: Start asks for it, and Finish, when the step before has been multiplied,
// stores it. Of the four places that a warp stores fours of depths to, at eight rows each, none shares a bank with
// another, since rows of every further four of depths lie in another order (SwapOf).
template <class T, int kExtent, Major kMajor, class Element, bool kTurns = false>
struct Bringer {
  static constexpr int kFours = kExtent * T::kDepth / 4, kEach = kFours < T::kThreads ? 1 : kFours / T::kThreads;
  static constexpr bool kOfDepths = kMajor == Major::kDepth;
  static constexpr int kPerLine = (kOfDepths ? T::kDepth : kExtent) / 4;  // fours that neighbour
  static_assert(T::kThreads % kPerLine == 0, "a thread's fours have one place in their lines");
  using Lines = typename T::template Lines<kExtent, kTurns ? Major::kPosition : kMajor>;
  const Element& element;
  bool whole;  // whether fours exist or do not, and are chunks of 16 bytes
  Found found[kEach];
  Four held[kTurns ? kEach : 1];

  __device__ Bringer(const Element& element, bool whole) : element(element), whole(whole) {}

  static __device__ int Place() { return T::Thread() % kPerLine * 4; }
  static __device__ int Line(int each) { return T::Thread() / kPerLine + each * (T::kThreads / kPerLine); }
  static __device__ constexpr int SwapOf(int k) { return kTurns ? k / 4 * 8 : 0; }

  // `follows` says that this step does, and must be the same for all threads.
  __device__ __forceinline__ void Start(Lines& lines, int step, bool follows) {
    if (kFours < T::kThreads && T::Thread() >= kFours) return;
    const auto k = [](int each) { return kOfDepths ? Place() : Line(each); };
    const auto i = [](int each) { return kOfDepths ? Line(each) : Place(); };
#pragma unroll
    for (int each = 0; each < kEach; ++each) {
      if (!follows)
        found[each] = element(step * T::kDepth + k(each), i(each));
      else
        found[each].from += element.Advance();
    }
    if (kTurns) {
#pragma unroll
      for (int each = 0; each < kEach; ++each) held[each] = Load(found[each]);
      return;
    }
    if (whole) {
#pragma unroll
      for (int each = 0; each < kEach; ++each)
        CopyAsync<16>(SharedAddress(lines.At(k(each), i(each))), found[each].from, found[each].count > 0);
      return;
    }
#pragma unroll
    for (int each = 0; each < kEach; ++each)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        CopyAsync<4>(SharedAddress(lines.At(k(each), i(each)) + j), found[each].from + j, j < found[each].count);
  }

  __device__ __forceinline__ Four Load(const Found& of) const {
    Four v = {};
    if (whole) {
      if (of.count > 0) v = LoadConstant(reinterpret_cast<const Four*>(of.from));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < of.count) v.v[j] = __ldg(of.from + j);
    }
    return v;
  }

  __device__ __forceinline__ void Finish(Lines& lines) {
    if constexpr (kTurns)
#pragma unroll
      for (int each = 0; each < kEach; ++each)
#pragma unroll
        for (int j = 0; j < 4; ++j) *lines.At(Place() + j, Line(each) ^ SwapOf(Place())) = held[each].v[j];
  }
};

// shared.sums = A B over the steps, or the part's of them, each thread its own.
template <class T, Major kMajorA, Major kMajorB, class ElementA, class ElementB>
__device__ __forceinline__ void MultiplyFloats(typename T::template Shared<kMajorA, kMajorB>& shared,
                                               const Steps& steps, bool whole, const ElementA& element_a,
                                               const ElementB& element_b) {
  const auto spread = [](const Four& four, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = four.v[i];
  };
  using Shared = typename T::template Shared<kMajorA, kMajorB>;
  constexpr bool kDeepA = Shared::kRowsOf == Major::kDepth, kDeepB = Shared::kColumnsOf == Major::kDepth;
  Bringer<T, T::kRows, kMajorA, ElementA, Shared::kTurns> bring_a(element_a, whole);
  Bringer<T, T::kColumns, kMajorB, ElementB, Shared::kTurns> bring_b(element_b, whole);
  // The last blocks and parts may have no steps, and bring one of zeros: beyond the depth.
  constexpr bool kWhole = T::kParts == 1;
  constexpr int kBeyond = kIndexLimit / T::kDepth;
  const int each = kWhole ? 0 : (steps.count + T::kParts - 1) / T::kParts;
  const int skipped = kWhole ? 0 : min(T::Part() * each, steps.count);
  const auto has = [&](int step) { return step < (kWhole ? steps.count : min(each, steps.count - skipped)); };
  const int first = kWhole || has(0) ? (T::kClusters ? steps.first : 0) + skipped : kBeyond;
  int left = 0, into = first < steps.runs_end && (T::kClusters || !kWhole) ? first % steps.run : 0;  // a run of steps
  const auto bring = [&](int step, int stage) {
    if (step == 0 || has(step)) {
      const bool follows = left != 0;
      bring_a.Start(shared.a[stage], first + step, follows);
      bring_b.Start(shared.b[stage], first + step, follows);
      left = follows ? left - 1 : first + step < steps.runs_end ? steps.run - 1 - into : 0;
      if (!follows) into = 0;
    }
    CommitCopies();
  };
  element_a.Prepare(0);
  const auto finish = [&](int stage) {
    bring_a.Finish(shared.a[stage]);
    bring_b.Finish(shared.b[stage]);
  };
  constexpr int kPerRow = T::kThreadColumns / 4;
  Four part[T::kThreadRows][kPerRow] = {};
  const int chunk = T::ChunkOf(steps.all);
  int stage = 1, next = 0, in_chunk = 0;
  // The first steps are none, and only bring others.
#pragma unroll 1
  for (int step = 1 - T::kStages; step <= 0 || has(step); ++step) {
    WaitForCopies<T::kStages - 2>();
    T::Sync();  // the step is there for all, and the one before is read
    bring(step + T::kStages - 1, next);
    element_a.Prepare(step + T::kStages);
    auto& a = shared.a[stage];
    auto& b = shared.b[stage];
    const int filled = next;
    next = stage;
    stage = stage + 1 == T::kStages ? 0 : stage + 1;
    if (step < 0) {
      finish(filled);
      continue;
    }
#pragma unroll
    for (int k = 0; k < T::kDepth; k += 4) {
      Four deep_rows[T::kThreadRows];
      if (kDeepA)
#pragma unroll
        for (int i = 0; i < T::kThreadRows; ++i) deep_rows[i] = a.Get(k, T::template Row<Shared::kRowsOf>(i));
#pragma unroll
      for (int four = 0; four < T::kThreadColumns / 4; ++four) {
        Four deep_columns[4];
        if (kDeepB)
#pragma unroll
          for (int j = 0; j < 4; ++j) deep_columns[j] = b.Get(k, T::Column(four) + j);
#pragma unroll
        for (int in_four = 0; in_four < 4; ++in_four) {
          float rows[T::kThreadRows], columns[4];
#pragma unroll
          for (int i = 0; i < T::kThreadRows; ++i) {
            if (kDeepA)
              rows[i] = deep_rows[i].v[in_four];
            else if (i % 4 == 0)
              spread(a.Get(k + in_four, T::template Row<Shared::kRowsOf>(i, bring_a.SwapOf(k))), rows + i);
          }
          if (!kDeepB) spread(b.Get(k + in_four, T::Column(four, bring_b.SwapOf(k))), columns);
          // To and fro, so that from one product to the next only one operand changes.
#pragma unroll
          for (int i = 0; i < T::kThreadRows; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              const int j = i % 2 == 0 ? n : 3 - n;
              part[i][four].v[j] += rows[i] * (kDeepB ? deep_columns[j].v[in_four] : columns[j]);
            }
        }
      }
    }
    finish(filled);
    if (++in_chunk < chunk && has(step + 1)) continue;
    in_chunk = 0;
#pragma unroll
    for (int four = 0; four < T::kFours; ++four) {
      Four& sum = shared.sums[four][T::Thread()];
      Four &each = part[four / kPerRow][four % kPerRow], more = step < chunk ? Four{} : sum;
#pragma unroll
      for (int j = 0; j < 4; ++j) more.v[j] += each.v[j];
      sum = more;
      each = {};
    }
  }
}

}  // namespace jaxdnn::conv
