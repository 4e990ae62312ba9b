// Depthwise convolution that memory bounds: of a line of up to four taps, and of the 3x3 windows of a data gradient of
// stride 2. A thread has four neighbouring channels of a pixel, one load of 8 or 16 bytes, and starts the loads of what
// comes next before it multiplies. Lanes run over all channels and then on to the next unit of work.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/conv/depthwise_data.cuh"

namespace jaxdnn::conv::depthwise {

template <class T>
using Quad = Packed<T, kQuad>;

// Sets what quads of channels and `units` units of work are, and returns how many blocks they take.
inline int64_t QuadBlocks(DataParams& q, int64_t units) {
  const int64_t quads = q.channels / kQuad;
  q.slabs.thread = FastDiv(quads);
  q.units = int(units);
  return CeilDiv(units * quads, kDepthwiseThreads);
}

// Pixels `step` bytes apart, at positions first, first + 1, ... of a line; zeros for those outside its extent.
template <class T, int kCount>
__device__ void LoadQuads(const char* from, int step, int first, int extent, Quad<T> (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[i] = {};
    if (static_cast<unsigned>(first + i) < static_cast<unsigned>(extent))
      to[i] = LoadConstant(reinterpret_cast<const Quad<T>*>(from + int64_t{step} * i));
  }
}

template <class T>
__device__ void LoadTap(const char* from, float (&to)[kQuad]) {
  Widen<T>(LoadConstant(reinterpret_cast<const Quad<T>*>(from)), to);
}

__device__ inline void AddProducts(float (&sum)[kQuad], const float (&a)[kQuad], const float (&b)[kQuad]) {
#pragma unroll
  for (int c = 0; c < kQuad; ++c) sum[c] = fmaf(a[c], b[c], sum[c]);
}

template <class T>
__device__ void BiasOf(const DataParams& p, int64_t index, float (&bias)[kQuad]) {
#pragma unroll
  for (int c = 0; c < kQuad; c += 2) {
    const float2 pair = BiasOf<T>(p.epilogue, index + c, true, p.widened);
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
    return QuadBlocks(q, p.batch * p.images * q.planes.divisor * q.lines.divisor * q.segments.divisor);
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
  LoadQuads<T>(from, p.in_pixel, position, extent, first);
  position += kTaps - 1;
  from += int64_t{p.in_pixel} * (kTaps - 1);
  LoadQuads<T>(from, p.in_pixel, position, extent, next);

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
  const bool plain = IsBiasAlone(p.epilogue),
             silu = p.epilogue.activation.kind == activation::Kind::kSilu && p.epilogue.residual == nullptr;
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
    LoadQuads<T>(from, p.in_pixel, position, extent, next);
    WithOut<T>(p.widened, [&](auto type) {
      using Out = typename decltype(type)::type;
      const auto store = [&](const auto& activate) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          float sum[kQuad];
          add(now[i], sum);
#pragma unroll
          for (float& each : sum) each = activate(each);
          if (column + i < end)
            StorePacked<Out, kQuad>(reinterpret_cast<Out*>(to + int64_t{out_pixel} * i), Narrow<Out>(sum));
        }
      };
      if (plain) {
        store([](float v) { return v; });
      } else if (silu) {
        const activation::Silu<Out> f{static_cast<float>(p.epilogue.activation.parameter)};
        store([&](float v) { return f.Forward(v); });
      } else {
#pragma unroll 1
        for (int i = 0; i < kBatch; ++i) {
          float sum[kQuad];
          add(now[0], sum);
          Rotate<1>(now);
          if (column + i >= end) continue;
          char* const at = to + int64_t{out_pixel} * i;
          Add<Out>(sum, p.epilogue.residual, (at - out) / int(sizeof(Out)));
          Activate<Out>(sum, p.epilogue.activation);
          StorePacked<Out, kQuad>(reinterpret_cast<Out*>(at), Narrow<Out>(sum));
        }
      }
    });
    to += int64_t{out_pixel} * kBatch;
  }
}

// A window of 3x3 taps, each of whose inputs is part of results 2 i + u - lead, u < 3, of lines and columns. The
// lattice of pairs of results 2 j and 2 j + 1, less `lead`, has the inputs' pitch.
struct Spread {
  static constexpr int kStrip = 4;  // pairs of results in a line

  // Of a dimension. Against the direction of taps, u is 2 - tap.
  static __host__ __device__ int Lead(const Axis& axis) { return axis.tap_step < 0 ? axis.offset : axis.offset + 2; }
  static __host__ __device__ int First(const PhasedAxis& at) { return Lead(at.axis) >> 1; }
  static int Count(const PhasedAxis& at) { return ((at.out - 1 + Lead(at.axis)) >> 1) - First(at) + 1; }

  static bool Takes(const DataParams& q) {
    const auto is_spread = [](const PhasedAxis& at) {
      return at.window == 3 && at.axis.step.divisor == 2 && at.axis.stride == 1 && std::abs(at.axis.tap_step) == 1;
    };
    return IsBiasAlone(q.epilogue) && q.at[0].window == 1 && q.at[0].axis.step.divisor == 1 && is_spread(q.at[1]) &&
           is_spread(q.at[2]);
  }

  // Sets how the work is shared out: strips, and segments, each of which begins with the line before.
  static int64_t Share(DataParams& q, const Problem& p) {
    constexpr int kSegment = 2;
    if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0) return 0;
    q.planes = FastDiv(q.at[0].MaxCount());
    q.strips = FastDiv(CeilDiv(Count(q.at[2]), kStrip));
    q.segment = kSegment;
    q.segments = FastDiv(CeilDiv(Count(q.at[1]), kSegment));
    return QuadBlocks(q, p.batch * p.images * q.planes.divisor * q.segments.divisor * q.strips.divisor);
  }
};

