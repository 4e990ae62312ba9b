// What the forward kernels do to their sums before they store them.
#pragma once

#include "cuda/activation/functions.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/float8.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

__host__ __device__ inline bool IsNone(const Epilogue& e) {
  return e.bias == nullptr && e.residual == nullptr && e.scale == nullptr &&
         e.activation.kind == activation::Kind::kIdentity;
}

// v += the elements of `array`, the epilogue's bias or residual, from `offset` on; nothing where there is none.
template <class Out, int kN>
__device__ __forceinline__ void Add(Accumulator<Out> (&v)[kN], const void* array, int64_t offset) {
  if (array == nullptr) return;
  const auto more = *reinterpret_cast<const Vec<Out, kN>*>(static_cast<const Out*>(array) + offset);
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] += static_cast<Accumulator<Out>>(more.v[i]);
}

// The same of operands of type In, or of floats where the result is `wide`.
template <class In, int kN>
__device__ __forceinline__ void AddEither(float (&v)[kN], const void* array, int64_t offset, bool wide) {
  if (sizeof(In) == 2 && wide)
    Add<float>(v, array, offset);
  else
    Add<In>(v, array, offset);
}

// The elements themselves, as they lie in memory: what is added only when all are on their way keeps no load waiting.
template <class In, int kN>
class EitherVec {
 public:
  EitherVec() = default;
  // Zeros where there is no array.
  __device__ EitherVec(const void* array, int64_t offset, bool wide) {
    if (array != nullptr) Load(array, offset, wide);
  }
  __device__ void Load(const void* array, int64_t offset, bool wide) {
    if (sizeof(In) == 4 || wide)
      Get(static_cast<const float*>(array) + offset);
    else
      Get(static_cast<const In*>(array) + offset);
  }
  __device__ void AddTo(float (&v)[kN], bool wide) const {
    if (sizeof(In) == 4 || wide)
      Add<float>(v);
    else
      Add<In>(v);
  }

 private:
  template <class T>
  __device__ void Get(const T* from) {
    const auto words = *reinterpret_cast<const Words<T, kN>*>(from);
#pragma unroll
    for (int i = 0; i < kN * int(sizeof(T)) / 4; ++i) words_.v[i] = words.v[i];
  }
  template <class T>
  __device__ void Add(float (&v)[kN]) const {
    Words<T, kN> words;
#pragma unroll
    for (int i = 0; i < kN * int(sizeof(T)) / 4; ++i) words.v[i] = words_.v[i];
    const auto more = BitCast<Vec<T, kN>>(words);
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] += static_cast<float>(more.v[i]);
  }

  Words<float, kN> words_ = {};
};

// x times the logistic function of linear x + cubic x^3, or that function by itself: silu, the tanh form of gelu, and
// sigmoid.
template <class Out>
struct OfLogistic {
  using A = Accumulator<Out>;
  A linear = 1, cubic = 0;
  bool gates = false;

  __device__ explicit OfLogistic(const activation::Activation& activation) {
    using Tanh = activation::GeluTanh<Out>;
    const bool is_gelu = activation.kind == activation::Kind::kGeluTanh;
    if (is_gelu) cubic = Tanh::kCubic;
    gates = activation.kind != activation::Kind::kSigmoid;
    if (gates) linear = is_gelu ? A(Tanh::kLinear) : static_cast<A>(activation.parameter);
  }
  __device__ A Forward(A x) const {
    // Without a cube its factor of 0 must not meet an infinity.
    const A slope = cubic == A(0) ? linear : linear + cubic * x * x;
    const A value = activation::Logistic<Out>(slope * x).value;
    return gates ? x * value : value;
  }
};

