// Forward and data gradient of depthwise convolution whose channels are no whole chunks of 16 bytes: 3x3 windows
// without dilation, forward with a stride of one or two. As in depthwise_slide.cuh a thread goes down the lines of its
// strip, and each line is added to the sums of all lines of results that it is part of.
#include "cuda/conv/depthwise.h"
#include "cuda/conv/depthwise_data.cuh"
#include "cuda/conv/unaligned_depthwise.cuh"

namespace jaxdnn::conv {
namespace depthwise {
namespace {

// A strip's results, `step` bytes apart, or the first `count` of them. One address follows from the last, which takes
// fewest instructions; and of such the compiler would not know that they are global memory's.
template <class Out, bool kAll, int kStrip>
__device__ void StoreUnaligned(const char* to, int step, int count, const float (&v)[kStrip]) {
#pragma unroll
  for (int j = 0; j < kStrip; ++j) {
    if (kAll || j < count) {
      if constexpr (sizeof(Out) == 4) {
        asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(v[j]) : "memory");
      } else {
        // Two are rounded in one instruction.
        const int even = j & ~1, odd = even + 1 < kStrip ? even + 1 : even;
        const uint32_t word = NarrowPair<Out>(v[even], v[odd]) >> (j % 2 * 16);
        asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(static_cast<uint16_t>(word)) : "memory");
      }
    }
    to += step;
    Keep(to);
  }
}

template <class U>
__global__ void __launch_bounds__(U::kThreads, U::kBlocks)
    UnalignedKernel(const __grid_constant__ DataParams p, const __grid_constant__ UnalignedTile tile, const char* in,
                    const char* in_end, const char* filter, char* out) {
  using T = typename U::T;
  constexpr int kTaps = U::kTaps, kStride = U::kStride, kStrip = U::kStrip, kSums = U::kHeld, kLines = U::kLines,
                kSize = sizeof(T);
  extern __shared__ __align__(16) char shared[];
  UnalignedRing<U::kStages> ring(shared, tile.threads);
  int slab, channel;
  const auto [strips, segment, plane, image] = Locate(p, p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab));
  const int64_t problem = p.images.Div(image);
  const int line0 = segment * p.segment, steps = min(p.segment, p.whole[1].count - line0) + kSums - 1;
  const int tile0 = strips * tile.strips * kStrip, first = p.whole[2].origin + kStride * tile0;
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const bool plane_inside = in_plane >= 0 && in_plane < p.at[0].axis.extent;
  const int in_lines = plane_inside ? p.at[1].axis.extent : 0, in_columns = p.at[2].axis.extent;
  int line = p.whole[1].origin + kStride * line0;
  const char* from = in + image * p.in_image + in_plane * p.in_line[0] + line * p.in_line[1];
  const UnalignedCopy copy(tile, first, in_columns, slab * tile.width * kSize, p.in_pixel, in_end);
  if (threadIdx.x >= tile.threads - 32) {
#pragma unroll 1
    for (int step = 0; step < steps; step += U::kSteps) {
      ring.WaitEmpty();
      BulkCopy copies[kLines] = {};
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        if (line >= 0 && line < in_lines)
          copies[i] = copy.template Of<T>(from, ring.Stages() + (ring.stage * kLines + i) * tile.bytes);
        from += p.in_line[1];
        ++line;
      }
      ring.Fill(copies);
    }
    return;
  }

  // Threads that are left over do as others do, and store nothing.
  const int unit = p.slabs.thread.Div(static_cast<int>(threadIdx.x), &channel), strip = min(unit, tile.strips - 1);
  const uint32_t read = ring.Stages() + strip * kStrip * kStride * tile.pitch + channel * kSize;
  channel += slab * tile.width;
  const int column0 = tile0 + strip * kStrip, in_column0 = first + kStride * strip * kStrip;
  const int columns = unit == strip && channel < p.channels ? p.whole[2].count - column0 : 0;
  channel = min(channel, p.channels - 1);
  float w[kTaps][kTaps];
  {
    const char* const taps = FirstTap<T>(p, p.whole, filter, problem, channel);
#pragma unroll
    for (int r = 0; r < kTaps; ++r)
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        const int64_t tap = r * p.whole[1].tap_step * p.filter_tap[1] + s * p.whole[2].tap_step * p.filter_tap[2];
        w[r][s] = static_cast<float>(*reinterpret_cast<const T*>(taps + tap));
      }
  }
  const float bias = BiasOf<T>(p, problem * p.channels + channel, false).x;

  float sums[kSums][kStrip];
  const auto up = [&](int k) {
#pragma unroll
    for (int j = 0; j < kStrip; ++j) sums[k][j] = k > 0 ? sums[k - 1][j] : bias;
  };
