// Gradients of a causal depthwise convolution of sequences, y[t] = f(z[t]) with z[t] = b + sum_j w[j] x[t - (k - 1) +
// j], of k = 2 to 4 taps: what state-space layers are trained through. With the cotangent g of y,
//
//   dz[t] = g[t] f'(z[t])       dw[j] = sum_t dz[t] x[t - (k - 1) + j]
//   dx[s] = sum_j w[j] dz[s + (k - 1) - j]       db = sum_t dz[t]
//
// Memory bounds it, so x and g are read once and dx is written, and nothing else but sums: z is computed again and dz
// never stored. Neither is rounded to the element type: that spares instructions, and f' is taken where forward took f.
//
// A thread has four neighbouring channels and goes along a segment of a sequence, the last k - 1 of x and of dz in
// registers, and the loads of the next positions on their way. Past the segment's end it computes the next k - 1 of dz
// as well, which dx wants there, and leaves them out of the sums. Threads of a block that have the same channels add
// theirs up in shared memory; blocks leave partial sums behind, which a second kernel adds in order.
#include <algorithm>

#include "cuda/activation/functions.cuh"
#include "cuda/common/column_sum.cuh"
#include "cuda/conv/depthwise_causal.h"
#include "cuda/conv/depthwise_quads.cuh"

