// Filter gradient of depthwise convolution whose channels are no whole chunks of 16 bytes: 3x3 windows without
// dilation, with a stride of one or two. As in depthwise_filter.cu a thread goes down lines of its strip with the sums
// of all taps in registers, and each line of x meets the last lines of y, which stay there.
#include <algorithm>

#include "cuda/common/column_sum.cuh"
#include "cuda/conv/depthwise.h"
#include "cuda/conv/depthwise_filter.cuh"
#include "cuda/conv/unaligned_depthwise.cuh"

namespace jaxdnn::conv {
namespace depthwise {
namespace {

struct UnalignedTiles {
  UnalignedTile x, y;
  int bytes;  // of a stage: lines of x, then of y

  template <class U>
  UnalignedTiles(U u, const FilterParams& q)
      : x(u, q.channels, q.at[2].out, U::kWidth, U::kStrip * U::kStride),
        y(u, q.channels, q.at[2].out, U::kStrip, U::kStrip),
        bytes(U::kLines * x.bytes + U::kSteps * y.bytes) {}
};

template <class U>
__global__ void __launch_bounds__(U::kThreads, U::kBlocks)
    UnalignedFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ UnalignedTiles tile,
                          const char* x, const char* x_end, const char* y, const char* y_end, float* partial,
                          char* out) {
  using T = typename U::T;
  constexpr int kTaps = U::kTaps, kStride = U::kStride, kStrip = U::kStrip, kHeld = U::kHeld, kLines = U::kLines,
                kSteps = U::kSteps, kSize = sizeof(T);
  extern __shared__ __align__(16) char shared[];
  UnalignedRing<U::kStages> ring(shared, tile.x.threads);
  int slab, lane;
  const int rest = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
  const int split = rest % p.splits, problem = rest / p.splits;
  const int unit = p.slabs.thread.Div(static_cast<int>(threadIdx.x), &lane), strip = min(unit, tile.x.strips - 1);
  const bool copies = threadIdx.x >= tile.x.threads - 32;
  const int first_byte = slab * tile.x.width * kSize, y_at = kLines * tile.x.bytes;
  const uint32_t read_x = ring.Stages() + strip * kStrip * kStride * tile.x.pitch + lane * kSize;
  const uint32_t read_y = ring.Stages() + y_at + strip * kStrip * tile.y.pitch + lane * kSize;
  const int lines = p.at[1].out, x_line = p.at[1].axis.offset, x_lines = p.at[1].axis.extent;

  float sums[kTaps][kTaps] = {};
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    const auto [strips, segment, plane, image] = Locate(p, id);
    const int x_plane = p.at[0].axis.Origin(plane);
    // Steps whose lines of x are zeros add nothing; those before `begin` fetch lines of y.
    const int begin = max(segment * p.segment, max(-x_line / kStride, 0)), first = begin - (kHeld - 1);
    const int end = min(min((segment + 1) * p.segment, lines + kHeld - 1), (x_lines - x_line + kStride - 1) / kStride);
    if (begin >= end || x_plane < 0 || x_plane >= p.at[0].axis.extent) continue;

    const int64_t whole_image = problem * int64_t{p.images.divisor} + image;
    const int tile0 = strips * tile.x.strips * kStrip, x_tile0 = p.at[2].axis.offset + kStride * tile0;
    const UnalignedCopy copy_x(tile.x, x_tile0, p.at[2].axis.extent, first_byte, p.x_pixel, x_end);
    const UnalignedCopy copy_y(tile.y, tile0, p.at[2].out, first_byte, p.y_pixel, y_end);
    const char* x_from = x + whole_image * p.x_image + x_plane * p.x_line[0] + (x_line + kStride * first) * p.x_line[1];
    const char* y_from = y + whole_image * p.y_image + plane * p.y_line[0] + first * p.y_line[1];
    if (copies) {
#pragma unroll 1
      for (int step = first; step < end; step += kSteps) {
        ring.WaitEmpty();
        const uint32_t stage = ring.Stages() + ring.stage * tile.bytes;
        BulkCopy copies[kLines + kSteps] = {};
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
          const int line = x_line + kStride * step + i;
          if (step + i / kStride >= begin && line >= 0 && line < x_lines)
            copies[i] = copy_x.template Of<T>(x_from, stage + i * tile.x.bytes);
          x_from += p.x_line[1];
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          if (step + i >= 0 && step + i < lines)
            copies[kLines + i] = copy_y.template Of<T>(y_from, stage + y_at + i * tile.y.bytes);
          y_from += p.y_line[1];
        }
        ring.Fill(copies);
      }
      continue;
    }

    uint32_t low_x = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x_from)),
             low_y = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(y_from));
    const int columns = p.at[2].out - tile0 - strip * kStrip, x_columns = p.at[2].axis.extent;
    const int x_column = x_tile0 + kStride * strip * kStrip;
    const bool edge = x_column < 0 || x_column + U::kWidth > x_columns;
    float held[kHeld][kStrip];
