// Forward and data gradient of depthwise convolution, with no workspace: products with band matrices, the ring or the
// sliding kernel where they are compiled for the window, products of whole images where these are small, and for all
// other windows one in which a thread computes one strip, tap by tap, the operand sliding through its registers.
#include "cuda/conv/depthwise.h"
#include "cuda/conv/depthwise_band_data.cuh"
#include "cuda/conv/depthwise_image_data.cuh"
#include "cuda/conv/depthwise_ring.cuh"
#include "cuda/conv/depthwise_slide.cuh"
#include "cuda/conv/depthwise_spread.cuh"
#include "cuda/conv/depthwise_volume.cuh"
#include "cuda/conv/depthwise_wide_data.cuh"

namespace jaxdnn::conv {
namespace depthwise {
namespace {

// What is left of the epilogue when the bias is in the sums.
template <class T, int kStrip>
__device__ void Finish(const DataParams& p, int64_t offset, int step, int count, float2 (&sums)[kStrip], bool both) {
  if (IsBiasAlone(p.epilogue)) return;
#pragma unroll 1
  for (int j = 0; j < kStrip; ++j, offset += step) {
    float v[2][1] = {{sums[0].x}, {sums[0].y}};
    if (j < count) AddResidual<T>(p, v[0], offset);
    if (j < count && both) AddResidual<T>(p, v[1], offset + 1);
    float pair[2] = {v[0][0], v[1][0]};
    ActivateResults<T>(p, pair);
    Rotate<1>(sums);
    sums[kStrip - 1] = {pair[0], pair[1]};
  }
}

// Any window: kChunk of its columns at a time.
template <class T, bool kPaired, int kStrip, int kChunk>
__global__ void __launch_bounds__(kDepthwiseThreads, kStrip* kChunk > 64 ? 2 : 4)
    StripKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  __shared__ DataBlock block;
  if (threadIdx.x == 0) block.Set(p);
  __syncthreads();
  int lane, line, strip, plane, image;
  const int unit = p.slabs.thread.Div(static_cast<int>(threadIdx.x), &lane);
  const Channels channels(p, block.slab * p.slabs.width + lane);
  if (unit >= p.slabs.units || channels.out >= p.channels || block.unit + unit >= p.units) return;
  image = p.lines.Div(block.unit + unit, &line);
  image = p.strips.Div(image, &strip);
  image = p.planes.Div(image, &plane);
  const int64_t problem = p.images.Div(image);
  const int column0 = strip * kStrip;
  if (plane >= block.at[0].count || line >= block.at[1].count || column0 >= block.at[2].count) return;

