// How warps of the kernels of small groups store their sums: neighbouring lanes exchange them until each has 16 bytes
// or so of one pixel, and together all bytes of it.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/conv/exchange.cuh"
#include "cuda/conv/grouped.cuh"

namespace jaxdnn::conv {

// Where the results of the lane's two columns go.
template <class T>
struct GroupedStore {
  uint32_t to[2];              // fours of channels
  bool there[2][T::kResults];  // by a column's result
  int line;                    // of the result; not all of an even number of them need exist

  __device__ GroupedStore(const GroupedParams& q, const GroupedBlock& block, int problem, int part)
      : line(block.first_line * T::kResults - q.outside_h) {
    const int in_part = FirstOfRun<T::kRunTiles>(), channel = part * T::kChannels + in_part;
    const int columns = block.Columns(q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = threadIdx.x % 32 / 4 + 8 * half;
      int x;
      const int image = q.image_columns.Div(block.first_column + column, &x);
      x = x * T::kResults - q.outside_w;
#pragma unroll
      for (int b = 0; b < T::kResults; ++b)
        there[half][b] = column < columns && in_part < T::kChannels && channel < q.channels &&
                         unsigned(x + b) < unsigned(q.result_width);
      to[half] = (uint32_t(problem * q.images + image) * q.result_height + line) * q.out_line +
                 uint32_t(x) * (q.channels / 4u) + channel / 4u;
    }
  }
  __device__ bool Exists(const GroupedParams& q, int half, int b) const {
    return there[half][b] && (T::kResults == 1 || unsigned(line) < unsigned(q.result_height));
  }
  // Of the column's result b, in elements.
  __device__ uint64_t Offset(const GroupedParams& q, int half, int b) const {
    return uint64_t{to[half] + b * (q.channels / 4u)} * 4;
  }
  __device__ void NextLine(const GroupedParams& q) {
    to[0] += q.out_line;
    to[1] += q.out_line;
    ++line;
  }
};

// The run of a pixel, as floats.
template <class T>
__device__ __forceinline__ void RunOf(const typename T::Sums& sums, int half, float (&run)[2 * T::kRunTiles]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    uint32_t words[T::kRunTiles] = {};
#pragma unroll
    for (int j = 0; j < T::kTiles; ++j) words[j] = __float_as_uint(sums[j][2 * half + e]);
    Transpose(words);
#pragma unroll
    for (int j = 0; j < T::kRunTiles; ++j) run[2 * j + e] = __uint_as_float(words[j]);
  }
}

template <class Out, int kRun>
__device__ __forceinline__ void StoreRun(Out* out, const float (&run)[kRun]) {
  constexpr int kN = kRun * int(sizeof(Out)) > 16 ? 16 / int(sizeof(Out)) : kRun;
#pragma unroll
  for (int i = 0; i < kRun; i += kN) {
    float part[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k) part[k] = run[i + k];
    StorePacked<Out, kN>(out + i, Narrow<Out, kN>(part));
  }
}

// The columns' results b of a line. kPlain: they are of the operands' type.
template <class T, bool kPlain>
__device__ __forceinline__ void StoreLine(const GroupedParams& q, const GroupedStore<T>& store, int b,
                                          const typename T::Sums& sums, void* out) {
  using In = typename T::In;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint64_t to = store.Offset(q, half, b);
    if (sizeof(In) == 4 || (!kPlain && q.type == DType::kF32)) {
      float run[2 * T::kRunTiles];
      RunOf<T>(sums, half, run);
      if (store.Exists(q, half, b)) StoreRun(static_cast<float*>(out) + to, run);
    } else if constexpr (sizeof(In) == 2) {
      // Rounded first: half as many words to exchange.
      Packed<In, 2 * T::kRunTiles> packed = {};
#pragma unroll
      for (int j = 0; j < T::kTiles; ++j) packed.v[j] = NarrowPair<In>(sums[j][2 * half], sums[j][2 * half + 1]);
      Transpose(packed.v);
      if (store.Exists(q, half, b)) StorePacked<In, 2 * T::kRunTiles>(static_cast<In*>(out) + to, packed);
    }
  }
}

// The bias of the lane's columns of each tile.
template <class T>
__device__ __forceinline__ void BiasOf(const GroupedParams& q, const GroupedWork& work, float (&bias)[T::kTiles][2]) {
  const int first = work.part * T::kChannels + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < T::kTiles; ++j)
    if (first + 8 * j < q.channels)
      AddTyped<typename T::In>(q.type, bias[j], q.epilogue.bias, int64_t{work.problem} * q.channels + first + 8 * j);
}

// What is left of the epilogue when the bias is in the sums, of a line of so many columns.
template <class T>
__device__ __forceinline__ void FinishLine(const GroupedParams& q, const GroupedStore<T>& store, int columns, int part,
                                           typename T::Sums& sums) {
  if (q.epilogue.residual != nullptr) {
    const int lane = threadIdx.x % 32, first = 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < T::kTiles; ++j)
        if (lane / 4 + 8 * half < columns && part * T::kChannels + 8 * j < q.channels)
          AddTyped<typename T::In>(q.type, reinterpret_cast<float (&)[2]>(sums[j][2 * half]), q.epilogue.residual,
                                   store.Offset(q, half, 0) - FirstOfRun<T::kRunTiles>() + first + 8 * j);
  }
  ActivateInTurn<float, 4>(reinterpret_cast<float (&)[4 * T::kTiles]>(sums), q.epilogue.activation);
}

}  // namespace jaxdnn::conv
