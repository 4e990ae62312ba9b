// Depthwise convolution that memory bounds, of a line of up to four taps. A thread has four neighbouring channels of a
// pixel, one load of 8 or 16 bytes, and starts the loads of what comes next before it multiplies. Lanes run over all
// channels and then on to the next unit of work.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/conv/depthwise_data.cuh"

namespace jaxdnn::conv::depthwise {

template <class T>
using Quad = Packed<T, kQuad>;

// Sets what a thread's `together` channels and `units` units of work are, and returns how many blocks they take.
inline int64_t ShareOut(DataParams& q, int together, int64_t units) {
  const int64_t threads = q.channels / together;
  q.slabs.thread = FastDiv(threads);
  q.units = int(units);
  return CeilDiv(units * threads, kDepthwiseThreads);
}

// Channels of pixels `step` bytes apart, at positions first, first + 1, ... of a line; zeros for those outside its
// extent.
template <class Together, int kCount>
__device__ void LoadPixels(const char* from, int step, int first, int extent, Together (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[i] = {};
    if (static_cast<unsigned>(first + i) < static_cast<unsigned>(extent))
      to[i] = LoadConstant(reinterpret_cast<const Together*>(from + int64_t{step} * i));
  }
}

template <class T, int kTogether>
__device__ void LoadTap(const char* from, float (&to)[kTogether]) {
  Widen<T>(LoadConstant(reinterpret_cast<const Packed<T, kTogether>*>(from)), to);
}

template <int kTogether>
__device__ void AddProducts(float (&sum)[kTogether], const float (&a)[kTogether], const float (&b)[kTogether]) {
#pragma unroll
  for (int c = 0; c < kTogether; ++c) sum[c] = fmaf(a[c], b[c], sum[c]);
}

template <class T, int kTogether>
__device__ void BiasOf(const DataParams& p, int64_t index, float (&bias)[kTogether]) {
#pragma unroll
  for (int c = 0; c < kTogether; c += 2) {
    const float2 pair = BiasOf<T>(p, index + c, true);
    bias[c] = pair.x;
    bias[c + 1] = pair.y;
  }
}

// Two to four taps in a line, side by side.
struct Line {
  static constexpr int kTaps = 4, kBatch = 8;  // results of a turn

  static bool Takes(const DataParams& q) {
    const PhasedAxis& at = q.at[2];
    return q.at[0].MaxTaps() == 1 && q.at[1].MaxTaps() == 1 && at.MaxTaps() > 1 && at.MaxTaps() <= kTaps &&
           at.stride == 1 && at.pitch == 1 && q.AllTaps();
  }

  // Sets how the work is shared out: segments of lines, which have kTaps - 1 pixels in common.
  static int64_t Share(DataParams& q, const Problem& p) {
    constexpr int kSegment = 16;
    q.planes = FastDiv(q.at[0].MaxCount());
    q.lines = FastDiv(q.at[1].MaxCount());
    q.segment = kSegment;
    q.segments = FastDiv(CeilDiv(q.at[2].MaxCount(), kSegment));
    if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return 0;
    return ShareOut(q, kQuad, p.batch * p.images * q.planes.divisor * q.lines.divisor * q.segments.divisor);
  }
};

// A thread goes along its segment, the last inputs in registers.
template <class T>
__global__ void __launch_bounds__(kDepthwiseThreads, sizeof(T) == 2 ? 5 : 4)
    LineKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  constexpr int kTaps = Line::kTaps, kBatch = Line::kBatch;
  int quad, segment, line, plane;
  int image = p.slabs.thread.Div(static_cast<int>(blockIdx.x) * kDepthwiseThreads + threadIdx.x, &quad);
  if (image >= p.units) return;
  image = p.segments.Div(image, &segment);
  image = p.lines.Div(image, &line);
  image = p.planes.Div(image, &plane);
  const int64_t problem = p.images.Div(image);
  const int channel = kQuad * quad, taps = p.whole[2].taps;
  const int begin = segment * p.segment, end = min(begin + p.segment, p.whole[2].count);
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const int in_line = p.whole[1].origin + p.at[1].pitch * p.at[1].stride * line;
  const bool inside = static_cast<unsigned>(in_plane) < static_cast<unsigned>(p.at[0].axis.extent) &&
                      static_cast<unsigned>(in_line) < static_cast<unsigned>(p.at[1].axis.extent);
  // Nothing is loaded that other segments need alone.
  const int extent = inside ? min(p.at[2].axis.extent, p.whole[2].origin + end + taps - 1) : 0;
  int position = p.whole[2].origin + begin;
  const char* from = in + image * p.in_image + in_plane * p.in_line[0] + in_line * p.in_line[1] +
                     int64_t{position} * p.in_pixel + channel * sizeof(T);
  Quad<T> first[kTaps - 1], next[kBatch];
  LoadPixels(from, p.in_pixel, position, extent, first);
  position += kTaps - 1;
  from += int64_t{p.in_pixel} * (kTaps - 1);
  LoadPixels(from, p.in_pixel, position, extent, next);

