// What a layer does to the sums of Hopper's forward convolutions before they are stored: bias, residual and activation,
// in the registers that the sums are in.
//
// Where a tile's rows are neighbours in the result, the residual comes through the ring, as steps after those of the
// product: a line of columns each, in the place of the operand's. So it is loaded as far ahead as everything else, and
// by a thread that waits for nothing. Elsewhere the threads that multiply read it from memory.
#pragma once

#include "cuda/conv/data_wgmma.cuh"

namespace jaxdnn::conv {

// Calls add(where) with the stage that has the residual's next line, by all who are told to take stages. Unlike
// products, which are waited for, loads may still be under way when the next instruction says that the stage is free,
// and the TMA unit does not wait for them: hence the fence.
template <class T, class F>
__device__ __forceinline__ void TakeResidual(Ring<T>& ring, const F& add) {
  hopper::WaitBarrier(ring.Full(), ring.parity);
  add(ring.Data());
  hopper::ShowSharedToTma();
  __syncwarp();
  Release(ring, ring.stage);
  ring.Next();
}

// v += two elements in a word.
template <class In>
__device__ __forceinline__ void AddWord(float* v, uint32_t word) {
  const auto two = BitCast<Vec<In, 2>>(word);
  v[0] += static_cast<float>(two.v[0]);
  v[1] += static_cast<float>(two.v[1]);
}

// Adds to 16 columns of 64 rows what lies in a slab as StoreSlabs lays it out, from the slab's column 16 q on.
template <class In>
__device__ __forceinline__ void AddSlab(uint32_t slab, int q, float (&v)[8]) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  if constexpr (sizeof(In) == 2) {
    const int row = 16 * warp + lane % 16;
    uint32_t words[4];
    LoadMatrices<false>(words, slab + row * kLineBytes + (((2 * q + lane / 16) ^ (row % 8)) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) AddWord<In>(v + 2 * i, words[i]);
  } else {
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 4 * q + i / 2 * 2 + lane % 4 / 2;
      uint32_t words[2];
      hopper::LoadWords(words, slab + (row + i % 2 * 8) * kLineBytes + ((chunk ^ (row % 8)) << 4) + lane % 2 * 8);
#pragma unroll
      for (int e = 0; e < 2; ++e) v[2 * i + e] += __uint_as_float(words[e]);
    }
  }
}

// Finishes the rows of a warpgroup, which begin at this one of the ring's tile T. Bias and residual are of the
// operands' type, or of floats where the result is `wide`.
template <class Own, class T>
__device__ void FinishSums(const WgmmaParams& p, Ring<T>& ring, int warpgroup, int first_row, const WgmmaPlace& place,
                           const int* pixels, bool wide, typename Own::Sums& sums) {
  using In = typename T::In;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  if (p.epilogue.bias != nullptr) {
    // Each is loaded once, by way of a slab.
    const uint32_t biases = ring.Slabs() + warpgroup * kSlabCount<Own> * Own::kSlab;
    if (thread == 0) hopper::WaitForStoreReads<0>();
    hopper::SyncWarpgroup(1 + warpgroup);
    if (thread < Own::kColumns / 2) {
      const int column = place.Column<Own>(2 * thread);
      float bias[2] = {};
      if (column < p.columns)
        AddEither<In>(bias, p.epilogue.bias,
                      int64_t{place.problem} * p.columns + (column < p.biases ? column : column - p.biases), wide);
      hopper::StorePair(biases + 8 * thread, bias[0], bias[1]);
    }
    hopper::SyncWarpgroup(1 + warpgroup);
#pragma unroll
    for (int j = 0; j < Own::kColumns / 8; ++j) {
      uint32_t words[2];
      hopper::LoadWords(words, biases + 32 * j + lane % 4 * 8);
#pragma unroll
      for (int m = 0; m < Own::kBlocks; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][4 * j + i] += __uint_as_float(words[i % 2]);
    }
  }
  if (p.residual_lines > 0) {
#pragma unroll
    for (int line = 0; line < Own::kColumns; line += Own::kLine)
      TakeResidual(ring, [&](uint32_t stage) {
#pragma unroll
        for (int m = 0; m < Own::kBlocks; ++m)
#pragma unroll
          for (int q = 0; q < Own::kLine / 16 && line + 16 * q < Own::kColumns; ++q)
            AddSlab<In>(stage + first_row * kLineBytes + m * Own::kSlab, q,
                        reinterpret_cast<float (&)[8]>(sums[m][line / 2 + 8 * q]));
      });
  } else if (p.epilogue.residual != nullptr) {
    // Half of a block's rows and 32 columns at a time.
    constexpr int kAcross = Own::kColumns / 32;
#pragma unroll 1
    for (int part = 0; part < Own::kBlocks * 2 * kAcross; ++part) {
      const int which = part / kAcross, pixel = pixels[which / 2 * 64 + which % 2 * 8 + 16 * warp + lane / 4];
      EitherVec<In, 2> loaded[4];  // all are on their way before the first is looked at
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = place.Column<Own>(part % kAcross * 32 + 8 * j) + lane % 4 * 2;
        if (pixel >= 0 && column < p.columns)
          loaded[j].Load(p.epilogue.residual, int64_t{pixel} * p.columns + column, wide);
      }
      float more[4][2] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) loaded[j].AddTo(more[j], wide);
      WithConstant<Own::kBlocks * 2 * kAcross>(part, [&](auto constant) {
        constexpr int i = decltype(constant)::value;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          sums[i / kAcross / 2][i % kAcross * 16 + j / 2 * 4 + i / kAcross % 2 * 2 + j % 2] += more[j / 2][j % 2];
      });
    }
  }
  ActivateSums<In>(reinterpret_cast<float (&)[sizeof(sums) / 4]>(sums), p.epilogue.activation, wide);
}