// The activations that many networks have; whether it is one.
template <class Out, int kN>
__device__ __forceinline__ bool ActivateAsMany(Accumulator<Out> (&v)[kN], const activation::Activation& activation) {
  using Kind = activation::Kind;
  const auto apply = [&v](const auto& f) {
#pragma unroll
    for (auto& each : v) each = f.Forward(each);
    return true;
  };
  const auto p = static_cast<Accumulator<Out>>(activation.parameter);
  switch (activation.kind) {
    case Kind::kIdentity:
      return true;
    case Kind::kRelu:
      return apply(activation::Relu<Out>{});
    case Kind::kClippedRelu:
      return apply(activation::ClippedRelu<Out>{p});
    case Kind::kLeakyRelu:
      return apply(activation::LeakyRelu<Out>{p});
    case Kind::kHardSwish:
      return apply(activation::HardSwish<Out>{});
    case Kind::kSigmoid:
    case Kind::kSilu:
    case Kind::kGeluTanh:
      return apply(OfLogistic<Out>(activation));
    case Kind::kGelu:
      return apply(activation::Gelu<Out>{});
    default:
      return false;
  }
}

// All activations in one kernel: callers keep to one call, in a loop that is not unrolled, of a few elements. Those
// that few networks have are called as functions, an element at a time, so that not every kernel has their code; but
// not where kCalls is false, for kernels that have no registers to spare around a call.
template <class Out, bool kCalls = true, int kN>
__device__ __forceinline__ void Activate(Accumulator<Out> (&v)[kN], const activation::Activation& activation) {
  const auto apply = [&v](const auto& f) {
#pragma unroll
    for (auto& each : v) each = f.Forward(each);
  };
  if constexpr (!kCalls)
    activation::WithFunctor<Out>(activation, apply);
  else if (!ActivateAsMany<Out>(v, activation))
    apply(activation::AnyActivation<Out>{activation});
}

// Moves what follows the first kCount registers to the front, so that a loop that is not unrolled can take an array
// piece by piece.
template <int kCount, class T, int kN>
__device__ __forceinline__ void Rotate(T (&v)[kN]) {
#pragma unroll
  for (int i = 0; i + kCount < kN; ++i) v[i] = v[i + kCount];
}

// The same, and the first ones to the end.
template <int kCount, class T, int kN>
__device__ __forceinline__ void Turn(T (&v)[kN]) {
  T first[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) first[i] = v[i];
  Rotate<kCount>(v);
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[kN - kCount + i] = first[i];
}

// All activations of four results of type In, or of floats where those are `wide`, for kernels that have no call, nor
// room for the code of more elements. Those that few networks have are computed as floats' are, one by one.
template <class In>
__device__ __forceinline__ void ActivateFour(float (&v)[4], const activation::Activation& activation, bool wide) {
  if ((sizeof(In) == 4 || !wide) && ActivateAsMany<In>(v, activation)) return;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const float out = activation::WithFunctor<float>(activation, [&](const auto& f) { return f.Forward(v[0]); });
    Rotate<1>(v);
    v[3] = out;
  }
}

// Whether an activation only bounds what it gets.
__host__ __device__ inline bool IsClamp(const activation::Activation& activation) {
  return activation.kind == activation::Kind::kRelu || activation.kind == activation::Kind::kClippedRelu;
}

// One that does.
struct Clamp {
  float most;

  __device__ explicit Clamp(const activation::Activation& activation)
      : most(activation.kind == activation::Kind::kRelu ? INFINITY : float(activation.parameter)) {}
  __device__ float operator()(float x) const { return activation::MinOrNan(activation::MaxOrNan(x, 0.f), most); }
};

// The activations of most networks, which take little code for any number of elements; whether it is one.
template <int kN>
__device__ __forceinline__ bool ActivateSimply(float (&v)[kN], const activation::Activation& activation) {
  if (activation.kind == activation::Kind::kIdentity) return true;
  if (!IsClamp(activation)) return false;
  const Clamp clamp(activation);
#pragma unroll
  for (float& each : v) each = clamp(each);
  return true;
}

// Activates an array kCount elements at a time, in such a loop; a long one in parts, which move up less. What is left
// of most layers needs none.
template <class Out, int kCount, int kN>
__device__ __forceinline__ void ActivateInTurn(float (&v)[kN], const activation::Activation& activation) {
  constexpr int kPart = kN <= 32 ? kCount : kN % 32 == 0 ? 32 : kN % 16 == 0 ? 16 : kN % 8 == 0 ? 8 : kCount;
  static_assert(kN % kPart == 0, "whole turns");
  if (ActivateSimply(v, activation)) return;
#pragma unroll 1
  for (int turn = 0; turn < kN / kPart; ++turn) {
    float (&first)[kPart] = reinterpret_cast<float (&)[kPart]>(v);
    if constexpr (kPart == kCount)
      Activate<Out>(first, activation);
    else
      ActivateInTurn<Out, kCount>(first, activation);
    Turn<kPart>(v);
  }
}

