// The backward pass of f(x + bias), and of prelu: dx and the operand's gradient in one pass.
//
// Bound by memory: g and the residual are read and dx written; partial sums are a few hundred rows of channels.
#include "cuda/activation/channel_sum.cuh"
#include "cuda/activation/channels.cuh"
#include "cuda/activation/map.cuh"
#include "cuda/activation/visit.cuh"

namespace jaxdnn::activation {
namespace {

// A rule maps g, with the residual and the channel's value, to dx and to what it adds to the operand's gradient.
template <class T, class F>
struct FromInput {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false, kOperand = true;
  F f;
  __device__ A operator()(A g, A x, A bias, A* term) const { return *term = g * f.Derivative(x + bias); }
};

template <class T>
struct FromOutput {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false, kOperand = false;
  OfOutput<T> f;
  __device__ A operator()(A g, A y, A, A* term) const { return *term = g * f.Derivative(y); }
};

template <class T>
struct FromMask {
  using A = Accumulator<T>;
  static constexpr bool kMasked = true, kOperand = false;
  A inside, outside;
  __device__ A operator()(A g, bool is_inside, A, A* term) const {
    return *term = ApplySlope(g, is_inside ? inside : outside);
  }
};

template <class T>
struct PRelu {
  using A = Accumulator<T>;
  static constexpr bool kMasked = false, kOperand = true;
  __device__ A operator()(A g, A x, A alpha, A* term) const {
    *term = x >= A(0) ? A(0) : g * x;
    return x >= A(0) ? g : ApplySlope(g, alpha);
  }
};

// Calls g with the rule, or the one that it stands for.
template <class Rule, class G>
__device__ void WithRule(const Rule& rule, G&& g) {
  g(rule);
}
template <class T, class G>
__device__ void WithRule(const FromInput<T, RareActivation<T>>& rule, G&& g) {
  WithSmooth(rule.f, [&](auto f) { g(FromInput<T, decltype(f)>{f}); });
}

template <class T, class Rule>
struct ChannelOp {
  static constexpr int N = kVecLength<T>;
  static constexpr bool kAsync = !Rule::kMasked;  // A lane's bits are too few for that.
  static constexpr bool kLong = sizeof(T) == 8 || std::is_same_v<Rule, FromInput<T, RareActivation<T>>>;
  using A = Accumulator<T>;
  using Vector = Vec<T, N>;
  using Residual = std::conditional_t<Rule::kMasked, uint8_t, T>;
  using LoadedResidual = std::conditional_t<Rule::kMasked, unsigned, Vec<T, N>>;
  struct Loaded {
    Vec<T, N> g;
    LoadedResidual residual;
  };
  Rule rule;
  const T* g;
  const Residual* residual;
  const T* operand;
  T* dx;

  __device__ void SelectGroup(int64_t group, const ChannelShape& shape) {
    const int64_t size = GroupSize(shape);
    g += group * size;
    dx += group * size;
    residual += group * (Rule::kMasked ? (size + 7) / 8 : size);
    if (Rule::kOperand) operand += group * shape.channels;
  }
  __device__ A Channel(int64_t c) const { return Rule::kOperand ? static_cast<A>(operand[c]) : A(0); }

  __device__ Loaded Load(int64_t i) const {
    Loaded out;
    out.g = reinterpret_cast<const Vec<T, N>*>(g)[i];
    if constexpr (Rule::kMasked)
      out.residual = LoadBits<N>(residual, i);
    else
      out.residual = reinterpret_cast<const Vec<T, N>*>(residual)[i];
    return out;
  }
  __device__ void Fetch(Vector* slot, int stride, int64_t i) const {
    CopyAsync(slot, reinterpret_cast<const Vector*>(g) + i);
    CopyAsync(slot + stride, reinterpret_cast<const Vector*>(residual) + i);
  }
  __device__ Loaded Take(const Vector* slot, int stride) const { return {slot[0], slot[stride]}; }
  __device__ void Store(int64_t i, const Vec<T, N>& out) const { reinterpret_cast<Vec<T, N>*>(dx)[i] = out; }

