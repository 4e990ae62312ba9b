// A training step of small problems, and its gradients: a block sees to its channels alone, and what it reads stays in
// a few registers. What takes time here is the way to memory and back, and to fetch the instructions: kernels are
// short.
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/small.cuh"
#include "cuda/batch_norm/statistics.cuh"
#include "cuda/common/convert.cuh"

namespace jaxdnn::batch_norm {
namespace {

constexpr int kSmallBlocks = 2;  // on a multiprocessor
constexpr int kHeld = 2;         // the most vectors of each input that a thread has
constexpr Most kMostSmall = {kSmallBlocks * kMultiprocessors, kHeld, kHeld};

// The thread's vectors of K inputs.
template <class M, int K>
class Held {
 public:
  using T = typename M::T;
  using A = Accumulator<T>;
  static constexpr int V = M::V;

  __device__ Held(const Tiling& t, const M& m, const T* const* in) : t_(t), m_(m) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i < m.steps) {
        const Span span = m.At(t, i);
        ends_[i] = span.hi << 16 | span.lo;
#pragma unroll
        for (int k = 0; k < K; ++k)
          if constexpr (M::kRuns)
            v_[k][i] = Load<M>(t, in[k], span);
          else
            v_[k][i] = *reinterpret_cast<const Vec<T, V>*>(in[k] + span.offset);
      }
  }

  // f(e, values): element e of a vector, of each input.
  template <class F>
  __device__ void ForEach(F&& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i < m_.steps) {
#pragma unroll
        for (int e = 0; e < V; ++e)
          if (Exists(i, e)) Call(f, i, e);
      }
  }

  // out = f(e, values)
  template <class F>
  __device__ void Map(T* out, F&& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i < m_.steps) {
        Vec<T, V> v;
#pragma unroll
        for (int e = 0; e < V; ++e) v.v[e] = static_cast<T>(Call(f, i, e));
        if constexpr (M::kRuns) {
          Store<M>(out, m_.At(t_, i), v);
        } else {
          Packed<T, V> packed;
          memcpy(&packed, &v, sizeof(v));
          StoreUnsplit<T, V>(out + m_.At(t_, i).offset, packed);
        }
      }
  }

 private:
  // Columns that a block has alone are whole vectors.
  __device__ bool Exists(int i, int e) const { return !M::kRuns || (e >= (ends_[i] & 0xFFFF) && e < ends_[i] >> 16); }
  template <class F>
  __device__ auto Call(F&& f, int i, int e) const {
    A values[K];
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = static_cast<A>(v_[k][i].v[e]);
    return f(e, values);
  }

  const Tiling& t_;
  const M& m_;
  Vec<T, V> v_[K][kHeld];
  int ends_[kHeld];  // Of what exists of a vector.
};

// Sums over the block, of each of its channels, in all threads of the channel.
template <class M>
struct BlockSums {
  using A = Accumulator<typename M::T>;
  static constexpr int kColumns = kNarrow * M::V, kParts = kThreads / kColumns;
  Pair<A> scratch[kThreads * M::W];
  Pair<A> parts[M::kRuns ? 1 : kParts][kColumns], sums[kColumns];

  __device__ void Reduce(const Tiling& t, const M& m, Pair<A> (&v)[M::W]) {
    const AddPairs add;
    if constexpr (M::kRuns) {
      jaxdnn::Reduce(v, add, Group{0, kSpan}, scratch);
    } else {
      // Down the rows of the tile in parts, and then the parts.
      const int columns = static_cast<int>(t.width.divisor) * M::V;
      const int rows = static_cast<int>(min(int64_t{t.height.divisor}, t.rows));
      int x;
      const int y = t.width.Div(static_cast<int>(threadIdx.x), &x), own = x * M::V;
      if (y < rows)
#pragma unroll
        for (int w = 0; w < M::W; ++w) scratch[y * columns + own + w] = v[w];
      __syncthreads();
      const int column = threadIdx.x % kColumns, part = threadIdx.x / kColumns;
      Pair<A> sum = {};
      if (column < columns)
        for (int row = part; row < rows; row += kParts) sum = add(sum, scratch[row * columns + column]);
      parts[part][column] = sum;
      __syncthreads();
      if (threadIdx.x < kColumns) {
#pragma unroll
        for (int i = 1; i < kParts; ++i) sum = add(sum, parts[i][column]);
        sums[column] = sum;
      }
      __syncthreads();
#pragma unroll
      for (int w = 0; w < M::W; ++w) v[w] = sums[own + w];
    }
  }
};