// The same, of results that are floats of shorter operands where they are `wide`. Few layers have those and an
// activation, whose code for floats is not worth another copy in each kernel.
template <class In, int kCount, int kN>
__device__ __forceinline__ void ActivateEither(float (&v)[kN], const activation::Activation& activation, bool wide) {
  if (sizeof(In) == 4 || !wide) return ActivateInTurn<In, kCount>(v, activation);
  if (activation.kind == activation::Kind::kIdentity) return;
#pragma unroll 1
  for (int i = 0; i < kN; ++i) {
    v[0] = activation::AnyActivation<float>{activation}.Forward(v[0]);
    Turn<1>(v);
  }
}

// Activates sums, in a loop that is not unrolled: four at a time, of parts that move up less than all would.
template <class In, int kN>
__device__ __forceinline__ void ActivateSums(float (&v)[kN], const activation::Activation& activation,
                                             bool wide = false) {
  constexpr int kPart = kN <= 32 ? kN : kN % 32 == 0 ? 32 : kN % 16 == 0 ? 16 : 8;
  static_assert(kN % kPart == 0, "whole turns");
  if (ActivateSimply(v, activation)) return;
#pragma unroll 1
  for (int part = 0; part < kN / kPart; ++part) {
    float (&first)[kPart] = reinterpret_cast<float (&)[kPart]>(v);
#pragma unroll 1
    for (int four = 0; four < kPart / 4; ++four) {
      float four_sums[4] = {v[0], v[1], v[2], v[3]};
      ActivateFour<In>(four_sums, activation, wide);
      Rotate<4>(first);
#pragma unroll
      for (int i = 0; i < 4; ++i) first[kPart - 4 + i] = four_sums[i];
    }
    Turn<kPart>(v);
  }
}

template <class Out, int kN>
__device__ __forceinline__ Vec<Out, kN> Round(const Accumulator<Out> (&v)[kN]) {
  Vec<Out, kN> out;
#pragma unroll
  for (int i = 0; i < kN; ++i) out.v[i] = static_cast<Out>(v[i]);
  return out;
}

// Calls f with a pointer to elements of the type, which is of floats of 16 or 32 bits, and where In is no byte, In or
// the type that it is summed in.
template <class In = int8_t, class Void, class F>
__device__ __forceinline__ void WithFloats(DType type, Void* array, const F& f) {
  const auto as = [&](auto tag) {
    using Type = typename decltype(tag)::type;
    f(static_cast<std::conditional_t<std::is_const_v<Void>, const Type, Type>*>(array));
  };
  if constexpr (sizeof(In) == 8) {
    as(TypeTag<double>());
  } else if (sizeof(In) == 4 || type == DType::kF32) {
    as(TypeTag<float>());
  } else if constexpr (sizeof(In) == 2) {
    as(TypeTag<In>());
  } else if (type == DType::kF16) {
    as(TypeTag<__half>());
  } else {
    as(TypeTag<__nv_bfloat16>());
  }
}

// Add, of an array of the type.
template <class In, class Sum, int kN>
__device__ __forceinline__ void AddTyped(DType type, Sum (&v)[kN], const void* array, int64_t offset) {
  if (array == nullptr) return;
  WithFloats<In>(type, array, [&](auto* typed) {
    Add<std::remove_const_t<std::remove_pointer_t<decltype(typed)>>>(v, typed, offset);
  });
}

struct ColumnFactors {
  float scale = 1, bias = 0;
};