template <class T>
__global__ void __launch_bounds__(kDepthwiseThreads, 4)
    SpreadKernel(const __grid_constant__ DataParams p, const char* in, const char* filter, char* out) {
  constexpr int kStrip = Spread::kStrip;
  int quad;
  const int unit = p.slabs.thread.Div(static_cast<int>(blockIdx.x) * kDepthwiseThreads + threadIdx.x, &quad);
  if (unit >= p.units) return;
  const auto [strip, segment, plane, image] = Locate(p, unit);
  const int64_t problem = p.images.Div(image);
  const int channel = kQuad * quad, lines = p.at[1].axis.extent;
  const int line_lead = Spread::Lead(p.at[1].axis), column_lead = Spread::Lead(p.at[2].axis);
  // Pair j needs inputs j - 1 and j.
  const int column = Spread::First(p.at[2]) + kStrip * strip;
  int line = Spread::First(p.at[1]) + p.segment * segment - 1;
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  const bool inside = static_cast<unsigned>(in_plane) < static_cast<unsigned>(p.at[0].axis.extent);
  const int extent = inside ? p.at[2].axis.extent : 0;
  const char* from = in + image * p.in_image + in_plane * p.in_line[0] + line * p.in_line[1] +
                     int64_t{column - 1} * p.in_pixel + channel * sizeof(T);
  Quad<T> next[kStrip + 1];
  const auto load = [&] {
    const bool there = static_cast<unsigned>(line) < static_cast<unsigned>(lines);
    LoadQuads<T>(from, p.in_pixel, column - 1, there ? extent : 0, next);
    from += p.in_line[1];
    ++line;
  };
  load();

  float w[3][3][kQuad], bias[kQuad];
  {
    const char* tap = filter + problem * p.filter_batch + channel * sizeof(T);
    const int64_t line_step = p.at[1].axis.tap_step < 0 ? p.filter_tap[1] : -p.filter_tap[1];
    const int64_t step = p.at[2].axis.tap_step < 0 ? p.filter_tap[2] : -p.filter_tap[2];
    if (line_step < 0) tap += 2 * p.filter_tap[1];
    if (step < 0) tap += 2 * p.filter_tap[2];
#pragma unroll
    for (int u = 0; u < 3; ++u)
#pragma unroll
      for (int v = 0; v < 3; ++v) LoadTap<T>(tap + u * line_step + v * step, w[u][v]);
  }
  BiasOf<T>(p, problem * p.channels + channel, bias);
  float before[kStrip + 1][kQuad], x[kStrip + 1][kQuad];
#pragma unroll
  for (int i = 0; i <= kStrip; ++i) Widen<T>(next[i], before[i]);
  load();

  const int size = p.widened ? sizeof(float) : sizeof(T), out_pixel = static_cast<int>(p.out_line[2]);
  const int out_column = 2 * column - column_lead, out_columns = p.at[2].out, out_lines = p.at[1].out;
  int out_line = 2 * (line - 1) - line_lead;
  const int last = min(out_line + 2 * p.segment, out_lines);
  char* to = out + image * p.out_image + plane * p.out_line[0] + out_line * p.out_line[1] +
             int64_t{out_column} * out_pixel + channel * size;
#pragma unroll 1
  for (; out_line < last; out_line += 2) {
#pragma unroll
    for (int i = 0; i <= kStrip; ++i) Widen<T>(next[i], x[i]);
    load();
    WithOut<T>(p.widened, [&](auto type) {
      using Out = typename decltype(type)::type;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (static_cast<unsigned>(out_line + u) < static_cast<unsigned>(out_lines)) {
#pragma unroll
          for (int i = 0; i < 2 * kStrip; ++i) {
            const int v = i % 2, at = i / 2 + 1;
            float sum[kQuad];
#pragma unroll
            for (int c = 0; c < kQuad; ++c) sum[c] = bias[c];
            AddProducts(sum, w[u][v], x[at]);
            if (v == 0) AddProducts(sum, w[u][2], x[at - 1]);
            if (u == 0) AddProducts(sum, w[2][v], before[at]);
            if (u == 0 && v == 0) AddProducts(sum, w[2][2], before[at - 1]);
            if (static_cast<unsigned>(out_column + i) < static_cast<unsigned>(out_columns))
              StorePacked<Out, kQuad>(reinterpret_cast<Out*>(to + int64_t{out_pixel} * i), Narrow<Out>(sum));
          }
        }
        to += p.out_line[1];
      }
    });
#pragma unroll
    for (int i = 0; i <= kStrip; ++i)
#pragma unroll
      for (int c = 0; c < kQuad; ++c) before[i][c] = x[i][c];
  }
}

// Calls f with the kernel of these that takes the problem, and how many blocks it runs, or fails as an invalid value.
template <class T, class F>
cudaError_t VisitQuads(DataParams& q, const Problem& p, F&& f) {
  const bool line = Line::Takes(q);
  if (!line && !Spread::Takes(q)) return cudaErrorInvalidValue;
  const int64_t blocks = line ? Line::Share(q, p) : Spread::Share(q, p);
  // Threads are numbered with 32 bits.
  if (blocks > INT32_MAX / kDepthwiseThreads) return cudaErrorInvalidValue;
  return f(line ? LineKernel<T> : SpreadKernel<T>, blocks);
}

}  // namespace jaxdnn::conv::depthwise
