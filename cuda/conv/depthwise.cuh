// What the depthwise kernels share: how a convolution of any stride and dilation becomes plain ones, and how threads
// share out the pixels and channels.
//
// A thread has two neighbouring channels, which of 16-bit floats are one word, and a strip of pixels along the last
// dimension. Lanes run over channels, so that loads coalesce; what strips have in common comes from the L1 cache.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/conv/axis.cuh"
#include "cuda/conv/nominal.h"

namespace jaxdnn::conv {

constexpr int kDepthwiseThreads = 128;

// n / d, of a number that is not negative.
__host__ __device__ inline int Quotient(int n, const FastDiv& d) {
#ifdef __CUDA_ARCH__
  return d.Div(n);
#else
  return n / static_cast<int>(d.divisor);
#endif
}

// The results at positions  first + period j  read the operand at  origin + pitch (stride j + k),  k < taps: without
// dilation, once the axis is cut into phases. Tap k of a phase is tap  first_tap + tap_step k  of the window.
struct PhaseLine {
  int first, count, origin, taps, first_tap, tap_step;
};

// A phase as a line of its own, without dilation, where every phase has all taps: `count` results, the operand's from
// `first` on; and of the operand the elements that these meet, `extent` from `element` on, `pitch` apart. At tap k
// result j reads number  start + stride j + k  of them.
struct Lattice {
  int first, count, start, element, extent;
};

struct PhasedAxis {
  Axis axis;
  int out, window;
  int period, phases, tap_period, stride, pitch;
  FastDiv periods, tap_periods, pitches;  // the same, to divide by

  PhasedAxis() = default;
  PhasedAxis(const Axis& axis, int64_t out, int64_t window) : axis(axis), out(int(out)), window(int(window)) {
    const int step = int(axis.step.divisor), tap = std::abs(axis.tap_step);
    period = step / std::gcd(axis.stride, step);
    tap_period = step / std::gcd(tap, step);
    stride = axis.stride * period / step;
    pitch = tap * tap_period / step;
    if (MaxTaps() > 1) {
      const int common = std::gcd(stride, pitch);
      period *= pitch / common;
      stride /= common;
    } else {
      pitch = stride;
      stride = 1;
    }
    phases = std::min(period, std::max(this->out, 1));
    periods = FastDiv(period);
    tap_periods = FastDiv(tap_period);
    pitches = FastDiv(pitch);
  }

  int MaxTaps() const { return int(CeilDiv(window, tap_period)); }
  int MaxCount() const { return int(CeilDiv(out, period)); }
  __host__ __device__ int Count(int phase) const { return Quotient(out - phase + period - 1, periods); }

  // `origin` is that of phase 0, which without dilation is all there is.
  __host__ __device__ Lattice Undilated(int origin) const { return {0, out, origin, 0, axis.extent}; }
  __host__ __device__ Lattice LatticeAt(int phase, int origin) const {
    if (pitch == 1) return Undilated(origin);
    const int at = origin + phase * axis.stride,
              start = at < 0 ? -Quotient(pitch - 1 - at, pitches) : Quotient(at, pitches);
    const int element = at - pitch * start, rest = axis.extent - element;
    return {phase, Count(phase), start, element, rest > 0 ? Quotient(rest + pitch - 1, pitches) : 0};
  }

  __host__ __device__ PhaseLine At(int phase) const {
    const int step = static_cast<int>(axis.step.divisor), candidates = tap_period < window ? tap_period : window;
    // The first result's tap is at element at / step, if that is one.
    int tap = 0, at = phase * axis.stride + axis.offset;
    const auto element = [&] {
      const int whole = Quotient(std::abs(at), axis.step);
      return at < 0 ? -whole : whole;
    };
    while (tap < candidates && element() * step != at) ++tap, at += axis.tap_step;
    PhaseLine p;
    p.first = phase;
    p.count = Count(phase);
    p.taps = tap < candidates ? Quotient(window - tap + tap_period - 1, tap_periods) : 0;
    // In the order of the operand's indices.
    p.first_tap = axis.tap_step < 0 ? tap + (p.taps - 1) * tap_period : tap;
    p.tap_step = axis.tap_step < 0 ? -tap_period : tap_period;
    at += (p.first_tap - tap) * axis.tap_step;
    p.origin = p.taps > 0 ? element() : 0;
    return p;
  }
};

// Two channels as they lie in memory.
template <class T>
using Pair = std::conditional_t<sizeof(T) == 2, uint32_t, float2>;

// Of channels that are neighbours and begin on a word, or `second` apart.
template <class T, bool kPaired>
__device__ Pair<T> LoadPair(const char* from, int second) {
  if constexpr (kPaired) {
    return __ldg(reinterpret_cast<const Pair<T>*>(from));
  } else if constexpr (sizeof(T) == 2) {
    const auto* bits = reinterpret_cast<const unsigned short*>(from);
    return __ldg(bits) | static_cast<uint32_t>(__ldg(bits + second)) << 16;
  } else {
    const auto* floats = reinterpret_cast<const float*>(from);
    return {__ldg(floats), __ldg(floats + second)};
  }
}

template <class T>
__device__ float2 ToFloats(Pair<T> pair) {
  if constexpr (sizeof(T) == 2) {
    return WidenPair<T>(pair);
  } else {
    return pair;
  }
}

template <class T>
__device__ Pair<T> ZeroPair() {
  if constexpr (sizeof(T) == 2) {
    return 0;
  } else {
    return {0, 0};
  }
}

// A 16-bit float of either kind: of kernels with few conversions there is one for both.
struct EitherHalf {
  uint16_t bits;
};
template <class T>
using EitherOf = std::conditional_t<sizeof(T) == 2, EitherHalf, T>;

// Calls f with the TypeTag of T, or of which kind it is.
template <class T, class F>
__device__ __forceinline__ void WithKind(bool is_half, F&& f) {
  if constexpr (!std::is_same_v<T, EitherHalf>) {
    f(TypeTag<T>{});
  } else if (is_half) {
    f(TypeTag<__half>{});
  } else {
    f(TypeTag<__nv_bfloat16>{});
  }
}

template <class T, int kCount>
__device__ __forceinline__ void WidenStrip(const Pair<T> (&from)[kCount], bool is_half, float2 (&to)[kCount]) {
  WithKind<T>(is_half, [&](auto type) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = ToFloats<typename decltype(type)::type>(from[i]);
  });
}

