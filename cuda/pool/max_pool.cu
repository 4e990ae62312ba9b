// Max pooling, and min pooling as the maximum of the negated.
//
// Bytes that must move: x + y, and a byte an output for the index under differentiation. Without an index a cell costs
// one instruction for two 16-bit channels, with it five.
#include "cuda/pool/forward.cuh"

namespace jaxdnn::pool {
namespace {

struct NoIndex {};

template <int N, class T, class Index>
struct Select {
  using Element = T;
  using Loaded = Vec<T, N>;
  static constexpr bool kIndexed = !std::is_same_v<Index, NoIndex>;
  using Mergeable = std::conditional_t<kIndexed, IndexedMax<T, N>, Max<T, N>>;
  using State = std::conditional_t<kIndexed && kInPairs<T, N> && sizeof(Index) == 1, IndexedPairMax<T, N>, Mergeable>;
  static constexpr int kWidth = N;
  static constexpr bool kUnrolls = sizeof(T) < 8 && !std::is_same_v<Index, int32_t>;

  Geometry g;
  Walk walk;
  Pitch in;
  const T* __restrict__ x;
  T* __restrict__ y;
  Index* __restrict__ index;
  unsigned flip;

  static __device__ Loaded Identity() { return Splat<T, N>(-INFINITY); }
  __device__ Loaded Get(const T* p) const { return Flip(Load<N>(p), flip); }
  template <class S>
  __device__ void Finish(const S& state, int64_t to, int, int, int) const {
    Store(y + to, Flip(BitCast<Vec<T, N>>(state.value), flip));
    if constexpr (kIndexed) {
      Vec<Index, N> winner;
#pragma unroll
      for (int j = 0; j < N; ++j) winner.v[j] = static_cast<Index>(state.Index(j));
      Store(index + to, winner);
    }
  }
};

template <class T, class Index>
cudaError_t Launch(const Geometry& g, const T* x, T* y, Index* index, bool minimum, Workspace workspace,
                   cudaStream_t stream) {
  return VisitWidth<T>(
      g.channels,
      [&](auto width) {
        constexpr int N = decltype(width)::value;
        const Select<N, T, Index> task = {g,     Walk(0, g.out, g.channels, N), Pitch(g.in, g.channels), x, y,
                                          index, SignMask<T>(minimum)};
        return LaunchWindows(task, workspace, stream);
      },
      x, y, index);
}

}  // namespace

cudaError_t MaxPool(const Geometry& g, DType dtype, IndexType index_type, bool minimum, const void* x, void* y,
                    void* index, Workspace workspace, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    if (index == nullptr) return Launch(g, in, out, static_cast<NoIndex*>(nullptr), minimum, workspace, stream);
    return VisitIndexType(index_type, [&](auto stored) {
      return Launch(g, in, out, static_cast<typename decltype(stored)::type*>(index), minimum, workspace, stream);
    });
  });
}

}  // namespace jaxdnn::pool
