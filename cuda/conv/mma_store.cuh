// How the sums of the mma.sync kernels leave: through shared memory, so that whole lines are stored at once. There they
// are floats (or 32-bit integers, as they are) whatever the result's type is, and are finished in place: each step is
// one loop, for all types and epilogues.
#pragma once

#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {

// Row by row, with a pitch that spreads the 8 rows of a store over the banks.
template <class T>
constexpr int kPitch = T::kColumns + 8;

template <class T>
__device__ float* StageSums(unsigned char* ring, const typename T::Sums& sums) {
  float* staged = reinterpret_cast<float*>(ring);
  constexpr int kRun = sizeof(typename T::In) == 1 ? 4 : 2;  // neighbouring columns that a thread has
#pragma unroll
  for (int i = 0; i < T::kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < T::kWarpColumns / 8; j += kRun / 2) {
      float* p = staged + (T::Row() + 16 * i + threadIdx.x % 32 / 4) * kPitch<T> + T::Column(j, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vec<float, kRun> run;
#pragma unroll
        for (int k = 0; k < kRun; ++k)
          run.v[k] = BitCast<float>(kRun == 2 ? sums[i][j][2 * half + k] : sums[i][j + k % 2][2 * half + k / 2]);
        *reinterpret_cast<Vec<float, kRun>*>(p + 8 * half * kPitch<T>) = run;
      }
    }
  }
  __syncthreads();
  return staged;
}

// Calls f(row, sums) for kN neighbours in each row that a thread has, always of the same columns; f says whether it
// changed them.
template <class T, int kN, int kUnroll, class F>
__device__ __forceinline__ void ForStaged(float* staged, const F& f) {
  constexpr int kRuns = T::kColumns / kN, kRowsApart = T::kThreads / kRuns;
  static_assert(kRowsApart * kRuns == T::kThreads && T::kRows % kRowsApart == 0);
  int row = threadIdx.x / kRuns;
  staged += row * kPitch<T> + threadIdx.x % kRuns * kN;
#pragma unroll kUnroll
  for (int i = 0; i < T::kRows / kRowsApart; ++i, row += kRowsApart, staged += kRowsApart * kPitch<T>) {
    auto& place = *reinterpret_cast<Vec<float, kN>*>(staged);
    // As a whole: element by element it would be so many accesses, of which each four meet in a bank.
    Vec<float, kN> sums = place;
    if (f(row, sums)) place = sums;
  }
}

// Adds an array's elements, of each row those from at(row) on, several rows' on their way together.
template <class T, int kN, class Out, class At>
__device__ __forceinline__ void AddStaged(float* staged, const Out* array, const At& at) {
  constexpr int kRuns = T::kColumns / kN, kRowsApart = T::kThreads / kRuns, kAtOnce = 4;
  static_assert(T::kRows / kRowsApart % kAtOnce == 0);
  int row = threadIdx.x / kRuns;
  staged += row * kPitch<T> + threadIdx.x % kRuns * kN;
#pragma unroll 1
  for (int i = 0; i < T::kRows / kRowsApart; i += kAtOnce) {
    Words<Out, kN> words[kAtOnce];
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      const int64_t from = at(row + b * kRowsApart);
      words[b] = {};
      if (from >= 0) words[b] = *reinterpret_cast<const Words<Out, kN>*>(array + from);
    }
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      auto& place = *reinterpret_cast<Vec<float, kN>*>(staged + b * kRowsApart * kPitch<T>);
      Vec<float, kN> sums = place;
      const auto more = BitCast<Vec<Out, kN>>(words[b]);
#pragma unroll
      for (int k = 0; k < kN; ++k) sums.v[k] += static_cast<float>(more.v[k]);
      place = sums;
    }
    row += kAtOnce * kRowsApart;
    staged += kAtOnce * kRowsApart * kPitch<T>;
  }
}

// The epilogue. address(column)(row) says where a sum goes, in elements of the result, or is -1; `whole_runs`, whether
// four columns and their addresses always follow each other; and bias(column) where a column's bias is. Of the tile's
// columns the first `columns` exist.
template <class T, class Address, class Bias>
__device__ void FinishStaged(float* staged, DType type, const Epilogue& epilogue, const Address& address,
                             bool whole_runs, const Bias& bias, int columns) {
  using In = typename T::In;
  constexpr bool kIntegers = std::is_integral_v<typename T::Sum>;
  if (epilogue.bias != nullptr || epilogue.scale != nullptr || kIntegers) {
    const int column = threadIdx.x % T::kColumns;
    ColumnFactors factors;
    if (column < columns) factors = LoadFactors<In>(type, epilogue, bias(column));
    ForStaged<T, 1, 4>(staged, [&](int, Vec<float, 1>& sum) {
      float v = kIntegers ? static_cast<float>(__float_as_int(sum.v[0])) : sum.v[0];
      // Rounded before the bias is added, as by two operations elsewhere.
      if (sizeof(In) == 1) v = __fmul_rn(v, factors.scale);
      if (epilogue.bias != nullptr) v += factors.bias;
      sum.v[0] = v;
      return true;
    });
    __syncthreads();
  }
  if (epilogue.residual != nullptr) {
    const auto add = [&](auto count) {
      constexpr int kN = decltype(count)::value;
      const auto at = address(threadIdx.x * kN % T::kColumns);
      WithFloats<In>(type, epilogue.residual, [&](auto* typed) { AddStaged<T, kN>(staged, typed, at); });
    };
    if (whole_runs) {
      add(std::integral_constant<int, 4>());
    } else {
      add(std::integral_constant<int, 1>());
    }
    __syncthreads();
  }
  if (epilogue.activation.kind == activation::Kind::kIdentity) return;
  if (IsClamp(epilogue.activation)) {
    const Clamp clamp(epilogue.activation);
    ForStaged<T, 4, 4>(staged, [&](int, Vec<float, 4>& sums) {
#pragma unroll
      for (float& each : sums.v) each = clamp(each);
      return true;
    });
  } else {
    ForStaged<T, 4, 1>(staged, [&](int, Vec<float, 4>& sums) {
      Activate<float>(sums.v, epilogue.activation);
      return true;
    });
  }
  __syncthreads();
}

// As elements of the type; integers are stored as they are where it is kF32.
template <class T, class Address>
__device__ void StoreStaged(float* staged, DType type, void* out, const Address& address, bool whole_runs) {
  using In = typename T::In;
  const auto store = [&](auto count) {
    constexpr int kN = decltype(count)::value;
    const auto at = address(threadIdx.x * kN % T::kColumns);
    WithFloats<In>(type, out, [&](auto* typed) {
      using Out = std::remove_pointer_t<decltype(typed)>;
      ForStaged<T, kN, 4>(staged, [&](int row, const Vec<float, kN>& sums) {
        const int64_t to = at(row);
        if (to >= 0) *reinterpret_cast<Vec<Out, kN>*>(typed + to) = Round<Out>(sums.v);
        return false;
      });
    });
  };
  if (whole_runs) {
    store(std::integral_constant<int, 4>());
  } else {
    store(std::integral_constant<int, 1>());
  }
}

}  // namespace jaxdnn::conv