#pragma unroll
  for (int k = 0; k < kSums; ++k) up(k);
  char* to = out + image * p.out_image + plane * p.out_line[0] + int64_t{line0 - (kSums - 1)} * p.out_line[1] +
             column0 * p.out_line[2] + channel * (p.widened ? int(sizeof(float)) : kSize);
  const bool edge = in_column0 < 0 || in_column0 + U::kWidth > in_columns;
  uint32_t low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from));
#pragma unroll 1
  for (int step = 0; step < steps;) {
    const uint32_t stage = read + ring.stage * kLines * tile.bytes;
    ring.WaitFull();
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      float x[U::kWidth];
      LoadUnaligned<T>(stage + i * tile.bytes + copy.Shift(low), tile.pitch, x);
      if (i == kLines - 1) ring.Release();
      const bool inside = line >= 0 && line < in_lines;
      if (edge || !inside) ZeroOutside(in_column0, inside ? in_columns : 0, x);
      low += static_cast<uint32_t>(p.in_line[1]);
      ++line;
      // Tap a + kStride k of the results `k` lines up.
      const int a = i % kStride;
#pragma unroll
      for (int k = kSums - 1; k >= 0; --k) {
        const int r = a + kStride * k;
        if (a == 0) up(k);
        if (r >= kTaps) continue;
#pragma unroll
        for (int s = 0; s < kTaps; ++s)
#pragma unroll
          for (int j = 0; j < kStrip; ++j) sums[k][j] = fmaf(w[r][s], x[j * kStride + s], sums[k][j]);
      }
      if (a < kStride - 1) continue;
      if (step >= kSums - 1 && step < steps) {
        ClampAll(p, sums[kSums - 1]);
        WithOut<T>(p.widened, [&](auto type) {
          using Out = typename decltype(type)::type;
          const int step_bytes = static_cast<int>(p.out_line[2]);
          if (columns >= kStrip)
            StoreUnaligned<Out, true>(to, step_bytes, columns, sums[kSums - 1]);
          else
            StoreUnaligned<Out, false>(to, step_bytes, columns, sums[kSums - 1]);
        });
      }
      to += p.out_line[1];
      ++step;
    }
  }
}

}  // namespace
}  // namespace depthwise

cudaError_t LaunchUnalignedDepthwiseData(const Problem& p, const void* operand, const void* filter, void* out,
                                         const Epilogue& epilogue, cudaStream_t stream) {
  using namespace depthwise;
  DataParams q = MakeParams(p, epilogue);
  if (!IsClampAlone(epilogue)) return cudaErrorInvalidValue;
  if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return cudaSuccess;
  return VisitSingleDType(p.in, [&](auto type) {
    using T = typename decltype(type)::type;
    return VisitUnaligned<T>(p, [&](auto u) {
      using U = decltype(u);
      const UnalignedTile t(u, q.channels, q.at[2].out, U::kWidth, U::kStrip * U::kStride);
      q.slabs.thread = FastDiv(t.width);
      q.slabs.count = FastDiv(CeilDiv(q.channels, t.width));
      q.planes = FastDiv(q.at[0].out);
      q.strips = FastDiv(CeilDiv(q.at[2].out, U::kStrip * t.strips));
      const int64_t columns = p.batch * p.images * q.planes.divisor * q.strips.divisor * q.slabs.count.divisor;
      q.segment = SegmentOf(columns, q.at[1].out, t.Places(u, U::kLines * t.bytes));
      q.segments = FastDiv(CeilDiv(q.at[1].out, q.segment));
      const char* const in = static_cast<const char*>(operand);
      const Grid grid = {columns * q.segments.divisor, t.threads,
                         size_t(UnalignedRing<U::kStages>::kBytes + U::kStages * U::kLines * t.bytes)};
      return LaunchKernel(UnalignedKernel<U>, grid, stream, q, t, in, in + p.batch * p.images * q.in_image,
                          static_cast<const char*>(filter), static_cast<char*>(out));
    });
  });
}

}  // namespace jaxdnn::conv
