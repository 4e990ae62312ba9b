// What the kernels of depthwise convolution's forward and data gradient share: their parameters, which channels and
// phase a thread has, and how it stores.
#pragma once

#include "cuda/conv/depthwise.cuh"
#include "cuda/conv/edges.cuh"
#include "cuda/conv/epilogue.cuh"

namespace jaxdnn::conv::depthwise {

struct DataParams {
  PhasedAxis at[kRank];
  Slabs slabs;
  FastDiv phases, column_phases;
  FastDiv lines, strips, planes, segments, images;  // of the largest phase; images per problem
  int segment;                                      // lines in a segment
  int units;                                        // of work, in a phase
  int channels;                                     // of the result
  // Strides in bytes.
  int in_pixel;
  int64_t in_line[kRank], in_image, out_line[kRank], out_image;
  int64_t in_step[kRank], out_step[kRank];  // between neighbours of a phase
  int64_t filter_tap[kRank], filter_batch;
  FastDiv features;  // results of an input channel
  bool forward, widened, is_half;
  PhaseLine whole[kRank];  // the only phase, if there is one
  Edges edges[kRank];      // of the operand
  Epilogue epilogue;
  bool clamps;  // results, to these
  float least, most;

  // Whether every result meets all taps.
  bool AllTaps() const { return at[0].axis.step.divisor * at[1].axis.step.divisor * at[2].axis.step.divisor == 1; }
};

// Whether an epilogue is a bias, or nothing; and whether results are at most clamped after that.
__host__ __device__ inline bool IsBiasAlone(const Epilogue& e) {
  return e.residual == nullptr && e.activation.kind == activation::Kind::kIdentity;
}

inline bool IsClampAlone(const Epilogue& e) {
  return IsBiasAlone(e) || (e.residual == nullptr && IsClamp(e.activation));
}

inline DataParams MakeParams(const Problem& p, const Epilogue& epilogue) {
  const bool forward = p.direction == Direction::kForward;
  const auto& in = forward ? p.x : p.y;
  const auto& out = forward ? p.y : p.x;
  const int64_t k = p.groups * p.features;
  DataParams q = {};
  q.epilogue = epilogue;
  q.forward = forward;
  q.widened = p.out != p.in;
  q.is_half = p.in == DType::kF16;
  q.clamps = epilogue.activation.kind != activation::Kind::kIdentity && IsClampAlone(epilogue);
  q.least = 0;
  q.most = epilogue.activation.kind == activation::Kind::kClippedRelu ? float(epilogue.activation.parameter) : INFINITY;
  q.channels = int(forward ? k : p.groups);
  const int size = p.in == DType::kF32 ? 4 : 2;
  q.in_pixel = int(forward ? p.groups : k) * size;
  q.features = FastDiv(p.features);
  q.slabs = Slabs(q.channels);
  q.images = FastDiv(p.images);
  int64_t in_stride = q.in_pixel, out_stride = q.channels * (p.out == DType::kF32 ? 4 : 2), tap_stride = k * size;
  int64_t phases = 1;
  for (int d = kRank - 1; d >= 0; --d) {
    q.at[d] = PhasedAxis(forward ? InputAxis(p, d) : OutputAxis(p, d), out[d], p.window[d]);
    q.in_line[d] = in_stride;
    q.out_line[d] = out_stride;
    q.in_step[d] = in_stride * q.at[d].pitch;
    q.out_step[d] = out_stride * q.at[d].period;
    q.filter_tap[d] = tap_stride;
    in_stride *= in[d];
    out_stride *= out[d];
    tap_stride *= p.window[d];
    phases *= q.at[d].phases;
  }
  q.in_image = in_stride;
  q.out_image = out_stride;
  q.filter_batch = tap_stride;
  q.phases = FastDiv(phases);
  q.column_phases = FastDiv(q.at[2].phases);
  for (int d = 0; d < kRank; ++d) {
    q.whole[d] = q.at[d].At(0);
    q.edges[d] = OperandEdges(p, d);
  }
  return q;
}

// What a block does.
struct DataBlock {
  PhaseLine at[kRank];
  int slab, unit;

  __device__ void Set(const DataParams& p) {
    int which, rest = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
    unit = p.phases.Div(rest, &which) * p.slabs.units;
#pragma unroll 1
    for (int d = kRank - 1; d >= 0; --d) {
      if (p.phases.divisor == 1) {
        at[d] = p.whole[d];
        continue;
      }
      const int phases = p.at[d].phases;
      at[d] = p.at[d].At(which % phases);
      which /= phases;
    }
  }
};

// Which channels a thread has, of result, operand and filter.
struct Channels {
  int out, in, filter, in_second, filter_second;  // the second's distance from the first
  bool both;