// Keep the compiler from computing a value again where it is used.
__device__ inline void Keep(const char*& pointer) { asm("" : "+l"(pointer)); }
__device__ inline void Keep(float2& pair) { asm("" : "+f"(pair.x), "+f"(pair.y)); }

// A strip of pixels `step` bytes apart, at positions first + pitch i of a line; zeros for those outside its extent.
template <class T, bool kPaired, int kCount>
__device__ void LoadStrip(const char* from, int step, int first, int pitch, int extent, int second,
                          Pair<T> (&to)[kCount]) {
  Keep(from);
  if (first >= 0 && first + pitch * (kCount - 1) < extent) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = LoadPair<T, kPaired>(from + int64_t{step} * i, second);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = ZeroPair<T>();
      if (static_cast<unsigned>(first + pitch * i) < static_cast<unsigned>(extent))
        to[i] = LoadPair<T, kPaired>(from + int64_t{step} * i, second);
    }
  }
}

__device__ inline void MultiplyAdd(float2& sum, float2 a, float2 b) {
  sum.x = fmaf(a.x, b.x, sum.x);
  sum.y = fmaf(a.y, b.y, sum.y);
}

// Whether both channels of a pair can be had at once, in all of the arrays: their memory allows it, and all have the
// same channels.
inline bool BeginOnPairs(const Problem& p, std::initializer_list<const void*> arrays) {
  const uintptr_t word = p.out == DType::kF32 ? 8 : 4;
  return std::all_of(arrays.begin(), arrays.end(),
                     [&](const void* a) { return reinterpret_cast<uintptr_t>(a) % word == 0; });
}
inline bool Paired(const Problem& p, std::initializer_list<const void*> arrays) {
  return p.features == 1 && p.groups % 2 == 0 && BeginOnPairs(p, arrays);
}

// Whether four channels can be had at once, in all of the operands.
constexpr int kQuad = 4;
inline bool AreQuads(const Problem& p, std::initializer_list<const void*> operands) {
  return p.features == 1 && p.groups % kQuad == 0 && std::all_of(operands.begin(), operands.end(), [&](const void* a) {
           return reinterpret_cast<uintptr_t>(a) % (kQuad * SizeOf(p.in)) == 0;
         });
}

// Channels of the result in slabs of at most a warp of pairs, equally wide.
struct Slabs {
  int width, units;  // pairs; groups of as many threads in a block
  FastDiv count, thread;

  Slabs() = default;
  explicit Slabs(int64_t channels) {
    const int64_t pairs = CeilDiv(channels, 2), slabs = CeilDiv(pairs, 32);
    width = int(CeilDiv(pairs, std::max<int64_t>(slabs, 1)));
    if (width < 1) width = 1;
    units = kDepthwiseThreads / width;
    count = FastDiv(slabs);
    thread = FastDiv(width);
  }
};

// Where a unit of the work lies that parameters divide into strips, of segments of lines, of planes, of images.
struct Where {
  int strip, segment, plane, image;
};

template <class Params>
__device__ __forceinline__ Where Locate(const Params& p, int unit) {
  Where at;
  unit = p.strips.Div(unit, &at.strip);
  unit = p.segments.Div(unit, &at.segment);
  at.image = p.planes.Div(unit, &at.plane);
  return at;
}

}  // namespace jaxdnn::conv