namespace jaxdnn::conv {
namespace depthwise {
namespace {

constexpr int kCausalThreads = 192, kCausalResident = 2;

// Positions whose loads are on their way at a time: as many as registers hold, of floats and in the loop that is not
// unrolled fewer.
template <int kTaps>
constexpr int kFewer = kTaps == 3 ? 3 : 4;
template <int kTaps>
constexpr int kMore = kTaps == 4 ? 8 : 6;

struct CausalParams {
  FastDiv width;     // quads of channels side by side in a block
  FastDiv slabs;     // blocks side by side, for all channels
  FastDiv splits;    // blocks that share a problem's sequences
  FastDiv segments;  // of a sequence
  int rows;          // segments that a block has at a time
  int units;         // segments of a problem
  int segment, length, quads, problems, sequences;
  bool aligned;
};

int64_t CountSplits(const CausalParams& p) { return CeilDiv(p.units, p.rows); }

CausalParams MakeCausalParams(const CausalLayer& l) {
  constexpr int64_t kWidth = 32, kShortest = 16, kLongest = 256;
  constexpr int64_t kBlocks = 132 * kCausalResident * 2;  // two waves of them on a large device
  CausalParams p = {};
  const int64_t quads = l.channels / kQuad, slabs = CeilDiv(quads, kWidth);
  p.quads = int(quads);
  p.slabs = FastDiv(slabs);
  p.width = FastDiv(slabs > 0 ? CeilDiv(quads, slabs) : 0);
  p.rows = kCausalThreads / int(p.width.divisor);
  p.problems = int(l.problems);
  p.sequences = int(l.sequences);
  p.length = int(l.length);
  // Segments of one length, in whole batches.
  const int64_t work = l.problems * l.sequences * l.length * slabs, batch = l.taps == 4 ? 8 : 12;
  const int64_t longest = std::clamp(CeilDiv(work, p.rows * kBlocks), kShortest, kLongest);
  const int64_t segments = std::max<int64_t>(CeilDiv(l.length, longest), 1);
  p.segment = int(CeilDiv(CeilDiv(l.length, segments), batch) * batch);
  const int64_t used = l.length > 0 ? CeilDiv(l.length, p.segment) : 0;
  p.segments = FastDiv(used);
  p.units = int(l.sequences * used);
  p.splits = FastDiv(CountSplits(p));
  return p;
}

template <class T>
__device__ Quad<T> LoadQuad(const T* from, bool aligned) {
  if (aligned) return LoadConstant(reinterpret_cast<const Quad<T>*>(from));
  T each[kQuad];
#pragma unroll
  for (int c = 0; c < kQuad; ++c) each[c] = from[c];
  Quad<T> quad;
  memcpy(&quad, each, sizeof(quad));
  return quad;
}

template <class T>
__device__ void StoreQuad(T* to, const Quad<T>& quad, bool aligned) {
  if (aligned) return StorePacked<T, kQuad>(to, quad);
  T each[kQuad];
  memcpy(each, &quad, sizeof(quad));
#pragma unroll
  for (int c = 0; c < kQuad; ++c) to[c] = each[c];
}

// g becomes g f'(z).
template <class T, class F>
__device__ __forceinline__ void Scale(const F& f, const float (&z)[kQuad], float (&g)[kQuad]) {
  const auto scale = [](const auto& f, float z, float g) {
    return f.kMasked ? activation::ApplySlope(g, f.Derivative(z)) : g * f.Derivative(z);
  };
  if constexpr (std::is_same_v<F, activation::Activation>) {
    // A channel at a time, so that the code of all activations is there once.
    float next[kQuad];
#pragma unroll
    for (int c = 0; c < kQuad; ++c) next[c] = z[c];
#pragma unroll 1
    for (int c = 0; c < kQuad; ++c) {
      g[0] = activation::WithFunctor<T>(f, [&](auto functor) { return scale(functor, next[0], g[0]); });
      Turn<1>(g);
      Turn<1>(next);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kQuad; ++c) g[c] = scale(f, z[c], g[c]);
  }
}

// silu' of 16-bit floats with few instructions; what is below 2^-120 counts as zero.
struct QuickSilu {
  static constexpr bool kMasked = false;
  float beta;
  __device__ float Derivative(float x) const {
    const float z = activation::Clamp(beta * x, 1024.0f);  // as Silu has it
    const float s = ApproximateReciprocal(1.0f + ApproximateExp2(-1.44269504f * z));
    return s * fmaf(z, 1.0f - s, 1.0f);
  }
};

// As of pairs: else what is widened is widened again for each of its uses.
__device__ inline void KeepFour(float (&v)[kQuad]) { asm("" : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])); }

template <int kCount>
__device__ __forceinline__ void Shift(float (&v)[kCount][kQuad]) {
#pragma unroll
  for (int i = 0; i + 1 < kCount; ++i)
#pragma unroll
    for (int c = 0; c < kQuad; ++c) v[i][c] = v[i + 1][c];
}

// Adds the sums of all threads `width` apart to those of the first `width`, in an order that is always the same.
template <int kSums>
__device__ void AddRows(float (&sums)[kSums][kQuad], int rows, int width) {
  using Four = Vec<float, kQuad>;
  __shared__ Four scratch[kSums][kCausalThreads];
  Four* const own = &scratch[0][threadIdx.x];
  const auto store = [&] {
#pragma unroll
    for (int j = 0; j < kSums; ++j) memcpy(&own[j * kCausalThreads], sums[j], sizeof(Four));
  };
  store();
#pragma unroll 1
  for (int half; rows > 1; rows = half) {
    half = (rows + 1) / 2;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= (rows - half) * width) continue;
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const Four other = own[j * kCausalThreads + half * width];
#pragma unroll
      for (int c = 0; c < kQuad; ++c) sums[j][c] += other.v[c];
    }
    store();
  }
}