  const int in_lines = p.at[1].axis.extent, in_planes = p.at[0].axis.extent, in_columns = p.at[2].axis.extent;
  const int stride = p.at[2].stride, taps = block.at[2].taps;
  const int first_plane = block.at[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const int first_line = block.at[1].origin + p.at[1].pitch * p.at[1].stride * line;
  const int reps = p.forward ? 1 : static_cast<int>(p.features.divisor);
  const int tap_step = block.at[2].tap_step * static_cast<int>(p.filter_tap[2]) * stride;
  const float2 bias = BiasOf<T>(p, problem * p.channels + channels.out, channels.both);
  float2 sums[kStrip];
#pragma unroll
  for (int j = 0; j < kStrip; ++j) sums[j] = bias;
  for (int m = 0; m < reps; ++m) {
    for (int d = 0; d < block.at[0].taps; ++d) {
      const int in_plane = first_plane + p.at[0].pitch * d;
      if (in_plane < 0 || in_plane >= in_planes) continue;
      for (int r = 0; r < block.at[1].taps; ++r) {
        const int in_line = first_line + p.at[1].pitch * r;
        if (in_line < 0 || in_line >= in_lines) continue;
        const char* line_at =
            in + image * p.in_image + in_plane * p.in_line[0] + in_line * p.in_line[1] + (channels.in + m) * sizeof(T);
        const char* w_from = filter + problem * p.filter_batch + (channels.filter + m) * sizeof(T) +
                             (block.at[0].first_tap + d * block.at[0].tap_step) * p.filter_tap[0] +
                             (block.at[1].first_tap + r * block.at[1].tap_step) * p.filter_tap[1] +
                             block.at[2].first_tap * p.filter_tap[2];
        // Taps a stride apart see the operand without one.
        for (int q = 0; q < min(stride, taps); ++q) {
          const int pitch = p.at[2].pitch * stride;
          const int begin = block.at[2].origin + p.at[2].pitch * q + pitch * column0;
          const int count = (taps - q + stride - 1) / stride;
          const char* w_at = w_from + q * block.at[2].tap_step * p.filter_tap[2];
          const char* from = line_at + int64_t{begin} * p.in_pixel;
          const int step = pitch * p.in_pixel;
          float2 x[kStrip + kChunk - 1];
          {
            Pair<T> first[kStrip - 1];
            LoadStrip<T, kPaired>(from, step, begin, pitch, in_columns, channels.in_second, first);
#pragma unroll
            for (int i = 0; i < kStrip - 1; ++i) x[i] = ToFloats<T>(first[i]);
          }
          from += int64_t{step} * (kStrip - 1);
          int next_column = begin + pitch * (kStrip - 1);
#pragma unroll 1
          for (int t = 0; t < count; t += kChunk) {
            Pair<T> w[kChunk], next[kChunk];
            LoadStrip<T, kPaired>(from, step, next_column, pitch, in_columns, channels.in_second, next);
            LoadStrip<T, kPaired>(w_at, tap_step, t, 1, count, channels.filter_second, w);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) x[kStrip - 1 + i] = ToFloats<T>(next[i]);
            const auto multiply = [&](int i) {
              const float2 wide = ToFloats<T>(w[i]);
#pragma unroll
              for (int j = 0; j < kStrip; ++j) MultiplyAdd(sums[j], wide, x[i + j]);
            };
            if (t + kChunk <= count) {
#pragma unroll
              for (int i = 0; i < kChunk; ++i) multiply(i);
            } else {
#pragma unroll
              for (int i = 0; i < kChunk - 1; ++i)
                if (t + i < count) multiply(i);
            }
#pragma unroll
            for (int i = 0; i < kStrip - 1; ++i) x[i] = x[i + kChunk];
            w_at += int64_t{tap_step} * kChunk;
            from += int64_t{step} * kChunk;
            next_column += pitch * kChunk;
          }
        }
      }
    }
  }
  char* to = out + image * p.out_image + (block.at[0].first + int64_t{p.at[0].period} * plane) * p.out_line[0] +
             (block.at[1].first + int64_t{p.at[1].period} * line) * p.out_line[1] +
             (block.at[2].first + int64_t{p.at[2].period} * column0) * p.out_line[2] +
             channels.out * (p.widened ? sizeof(float) : sizeof(T));
  const int out_column = static_cast<int>(p.out_line[2]) * p.at[2].period, count = block.at[2].count - column0;
  const int shift = OutShift<T>(p);
  Finish<T>(p, (to - out) >> shift, out_column >> shift, count, sums, channels.both);
  WithOut<T>(p.widened, [&](auto type) {
    StoreStrip<typename decltype(type)::type, kPaired>(to, out_column, count, sums, channels.both);
  });
}

// Calls f with the first of the kernels that takes the problem, or fails as an invalid value.
template <class F, class... Each>
cudaError_t VisitTaking(const DataParams& q, F&& f, TypeTag<Each>... each) {
  cudaError_t status = cudaErrorInvalidValue;
  (void)((Each::Takes(q) && (status = f(each), true)) || ...);
  return status;
}

}  // namespace
}  // namespace depthwise