// The first of a thread's channels, which are neighbours.
template <class M>
__device__ int64_t FirstChannel(const Tiling& t, const M& m) {
  if constexpr (M::kRuns)
    return m.block.outer * t.c + m.block.tile;
  else
    return m.block.outer * t.c + min(m.column, t.columns - M::V);
}

// Whether this thread writes what there is one of for each channel.
template <class M>
__device__ bool IsFirst(const Tiling& t, const M& m) {
  if constexpr (M::kRuns)
    return threadIdx.x == 0;
  else
    return threadIdx.x < t.width.divisor && m.column < t.columns;
}

template <class M, class G>
__global__ void __launch_bounds__(kThreads, kSmallBlocks)
    TrainSmallKernel(Tiling t, Arrays<typename M::T> arrays, Parameters<Accumulator<typename M::T>> affine, G group,
                     Statistic<Accumulator<typename M::T>> statistic) {
  using A = Accumulator<typename M::T>;
  constexpr int W = M::W;
  __shared__ BlockSums<M> shared;
  const M m(t, false);
  const Held<M, 1> x(t, m, arrays.in);
  const int64_t first = FirstChannel(t, m);
  A scale[W], bias[W];
#pragma unroll
  for (int w = 0; w < W; ++w) scale[w] = affine.scale[first + w], bias[w] = affine.bias[first + w];
  const A share = A(1) / static_cast<A>(t.n * t.s);

  // A first mean, a sum that cannot overflow; the second pass says how far it is off.
  Pair<A> sums[W] = {};
  x.ForEach([&](int e, const A(&v)[1]) { sums[e % W].first = fma(v[0], share, sums[e % W].first); });
  shared.Reduce(t, m, sums);
  A mean[W], a[W];
#pragma unroll
  for (int w = 0; w < W; ++w) mean[w] = sums[w].first, sums[w] = {};
  x.ForEach([&](int e, const A(&v)[1]) {
    const A d = v[0] - mean[e % W];
    sums[e % W].first += d;
    sums[e % W].second += d * d;
  });
  shared.Reduce(t, m, sums);
  A var[W];
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const A off = sums[w].first * share;
    mean[w] += off;
    var[w] = max(sums[w].second * share - off * off, A(0));
    a[w] = scale[w] * InverseRoot(var[w] + affine.epsilon);
  }
  if (IsFirst(t, m)) {
#pragma unroll
    for (int w = 0; w < W; ++w) statistic.mean[first + w] = mean[w], statistic.var[first + w] = var[w];
  }
  x.Map(arrays.out, [&](int e, const A(&v)[1]) {
    const int w = e % W;
    return group.Forward(fma(v[0] - mean[w], a[w], bias[w]));
  });
}

template <class M, class G>
__global__ void __launch_bounds__(kThreads, kSmallBlocks)
    TrainGradientKernel(Tiling t, Arrays<typename M::T> arrays, Parameters<Accumulator<typename M::T>> affine, G group,
                        Coefficients<Accumulator<typename M::T>> coefficients) {
  using A = Accumulator<typename M::T>;
  constexpr int W = M::W;
  __shared__ BlockSums<M> shared;
  const M m(t, false);
  const Held<M, 2> held(t, m, arrays.in);  // g and x
  const int64_t first = FirstChannel(t, m);
  A mean[W], scale[W], root[W], bias[W];
#pragma unroll
  for (int w = 0; w < W; ++w) {
    mean[w] = affine.mean[first + w], scale[w] = affine.scale[first + w], bias[w] = affine.bias[first + w];
    root[w] = InverseRoot(affine.var[first + w] + affine.epsilon);
  }
  // D g
  const auto slope = [&](int w, A g, A centered) { return group.Slope(g, fma(centered, scale[w] * root[w], bias[w])); };
  Pair<A> sums[W] = {};
  held.ForEach([&](int e, const A(&v)[2]) {
    const A centered = v[1] - mean[e % W], h = slope(e % W, v[0], centered);
    sums[e % W].first += h;
    sums[e % W].second += h * centered;
  });
  shared.Reduce(t, m, sums);
  const bool writes = IsFirst(t, m);
  const A share = A(1) / static_cast<A>(t.n * t.s);
#pragma unroll
  for (int w = 0; w < W; ++w) sums[w] = coefficients.Set(first + w, sums[w], scale[w], root[w], share, writes);
  held.Map(arrays.out, [&](int e, const A(&v)[2]) {
    const int w = e % W;
    const A centered = v[1] - mean[w];
    return fma(scale[w] * root[w], slope(w, v[0], centered), fma(centered, sums[w].second, sums[w].first));
  });
}

