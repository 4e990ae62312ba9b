// How the sums of the mma.sync kernels leave: through shared memory, so that whole lines are stored at once.
#pragma once

#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {

// The sums in shared memory, as Staged, row by row with a pitch that spreads the 8 rows of a store over the banks.
template <class T, class Staged>
constexpr int kPitch = T::kColumns + 16 / sizeof(Staged);

template <class T, class Staged>
__device__ Staged* StageSums(unsigned char* ring, const typename T::Sums& sums) {
  Staged* scratch = reinterpret_cast<Staged*>(ring);
  constexpr int kRun = sizeof(typename T::In) == 1 ? 4 : 2;  // neighbouring columns that a thread has
#pragma unroll
  for (int i = 0; i < T::kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < T::kWarpColumns / 8; j += kRun / 2) {
      Staged* p = scratch + (T::Row() + 16 * i + threadIdx.x % 32 / 4) * kPitch<T, Staged> + T::Column(j, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vec<Staged, kRun> run;
#pragma unroll
        for (int k = 0; k < kRun; ++k)
          run.v[k] = static_cast<Staged>(kRun == 2 ? sums[i][j][2 * half + k] : sums[i][j + k % 2][2 * half + k / 2]);
        *reinterpret_cast<Vec<Staged, kRun>*>(p + 8 * half * kPitch<T, Staged>) = run;
      }
    }
  }
  __syncthreads();
  return scratch;
}

// The sums back from there.
template <class T>
__device__ void TakeStaged(const float* scratch, typename T::Sums& sums) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kWarpRows / 16; ++i)
#pragma unroll
    for (int j = 0; j < T::kWarpColumns / 8; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        sums[i][j][k] =
            scratch[(T::Row() + 16 * i + threadIdx.x % 32 / 4 + k / 2 * 8) * kPitch<T, float> + T::Column(j, k)];
  __syncthreads();
}

// Stores the block's sums through shared memory, so that whole lines leave at once. address(row, column) says where to,
// in elements of `out`, or is -1; and `whole_runs`, whether kChunk columns and their addresses always follow each
// other.
template <class T, int kChunk, class Out, class Address>
__device__ void StoreSums(unsigned char* ring, const typename T::Sums& sums, Out* out, const Address& address,
                          bool whole_runs) {
  const Out* scratch = StageSums<T, Out>(ring, sums);
  const auto store = [&](auto vec) {
    constexpr int kN = decltype(vec)::value, kRuns = T::kColumns / kN;
#pragma unroll 4
    for (int run = threadIdx.x; run < T::kRows * kRuns; run += T::kThreads) {
      const int row = run / kRuns, column = run % kRuns * kN;
      const int64_t offset = address(row, column);
      if (offset >= 0)
        *reinterpret_cast<Vec<Out, kN>*>(out + offset) =
            *reinterpret_cast<const Vec<Out, kN>*>(scratch + row * kPitch<T, Out> + column);
    }
  };
  constexpr int kMost = 16 / sizeof(Out), kRun = kMost > kChunk ? kChunk : kMost;
  if (whole_runs) {
    store(std::integral_constant<int, kRun>());
  } else {
    store(std::integral_constant<int, 1>());
  }
}

// The same through an epilogue, whose bias for a column is at bias(column).
template <class T, class Out, class Address, class Bias>
__device__ void StoreFinished(unsigned char* ring, const typename T::Sums& sums, Out* out, const Address& address,
                              bool whole_runs, const Epilogue& epilogue, const Bias& bias) {
  constexpr int kN = 4, kRuns = T::kColumns / kN;
  const float* scratch = StageSums<T, float>(ring, sums);
#pragma unroll 1
  for (int run = threadIdx.x; run < T::kRows * kRuns; run += T::kThreads) {
    const int row = run / kRuns, column = run % kRuns * kN;
    int64_t to[kN];
    float v[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      to[i] = i > 0 && whole_runs ? to[0] + i : address(row, column + i);
      v[i] = scratch[row * kPitch<T, float> + column + i];
    }
    if (whole_runs) {
      if (to[0] < 0) continue;
      Add<Out>(v, epilogue.bias, bias(column));
      Add<Out>(v, epilogue.residual, to[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        float one[] = {v[i]};
        if (to[i] < 0) continue;
        Add<Out>(one, epilogue.bias, bias(column + i));
        Add<Out>(one, epilogue.residual, to[i]);
        v[i] = one[0];
      }
    }
    Activate<Out>(v, epilogue.activation);
    const Vec<Out, kN> rounded = Round<Out>(v);
    if (whole_runs) {
      *reinterpret_cast<Vec<Out, kN>*>(out + to[0]) = rounded;
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i)
        if (to[i] >= 0) out[to[i]] = rounded.v[i];
    }
  }
}

// The same of 8-bit operands, as elements of the type. Of the tile's columns the first `columns` exist.
template <class T, class Address, class Bias>
__device__ void StoreBytes(unsigned char* ring, const typename T::Sums& sums, DType type, void* out,
                           const Address& address, bool whole_runs, const Epilogue& epilogue, const Bias& bias,
                           int columns) {
  using Sum = typename T::Sum;
  constexpr int kN = BytesEpilogue::kN, kRuns = T::kColumns / kN;
  static_assert(T::kThreads % kRuns == 0);
  const Sum* scratch = StageSums<T, Sum>(ring, sums);
  const int column = threadIdx.x % kRuns * kN;  // of all that this thread stores
  const BytesEpilogue finish(
      type, epilogue, [&](int i) { return LoadFactors(type, epilogue, column + i < columns ? bias(column + i) : -1); });
  const int first_row = threadIdx.x / kRuns;
  constexpr int kRowsApart = T::kThreads / kRuns;
  if (whole_runs) {
    finish.ForRows(out, [&](const auto& store, auto unroll) {
#pragma unroll decltype(unroll)::value
      for (int i = 0; i < T::kRows / kRowsApart; ++i) {
        const int row = first_row + i * kRowsApart;
        const int64_t to = address(row, column);
        if (to >= 0) store(*reinterpret_cast<const Vec<Sum, kN>*>(scratch + row * kPitch<T, Sum> + column), to);
      }
    });
  } else {
#pragma unroll 1
    for (int i = 0; i < T::kRows / kRowsApart * kN; ++i) {
      const int row = first_row + i / kN * kRowsApart;
      const int64_t to = address(row, column + i % kN);
      if (to >= 0) finish.StoreAny(Vec<Sum, 1>{scratch[row * kPitch<T, Sum> + column + i % kN]}, i % kN, out, to);
    }
  }
}

}  // namespace jaxdnn::conv