// F is the activation's functor, or Activation: any of them, in a loop that is not unrolled, which takes arrays that
// are not aligned too.
template <class T, int kTaps, class F>
__global__ void __launch_bounds__(kCausalThreads, kCausalResident)
    CausalKernel(const __grid_constant__ CausalParams p, F f, const T* g, const T* x, const T* w, const T* bias, T* dx,
                 float* partial) {
  constexpr bool kAny = std::is_same_v<F, activation::Activation>;
  constexpr int kBefore = kTaps - 1, kBatch = kAny || sizeof(T) > 2 ? kFewer<kTaps> : kMore<kTaps>;
  static_assert(kBatch % kTaps == 0, "positions have their turns in each batch");
  const bool aligned = !kAny || p.aligned;
  const int width = static_cast<int>(p.width.divisor), pitch = kQuad * p.quads;
  int slab, split, lane, segment;
  const int problem = p.splits.Div(p.slabs.Div(static_cast<int>(blockIdx.x), &slab), &split);
  const int row = p.width.Div(static_cast<int>(threadIdx.x), &lane);
  const int quad = slab * width + lane, unit = split * p.rows + row;
  const int sequence = p.segments.Div(unit, &segment);
  const bool there = row < p.rows && unit < p.units && quad < p.quads;
  const int64_t channel = int64_t{kQuad} * quad;
  // Of all problems' taps first, and then of all biases.
  partial += (int64_t{problem} * kTaps * p.splits.divisor + split) * pitch + channel;

  float sums[kTaps + 1][kQuad] = {};  // of dw, and of dbias
  if (there) {
    const int begin = segment * p.segment;
    const int count = min(p.segment, p.length - begin), wanted = min(count + kBefore, p.length - begin);
    const int64_t at = ((int64_t{problem} * p.sequences + sequence) * p.length + begin) * pitch + channel;
    x += at;
    g += at;
    dx += at;
    Quad<T> next_x[kBatch] = {}, next_g[kBatch] = {};
    float taps[kTaps][kQuad], first[kQuad] = {}, inputs[kTaps][kQuad], dz[kTaps][kQuad];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= wanted) continue;
      next_x[i] = LoadQuad(x + int64_t{pitch} * i, aligned);
      next_g[i] = LoadQuad(g + int64_t{pitch} * i, aligned);
    }
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      Widen<T>(LoadQuad(w + (int64_t{problem} * kTaps + j) * pitch + channel, aligned), taps[j]);
    if (bias != nullptr) Widen<T>(LoadQuad(bias + int64_t{problem} * pitch + channel, aligned), first);
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      Quad<T> before = {};
      if (begin + i >= kBefore) before = LoadQuad(x + int64_t{pitch} * (i - kBefore), aligned);
      Widen<T>(before, inputs[i]);
#pragma unroll
      for (int c = 0; c < kQuad; ++c) dz[i][c] = 0;  // of no result that is stored
    }

    int t = 0;  // from `begin`
    // Has x and g of position t + ahead, and sends for those of kBatch positions further on. Of kTaps places that take
    // turns, `turn` is the first position's that the present one sees.
    const auto take = [&](Quad<T>& of_x, Quad<T>& of_g, int ahead, int turn) {
      Widen<T>(of_x, inputs[(turn + kBefore) % kTaps]);
      Widen<T>(of_g, dz[(turn + kBefore) % kTaps]);
      KeepFour(inputs[(turn + kBefore) % kTaps]);
      KeepFour(dz[(turn + kBefore) % kTaps]);
      if (t + ahead + kBatch >= wanted) return;
      of_x = LoadQuad(x + int64_t{pitch} * (ahead + kBatch), aligned);
      of_g = LoadQuad(g + int64_t{pitch} * (ahead + kBatch), aligned);
    };
    const auto step = [&](int ahead, int turn, bool exists, bool counts, bool stores) {
      float (&now)[kQuad] = dz[(turn + kBefore) % kTaps];
      float z[kQuad];
#pragma unroll
      for (int c = 0; c < kQuad; ++c) z[c] = first[c];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) AddProducts(z, taps[j], inputs[(turn + j) % kTaps]);
      Scale<T>(f, z, now);
#pragma unroll
      for (int c = 0; c < kQuad; ++c) now[c] = exists ? now[c] : 0.0f;
      if (counts) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) AddProducts(sums[j], now, inputs[(turn + j) % kTaps]);