// Of the column whose scale and bias are at `channel`, or if that is -1 of none.
template <class In = int8_t>
__device__ __forceinline__ ColumnFactors LoadFactors(DType type, const Epilogue& epilogue, int64_t channel) {
  ColumnFactors factors;
  if (epilogue.scale != nullptr && channel >= 0) factors.scale = epilogue.scale[channel];
  if (epilogue.bias != nullptr && channel >= 0)
    WithFloats<In>(type, epilogue.bias, [&](auto* typed) { factors.bias = static_cast<float>(typed[channel]); });
  return factors;
}

// What becomes of the sums of 8-bit operands in four neighbouring columns, of many rows: integers are stored as they
// are, others as floats of the type, after the epilogue.
struct BytesEpilogue {
  static constexpr int kN = 4;
  // Copies, so that a store to anywhere changes none of them.
  const DType type;
  const void* const residual;
  const activation::Activation activation;
  const bool biased;
  float scale[kN], bias[kN];

  // factors(i) are those of column i.
  template <class Factors>
  __device__ __forceinline__ BytesEpilogue(DType type, const Epilogue& epilogue, const Factors& factors)
      : type(type), residual(epilogue.residual), activation(epilogue.activation), biased(epilogue.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const ColumnFactors of_column = factors(i);
      scale[i] = of_column.scale;
      bias[i] = of_column.bias;
    }
  }

  // Calls visit(store, unroll), whose loop over rows, unrolled so many times, calls store(sums, to) for each, where kN
  // elements are aligned at `to`. What the elements are, and whether the loop holds the code of all activations, is
  // decided once.
  template <class Visit>
  __device__ __forceinline__ void ForRows(void* out, const Visit& visit) const {
    constexpr std::integral_constant<int, 4> kFour;
    const auto kind = activation.kind;
    const bool relu = kind == activation::Kind::kRelu;
    if (type == DType::kS32) {
      visit([&](const auto& sums, int64_t to) { StoreRun(sums, static_cast<int*>(out) + to); }, kFour);
    } else if (relu || kind == activation::Kind::kIdentity) {
      WithFloats(type, out, [&](auto* typed) {
        const auto store = [&](const auto& sums, int64_t to) {
          float v[kN];
          Scale(sums, 0, v);
          Add<Element<decltype(typed)>>(v, residual, to);
#pragma unroll
          for (float& each : v) each = relu && each < 0 ? 0 : each;
          StoreRun(Round<Element<decltype(typed)>>(v), typed + to);
        };
        visit(store, kFour);
      });
    } else {
      visit([&](const auto& sums, int64_t to) { StoreAny(sums, 0, out, to); }, std::integral_constant<int, 1>());
    }
  }

  // Column `first` by itself, or all.
  template <class Sum, int kCount>
  __device__ __forceinline__ void StoreAny(const Vec<Sum, kCount>& sums, int first, void* out, int64_t to) const {
    if (type == DType::kS32) return StoreRun(sums, static_cast<int*>(out) + to);
    float v[kCount];
    Scale(sums, first, v);
    WithFloats(type, residual, [&](auto* typed) { Add<Element<decltype(typed)>>(v, typed, to); });
    Activate<float>(v, activation);
    WithFloats(type, out, [&](auto* typed) { StoreRun(Round<Element<decltype(typed)>>(v), typed + to); });
  }

 private:
  template <class Pointer>
  using Element = std::remove_const_t<std::remove_pointer_t<Pointer>>;

  template <class Run, class T>
  static __device__ __forceinline__ void StoreRun(const Run& run, const T* to) {
    *reinterpret_cast<Run*>(const_cast<T*>(to)) = run;
  }

  template <class Sum, int kCount>
  __device__ __forceinline__ void Scale(const Vec<Sum, kCount>& sums, int first, float (&v)[kCount]) const {
    // Without an index that would put an array into memory.
    const auto of = [&](const float (&each)[kN], int i) {
      if constexpr (kCount == kN) return each[i];
      return first == 0 ? each[0] : first == 1 ? each[1] : first == 2 ? each[2] : each[3];
    };
    // Rounded before the bias is added, as by two operations elsewhere.
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fmul_rn(static_cast<float>(sums.v[i]), of(scale, i));
    if (biased) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += of(bias, i);
    }
  }
};

}  // namespace jaxdnn::conv
