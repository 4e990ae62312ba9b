// y = f(x) and y = f(x + bias), with the mask of functions that have two slopes; prelu.
//
// Bound by memory: x is read and y written, and a mask adds a bit an element.
#include "cuda/activation/activation.h"
#include "cuda/activation/channels.cuh"
#include "cuda/activation/map.cuh"
#include "cuda/activation/visit.cuh"

namespace jaxdnn::activation {
namespace {

template <class T, class F>
struct ForwardOp {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  F f;
  ChannelOperand<T> bias;
  const T* x;
  T* y;
  uint8_t* mask;
  BitRows rows;

  __device__ void Vector(int64_t i) const {
    const auto in = reinterpret_cast<const Vec<T, N>*>(x)[i];
    A z[N];
    bias.Get(i, z);
    Vec<T, N> out;
    unsigned bits = 0;
    With(f, [&](auto functor) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        z[j] += static_cast<A>(in.v[j]);
        out.v[j] = static_cast<T>(functor.Forward(z[j]));
        if constexpr (functor.kMasked) bits |= unsigned{functor.IsInside(z[j])} << j;
      }
    });
    reinterpret_cast<Vec<T, N>*>(y)[i] = out;
    if constexpr (F::kMasked)
      if (mask != nullptr) StoreBits<N>(mask, i, bits);
  }

  // A bit of the mask, or an element.
  __device__ void Tail(int64_t t, bool valid) const {
    const int64_t i = valid ? rows.Element(t) : -1;
    bool inside = false;
    if (i >= 0) {
      const A z = static_cast<A>(x[i]) + bias.At(i);
      With(f, [&](auto functor) {
        y[i] = static_cast<T>(functor.Forward(z));
        if constexpr (functor.kMasked) inside = functor.IsInside(z);
      });
    }
    if constexpr (F::kMasked)
      if (mask != nullptr) StoreBit(mask, t, valid, inside);
  }
};

template <class T>
struct PReluOp {
  static constexpr int N = kVecLength<T>;
  using A = Accumulator<T>;
  ChannelOperand<T> alpha;
  const T* x;
  T* y;

  __device__ void Vector(int64_t i) const {
    A a[N];
    alpha.Get(i, a);
    const auto in = reinterpret_cast<const Vec<T, N>*>(x)[i];
    Vec<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.v[j] = Element(in.v[j], a[j]);
    reinterpret_cast<Vec<T, N>*>(y)[i] = out;
  }
  __device__ void Tail(int64_t i, bool valid) const {
    if (valid) y[i] = Element(x[i], alpha.At(i));
  }

 private:
  static __device__ T Element(T x, A alpha) { return static_cast<T>(LeakyRelu<T>{alpha}.Forward(static_cast<A>(x))); }
};

}  // namespace

cudaError_t Forward(const Activation& activation, DType dtype, const ChannelShape& given, const void* x,
                    const void* bias, void* y, uint8_t* mask, cudaStream_t stream) {
  // Groups matter to a bias, and to bits where a group does not fill whole bytes.
  const bool flat = bias == nullptr && (mask == nullptr || GroupSize(given) % 8 == 0);
  const ChannelShape shape = flat ? ChannelShape{1, Size(given), 1, 1} : given;
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = kVecLength<T>;
    return ForEachChunk(shape, [&](const ChannelShape& chunk, int64_t first) {
      const BitRows rows = mask != nullptr ? BitRows(chunk.groups, GroupSize(chunk)) : BitRows(1, Size(chunk));
      const int64_t most = mask != nullptr ? rows.Vectors<N>() : Size(chunk) / N;
      const int64_t vectors = IsVectorAligned(x, y) ? most : 0, end = mask != nullptr ? rows.Bits() : Size(chunk);
      return VisitForward<T>(activation, [&](auto f) {
        const ForwardOp<T, decltype(f)> op{f,
                                           ChannelOperand<T>(bias, chunk),
                                           static_cast<const T*>(x) + first,
                                           static_cast<T*>(y) + first,
                                           mask != nullptr ? mask + first / 8 : nullptr,
                                           rows};
        return Map(op, vectors, vectors * N, end, stream);
      });
    });
  });
}

cudaError_t PReluForward(DType dtype, const ChannelShape& shape, const void* x, const void* alpha, void* y,
                         cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = kVecLength<T>;
    return ForEachChunk(shape, [&](const ChannelShape& chunk, int64_t first) {
      const int64_t vectors = IsVectorAligned(x, y) ? Size(chunk) / N : 0;
      const PReluOp<T> op{ChannelOperand<T>(alpha, chunk), static_cast<const T*>(x) + first,
                          static_cast<T*>(y) + first};
      return Map(op, vectors, vectors * N, Size(chunk), stream);
    });
  });
}

}  // namespace jaxdnn::activation
