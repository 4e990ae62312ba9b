// The frame's results on Hopper's tensor cores, forward and in the data gradient, of one group whose channels are whole
// 16 bytes: as in frame_mma.cu, but that a warpgroup gathers rows while two others multiply.
//
// Where a row reads the operand a lane works out once a tap; asynchronous copies then bring its channels, line by line,
// to where TMA's swizzle would put them. The filter's boxes come by TMA. Floats are so in the data gradient alone,
// since forward their filter is MN-major; and an epilogue is left to the other kernel.
#include "cuda/common/device_code.h"
#include "cuda/conv/frame.cuh"
#include "cuda/conv/wgmma_store.cuh"

namespace jaxdnn::conv {
namespace {

template <class In, int kColumns>
using FrameTile = WgmmaTile<In, 128, kColumns, false, false>;

struct FrameParams {
  DataParams data;
  Frame frame;
  CUtensorMap filter;
  int lines;       // of channels
  bool continued;  // the sums of the results' own positions are there already, as floats
  bool wide;       // the result is of floats
};

// What SetReading works out, of all of a block's readings at once, by a lane each: one after the other they would take
// longer than the products.
struct Reading {
  int sign[kRank], shift[kRank], first_tap[kRank], taps[kRank];

  __device__ void Take(const FrameBlock& block) {
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      sign[d] = block.sign[d], shift[d] = block.shift[d];
      first_tap[d] = block.phase[d].first_tap, taps[d] = block.phase[d].taps;
    }
  }
  __device__ void Set(FrameBlock& block) const {
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      block.sign[d] = sign[d], block.shift[d] = shift[d];
      block.phase[d].first_tap = first_tap[d], block.phase[d].taps = taps[d];
    }
  }
};

// Calls f(tap of the window, taps from the reading's first one) for all that a reading meets.
template <class F>
__device__ void ForEachTap(const DataParams& p, const FrameBlock& block, const F& f) {
  const PhaseAxis(&phase)[kRank] = block.phase;
  for (int a = 0; a < phase[0].taps; ++a)
    for (int b = 0; b < phase[1].taps; ++b)
      for (int c = 0; c < phase[2].taps; ++c) {
        const int plane = phase[0].first_tap + a * p.tap_period[0], line = phase[1].first_tap + b * p.tap_period[1];
        f((plane * p.window[1] + line) * p.window[2] + phase[2].first_tap + c * p.tap_period[2], {a, b, c});
      }
}

template <class T, bool kForward>
__device__ void LoadFilter(const FrameParams& p, const Ring<T>& ring, int column, int line, int tap) {
  hopper::ArriveExpecting(ring.Full(), T::kBytesB);
  const uint32_t to = ring.Data() + T::kBytesA;
  if constexpr (kForward) {
#pragma unroll
    for (int i = 0; i < T::kColumns; i += T::kLine)
      hopper::LoadBox(to + i * kLineBytes, &p.filter, ring.Full(), column + i, line * T::kLine, tap);
  } else {
    hopper::LoadBox(to, &p.filter, ring.Full(), line * T::kLine, column, tap);
  }
}

// By one of the four warps that fill stages, with 32 rows each.
template <class T, bool kForward>
__device__ void Gather(const FrameParams& p, FrameBlock block, const Reading* readings, Ring<T> ring, int warp,
                       const typename T::In* in) {
  using In = typename T::In;
  constexpr int kChunk = 16 / sizeof(In), kAtOnce = 4;  // rows that the warp copies lines of at once
  const DataParams& q = p.data;
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const int64_t first = block.first_row + warp * 32, rows = block.row_count - first;
  int at[kRank];
  Row row = block.RowAt(q, p.frame, static_cast<int>(first + lane), at);
#pragma unroll 1
  for (int which = p.continued, count = block.Readings(); which < count; ++which) {
    readings[which].Set(block);
#pragma unroll
    for (int d = 0; d < kRank; ++d) row.origin[d] = block.Origin(q, d, at[d]);
    ForEachTap(q, block, [&](int tap, const int (&from)[kRank]) {
      const int64_t begin = Find(q, p.frame, row, from, block.phase[0].taps);
      const In* lines[32 / kAtOnce];
#pragma unroll
      for (int i = 0; i < 32 / kAtOnce; ++i) {
        const int64_t of_row = __shfl_sync(~0u, begin, i * kAtOnce + lane / 8);
        lines[i] = of_row < 0 ? nullptr : in + of_row + chunk * kChunk;
      }
#pragma unroll 1
      for (int line = 0; line < p.lines; ++line) {
        hopper::WaitBarrier(ring.Empty(ring.stage), ring.parity ^ 1);
        if (warp == 0 && lane == 0) LoadFilter<T, kForward>(p, ring, block.column_tile * T::kColumns, line, tap);
        const bool within = line * T::kLine + chunk * kChunk < q.channels;
#pragma unroll
        for (int i = 0; i < 32 / kAtOnce; ++i) {
          // Past the last row nobody minds what sums are.
          if (i * kAtOnce >= rows) break;
          const int r = i * kAtOnce + lane / 8;
          const bool copies = within && lines[i] != nullptr;
          CopyAsync<16>(ring.Data() + (warp * 32 + r) * kLineBytes + ((chunk ^ (r % 8)) << 4),
                        copies ? lines[i] + line * T::kLine : in, copies);
        }
        hopper::ArriveAfterCopies(ring.Full());
        ring.Next();
      }
    });
  }
}