  __device__ Vec<T, N> Map(const Loaded& in, const A (&p)[N], A (&sum)[N]) const {
    Vec<T, N> out;
    WithRule(rule, [&](const auto& of) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A term;
        const A along = static_cast<A>(in.g.v[j]);
        if constexpr (Rule::kMasked)
          out.v[j] = static_cast<T>(of(along, in.residual >> j & 1, p[j], &term));
        else
          out.v[j] = static_cast<T>(of(along, static_cast<A>(in.residual.v[j]), p[j], &term));
        sum[j] += term;
      }
    });
    return out;
  }

  __device__ Loaded Gather(int64_t i, int64_t size) const {
    Loaded out = {};
    const int64_t left = size - i * N;
    const int count = left < N ? static_cast<int>(left) : N;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j >= count) continue;
      const int64_t e = i * N + j;
      out.g.v[j] = g[e];
      if constexpr (Rule::kMasked)
        out.residual |= (residual[e / 8] >> (e % 8) & 1u) << j;
      else
        out.residual.v[j] = residual[e];
    }
    return out;
  }
  __device__ void Scatter(int64_t i, int64_t size, const Vec<T, N>& out) const {
    const int64_t left = size - i * N;
    const int count = left < N ? static_cast<int>(left) : N;
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < count) dx[i * N + j] = out.v[j];
  }

  __device__ A Element(int64_t e, A p) const {
    A term;
    WithRule(rule, [&](const auto& of) {
      if constexpr (Rule::kMasked)
        dx[e] = static_cast<T>(of(static_cast<A>(g[e]), residual[e / 8] >> (e % 8) & 1, p, &term));
      else
        dx[e] = static_cast<T>(of(static_cast<A>(g[e]), static_cast<A>(residual[e]), p, &term));
    });
    return term;
  }
};

template <class T, class Rule>
cudaError_t Launch(Rule rule, const ChannelShape& shape, const void* g, const void* residual, const void* operand,
                   void* dx, void* doperand, void* workspace, cudaStream_t stream) {
  using Op = ChannelOp<T, Rule>;
  const Op op{rule, static_cast<const T*>(g), static_cast<const typename Op::Residual*>(residual),
              static_cast<const T*>(operand), static_cast<T*>(dx)};
  const bool vectors = IsVectorAligned(g, dx) && (Rule::kMasked || IsVectorAligned(residual));
  return MapAndSum(op, shape, vectors, workspace, static_cast<T*>(doperand), stream);
}

}  // namespace

cudaError_t BiasBackward(const Activation& activation, DType dtype, const ChannelShape& shape, const void* g,
                         const void* residual, const void* bias, void* dx, void* dbias, void* workspace,
                         cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    if (const auto slopes = SlopesOf(activation)) {
      const FromMask<T> rule{static_cast<A>(slopes->inside), static_cast<A>(slopes->outside)};
      return Launch<T>(rule, shape, g, residual, nullptr, dx, dbias, workspace, stream);
    }
    return VisitSmooth<T>(activation, [&](auto f) {
      using F = decltype(f);
      using Rule = std::conditional_t<std::is_same_v<F, OfOutput<T>>, FromOutput<T>, FromInput<T, F>>;
      return Launch<T>(Rule{f}, shape, g, residual, bias, dx, dbias, workspace, stream);
    });
  });
}

cudaError_t PReluBackward(DType dtype, const ChannelShape& shape, const void* g, const void* x, const void* alpha,
                          void* dx, void* dalpha, void* workspace, cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return Launch<T>(PRelu<T>{}, shape, g, x, alpha, dx, dalpha, workspace, stream);
  });
}

int64_t ChannelWorkspace(DType dtype, const ChannelShape& shape) {
  int64_t bytes = 0;
  (void)VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    bytes = Size(shape) == 0 ? 0 : PartialLength<T>(shape) * static_cast<int64_t>(sizeof(Accumulator<T>));
    return cudaSuccess;
  });
  return bytes;
}

}  // namespace jaxdnn::activation
