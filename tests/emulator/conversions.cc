// Comparisons and conversions.
#include <algorithm>

#include "instructions.h"

namespace emulator {
namespace {

// What two numbers can be to each other, and how a third predicate goes in.
enum : int64_t { kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8, kAlone = 0, kAnd = 16, kOr = 32, kXor = 64 };

template <class T>
int64_t Relation(T a, T b) {
  return a < b ? kLess : a == b ? kEqual : a > b ? kGreater : kUnordered;
}

template <class T>
bool Compare(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const auto source = [&](int k) {
      if constexpr (!std::is_same_v<T, float>) return Get<T>(w.r[i.s[k]], l);
      const float v = FloatOf(i.type, Get<uint32_t>(w.r[i.s[k]], l));
      return static_cast<T>(i.flags & kFtz ? Flush(v) : v);
    };
    bool p = i.immediate & Relation(source(0), source(1)), q = !p;
    if (i.s.size() > 2) {
      const bool c = Predicate(w, i, 2, l);
      const auto with = [&](bool v) { return i.immediate & kAnd ? v && c : i.immediate & kOr ? v || c : v != c; };
      p = with(p);
      q = with(q);
    }
    w.r[i.d[0]][l] = p;
    if (i.d.size() > 1) w.r[i.d[1]][l] = q;
  });
  return true;
}

// set.u32, of pairs: all bits of a half, or none.
bool ComparePair(Warp& w, const Instruction& i, Mask m) {
  const Scalar type = PartOf(i.type2);
  ForLanes(m, [&](int l) {
    const auto half = [&](int shift) -> uint64_t {
      const auto source = [&](int k) { return FloatOf(type, Get<uint32_t>(w.r[i.s[k]], l) >> shift); };
      return i.immediate & Relation(source(0), source(1)) ? 0xFFFF : 0;
    };
    w.r[i.d[0]][l] = half(16) << 16 | half(0);
  });
  return true;
}

// One float, as 1 or 0.
bool CompareToFloat(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const auto source = [&](int k) { return Get<float>(w.r[i.s[k]], l); };
    Put(w.r[i.d[0]], l, i.immediate & Relation(source(0), source(1)) ? 1.0f : 0.0f);
  });
  return true;
}

int64_t RelationNamed(const std::string& name) {
  constexpr int64_t kLessEqual = kLess | kEqual, kGreaterEqual = kGreater | kEqual, kNotEqual = kLess | kGreater;
  static const std::map<std::string_view, int64_t> kRelations = {
      {"eq", kEqual},
      {"ne", kNotEqual},
      {"lt", kLess},
      {"le", kLessEqual},
      {"gt", kGreater},
      {"ge", kGreaterEqual},
      {"lo", kLess},
      {"ls", kLessEqual},
      {"hi", kGreater},
      {"hs", kGreaterEqual},
      {"equ", kEqual | kUnordered},
      {"neu", kNotEqual | kUnordered},
      {"ltu", kLess | kUnordered},
      {"leu", kLessEqual | kUnordered},
      {"gtu", kGreater | kUnordered},
      {"geu", kGreaterEqual | kUnordered},
      {"num", kLessEqual | kGreater},
      {"nan", kUnordered},
  };
  return kRelations.at(name);
}

void BindCompare(Operands& o) {
  const Scalar t = o.i.type;
  const Run run = t == Scalar::kF64 ? Compare<double>
                  : IsFloat(t)      ? Compare<float>
                                    : WithInteger(t, [](auto zero) -> Run { return Compare<decltype(zero)>; });
  const int64_t combine = o.Has("and") ? kAnd : o.Has("or") ? kOr : o.Has("xor") ? kXor : kAlone;
  o.Plain(run, RelationNamed(o.words[1]) | combine);
}
void BindSet(Operands& o) {
  const bool pair = o.i.type == Scalar::kU32 && IsPair(o.i.type2);
  if (!pair && !(o.i.type == Scalar::kF32 && o.i.type2 == Scalar::kF32)) throw Error("unknown types");
  o.Plain(pair ? ComparePair : CompareToFloat, RelationNamed(o.words[1]));
}

// Between single numbers. i.immediate says how floats become whole numbers, or that they need not.
constexpr double (*kWhole[])(double) = {std::nearbyint, std::trunc, std::floor, std::ceil};
constexpr int64_t kNotWhole = 4;

uint64_t Converted(const Instruction& i, uint64_t bits) {
  const Scalar to = i.type, from = i.type2;
  const auto integer = [&](__int128 v) {
    return WithInteger(to, [&](auto zero) { return static_cast<uint64_t>(static_cast<decltype(zero)>(v)); });
  };
  const int width = 8 * Bytes(to);
  const auto clamped = [&](__int128 v) {
    const __int128 low = IsSigned(to) ? -(__int128{1} << (width - 1)) : 0;
    return integer(std::clamp(v, low, low + (__int128{1} << width) - 1));
  };
  if (!IsFloat(from)) {
    const auto v = WithInteger(from, [&](auto zero) { return __int128{static_cast<decltype(zero)>(bits)}; });
    if (!IsFloat(to)) return i.flags & kSat ? clamped(v) : integer(v);
    if (to == Scalar::kF32) return std::bit_cast<uint32_t>(RoundToFloat(static_cast<long double>(v), i.flags));
    return BitsOf(to, static_cast<double>(v), i.flags);
  }
  double v = DoubleOf(from, bits);
  if (i.flags & kFtz && from == Scalar::kF32) v = Flush(static_cast<float>(v));
  if (i.immediate != kNotWhole) v = kWhole[i.immediate](v);
  if (IsFloat(to)) return BitsOf(to, v, i.flags);
  // What is no number: zero, but for 64 bits and from double the largest negative one.
  if (std::isnan(v)) return width == 64 || from == Scalar::kF64 ? integer(__int128{1} << (width - 1)) : 0;
  return clamped(static_cast<__int128>(std::clamp(v, -0x1p65, 0x1p65)));
}
bool Convert(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = Converted(i, w.r[i.s[0]][l]); });
  return true;
}

// From a pair, or from two floats of which the upper one comes first, to a pair.
bool ConvertPair(Warp& w, const Instruction& i, Mask m) {
  const Scalar to = PartOf(i.type), from = PartOf(i.type2);
  ForLanes(m, [&](int l) {
    const auto part = [&](int k) {
      const uint64_t bits = IsPair(i.type2) ? w.r[i.s[0]][l] >> 8 * Bytes(from) * k : w.r[i.s[1 - k]][l];
      return BitsOf(to, DoubleOf(from, bits), i.flags);
    };
    w.r[i.d[0]][l] = part(1) << 8 * Bytes(to) | part(0);
  });
  return true;
}

void BindConvert(Operands& o) {
  const int64_t whole = o.Has("rni") ? 0 : o.Has("rzi") ? 1 : o.Has("rmi") ? 2 : o.Has("rpi") ? 3 : kNotWhole;
  if (!IsFloat(o.i.type) && IsFloat(o.i.type2) && whole == kNotWhole) throw Error("no rounding");
  o.Plain(IsPair(o.i.type) ? ConvertPair : Convert, whole);
}

}  // namespace

const Table kConversions = {
    {"setp", BindCompare},
    {"set", BindSet},
    {"cvt", BindConvert},
    {"cvt.rn.tf32", Bitwise<uint32_t>([](auto bits) { return RoundToTf32(bits); })},
    {"cvt.rna.tf32", Bitwise<uint32_t>([](auto bits) { return RoundToTf32(bits, true); })},
};

}  // namespace emulator
