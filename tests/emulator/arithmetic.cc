// Instructions that add, multiply, divide and choose: of floats and of integers.
#include <algorithm>

#include "instructions.h"

namespace emulator {
namespace {

// Of floats that instructions round or flush as they say. T is what the operation is computed in: of the narrower types
// double, so that they are rounded once.
template <class T, class Op>
bool Rounded(Warp& w, const Instruction& i, Mask m) {
  const Scalar type = PartOf(i.type);
  ForLanes(m, [&](int l) {
    uint64_t result = 0;
    for (int shift = 0; shift == 0 || (shift == 16 && IsPair(i.type)); shift += 16) {
      bool all = true;  // are numbers
      const auto source = [&](int k) {
        T v = static_cast<T>(DoubleOf(type, w.r[i.s[k]][l] >> shift));
        if (i.flags & kFtz && type == Scalar::kF32) v = Flush(static_cast<float>(v));
        all &= !std::isnan(v);
        return v;
      };
      const double v = Call<T>(Op{}, source);
      result |= BitsOf(type, i.flags & kNan && !all ? NAN : v, i.flags) << shift;
    }
    w.r[i.d[0]][l] = result;
  });
  return true;
}

template <class Op>
void Float(Operands& o) {
  const Scalar t = o.i.type;
  if (o.i.flags == 0 && t == Scalar::kF32) return o.Plain(Each<float, Op>);
  if (o.i.flags == 0 && t == Scalar::kF64) return o.Plain(Each<double, Op>);
  // Directions of float are found in double, where that is exact enough to tell them.
  const bool directed = o.i.flags & (kRm | kRp | kRz);
  o.Plain(t == Scalar::kF32 && !directed ? Rounded<float, Op> : Rounded<double, Op>);
}

// A table's entries: of floats, of them and integers, and of them and integers modulo their range.
template <class Op>
Binder Floats(Op) {
  return Float<Op>;
}
template <class Op>
Binder Both(Op) {
  return [](Operands& o) { IsFloat(o.i.type) ? Float<Op>(o) : Integers(Op{})(o); };
}
template <class Op>
Binder Wrapping(Op) {
  return [](Operands& o) {
    if (o.Has("cc")) throw Error("a carry");
    IsFloat(o.i.type) ? Float<Op>(o) : Modulo(Op{})(o);
  };
}

template <class T>
T MultiplyAdd(T a, T b, T c) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fma(a, b, c);
  else
    return a * b + c;
}

// Of twice as many bits, at least.
template <class T>
using Wide = std::conditional_t<sizeof(T) < 8, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>;

template <class T>
T High(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) * b >> 8 * sizeof(T));
}

// mul.wide and mad.wide: of a result, and a third operand, of twice as many bits.
template <class T>
bool MultiplyWide(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const auto product = static_cast<Wide<T>>(Get<T>(w.r[i.s[0]], l)) * Get<T>(w.r[i.s[1]], l);
    const uint64_t sum = static_cast<uint64_t>(product) + (i.s.size() > 2 ? w.r[i.s[2]][l] : 0);
    w.r[i.d[0]][l] = sizeof(T) == 2 ? static_cast<uint32_t>(sum) : sum;
  });
  return true;
}
void BindWide(Operands& o) {
  o.Plain(WithInteger(o.i.type, [](auto zero) -> Run { return MultiplyWide<decltype(zero)>; }));
}

// Integers by zero: all ones, as the hardware's sequence gives, and the dividend.
template <class T>
T Quotient(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a / b;
  else
    return b == 0 ? static_cast<T>(-1) : static_cast<T>(static_cast<Wide<T>>(a) / b);
}
template <class T>
T Remainder(T a, T b) {
  return b == 0 ? a : static_cast<T>(static_cast<Wide<T>>(a) % b);
}

// A NaN loses against a number.
template <class T>
T Larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return b;
    if (a == b) return std::signbit(a) ? b : a;
  }
  return b > a ? b : a;
}
template <class T>
T Smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return -Larger(-a, -b);
  else
    return std::min(a, b);
}
template <class T>
T Absolute(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return a < 0 ? static_cast<T>(-static_cast<uint64_t>(a)) : a;
}

}  // namespace

const Table kArithmetic = {
    {"add", Wrapping([](auto a, auto b) { return a + b; })},
    {"sub", Wrapping([](auto a, auto b) { return a - b; })},
    {"mul", Wrapping([](auto a, auto b) { return a * b; })},
    {"mad", Wrapping([](auto a, auto b, auto c) { return MultiplyAdd(a, b, c); })},
    {"fma", Floats([](auto a, auto b, auto c) { return MultiplyAdd(a, b, c); })},
    {"neg", Wrapping([](auto a) { return -a; })},
    {"mul.hi", Integers([](auto a, auto b) { return High(a, b); })},
    {"mul.wide", BindWide},
    {"mad.wide", BindWide},
    {"div", Both([](auto a, auto b) { return Quotient(a, b); })},
    {"rem", Integers([](auto a, auto b) { return Remainder(a, b); })},
    {"max", Both([](auto a, auto b) { return Larger(a, b); })},
    {"min", Both([](auto a, auto b) { return Smaller(a, b); })},
    {"abs", Both([](auto a) { return Absolute(a); })},
    {"copysign", Floats([](auto a, auto b) { return std::copysign(b, a); })},
    {"sqrt", Floats([](auto a) { return std::sqrt(a); })},
    {"rsqrt", Floats([](auto a) { return 1 / std::sqrt(a); })},
    {"rcp", Floats([](auto a) { return 1 / a; })},
    {"ex2", Floats([](auto a) { return std::exp2(a); })},
    {"lg2", Floats([](auto a) { return std::log2(a); })},
    {"tanh", Floats([](auto a) { return std::tanh(a); })},
};

}  // namespace emulator