// Adds what is where StoreSums would store them.
template <class T, class Address>
__device__ void AddStored(typename T::Sums& sums, const float* stored, int count, const Address& address) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t offset = address(thread / 32 * 16 + lane / 4 + 8 * half);
    float* const v = &sums[0][2 * half];
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
      if (offset < 0 || column >= count) continue;
      const auto pair = *reinterpret_cast<const Vec<float, 2>*>(stored + offset + column);
      v[4 * j] += pair.v[0];
      v[4 * j + 1] += pair.v[1];
    }
  }
}

template <class T, bool kForward>
__device__ void Consume(const FrameParams& p, const FrameBlock& block, const Reading* readings, Ring<T> ring,
                        int warpgroup, void* out) {
  using In = typename T::In;
  using Own = HalfTile<T>;
  const DataParams& q = p.data;
  int steps = 0;
  for (int which = p.continued, count = block.Readings(); which < count; ++which) {
    const int (&taps)[kRank] = readings[which].taps;
    steps += taps[0] * taps[1] * taps[2] * p.lines;
  }
  if (block.first_row + warpgroup * Own::kRows >= block.row_count) {
    // In the corners boxes have few rows, and many readings.
    for (; steps > 0; --steps, ring.Next()) {
      hopper::WaitBarrier(ring.Full(), ring.parity);
      Release(ring, ring.stage);
    }
    return;
  }
  typename Own::Sums sums;
  if (steps > 0) {
    MultiplyStagesTogether<T, false, kForward, true>(ring, steps, warpgroup, sums);
  } else {
#pragma unroll
    for (float& sum : sums[0]) sum = 0;
  }
  const int column = block.column_tile * T::kColumns;
  // Where the thread's two rows are stored, of which the second is 8 below the first.
  static_assert(Own::kRows == 64);
  int64_t upper = 0, lower = 0;
  int row =
      static_cast<int>(block.first_row) + (warpgroup * 4 + threadIdx.x % kWarpgroup / 32) * 16 + threadIdx.x % 32 / 4;
#pragma unroll 1
  for (int i = 0; i < 2; ++i, row += 8) {
    int at[kRank];
    const int64_t result = block.RowAt(q, p.frame, row, at).result;
    upper = lower;
    lower = result < 0 ? -1 : result * q.result_pixel;
  }
  const auto offset = [=](int of_block) { return of_block / 8 % 2 == 0 ? upper : lower; };
  if (sizeof(In) == 2 && !p.wide) {
    StoreSums<Own>(sums, static_cast<In*>(out) + column, q.columns - column, offset);
  } else {
    float* const floats = static_cast<float*>(out) + column;
    if (p.continued) AddStored<Own>(sums, floats, q.columns - column, offset);
    StoreSums<Own>(sums, floats, q.columns - column, offset);
  }
}

template <class T, bool kForward>
__global__ void __launch_bounds__(T::kThreads, 1)
    FrameWgmmaKernel(const __grid_constant__ FrameParams p, const typename T::In* in, void* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Reading readings[kFrameMostReadings];
    FrameBlock block(p.data, p.frame);
    if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
    if (threadIdx.x < block.Readings()) {
      block.SetReading(p.data, p.frame, threadIdx.x);
      readings[threadIdx.x].Take(block);
    }
    const Ring<T> ring(shared);
    ring.Init(kConsumers, kWarpgroup + 1);  // all who gather, and the filter's bytes
    RunRoles<0, 104>([](int) {}, [&](int warpgroup) { Consume<T, kForward>(p, block, readings, ring, warpgroup, out); },
                     [&](int warp) { Gather<T, kForward>(p, block, readings, ring, warp, in); });
  }
}

template <class T, bool kForward>
cudaError_t LaunchTile(const Problem& p, const void* operand, const void* filter, void* out, cudaStream_t stream) {
  FrameParams q = {MakeDataParams(p, {}, T::kRows, T::kColumns), MakeFrame(p, p.images, T::kRows)};
  q.lines = int(CeilDiv(q.data.channels, T::kLine));
  q.continued = !kForward && p.out == DType::kF32 && FrameShare(p) < 1;
  q.wide = p.out == DType::kF32;
  const cudaError_t e = EncodeBoxes(&q.filter, p.in, filter, {p.features, p.channels, p.Taps()},
                                    {T::kLine, kForward ? T::kLine : T::kColumns, 1});
  if (e != cudaSuccess) return e;
  const Grid grid = {FrameBlocks(p, q.data, q.frame), T::kThreads, T::kSharedBytes};
  return LaunchKernel(FrameWgmmaKernel<T, kForward>, grid, stream, q, static_cast<const typename T::In*>(operand), out);
}

}  // namespace

int LaunchFrameWgmma(const Problem& p, const void* operand, const void* filter, void* out, CUstream_st* stream) {
  const auto aligned = [](const void* a) { return reinterpret_cast<uintptr_t>(a) % 16 == 0; };
  if (!HasHopperCode() || !TakesFrameWgmma(p) || !aligned(operand) || !aligned(filter) || !aligned(out))
    return cudaErrorInvalidValue;
  const bool forward = p.direction == Direction::kForward, large = FrameColumns(p) == 128;
  const auto with_type = [&](auto in) -> cudaError_t {
    using In = typename decltype(in)::type;
    using Large = FrameTile<In, 128>;
    using Small = FrameTile<In, 64>;
    if constexpr (sizeof(In) == 2)
      if (forward)
        return large ? LaunchTile<Large, true>(p, operand, filter, out, stream)
                     : LaunchTile<Small, true>(p, operand, filter, out, stream);
    return large ? LaunchTile<Large, false>(p, operand, filter, out, stream)
                 : LaunchTile<Small, false>(p, operand, filter, out, stream);
  };
  if (p.in == DType::kF32) return with_type(TypeTag<float>());
  return p.in == DType::kBF16 ? with_type(TypeTag<__nv_bfloat16>()) : with_type(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