// The same where many blocks share a channel: pairs [outer, 2, c] are the sums before and the coefficients after.
__global__ void __launch_bounds__(kThreads)
    CoefficientsKernel(int64_t channels, int64_t c, float share, Parameters<float> affine,
                       Coefficients<float> coefficients, float* pairs) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= channels) return;
  float* const first = pairs + i / c * c + i;
  const float root = InverseRoot(affine.var[i] + affine.epsilon);
  const Pair<float> k = coefficients.Set(i, {first[0], first[c]}, affine.scale[i], root, share, true);
  first[0] = k.first;
  first[c] = k.second;
}

}  // namespace

bool TrainSmall(const Problem& p, const Affine& affine, activation::Activation f, const void* x, void* y, void* mean,
                void* var, cudaStream_t stream, cudaError_t* e) {
  return VisitAlone(p, f, IsVectorAligned(x, y), kMostSmall, [&](auto access, const Tiling& t) {
    using M = typename decltype(access)::type;
    using T = typename M::T;
    const Arrays<T> arrays = {{static_cast<const T*>(x)}, static_cast<T*>(y)};
    const Statistic<float> statistic = {static_cast<float*>(mean), static_cast<float*>(var)};
    *e = LaunchKernel(TrainSmallKernel<M, PlainGroup<T>>, t.Blocks(), kThreads, stream, t, arrays, affine,
                      PlainGroup<T>{f.kind == activation::Kind::kRelu}, statistic);
  });
}

cudaError_t TrainGradient(const Problem& p, const Affine& affine, activation::Activation f, const void* g,
                          const void* x, void* dx, void* d_scale, void* d_bias, Workspace workspace,
                          cudaStream_t stream) {
  if (p.dtype == DType::kF64 || p.where || p.outer * p.n * p.c * p.s == 0) return cudaErrorNotSupported;
  const Coefficients<float> coefficients = {static_cast<float*>(d_scale), static_cast<float*>(d_bias)};
  cudaError_t e = cudaSuccess;
  if (VisitAlone(p, f, IsVectorAligned(g, x, dx), kMostSmall, [&](auto access, const Tiling& t) {
        using M = typename decltype(access)::type;
        using T = typename M::T;
        const Arrays<T> arrays = {{static_cast<const T*>(g), static_cast<const T*>(x)}, static_cast<T*>(dx)};
        e = LaunchKernel(TrainGradientKernel<M, PlainGroup<T>>, t.Blocks(), kThreads, stream, t, arrays, affine,
                         PlainGroup<T>{f.kind == activation::Kind::kRelu}, coefficients);
      }))
    return e;
  if (GradientCluster(p, affine, f, g, x, dx, coefficients, stream, &e)) return e;
  // The sums, and from them the pairs, stand before the partial results.
  const size_t bytes = 2 * static_cast<size_t>(p.outer * p.c) * sizeof(float);
  if (workspace.bytes < 2 * bytes) return cudaErrorInvalidValue;
  float* pairs = static_cast<float*>(workspace.data);
  const Workspace rest = {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
  e = Sums(p, affine, f, Slot::kOuter, g, x, nullptr, pairs, nullptr, rest, stream);
  if (e == cudaSuccess)
    e = LaunchKernel(CoefficientsKernel, CeilDiv(p.outer * p.c, kThreads), kThreads, stream, p.outer * p.c, p.c,
                     1.0f / static_cast<float>(p.n * p.s), Parameters<float>(affine), coefficients, pairs);
  return e != cudaSuccess ? e : Gradient(p, affine, f, g, pairs, x, dx, stream);
}

}  // namespace jaxdnn::batch_norm