  float w[kTaps][kQuad] = {}, bias[kQuad];
  const char* const w_from = FirstTap<T>(p, p.whole, filter, problem, channel);
#pragma unroll
  for (int t = 0; t < kTaps; ++t)
    if (t < taps) LoadTap<T>(w_from + p.whole[2].tap_step * t * p.filter_tap[2], w[t]);
  BiasOf<T>(p, problem * p.channels + channel, bias);
  float x[kTaps][kQuad];
#pragma unroll
  for (int t = 0; t < kTaps - 1; ++t) Widen<T>(first[t], x[t]);
  const auto add = [&](const Quad<T>& last, float (&sum)[kQuad]) {
    Widen<T>(last, x[kTaps - 1]);
#pragma unroll
    for (int c = 0; c < kQuad; ++c) sum[c] = bias[c];
#pragma unroll
    for (int t = 0; t < kTaps; ++t)
      if (t < 2 || t < taps) AddProducts(sum, w[t], x[t]);
#pragma unroll
    for (int t = 0; t < kTaps - 1; ++t)
#pragma unroll
      for (int c = 0; c < kQuad; ++c) x[t][c] = x[t + 1][c];
  };

  // State-space layers' activation runs at the rate of memory too; the code of all is there once, in a loop.
  const bool plain = IsBiasAlone(p.epilogue), silu = p.epilogue.activation.kind == activation::Kind::kSilu &&
                                                     p.epilogue.residual == nullptr && !p.widened;
  const int size = p.widened ? sizeof(float) : sizeof(T), out_pixel = static_cast<int>(p.out_line[2]);
  char* to =
      out + image * p.out_image + plane * p.out_line[0] + line * p.out_line[1] + begin * p.out_line[2] + channel * size;
#pragma unroll 1
  for (int column = begin; column < end; column += kBatch) {
    Quad<T> now[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) now[i] = next[i];
    position += kBatch;
    from += int64_t{p.in_pixel} * kBatch;
    LoadPixels(from, p.in_pixel, position, extent, next);
    const auto store = [&](int i, const float (&sum)[kQuad]) {
      if (column + i >= end) return;
      WithOut<T>(p.widened, [&](auto type) {
        using Out = typename decltype(type)::type;
        StorePacked<Out, kQuad>(reinterpret_cast<Out*>(to + int64_t{out_pixel} * i), Narrow<Out>(sum));
      });
    };
    const auto store_all = [&](const auto& activate) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float sum[kQuad];
        add(now[i], sum);
#pragma unroll
        for (float& each : sum) each = activate(each);
        store(i, sum);
      }
    };
    if (plain) {
      store_all([](float v) { return v; });
    } else if (silu) {
      const activation::Silu<T> f{static_cast<float>(p.epilogue.activation.parameter)};
      store_all([&](float v) { return f.Forward(v); });
    } else {
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        float sum[kQuad];
        add(now[0], sum);
        Rotate<1>(now);
        if (column + i < end) AddResidual<T>(p, sum, (to - out + int64_t{out_pixel} * i) >> OutShift<T>(p));
        ActivateResults<T>(p, sum);
        store(i, sum);
      }
    }
    to += int64_t{out_pixel} * kBatch;
  }
}

}  // namespace jaxdnn::conv::depthwise