#pragma unroll 1
    for (int step = first; step < end;) {
      const int stage = ring.stage * tile.bytes;
      ring.WaitFull();
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int a = i % kStride;
        if (a == 0) {
#pragma unroll
          for (int h = kHeld - 1; h > 0; --h)
#pragma unroll
            for (int j = 0; j < kStrip; ++j) held[h][j] = held[h - 1][j];
          LoadUnaligned<T>(read_y + stage + i / kStride * tile.y.bytes + copy_y.Shift(low_y), tile.y.pitch, held[0]);
          low_y += static_cast<uint32_t>(p.y_line[1]);
        }
        float wide[U::kWidth];
        LoadUnaligned<T>(read_x + stage + i * tile.x.bytes + copy_x.Shift(low_x), tile.x.pitch, wide);
        if (i == kLines - 1) ring.Release();
        low_x += static_cast<uint32_t>(p.x_line[1]);
        const int line = x_line + kStride * step + a;
        if (step >= begin && step < end && line >= 0 && line < x_lines) {
          if (edge) ZeroOutside(x_column, x_columns, wide);
#pragma unroll
          for (int h = 0; h < kHeld; ++h) {
            const int r = a + kStride * h;
            if (r >= kTaps || step < h || step - h >= lines) continue;
            const auto add = [&](int j) {
#pragma unroll
              for (int s = 0; s < kTaps; ++s) sums[r][s] = fmaf(wide[j * kStride + s], held[h][j], sums[r][s]);
            };
            if (columns >= kStrip) {
#pragma unroll
              for (int j = 0; j < kStrip; ++j) add(j);
            } else {
#pragma unroll
              for (int j = 0; j < kStrip - 1; ++j)
                if (j < columns) add(j);
            }
          }
        }
        if (a == kStride - 1) ++step;
      }
    }
  }

  // The sums of a channel's strips come together, a line of taps at a time. Not where the barriers are: the last
  // arrivals there, which nobody waits for, may change these words later still.
  float* const scratch = reinterpret_cast<float*>(shared + UnalignedRing<U::kStages>::kBytes);
  const int width = tile.x.width;
#pragma unroll
  for (int r = 0; r < kTaps; ++r) {
    __syncthreads();
    if (unit == strip && !copies) {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) scratch[(s * tile.x.strips + unit) * width + lane] = sums[r][s];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kTaps * width; i += tile.x.threads) {
      const int s = i / width, of = i - s * width, channel = slab * width + of;
      if (channel >= p.channels) continue;
      float sum = 0;
#pragma unroll 1
      for (int u = 0; u < tile.x.strips; ++u) sum += scratch[(s * tile.x.strips + u) * width + of];
      const int64_t to = ((int64_t{problem} * kTaps + r) * kTaps + s) * p.channels + channel;
      if (partial)
        partial[split * p.size + to] = sum;
      else if (p.widened)
        reinterpret_cast<float*>(out)[to] = sum;
      else
        reinterpret_cast<T*>(out)[to] = static_cast<T>(sum);
    }
  }
}

}  // namespace
}  // namespace depthwise

cudaError_t LaunchUnalignedDepthwiseFilter(const Problem& p, const Config& config, const void* x, const void* y,
                                           void* out, void* workspace, cudaStream_t stream) {
  using namespace depthwise;
  if (p.FilterSize() == 0) return cudaSuccess;
  FilterParams q = MakeParams(p);
  return VisitSingleDType(p.in, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitUnaligned<T>(p, [&](auto u) {
      using U = decltype(u);
      const UnalignedTiles t(u, q);
      q.slabs.thread = FastDiv(t.x.width);
      q.slabs.count = FastDiv(CeilDiv(q.channels, t.x.width));
      q.planes = FastDiv(q.at[0].out);
      q.strips = FastDiv(CeilDiv(q.at[2].out, U::kStrip * t.x.strips));
      const int64_t columns = p.images * int64_t{q.planes.divisor} * q.strips.divisor;
      const int64_t places =
          std::clamp<int64_t>(t.x.Places(u, t.bytes) / (p.batch * q.slabs.count.divisor), 1, config.splits);
      const int steps = q.at[1].out + U::kHeld - 1;
      q.segment = SegmentOf(columns, steps, places);
      q.segments = FastDiv(CeilDiv(steps, q.segment));
      q.units = int(columns * q.segments.divisor);
      q.splits = int(std::clamp<int64_t>(q.units, 1, places));
      const int64_t blocks = p.batch * q.splits * q.slabs.count.divisor;
      const size_t sums = U::kTaps * t.x.strips * t.x.width * sizeof(float);
      const size_t shared = UnalignedRing<U::kStages>::kBytes + std::max(sums, size_t(U::kStages) * t.bytes);
      const Grid grid = {blocks, t.x.threads, shared};
      float* const partial = q.splits > 1 ? static_cast<float*>(workspace) : nullptr;
      const auto *const from_x = static_cast<const char*>(x), *const from_y = static_cast<const char*>(y);
      const int64_t images = p.batch * p.images;
      const cudaError_t status =
          LaunchKernel(UnalignedFilterKernel<U>, grid, stream, q, t, from_x, from_x + images * q.x_image, from_y,
                       from_y + images * q.y_image, partial, static_cast<char*>(out));
      if (status != cudaSuccess || partial == nullptr) return status;
      if (p.out == p.in) return SumRows<float>(partial, 1, q.splits, q.size, static_cast<T*>(out), stream);
      return SumRows<float>(partial, 1, q.splits, q.size, static_cast<float*>(out), stream);
    });
  });
}

}  // namespace jaxdnn::conv
