// Max pooling, and min pooling as the maximum of the negated.
//
// Bytes that must move: x + y, and a byte an output for the index under differentiation. Without an index a cell costs
// one instruction for two 16-bit channels, with it five.
#include "cuda/pool/forward.cuh"
#include "cuda/pool/planes.cuh"
#include "cuda/pool/rows.cuh"

namespace jaxdnn::pool {
namespace {

template <int N, class T, bool kIndexed>
struct Select {
  using Element = T;
  using Loaded = Words<T, N>;
  using Mergeable = std::conditional_t<kIndexed, IndexedMax<T, N>, Max<T, N>>;
  using Quick = std::conditional_t<kIndexed && kIsTuned<T> && (N > 1), QuickMax<T, N>, Mergeable>;
  using State = std::conditional_t<kIndexed && kInPairs<T, N>, IndexedPairMax<T, N>, Mergeable>;
  static constexpr int kWidth = N, kResident = 4;
  static constexpr bool kUnrolls = true, kShares = true, kWidens = false, kIdempotent = true, kIsLight = !kIndexed,
                        kWhole = true;

  Shape g;
  Walk walk;
  Pitch in;
  const T* __restrict__ x;
  T* __restrict__ y;
  void* __restrict__ index;
  bool wide;  // whether the index takes four bytes
  unsigned flip;

  // What padding loads: the least once it is prepared.
  __device__ Loaded Identity() const { return Flip<T, N>(Splat<T, N>(-INFINITY), flip); }
  __device__ Loaded Get(const T* p) const { return LoadWords<N>(p); }
  __device__ Loaded Prepare(const Loaded& v) const { return Flip<T, N>(v, flip); }
  // Stores the first `count`, neighbours in a row, one by one.
  template <class S>
  __device__ void FinishEach(const S& state, int to, int, int, int count) const {
    const auto value = BitCast<Vec<T, N>>(Flip<T, N>(BitCast<Words<T, N>>(state.value), flip));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j >= count) continue;
      y[to + j] = value.v[j];
      if constexpr (kIndexed) static_cast<uint8_t*>(index)[to + j] = static_cast<uint8_t>(state.Index(j));
    }
  }
  template <bool = false, class S>
  __device__ void Finish(const S& state, int64_t to, int, int, int) const {
    Store(y + to, BitCast<Vec<T, N>>(Flip<T, N>(BitCast<Words<T, N>>(state.value), flip)));
    if constexpr (kIndexed) {
      if (wide) {
#pragma unroll
        for (int j = 0; j < N; ++j) static_cast<int32_t*>(index)[to + j] = state.Index(j);
      } else {
        Vec<uint8_t, N> winner;
#pragma unroll
        for (int j = 0; j < N; ++j) winner.v[j] = static_cast<uint8_t>(state.Index(j));
        Store(static_cast<uint8_t*>(index) + to, winner);
      }
    }
  }
};

}  // namespace

cudaError_t MaxPool(const Geometry& g, DType dtype, IndexType index_type, bool minimum, const void* x, void* y,
                    void* index, Workspace workspace, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    const uint8_t* bytes = static_cast<const uint8_t*>(index);
    const auto launch = [&](auto indexed) {
      const auto task = [&](auto width, int neighbours) {
        return Select<width(), T, indexed()>{
            Shape(g), Walk(0, g.out, g.channels, neighbours), Pitch(g.in, g.channels), in, out,
            index,    index_type == IndexType::kInt32,        SignMask<T>(minimum)};
      };
      const auto general = [&] {
        return VisitWidth<T>(
            g.channels, [&](auto width) { return LaunchWindows(task(width, width), workspace, stream); }, in, out,
            bytes);
      };
      if constexpr (kIsTuned<T>) {
        const auto planes = [&] {
          if (index != nullptr && index_type != IndexType::kUint8) return general();
          return LaunchPlanes(g, general, stream,
                              [&] { return task(std::integral_constant<int, kVecLength<T>>{}, 1); });
        };
        return LaunchRows<T>(g, IsVectorAligned(in, out, bytes), planes, stream,
                             [&](auto width) { return task(width, 1); });
      } else {
        return general();
      }
    };
    return index == nullptr ? launch(std::false_type{}) : launch(std::true_type{});
  });
}

}  // namespace jaxdnn::pool