cudaError_t LaunchDepthwiseData(const Problem& p, const void* operand, const void* filter, void* out,
                                const Epilogue& epilogue, cudaStream_t stream) {
  using namespace depthwise;
  DataParams q = MakeParams(p, epilogue);
  return VisitSingleDType(p.in, [&](auto type) {
    using T = typename decltype(type)::type;
    const char *in = static_cast<const char*>(operand), *w = static_cast<const char*>(filter);
    const auto launch_grid = [&](auto* kernel, const Grid& grid, const DataParams& r, const auto&... tile) {
      return LaunchKernel(kernel, grid, stream, r, tile..., in, w, static_cast<char*>(out));
    };
    const auto launch = [&](auto* kernel, int64_t blocks) {
      return launch_grid(kernel, Grid{blocks, kDepthwiseThreads}, q);
    };
    const auto results = reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(epilogue.residual);
    const bool paired = Paired(p, {operand, filter, out});
    const auto launch_ring = [&](auto pairing, auto... rings) {
      constexpr Pairing kPairing = decltype(pairing)::value;
      if (reinterpret_cast<uintptr_t>(operand) % 16 != 0) return cudaErrorInvalidValue;
      return VisitTaking(
          q,
          [&](auto tag) {
            using R = typename decltype(tag)::type;
            using L = Lanes<T, kPairing>;
            DataParams r = q;
            const int64_t warps = R::Share(r, p);
            if (warps > INT32_MAX - kDepthwiseWarps) return cudaErrorInvalidValue;
            constexpr int kRing = R::template kStages<L> * R::template kLineBytes<L>;
            const Grid grid = {CeilDiv(warps, kDepthwiseWarps), kDepthwiseThreads, kDepthwiseWarps * kRing};
            // The most usual ones do not look for a phase, which takes 2 % of their time.
            if constexpr (R::kLines == kEdgesTaps && R::kStride == 1 && kPairing == Pairing::kPlain) {
              if (HasFrame(p)) return launch_grid(RingKernel<R, T, L, true, false>, grid, r);
              if (r.phases.divisor == 1 && r.at[1].pitch == 1 && r.at[2].pitch == 1)
                return launch_grid(RingKernel<R, T, L, false, false>, grid, r);
            }
            return HasFrame(p) ? cudaErrorInvalidValue : launch_grid(RingKernel<R, T, L, false, true>, grid, r);
          },
          rings...);
    };
    const auto launch_plain_ring = [&] {
      if (!paired) return cudaErrorInvalidValue;
      return launch_ring(PairingTag<Pairing::kPlain>{}, TypeTag<Ring<3, 3, 1, 7, 4>>{}, TypeTag<Ring<3, 3, 2, 3, 6>>{},
                         TypeTag<Ring<5, 5, 1, 7, 2>>{}, TypeTag<Ring<5, 5, 2, 5, 3>>{},
                         TypeTag<Ring<7, 7, 1, 7, 2>>{});
    };
    if (HasFrame(p)) return launch_plain_ring();
    if (TakesMultiplied(p) && BeginOnPairs(p, {filter, out}) && (q.forward || !epilogue.bias)) {
      const cudaError_t status = q.forward
                                     ? launch_ring(PairingTag<Pairing::kShared>{}, TypeTag<Ring<3, 3, 1, 7, 4>>{},
                                                   TypeTag<Ring<3, 3, 2, 3, 6>>{})
                                     : launch_ring(PairingTag<Pairing::kSummed>{}, TypeTag<Ring<3, 3, 1, 7, 4>>{});
      if (status != cudaErrorInvalidValue) return status;
    }
    if (AreQuads(p, {operand, filter}) && results % (kQuad * SizeOf(p.out)) == 0) {
      DataParams r = q;
      if constexpr (sizeof(T) == 2) {
        const VolumeTile tile(q.channels, q.at[2].MaxCount());
        if (Volume<T>::Takes(q, tile)) {
          const int64_t blocks = Volume<T>::Share(r, p, tile);
          return launch_grid(VolumeKernel<T>, Grid{blocks, tile.threads, Volume<T>::SharedBytes(tile)}, r, tile);
        }
      }
      const cudaError_t status = VisitStreaming<T>(
          r, p, [&](auto* kernel, int64_t blocks) { return launch_grid(kernel, Grid{blocks, kDepthwiseThreads}, r); });
      if (status != cudaErrorInvalidValue) return status;
    }
    if constexpr (sizeof(T) == 2) {
      const uintptr_t all = results | reinterpret_cast<uintptr_t>(operand) | reinterpret_cast<uintptr_t>(filter);
      if (p.features == 1 && q.in_pixel % 16 == 0 && all % 16 == 0) {
        if (TakesBands(p) && IsBiasAlone(q.epilogue) && !q.widened)
          return VisitBand(p, [&](auto band) {
            using B = decltype(band);
            const BandTile<B> t(p, q.channels, q.at);
            const Grid grid = {t.units * t.slabs.divisor, B::kThreads, BandDataBytes<B>(t)};
            return launch_grid(BandKernel<B, T>, grid, q, t);
          });
        if (TakesWide(p)) {
          const auto launch_wide = [&](auto tag) {
            using W = decltype(tag);
            const WideTile t = W::Tile(q);
            const Grid grid = W::GridOf(q, p, t);
            return CanShare(grid.shared_bytes) ? launch_grid(WideKernel<W::kSteps, T>, grid, q, t)
                                               : cudaErrorInvalidValue;
          };
          const cudaError_t status = p.window[2] <= Wide<2>::kColumns ? launch_wide(Wide<2>{}) : launch_wide(Wide<3>{});
          if (status != cudaErrorInvalidValue) return status;
        }
        if (TakesImages(p)) {
          const ImageTile t = ImageTile::Of(q, p);
          const Grid grid = t.GridOf(p);
          if (CanShare(grid.shared_bytes))
            return t.fragments == 1 ? launch_grid(ImageKernel<1, T>, grid, q, t)
                                    : launch_grid(ImageKernel<2, T>, grid, q, t);
        }
      }
    }
    if (const cudaError_t status = launch_plain_ring(); status != cudaErrorInvalidValue) return status;
    if (paired) {
      const cudaError_t status = VisitTaking(
          q,
          [&](auto tag) {
            using S = typename decltype(tag)::type;
            const int64_t blocks = Blocks(q, p, S::kStrip, S::Segment(q, p));
            return launch(SlideKernel<EitherOf<T>, S::kPlanes, S::kLines, S::kColumns, S::kStride, S::kRagged,
                                      S::kStrip, S::kBlocks>,
                          blocks);
          },
          TypeTag<Slide<1, 3, 3, 1, false, 8, 2>>{}, TypeTag<Slide<1, 3, 3, 2, false, 4, 4>>{},
          TypeTag<Slide<1, 5, 5, 1, false, 8, 2>>{}, TypeTag<Slide<1, 5, 5, 2, false, 4, 2>>{},
          TypeTag<Slide<1, 7, 7, 1, false, sizeof(T) == 4 ? 3 : 4, 2>>{}, TypeTag<Slide<3, 3, 3, 1, false, 7, 2>>{},
          TypeTag<Slide<1, 2, 2, 1, true, 4, 4>>{}, TypeTag<Slide<1, 3, 3, 1, true, 4, 4>>{});
      if (status != cudaErrorInvalidValue) return status;
    }
    const auto strip = [&](auto tag) {
      constexpr bool kPaired = decltype(tag)::value;
      if (q.at[2].MaxTaps() <= 4 * q.at[2].stride) {
        const int64_t blocks = Blocks(q, p, 8, 1);
        return launch(StripKernel<T, kPaired, 8, 4>, blocks);
      }
      const int64_t blocks = Blocks(q, p, 14, 1);
      return launch(StripKernel<T, kPaired, 14, 16>, blocks);
    };
    return paired ? strip(std::true_type{}) : strip(std::false_type{});
  });
}

}  // namespace jaxdnn::conv