  __device__ Channels(const DataParams& p, int pair) : out(2 * pair), both(2 * pair + 1 < p.channels) {
    if (p.forward) {
      in = p.features.Div(out);
      in_second = both ? p.features.Div(out + 1) - in : 0;
      filter = out;
      filter_second = both;
    } else {
      in = filter = out * static_cast<int>(p.features.divisor);
      in_second = filter_second = both ? static_cast<int>(p.features.divisor) : 0;
    }
  }
};

// Of results that layers of IsClampAlone end with. NaN stays.
__device__ __forceinline__ void Clamp(const DataParams& p, float& v) {
  v = activation::MinOrNan(activation::MaxOrNan(v, p.least), p.most);
}
__device__ __forceinline__ void Clamp(const DataParams& p, float2& v) {
  Clamp(p, v.x);
  Clamp(p, v.y);
}
template <class V, int kN>
__device__ __forceinline__ void ClampAll(const DataParams& p, V (&sums)[kN]) {
  if (!p.clamps) return;
#pragma unroll
  for (V& each : sums) Clamp(p, each);
}

template <class T, bool kPaired>
__device__ void StorePair(char* to, float2 v, bool both) {
  if constexpr (!kPaired) {
    reinterpret_cast<T*>(to)[0] = static_cast<T>(v.x);
    if (both) reinterpret_cast<T*>(to)[1] = static_cast<T>(v.y);
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(to) = NarrowPair<T>(v.x, v.y);
  } else {
    *reinterpret_cast<float2*>(to) = v;
  }
}

// The first `count` of a strip's results, `step` bytes apart.
template <class Out, bool kPaired, int kStrip>
__device__ void StoreStrip(char* to, int step, int count, const float2 (&sums)[kStrip], bool both) {
#pragma unroll
  for (int j = 0; j < kStrip; ++j)
    if (j < count) StorePair<Out, kPaired>(to + int64_t{step} * j, sums[j], both);
}

// Calls f with the TypeTag of the result's type: the operands', or that of the sums.
template <class T, class F>
__device__ void WithOut(bool widened, F&& f) {
  if constexpr (sizeof(T) == 2) {
    if (widened) return f(TypeTag<float>{});
  }
  f(TypeTag<T>{});
}

// An element's bytes are two to this power.
template <class T>
__device__ int OutShift(const DataParams& p) {
  return sizeof(T) == 4 || p.widened ? 2 : 1;
}

// The same where T may be either 16-bit float.
template <class T, class F>
__device__ void WithOut(const DataParams& p, F&& f) {
  if (sizeof(T) == 2 && p.widened) return f(TypeTag<float>{});
  WithKind<T>(p.is_half, f);
}

// Adds the residual's kN elements from `offset` on.
template <class T, int kN>
__device__ __forceinline__ void AddResidual(const DataParams& p, float (&v)[kN], int64_t offset) {
  WithOut<T>(p.widened, [&](auto type) { Add<typename decltype(type)::type>(v, p.epilogue.residual, offset); });
}

template <class T, int kN>
__device__ __forceinline__ void ActivateResults(const DataParams& p, float (&v)[kN]) {
  ActivateEither<T, kN % 4 == 0 ? 4 : kN>(v, p.epilogue.activation, p.widened);
}

// The bias of a thread's channels, or zeros.
template <class Out>
__device__ float2 BiasOf(const Epilogue& e, int64_t index, bool both) {
  float bias[2][1] = {};
  Add<Out>(bias[0], e.bias, index);
  if (both) Add<Out>(bias[1], e.bias, index + 1);
  return {bias[0][0], bias[1][0]};
}
template <class T>
__device__ float2 BiasOf(const DataParams& p, int64_t index, bool both) {
  float2 bias;
  WithOut<T>(p, [&](auto type) { bias = BiasOf<typename decltype(type)::type>(p.epilogue, index, both); });
  return bias;
}

// Where the filter of a problem's channel begins that a phase meets: at its first tap.
template <class T>
__device__ const char* FirstTap(const DataParams& p, const PhaseLine (&phase)[kRank], const char* filter,
                                int64_t problem, int channel) {
  filter += problem * p.filter_batch + channel * sizeof(T);
#pragma unroll
  for (int d = 0; d < kRank; ++d) filter += phase[d].first_tap * p.filter_tap[d];
  return filter;
}

// Loads a pair of channels of the taps of a plane of the window, which begins at `from`. kRagged: those that there are.
template <class T, bool kRagged, int kLines, int kColumns>
__device__ __forceinline__ void LoadTaps(const DataParams& p, const PhaseLine (&phase)[kRank], const char* from,
                                         int second, bool plane, Pair<T> (&taps)[kLines][kColumns]) {
  const int64_t line = phase[1].tap_step * p.filter_tap[1], column = phase[2].tap_step * p.filter_tap[2];
#pragma unroll
  for (int r = 0; r < kLines; ++r, from += line) {
    const char* at = from;
#pragma unroll
    for (int s = 0; s < kColumns; ++s, at += column) {
      Keep(at);
      taps[r][s] = ZeroPair<T>();
      if (!kRagged || (plane && r < phase[1].taps && s < phase[2].taps)) taps[r][s] = LoadPair<T, true>(at, second);
    }
  }
}

// All of a window's taps as floats, once all are on their way.
template <class T, int kCount>
__device__ __forceinline__ void WidenTaps(const DataParams& p, const Pair<T> (&taps)[kCount], float2 (&w)[kCount]) {
  WidenStrip<T>(taps, p.is_half, w);
#pragma unroll
  for (float2& each : w) Keep(each);
}

// A result with its bias, term by term, of a convolution without stride or phases in its lines and columns. Padding
// beside a line is zero, and of a data gradient no term.
template <class T>
__device__ float ResultOf(const DataParams& p, const char* in, const char* filter, int64_t problem, int image,
                          int plane, int line, int column, int channel) {
  float sum = BiasOf<T>(p, problem * p.channels + channel, false).x;
  const int in_plane = p.whole[0].origin + p.at[0].pitch * p.at[0].stride * plane;
  if (static_cast<unsigned>(in_plane) >= static_cast<unsigned>(p.at[0].axis.extent)) return sum;
  const char* const x_at = in + image * p.in_image + in_plane * p.in_line[0] + channel * sizeof(T);
  const char* const w_at = FirstTap<T>(p, p.whole, filter, problem, channel);
#pragma unroll 1
  for (int r = 0; r < p.whole[1].taps; ++r) {
    const int in_line = p.whole[1].origin + line + r;
    if (static_cast<unsigned>(in_line) >= static_cast<unsigned>(p.at[1].axis.extent)) continue;
#pragma unroll 1
    for (int s = 0; s < p.whole[2].taps; ++s) {
      const int in_column = p.whole[2].origin + column + s;
      const bool inside = static_cast<unsigned>(in_column) < static_cast<unsigned>(p.at[2].axis.extent);
      if (!inside && !p.forward) continue;
      const int64_t tap = r * p.whole[1].tap_step * p.filter_tap[1] + s * p.whole[2].tap_step * p.filter_tap[2];
      const char* const x = x_at + in_line * p.in_line[1] + int64_t{in_column} * p.in_pixel;
      sum = fmaf(inside ? static_cast<float>(*reinterpret_cast<const T*>(x)) : 0,
                 static_cast<float>(*reinterpret_cast<const T*>(w_at + tap)), sum);
    }
  }
  return sum;
}

// Stores the sums of a pixel's eight channels from `channel0` on, whole chunks of all arrays, after the epilogue. What
// is not finite is computed again: a zero of a matrix does not make up for an infinity or NaN.
template <class T>
__device__ __forceinline__ void StoreEight(const DataParams& p, const char* in, const char* filter, char* out,
                                           int64_t problem, int image, int plane, int line, int column, int channel0,
                                           float (&v)[8]) {
  constexpr int kChannels = 8;
#pragma unroll
  for (int c = 0; c < kChannels; c += 2) {
    const float2 bias = BiasOf<T>(p, problem * p.channels + channel0 + c, true);
    v[c] += bias.x;
    v[c + 1] += bias.y;
  }
  float odd = 0;
#pragma unroll
  for (const float each : v) odd = fmaf(each, 0, odd);
  if (odd != 0) {
#pragma unroll 1
    for (int c = 0; c < kChannels; ++c) {
      float each = v[0];
      if (!isfinite(each)) each = ResultOf<T>(p, in, filter, problem, image, plane, line, column, channel0 + c);
      Rotate<1>(v);
      v[kChannels - 1] = each;
    }
  }
  char* const to = out + image * p.out_image + plane * p.out_line[0] + line * p.out_line[1] + column * p.out_line[2] +
                   (int64_t{channel0} << OutShift<T>(p));
  const int64_t offset = (to - out) >> OutShift<T>(p);
#pragma unroll
  for (int c = 0; c < kChannels; c += 4) AddResidual<T>(p, reinterpret_cast<float (&)[4]>(v[c]), offset + c);
  ActivateResults<T>(p, v);
  WithOut<T>(p.widened, [&](auto type) {
    using Out = typename decltype(type)::type;
    constexpr int kPack = 16 / sizeof(Out);
#pragma unroll
    for (int c = 0; c < kChannels; c += kPack) {
      float pack[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) pack[i] = v[c + i];
      StorePacked<Out, kPack>(reinterpret_cast<Out*>(to) + c, Narrow<Out>(pack));
    }
  });
}

// Sets how the work is shared out: strips, and segments of `segment` lines.
inline int64_t Blocks(DataParams& q, const Problem& p, int strip, int segment) {
  q.planes = FastDiv(q.at[0].MaxCount());
  q.lines = FastDiv(q.at[1].MaxCount());
  q.strips = FastDiv(CeilDiv(q.at[2].MaxCount(), strip));
  q.segment = std::max(segment, 1);
  q.segments = FastDiv(CeilDiv(q.at[1].MaxCount(), q.segment));
  q.units = int(p.batch * p.images * q.at[0].MaxCount() * q.segments.divisor * q.strips.divisor);
  if (q.at[0].out == 0 || q.at[1].out == 0 || q.at[2].out == 0 || q.channels == 0) return 0;
  return CeilDiv(q.units, q.slabs.units) * q.phases.divisor * q.slabs.count.divisor;
}

}  // namespace jaxdnn::conv::depthwise