// The same of a product's transpose (wgmma_across.cuh), of which a warpgroup has one of the two lines of columns.
template <class T>
__device__ void FinishAcross(const WgmmaParams& p, Ring<T>& ring, int warpgroup, const WgmmaPlace& place,
                             const int* pixels, typename T::Sums& sums) {
  using In = typename T::In;
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const int column = place.column + warpgroup * T::kLine + 16 * warp + lane / 4;  // and the eighth after it
  float bias[2][1] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (column + 8 * i < p.columns)
      Add<In>(bias[i], p.epilogue.bias, int64_t{place.problem} * p.columns + column + 8 * i);
#pragma unroll
  for (int i = 0; i < T::kRows / 2; ++i) sums[0][i] += bias[i / 2 % 2][0];
#pragma unroll 1
  for (int line = 0; line < p.residual_lines; ++line)
    TakeResidual(ring, [&](uint32_t stage) {
      if (line != warpgroup) return;
#pragma unroll
      for (int first = 0; first < T::kRows; first += 16) {
        const int row = first + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        uint32_t words[4];
        LoadMatrices<true>(words, stage + row * kLineBytes + ((chunk ^ (row % 8)) << 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) AddWord<In>(&sums[0][first / 2 + 2 * i], words[i]);
      }
    });
  if (p.residual_lines == 0 && p.epilogue.residual != nullptr) {
#pragma unroll 1
    for (int first = 0; first < T::kRows; first += 16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int pixel = pixels[first + i / 4 * 8 + lane % 4 * 2 + i % 2], of = column + i / 2 % 2 * 8;
        if (pixel >= 0 && of < p.columns)
          Add<In>(reinterpret_cast<float (&)[1]>(sums[0][i]), p.epilogue.residual, int64_t{pixel} * p.columns + of);
      }
      Turn<8>(sums[0]);
    }
  }
  ActivateSums<In>(sums[0], p.epilogue.activation);
}

// The same of floats whose filter went through registers: of a part of the ring's tile T, from this column on.
template <class Part, class T>
__device__ void FinishHeld(const WgmmaParams& p, Ring<T>& ring, int first_column, const WgmmaPlace& place,
                           const int* pixels, typename Held<Part>::Sums& sums) {
  using H = Held<Part>;
  const int of_tile = first_column + H::Column(), column = place.column + H::Column();
  const bool exists = column < p.columns;
  float bias[H::kVector] = {};
  if (exists) Add<float>(bias, p.epilogue.bias, int64_t{place.problem} * p.columns + column);
  constexpr int kEach = Part::kRows / 4;
#pragma unroll
  for (int i = 0; i < kEach; ++i) H::Add(sums, i, bias);
#pragma unroll 1
  for (int line = 0; line < p.residual_lines; ++line)
    TakeResidual(ring, [&](uint32_t stage) {
      if (line != of_tile / T::kLine) return;  // the same in all of a warp
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = H::Row(i), chunk = of_tile % T::kLine / 4;
        uint32_t words[H::kVector];
        hopper::LoadWords(words, stage + row * kLineBytes + ((chunk ^ (row % 8)) << 4) + of_tile % 4 * 4);
        H::Add(sums, i, reinterpret_cast<const float (&)[H::kVector]>(words));
      }
    });
  if (p.residual_lines == 0 && p.epilogue.residual != nullptr) {
    constexpr int kAtOnce = 4, kShare = kAtOnce * H::kVector / H::kBlocks;  // rows; and of every block's sums
#pragma unroll 1
    for (int i = 0; i < kEach; i += kAtOnce) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int pixel = pixels[H::Row(i + k)];
        float residual[H::kVector] = {};
        if (pixel >= 0 && exists) Add<float>(residual, p.epilogue.residual, int64_t{pixel} * p.columns + column);
        H::Add(sums, k, residual);
      }
#pragma unroll
      for (auto& block : sums) Turn<kShare>(block);
    }
  }
  ActivateSums<float>(reinterpret_cast<float (&)[sizeof(sums) / 4]>(sums), p.epilogue.activation);
}

}  // namespace jaxdnn::conv