#pragma unroll
        for (int c = 0; c < kQuad; ++c) sums[kTaps][c] += now[c];
      }
      if (stores) {
        float sum[kQuad] = {};
#pragma unroll
        for (int j = 0; j < kTaps; ++j) AddProducts(sum, taps[j], dz[(turn + kBefore - j) % kTaps]);
        StoreQuad(dx + int64_t{pitch} * (ahead - kBefore), Narrow<T>(sum), aligned);
      }
    };
    const auto advance = [&](int positions) {
      t += positions;
      x += int64_t{pitch} * positions;
      g += int64_t{pitch} * positions;
      dx += int64_t{pitch} * positions;
    };
    if constexpr (!kAny) {
#pragma unroll 1
      for (; t + kBatch <= count; advance(kBatch)) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          take(next_x[i], next_g[i], i, i);
          step(i, i, true, true, i >= kBefore || t > 0);
        }
      }
    }
#pragma unroll 1
    for (; t < count + kBefore; advance(1)) {
      take(next_x[0], next_g[0], 0, 0);
      const Quad<T> last_x = next_x[0], last_g = next_g[0];
      Rotate<1>(next_x);
      Rotate<1>(next_g);
      next_x[kBatch - 1] = last_x;
      next_g[kBatch - 1] = last_g;
      step(0, 0, t < wanted, t < count, t >= kBefore);
      Shift(inputs);
      Shift(dz);
    }
  }

  AddRows(sums, p.rows, width);
  if (static_cast<int>(threadIdx.x) >= width || quad >= p.quads) return;
#pragma unroll
  for (int j = 0; j <= kTaps; ++j) {
    if (j == kTaps && bias == nullptr) return;
    const int64_t place = j < kTaps ? j : int64_t{p.problems - problem} * kTaps + problem;
#pragma unroll
    for (int c = 0; c < kQuad; ++c) partial[place * p.splits.divisor * pitch + c] = sums[j][c];
  }
}

template <class F>
cudaError_t VisitTaps(int taps, F&& f) {
  switch (taps) {
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace depthwise

int64_t CausalWorkspace(const CausalLayer& l) {
  return l.problems * (l.taps + l.bias) * depthwise::CountSplits(depthwise::MakeCausalParams(l)) * l.channels *
         int64_t{sizeof(float)};
}

int LaunchCausalBackward(const CausalLayer& l, const CausalGradients& a, void* workspace, CUstream_st* stream) {
  using namespace depthwise;
  CausalParams p = MakeCausalParams(l);
  const int64_t splits = CountSplits(p);
  return VisitSingleDType(l.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    p.aligned = IsVectorAligned(a.g, a.x, a.w, a.bias, a.dx);
    const auto run = [&](auto taps, auto f) {
      return LaunchKernel(CausalKernel<T, taps(), decltype(f)>, l.problems * splits * p.slabs.divisor, kCausalThreads,
                          stream, p, f, static_cast<const T*>(a.g), static_cast<const T*>(a.x),
                          static_cast<const T*>(a.w), static_cast<const T*>(a.bias), static_cast<T*>(a.dx),
                          static_cast<float*>(workspace));
    };
    const cudaError_t status = VisitTaps(l.taps, [&](auto taps) {
      using activation::Kind;
      if (p.aligned && l.activation.kind == Kind::kIdentity) return run(taps, activation::Identity<T>{});
      using Silu = std::conditional_t<sizeof(T) == 2, QuickSilu, activation::Silu<T>>;
      if (p.aligned && l.activation.kind == Kind::kSilu)
        return run(taps, Silu{static_cast<float>(l.activation.parameter)});
      return run(taps, l.activation);
    });
    if (status != cudaSuccess) return status;
    return SumRowsOfTwo(static_cast<const float*>(workspace), l.problems * l.taps, l.bias ? l.problems : 0, splits,
                        l.channels, static_cast<T*>(a.dw), static_cast<T*>(a.dbias), stream);
  });
}

}  // namespace jaxdnn::conv
