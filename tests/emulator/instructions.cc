// What instructions do, but for those on matrices and tiles (matrices.cc).
#include "instructions.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace emulator {

[[noreturn]] void Fail(const Instruction& i, const std::string& why) { throw Error(why + " in: " + i.text); }

uint8_t* Shared(Warp& w, uint64_t address, int64_t bytes, const Instruction& i) {
  Block* block = w.block;
  if (const uint64_t rank = address >> 24 & 0xFF; rank > 0) {
    if (rank > block->cluster->blocks.size()) Fail(i, "shared memory of no block of the cluster");
    block = block->cluster->blocks[rank - 1].get();
  }
  const int64_t offset = address & 0xFFFFFF;
  if (offset + bytes > block->shared_bytes || offset < kSharedBase)
    Fail(i, "shared address " + std::to_string(offset) + " of " + std::to_string(bytes) + " bytes is beyond " +
                std::to_string(block->shared_bytes));
  if (offset % bytes != 0 && bytes <= 16 && (bytes & (bytes - 1)) == 0)
    Fail(i, "shared address " + std::to_string(offset) + " is not aligned");
  return block->shared + offset;
}

namespace {

// 16-bit floats -----------------------------------------------------------------------------------------------------

float FromHalf(uint16_t h) {
  _Float16 value;
  std::memcpy(&value, &h, 2);
  return static_cast<float>(value);
}
uint16_t ToHalf(double v) {
  const _Float16 value = static_cast<_Float16>(v);
  uint16_t h;
  std::memcpy(&h, &value, 2);
  return std::isnan(v) ? 0x7FFF : h;
}
float FromBFloat(uint16_t b) {
  const uint32_t bits = uint32_t{b} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// To nearest, ties to even. The way from double over float rounds once: what is lost first is remembered in a last bit.
uint16_t ToBFloat(double v) {
  if (std::isnan(v)) return 0x7FFF;
  float f = static_cast<float>(v);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isfinite(f) && static_cast<double>(f) != v) {
    if (std::fabs(static_cast<double>(f)) > std::fabs(v)) --bits;  // towards zero
    bits |= 1;
  }
  if (std::isfinite(f)) bits += 0x7FFF + (bits >> 16 & 1);
  return static_cast<uint16_t>(bits >> 16);
}

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// Reading and writing registers -------------------------------------------------------------------------------------

template <class T>
T Get(const Reg& r, int lane) {
  T value;
  std::memcpy(&value, &r[lane], sizeof(T));
  return value;
}
template <class T>
void Put(Reg& r, int lane, T value) {
  if constexpr (std::is_integral_v<T> && sizeof(T) < 8) {  // a load may fill a wider register
    r[lane] = static_cast<uint64_t>(static_cast<int64_t>(value));
  } else {
    r[lane] = 0;
    std::memcpy(&r[lane], &value, sizeof(T));
  }
}

template <class F>
void ForLanes(Mask lanes, F f) {
  if (lanes == ~Mask{0}) {
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) f(__builtin_ctz(lanes));
  }
}

enum Flag : uint32_t {
  kFtz = 1,
  kSat = 2,
  kHi = 4,
  kRm = 8,
  kRp = 16,
  kRz = 32,
  kRelu = 64,
  kNan = 128,
  kWrap = 256,
  kLeft = 512,
  kNegate = 1024,
  kTransposed = 2048
};

float Flush(float v) { return std::fabs(v) < std::numeric_limits<float>::min() ? std::copysign(0.0f, v) : v; }

// A float operation: denormals flushed and results clipped as the instruction says. Sixteen-bit ones are computed in
// double and rounded once.
template <class Op>
bool Floats(Warp& w, const Instruction& i, Mask m) {
  const auto compute = [&](auto get, auto put) {
    ForLanes(m, [&](int l) {
      if constexpr (Op::kInputs == 1) put(w.r[i.d[0]], l, Op::Run(get(w.r[i.s[0]], l)));
      if constexpr (Op::kInputs == 2) put(w.r[i.d[0]], l, Op::Run(get(w.r[i.s[0]], l), get(w.r[i.s[1]], l)));
      if constexpr (Op::kInputs == 3)
        put(w.r[i.d[0]], l, Op::Run(get(w.r[i.s[0]], l), get(w.r[i.s[1]], l), get(w.r[i.s[2]], l)));
    });
  };
  const bool ftz = i.flags & kFtz, sat = i.flags & kSat, relu = i.flags & kRelu;
  const auto clip = [&](auto v) {
    if (sat) v = v > 0 ? std::min(v, decltype(v){1}) : decltype(v){0};
    if (relu && !(v > 0) && !std::isnan(v)) v = 0;
    return v;
  };
  switch (i.type) {
    case Scalar::kF32: {
      if (!ftz && !sat && i.flags == 0) {
        compute([](const Reg& r, int l) { return Get<float>(r, l); }, [](Reg& r, int l, float v) { Put(r, l, v); });
        return true;
      }
      const uint32_t round = i.flags & (kRm | kRp | kRz);
      if (round != 0) {  // in double, where that is exact enough to tell the direction
        compute(
            [&](const Reg& r, int l) { return static_cast<double>(ftz ? Flush(Get<float>(r, l)) : Get<float>(r, l)); },
            [&](Reg& r, int l, double v) {
              float f = static_cast<float>(v);
              const bool down = round & kRm || (round & kRz && v > 0), up = round & kRp || (round & kRz && v < 0);
              if (down && static_cast<double>(f) > v) f = std::nextafter(f, -INFINITY);
              if (up && static_cast<double>(f) < v) f = std::nextafter(f, INFINITY);
              Put(r, l, clip(ftz ? Flush(f) : f));
            });
        return true;
      }
      compute([&](const Reg& r, int l) { return ftz ? Flush(Get<float>(r, l)) : Get<float>(r, l); },
              [&](Reg& r, int l, float v) { Put(r, l, clip(ftz ? Flush(v) : v)); });
      return true;
    }
    case Scalar::kF64:
      compute([](const Reg& r, int l) { return Get<double>(r, l); }, [](Reg& r, int l, double v) { Put(r, l, v); });
      return true;
    case Scalar::kF16:
    case Scalar::kBF16: {
      const bool half = i.type == Scalar::kF16;
      compute(
          [&](const Reg& r, int l) {
            return static_cast<double>(half ? FromHalf(Get<uint16_t>(r, l)) : FromBFloat(Get<uint16_t>(r, l)));
          },
          [&](Reg& r, int l, double v) { Put<uint16_t>(r, l, half ? ToHalf(clip(v)) : ToBFloat(clip(v))); });
      return true;
    }
    case Scalar::kF16x2:
    case Scalar::kBF16x2: {
      const bool half = i.type == Scalar::kF16x2;
      Reg result = {};
      for (int part = 0; part < 2; ++part) {
        const auto get = [&](const Reg& r, int l) {
          const uint16_t bits = static_cast<uint16_t>(r[l] >> 16 * part);
          return static_cast<double>(half ? FromHalf(bits) : FromBFloat(bits));
        };
        const auto put = [&](Reg&, int l, double v) {
          result[l] |= uint64_t{half ? ToHalf(clip(v)) : ToBFloat(clip(v))} << 16 * part;
        };
        compute(get, put);
      }
      ForLanes(m, [&](int l) { w.r[i.d[0]][l] = result[l]; });
      return true;
    }
    default:
      Fail(i, "no such float type");
  }
}

// The larger and the smaller number: a NaN loses against a number, but where the instruction says .NaN.
template <class T>
T Larger(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
struct FAdd {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return a + b;
  }
};
struct FSub {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return a - b;
  }
};
struct FMul {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return a * b;
  }
};
struct FDiv {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return a / b;
  }
};
struct FFma {
  static constexpr int kInputs = 3;
  template <class T>
  static T Run(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
struct FNeg {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return -a;
  }
};
struct FAbs {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::fabs(a);
  }
};
struct FSqrt {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::sqrt(a);
  }
};
struct FRcp {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return T{1} / a;
  }
};
struct FRsqrt {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return T{1} / std::sqrt(a);
  }
};
struct FExp2 {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::exp2(a);
  }
};
struct FLog2 {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::log2(a);
  }
};
struct FSin {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::sin(a);
  }
};
struct FCos {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::cos(a);
  }
};
struct FTanh {
  static constexpr int kInputs = 1;
  template <class T>
  static T Run(T a) {
    return std::tanh(a);
  }
};
struct FMax {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return Larger(a, b);
  }
};
struct FMin {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return -Larger(-a, -b);
  }
};
struct FMaxNan {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return std::isnan(a) || std::isnan(b) ? T(NAN) : Larger(a, b);
  }
};
struct FMinNan {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return std::isnan(a) || std::isnan(b) ? T(NAN) : -Larger(-a, -b);
  }
};
struct FMax3 {
  static constexpr int kInputs = 3;
  template <class T>
  static T Run(T a, T b, T c) {
    return Larger(Larger(a, b), c);
  }
};
struct FCopysign {
  static constexpr int kInputs = 2;
  template <class T>
  static T Run(T a, T b) {
    return std::copysign(b, a);
  }
};

// Integers ----------------------------------------------------------------------------------------------------------

template <class T, class Op>
bool Integers1(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    Put(w.r[i.d[0]], l, static_cast<typename Op::template Result<T>>(Op::Run(Get<T>(w.r[i.s[0]], l))));
  });
  return true;
}
template <class T, class Op>
bool Integers2(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    Put(w.r[i.d[0]], l,
        static_cast<typename Op::template Result<T>>(Op::Run(Get<T>(w.r[i.s[0]], l), Get<T>(w.r[i.s[1]], l))));
  });
  return true;
}
template <class T, class Op>
bool Integers3(Warp& w, const Instruction& i, Mask m) {
  using R = typename Op::template Result<T>;
  ForLanes(m, [&](int l) {
    Put(w.r[i.d[0]], l,
        static_cast<R>(Op::Run(Get<T>(w.r[i.s[0]], l), Get<T>(w.r[i.s[1]], l), Get<R>(w.r[i.s[2]], l))));
  });
  return true;
}

struct Same {
  template <class T>
  using Result = T;
};
struct Wide {
  template <class T>
  using Result = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                    std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
};
struct Word {
  template <class T>
  using Result = uint32_t;
};
template <class T>
using Big = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
template <class T>
using U = std::make_unsigned_t<T>;

struct IAdd : Same {
  template <class T>
  static T Run(T a, T b) {
    return static_cast<T>(U<T>(a) + U<T>(b));
  }
};
struct ISub : Same {
  template <class T>
  static T Run(T a, T b) {
    return static_cast<T>(U<T>(a) - U<T>(b));
  }
};
struct IMulLo : Same {
  template <class T>
  static T Run(T a, T b) {
    return static_cast<T>(uint64_t(a) * uint64_t(b));
  }
};
struct IMulHi : Same {
  template <class T>
  static T Run(T a, T b) {
    return static_cast<T>(Big<T>(a) * Big<T>(b) >> 8 * sizeof(T));
  }
};
struct IMulWide : Wide {
  template <class T>
  static Result<T> Run(T a, T b) {
    return static_cast<Result<T>>(Big<T>(a) * Big<T>(b));
  }
};
struct IMadLo : Same {
  template <class T>
  static T Run(T a, T b, T c) {
    return static_cast<T>(uint64_t(a) * uint64_t(b) + uint64_t(c));
  }
};
struct IMadHi : Same {
  template <class T>
  static T Run(T a, T b, T c) {
    return static_cast<T>(IMulHi::Run(a, b) + c);
  }
};
struct IMadWide : Wide {
  template <class T>
  static Result<T> Run(T a, T b, Result<T> c) {
    return static_cast<Result<T>>(uint64_t(IMulWide::Run(a, b)) + uint64_t(c));
  }
};
// By zero: all ones, as the hardware's sequence gives, and the dividend.
struct IDiv : Same {
  template <class T>
  static T Run(T a, T b) {
    return b == 0 ? static_cast<T>(-1) : static_cast<T>(Big<T>(a) / Big<T>(b));
  }
};
struct IRem : Same {
  template <class T>
  static T Run(T a, T b) {
    return b == 0 ? a : static_cast<T>(Big<T>(a) % Big<T>(b));
  }
};
struct IMin : Same {
  template <class T>
  static T Run(T a, T b) {
    return std::min(a, b);
  }
};
struct IMax : Same {
  template <class T>
  static T Run(T a, T b) {
    return std::max(a, b);
  }
};
struct IAnd : Same {
  template <class T>
  static T Run(T a, T b) {
    return a & b;
  }
};
struct IOr : Same {
  template <class T>
  static T Run(T a, T b) {
    return a | b;
  }
};
struct IXor : Same {
  template <class T>
  static T Run(T a, T b) {
    return a ^ b;
  }
};
struct INot : Same {
  template <class T>
  static T Run(T a) {
    return ~a;
  }
};
struct INeg : Same {
  template <class T>
  static T Run(T a) {
    return static_cast<T>(U<T>{0} - U<T>(a));
  }
};
struct IAbs : Same {
  template <class T>
  static T Run(T a) {
    return a < T{0} ? static_cast<T>(U<T>{0} - U<T>(a)) : a;
  }
};
struct IPopc : Word {
  template <class T>
  static uint32_t Run(T a) {
    return __builtin_popcountll(U<T>(a));
  }
};
struct IClz : Word {
  template <class T>
  static uint32_t Run(T a) {
    return a == 0 ? 8 * sizeof(T) : __builtin_clzll(U<T>(a)) - (64 - 8 * sizeof(T));
  }
};
struct IBrev : Same {
  template <class T>
  static T Run(T a) {
    U<T> out = 0;
    for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) out |= (U<T>(a) >> bit & 1) << (8 * sizeof(T) - 1 - bit);
    return out;
  }
};

template <class T>
constexpr Scalar kScalar = Scalar::kNone;
template <class Op, template <class, class> class Form>
struct Chosen;

#define FOR_INTEGERS(FORM, OP)     \
  [](Scalar t) -> Run {            \
    switch (t) {                   \
      case Scalar::kPred:          \
      case Scalar::kB8:            \
      case Scalar::kU8:            \
        return FORM<uint8_t, OP>;  \
      case Scalar::kS8:            \
        return FORM<int8_t, OP>;   \
      case Scalar::kB16:           \
      case Scalar::kU16:           \
        return FORM<uint16_t, OP>; \
      case Scalar::kS16:           \
        return FORM<int16_t, OP>;  \
      case Scalar::kB32:           \
      case Scalar::kU32:           \
        return FORM<uint32_t, OP>; \
      case Scalar::kS32:           \
        return FORM<int32_t, OP>;  \
      case Scalar::kB64:           \
      case Scalar::kU64:           \
        return FORM<uint64_t, OP>; \
      case Scalar::kS64:           \
        return FORM<int64_t, OP>;  \
      default:                     \
        return nullptr;            \
    }                              \
  }

bool HighestBit(Warp& w, const Instruction& i, Mask m) {  // bfind, of unsigned numbers
  ForLanes(m, [&](int l) {
    const uint64_t a = Bytes(i.type) == 8 ? w.r[i.s[0]][l] : w.r[i.s[0]][l] & 0xFFFFFFFF;
    const int top = 8 * Bytes(i.type) - 1;
    const int at = a == 0 ? -1 : 63 - __builtin_clzll(a);
    Put<uint32_t>(w.r[i.d[0]], l, static_cast<uint32_t>(i.immediate && at >= 0 ? top - at : at));
  });
  return true;
}

bool NotPredicate(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = !w.r[i.s[0]][l]; });
  return true;
}

// Sums of 32 bits with a carry, in and out.
bool AddCarry(Warp& w, const Instruction& i, Mask m) {
  const bool in = i.immediate & 1, out = i.immediate & 2, subtract = i.immediate & 4;
  ForLanes(m, [&](int l) {
    const auto compute = [&](auto zero) {
      using T = decltype(zero);
      const T a = Get<T>(w.r[i.s[0]], l), b = Get<T>(w.r[i.s[1]], l);
      const unsigned __int128 carry = in ? w.carry >> l & 1 : 0;
      const unsigned __int128 sum = subtract ? (unsigned __int128){a} - b - carry : (unsigned __int128){a} + b + carry;
      Put(w.r[i.d[0]], l, static_cast<T>(sum));
      const Mask bit = static_cast<Mask>(sum >> 8 * sizeof(T) & 1) << l;
      if (out) w.carry = (w.carry & ~(Mask{1} << l)) | bit;
    };
    Bytes(i.type) == 8 ? compute(uint64_t{0}) : compute(uint32_t{0});
  });
  return true;
}

bool ShiftRun(Warp& w, const Instruction& i, Mask m) {
  const bool left = i.flags & kLeft;
  ForLanes(m, [&](int l) {
    const auto shift = [&](auto zero) {
      using T = decltype(zero);
      const T a = Get<T>(w.r[i.s[0]], l);
      const uint32_t by = Get<uint32_t>(w.r[i.s[1]], l), width = 8 * sizeof(T);
      T out;
      if (left)
        out = by >= width ? T{0} : static_cast<T>(U<T>(a) << by);
      else
        out = by >= width ? (a < T{0} ? static_cast<T>(-1) : T{0}) : static_cast<T>(a >> by);
      Put(w.r[i.d[0]], l, out);
    };
    switch (i.type) {
      case Scalar::kB16:
      case Scalar::kU16:
        return shift(uint16_t{0});
      case Scalar::kS16:
        return shift(int16_t{0});
      case Scalar::kB32:
      case Scalar::kU32:
        return shift(uint32_t{0});
      case Scalar::kS32:
        return shift(int32_t{0});
      case Scalar::kS64:
        return shift(int64_t{0});
      default:
        return shift(uint64_t{0});
    }
  });
  return true;
}

// shf: 32 bits of two words side by side.
bool FunnelShift(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const uint64_t both = w.r[i.s[1]][l] << 32 | (w.r[i.s[0]][l] & 0xFFFFFFFF);
    uint32_t by = Get<uint32_t>(w.r[i.s[2]], l);
    by = i.flags & kWrap ? by & 31 : std::min(by, 32u);
    Put<uint32_t>(w.r[i.d[0]], l, static_cast<uint32_t>(i.flags & kLeft ? both >> (32 - by) : both >> by));
  });
  return true;
}

bool Permute(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const uint64_t both = w.r[i.s[1]][l] << 32 | (w.r[i.s[0]][l] & 0xFFFFFFFF);
    const uint32_t selector = Get<uint32_t>(w.r[i.s[2]], l);
    uint32_t out = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t pick = selector >> 4 * k & 15;
      uint32_t byte = both >> 8 * (pick & 7) & 0xFF;
      if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
      out |= byte << 8 * k;
    }
    Put(w.r[i.d[0]], l, out);
  });
  return true;
}

bool Lop3(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const uint32_t a = Get<uint32_t>(w.r[i.s[0]], l), b = Get<uint32_t>(w.r[i.s[1]], l),
                   c = Get<uint32_t>(w.r[i.s[2]], l);
    const uint32_t table = Get<uint32_t>(w.r[i.s[3]], l);
    uint32_t out = 0;
    for (int k = 0; k < 8; ++k)
      if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    Put(w.r[i.d[0]], l, out);
  });
  return true;
}

bool Lop3Predicate(Warp& w, const Instruction& i, Mask m) {  // lop3.or.b32 d|p, a, b, c, table, q
  Instruction plain = i;
  Lop3(w, plain, m);
  ForLanes(m, [&](int l) {
    const bool any = Get<uint32_t>(w.r[i.d[0]], l) != 0, q = w.r[i.s[4]][l] != 0;
    w.r[i.d[1]][l] = i.immediate ? any && q : any || q;
  });
  return true;
}

bool ExtractBits(Warp& w, const Instruction& i, Mask m) {
  const int width = 8 * Bytes(i.type);
  const bool is_signed = i.type == Scalar::kS32 || i.type == Scalar::kS64;
  ForLanes(m, [&](int l) {
    const uint64_t a = width == 32 ? Get<uint32_t>(w.r[i.s[0]], l) : w.r[i.s[0]][l];
    const int at = w.r[i.s[1]][l] & 0xFF, length = w.r[i.s[2]][l] & 0xFF;
    uint64_t out = 0;
    if (length > 0) {
      const int top = std::min(at + length - 1, width - 1);
      const uint64_t sign = is_signed ? a >> top & 1 : 0;
      for (int bit = 0; bit < width; ++bit) {
        const bool inside = bit < length && at + bit < width;
        out |= (inside ? a >> (at + bit) & 1 : sign) << bit;
      }
    }
    width == 32 ? Put<uint32_t>(w.r[i.d[0]], l, static_cast<uint32_t>(out)) : Put<uint64_t>(w.r[i.d[0]], l, out);
  });
  return true;
}

bool InsertBits(Warp& w, const Instruction& i, Mask m) {
  const int width = 8 * Bytes(i.type);
  ForLanes(m, [&](int l) {
    const uint64_t a = w.r[i.s[0]][l];
    uint64_t out = w.r[i.s[1]][l];
    const int at = w.r[i.s[2]][l] & 0xFF, length = w.r[i.s[3]][l] & 0xFF;
    for (int bit = 0; bit < length && at + bit < width; ++bit)
      out = (out & ~(uint64_t{1} << (at + bit))) | (a >> bit & 1) << (at + bit);
    w.r[i.d[0]][l] = width == 32 ? out & 0xFFFFFFFF : out;
  });
  return true;
}

bool Select(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = w.r[i.s[w.r[i.s[2]][l] ? 0 : 1]][l]; });
  return true;
}

bool DotProduct(Warp& w, const Instruction& i, Mask m) {  // dp4a
  ForLanes(m, [&](int l) {
    int32_t sum = Get<int32_t>(w.r[i.s[2]], l);
    for (int k = 0; k < 4; ++k) {
      const uint8_t a = w.r[i.s[0]][l] >> 8 * k, b = w.r[i.s[1]][l] >> 8 * k;
      sum += (i.type == Scalar::kS32 ? static_cast<int8_t>(a) : a) *
             (i.type2 == Scalar::kS32 ? static_cast<int8_t>(b) : b);
    }
    Put(w.r[i.d[0]], l, sum);
  });
  return true;
}

// Comparisons -------------------------------------------------------------------------------------------------------

enum Relation { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kIsNan };
enum Combine { kNothing, kWithAnd, kWithOr, kWithXor };

template <class T>
bool Holds(Relation relation, bool unordered, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool nan = std::isnan(a) || std::isnan(b);
    if (relation == kNum) return !nan;
    if (relation == kIsNan) return nan;
    if (nan) return unordered;
  }
  switch (relation) {
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    default:
      return a >= b;
  }
}

bool Compare(Warp& w, const Instruction& i, Mask m) {
  const auto relation = static_cast<Relation>(i.immediate & 15);
  const bool unordered = i.immediate & 16, ftz = i.flags & kFtz;
  const auto combine = static_cast<Combine>(i.immediate >> 8);
  ForLanes(m, [&](int l) {
    const auto of = [&](auto zero) {
      using T = decltype(zero);
      return Holds(relation, unordered, Get<T>(w.r[i.s[0]], l), Get<T>(w.r[i.s[1]], l));
    };
    bool p;
    switch (i.type) {
      case Scalar::kF32: {
        const float a = Get<float>(w.r[i.s[0]], l), b = Get<float>(w.r[i.s[1]], l);
        p = Holds(relation, unordered, ftz ? Flush(a) : a, ftz ? Flush(b) : b);
        break;
      }
      case Scalar::kF64:
        p = of(double{});
        break;
      case Scalar::kF16:
        p = Holds(relation, unordered, FromHalf(Get<uint16_t>(w.r[i.s[0]], l)),
                  FromHalf(Get<uint16_t>(w.r[i.s[1]], l)));
        break;
      case Scalar::kBF16:
        p = Holds(relation, unordered, FromBFloat(Get<uint16_t>(w.r[i.s[0]], l)),
                  FromBFloat(Get<uint16_t>(w.r[i.s[1]], l)));
        break;
      case Scalar::kB16:
      case Scalar::kU16:
        p = of(uint16_t{});
        break;
      case Scalar::kS16:
        p = of(int16_t{});
        break;
      case Scalar::kB32:
      case Scalar::kU32:
        p = of(uint32_t{});
        break;
      case Scalar::kS32:
        p = of(int32_t{});
        break;
      case Scalar::kS64:
        p = of(int64_t{});
        break;
      default:
        p = of(uint64_t{});
    }
    bool q = !p;
    if (combine != kNothing) {
      const bool c = (w.r[i.s[2]][l] != 0) != static_cast<bool>(i.flags & kNegate);
      const auto with = [&](bool v) { return combine == kWithAnd ? v && c : combine == kWithOr ? v || c : v != c; };
      p = with(p);
      q = with(q);
    }
    w.r[i.d[0]][l] = p;
    if (i.d.size() > 1) w.r[i.d[1]][l] = q;
  });
  return true;
}

bool TestProperty(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const double v = i.type == Scalar::kF32 ? Get<float>(w.r[i.s[0]], l) : Get<double>(w.r[i.s[0]], l);
    const std::string& what = i.modifiers[0];
    w.r[i.d[0]][l] = what == "finite"       ? std::isfinite(v)
                     : what == "infinite"   ? std::isinf(v)
                     : what == "notanumber" ? std::isnan(v)
                     : what == "number"     ? !std::isnan(v)
                                            : std::isnormal(v);
  });
  return true;
}

// Conversions -------------------------------------------------------------------------------------------------------

bool IsFloat(Scalar t) { return t == Scalar::kF32 || t == Scalar::kF64 || t == Scalar::kF16 || t == Scalar::kBF16; }
bool IsSigned(Scalar t) { return t == Scalar::kS8 || t == Scalar::kS16 || t == Scalar::kS32 || t == Scalar::kS64; }

double AsDouble(const Reg& r, int l, Scalar t, bool ftz) {
  switch (t) {
    case Scalar::kF32:
      return ftz ? Flush(Get<float>(r, l)) : Get<float>(r, l);
    case Scalar::kF64:
      return Get<double>(r, l);
    case Scalar::kF16:
      return FromHalf(Get<uint16_t>(r, l));
    default:
      return FromBFloat(Get<uint16_t>(r, l));
  }
}
__int128 AsInteger(const Reg& r, int l, Scalar t) {
  switch (t) {
    case Scalar::kU8:
    case Scalar::kB8:
      return Get<uint8_t>(r, l);
    case Scalar::kS8:
      return Get<int8_t>(r, l);
    case Scalar::kU16:
    case Scalar::kB16:
      return Get<uint16_t>(r, l);
    case Scalar::kS16:
      return Get<int16_t>(r, l);
    case Scalar::kU32:
    case Scalar::kB32:
      return Get<uint32_t>(r, l);
    case Scalar::kS32:
      return Get<int32_t>(r, l);
    case Scalar::kS64:
      return Get<int64_t>(r, l);
    default:
      return Get<uint64_t>(r, l);
  }
}
__int128 Clamped(__int128 v, Scalar t) {
  const int bits = 8 * Bytes(t);
  const __int128 high = IsSigned(t) ? (__int128{1} << (bits - 1)) - 1 : (__int128{1} << bits) - 1;
  const __int128 low = IsSigned(t) ? -(__int128{1} << (bits - 1)) : 0;
  return std::clamp(v, low, high);
}
void PutInteger(Reg& r, int l, Scalar t, __int128 v) {
  switch (t) {
    case Scalar::kU8:
    case Scalar::kB8:
      return Put(r, l, static_cast<uint8_t>(v));
    case Scalar::kS8:
      return Put(r, l, static_cast<int8_t>(v));
    case Scalar::kU16:
    case Scalar::kB16:
      return Put(r, l, static_cast<uint16_t>(v));
    case Scalar::kS16:
      return Put(r, l, static_cast<int16_t>(v));
    case Scalar::kU32:
    case Scalar::kB32:
      return Put(r, l, static_cast<uint32_t>(v));
    case Scalar::kS32:
      return Put(r, l, static_cast<int32_t>(v));
    case Scalar::kS64:
      return Put(r, l, static_cast<int64_t>(v));
    default:
      return Put(r, l, static_cast<uint64_t>(v));
  }
}
float RoundedFloat(double v, uint32_t flags) {
  float f = static_cast<float>(v);
  const bool down = flags & kRm || (flags & kRz && v > 0), up = flags & kRp || (flags & kRz && v < 0);
  if (down && static_cast<double>(f) > v) f = std::nextafter(f, -INFINITY);
  if (up && static_cast<double>(f) < v) f = std::nextafter(f, INFINITY);
  return flags & kFtz ? Flush(f) : f;
}

// cvt. Of float to integer, i.immediate says how: 0 to nearest, 1 to zero, 2 down, 3 up, or -1 where none is named.
bool Convert(Warp& w, const Instruction& i, Mask m) {
  const Scalar to = i.type, from = i.type2;
  const Reg& s = w.r[i.s[0]];
  Reg& d = w.r[i.d[0]];
  ForLanes(m, [&](int l) {
    if (!IsFloat(from) && !IsFloat(to)) {
      const __int128 v = AsInteger(s, l, from);
      return PutInteger(d, l, to, i.flags & kSat ? Clamped(v, to) : v);
    }
    if (!IsFloat(from)) {
      const __int128 v = AsInteger(s, l, from);
      if (to == Scalar::kF64) return Put(d, l, static_cast<double>(v));
      if (to == Scalar::kF32) {
        // Once rounded: from 64 bits a double would be in between.
        float f = static_cast<float>(v);
        const long double exact = static_cast<long double>(v);
        const bool down = i.flags & kRm || (i.flags & kRz && v > 0), up = i.flags & kRp || (i.flags & kRz && v < 0);
        if (down && f > exact) f = std::nextafter(f, -INFINITY);
        if (up && f < exact) f = std::nextafter(f, INFINITY);
        return Put(d, l, f);
      }
      return Put<uint16_t>(d, l,
                           to == Scalar::kF16 ? ToHalf(static_cast<double>(v)) : ToBFloat(static_cast<double>(v)));
    }
    double v = AsDouble(s, l, from, i.flags & kFtz);
    const auto whole = [&](double x) {
      return i.immediate == 0   ? std::nearbyint(x)
             : i.immediate == 1 ? std::trunc(x)
             : i.immediate == 2 ? std::floor(x)
                                : std::ceil(x);
    };
    if (!IsFloat(to)) {
      if (std::isnan(v)) {
        // Zero, but for 64 bits and from double the largest negative one.
        return PutInteger(d, l, to, Bytes(to) == 8 || from == Scalar::kF64 ? __int128{1} << (8 * Bytes(to) - 1) : 0);
      }
      const double limit = 1.7e38;
      return PutInteger(d, l, to, Clamped(static_cast<__int128>(std::clamp(whole(v), -limit / 2, limit / 2)), to));
    }
    if (i.immediate >= 0) v = whole(v);
    if (i.flags & kSat) v = v > 0 ? std::min(v, 1.0) : 0;
    if (i.flags & kRelu && !(v > 0) && !std::isnan(v)) v = 0;
    switch (to) {
      case Scalar::kF64:
        return Put(d, l, v);
      case Scalar::kF32:
        return Put(d, l, RoundedFloat(v, i.flags));
      case Scalar::kF16:
        return Put<uint16_t>(d, l, ToHalf(v));
      default:
        return Put<uint16_t>(d, l, ToBFloat(v));
    }
  });
  return true;
}

// cvt.rn.bf16x2.f32 d, high, low.
bool ConvertPair(Warp& w, const Instruction& i, Mask m) {
  const bool half = i.type == Scalar::kF16x2;
  ForLanes(m, [&](int l) {
    const auto part = [&](int k) -> uint64_t {
      float v = Get<float>(w.r[i.s[k]], l);
      if (i.flags & kRelu && !(v > 0) && !std::isnan(v)) v = 0;
      return half ? ToHalf(v) : ToBFloat(v);
    };
    w.r[i.d[0]][l] = part(0) << 16 | part(1);
  });
  return true;
}

// cvt.rn and .rna .tf32.f32: to 11 bits of mantissa, ties to even or away from zero.
bool ConvertTf32(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    uint32_t bits = Get<uint32_t>(w.r[i.s[0]], l);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
      bits = 0x7FFFFFFF;
    else if ((bits & 0x7F800000) != 0x7F800000)
      bits += i.immediate ? 0x1000 : 0xFFF + (bits >> 13 & 1);
    Put<uint32_t>(w.r[i.d[0]], l, bits & 0xFFFFE000);
  });
  return true;
}

// 8-bit floats: e4m3 (no infinity; 448 at most) and e5m2.
uint8_t ToFloat8(float v, bool e5m2) {
  if (std::isnan(v)) return 0x7F;
  const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const float most = e5m2 ? 57344.0f : 448.0f;
  const uint8_t sign = std::signbit(v) ? 0x80 : 0;
  float a = std::fabs(v);
  if (a == 0) return sign;
  int exponent;
  std::frexp(a, &exponent);
  exponent = std::max(exponent - 1, 1 - bias);
  const float unit = std::ldexp(1.0f, exponent - mantissa);
  a = std::nearbyint(a / unit) * unit;
  a = std::min(a, most);  // .satfinite
  std::frexp(a, &exponent);
  exponent = a == 0 ? 1 - bias : std::max(exponent - 1, 1 - bias);
  const int steps = static_cast<int>(a / std::ldexp(1.0f, exponent - mantissa));
  const int field = steps < 1 << mantissa ? 0 : exponent + bias;
  return static_cast<uint8_t>(sign | (field << mantissa) | (steps & ((1 << mantissa) - 1)));
}
float FromFloat8(uint8_t b, bool e5m2) {
  const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const int field = (b & 0x7F) >> mantissa, rest = b & ((1 << mantissa) - 1);
  float v;
  if (e5m2 && field == 31)
    v = rest ? NAN : INFINITY;
  else if (!e5m2 && (b & 0x7F) == 0x7F)
    v = NAN;
  else
    v = field == 0 ? std::ldexp(static_cast<float>(rest), 1 - bias - mantissa)
                   : std::ldexp(static_cast<float>((1 << mantissa) + rest), field - bias - mantissa);
  return b & 0x80 ? -v : v;
}
bool FromFloat8Pair(Warp& w, const Instruction& i, Mask m) {  // cvt.rn.f16x2.e4m3x2
  ForLanes(m, [&](int l) {
    const uint16_t s = Get<uint16_t>(w.r[i.s[0]], l);
    const auto part = [&](int k) -> uint64_t {
      return ToHalf(FromFloat8(static_cast<uint8_t>(s >> 8 * k), i.immediate));
    };
    w.r[i.d[0]][l] = part(1) << 16 | part(0);
  });
  return true;
}
bool ToFloat8Pair(Warp& w, const Instruction& i, Mask m) {  // cvt.rn.satfinite.e4m3x2.f32 d, high, low
  ForLanes(m, [&](int l) {
    Put<uint16_t>(w.r[i.d[0]], l,
                  static_cast<uint16_t>(ToFloat8(Get<float>(w.r[i.s[0]], l), i.immediate) << 8 |
                                        ToFloat8(Get<float>(w.r[i.s[1]], l), i.immediate)));
  });
  return true;
}

// Moves and memory --------------------------------------------------------------------------------------------------

bool Move(Warp& w, const Instruction& i, Mask m) {
  if (i.d.size() == i.s.size()) {
    ForLanes(m, [&](int l) { w.r[i.d[0]][l] = w.r[i.s[0]][l]; });
  } else if (i.s.size() > 1) {  // packs
    const int bits = 8 * Bytes(i.type) / static_cast<int>(i.s.size());
    ForLanes(m, [&](int l) {
      uint64_t v = 0;
      for (size_t k = 0; k < i.s.size(); ++k) v |= (w.r[i.s[k]][l] & ((uint64_t{1} << bits) - 1)) << bits * k;
      w.r[i.d[0]][l] = v;
    });
  } else {
    const int bits = 8 * Bytes(i.type) / static_cast<int>(i.d.size());
    ForLanes(m, [&](int l) {
      const uint64_t v = w.r[i.s[0]][l];
      for (size_t k = 0; k < i.d.size(); ++k) w.r[i.d[k]][l] = v >> bits * k & ((uint64_t{1} << bits) - 1);
    });
  }
  return true;
}

enum Space { kGeneric, kGlobal, kSharedSpace, kLocal, kParam };

uint8_t* Address(Warp& w, const Instruction& i, int l, int64_t bytes) {
  const uint64_t at = w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate);
  switch (static_cast<Space>(i.flags & 7)) {
    case kSharedSpace:
      return Shared(w, at & 0xFFFFFFFF, bytes, i);
    case kGeneric: {
      uint8_t* p = Generic(w, at, bytes, i);
      if (at % bytes != 0) Fail(i, "address is not aligned");
      return p;
    }
    default:
      if (at >> 56 == kSharedTag >> 56) Fail(i, "a shared address where another is wanted");
      if (at < 4096) Fail(i, "null address");
      if (at % bytes != 0) Fail(i, "address is not aligned");
      return reinterpret_cast<uint8_t*>(at);
  }
}

template <class T>
bool Load(Warp& w, const Instruction& i, Mask m) {
  const int64_t count = static_cast<int64_t>(i.d.size());
  ForLanes(m, [&](int l) {
    const uint8_t* p = Address(w, i, l, count * sizeof(T));
    T values[8];
    std::memcpy(values, p, count * sizeof(T));
    for (int k = 0; k < count; ++k) Put(w.r[i.d[k]], l, values[k]);
  });
  return true;
}
template <class T>
bool Store(Warp& w, const Instruction& i, Mask m) {
  const int64_t count = static_cast<int64_t>(i.s.size()) - 1;
  ForLanes(m, [&](int l) {
    T values[8];
    for (int k = 0; k < count; ++k) values[k] = Get<T>(w.r[i.s[k + 1]], l);
    std::memcpy(Address(w, i, l, count * sizeof(T)), values, count * sizeof(T));
  });
  return true;
}

template <template <class> class>
struct Never;

#define FOR_MEMORY(FORM)                                                                         \
  [](Scalar t) -> Run {                                                                          \
    switch (t) {                                                                                 \
      case Scalar::kB8:                                                                          \
      case Scalar::kU8:                                                                          \
        return FORM<uint8_t>;                                                                    \
      case Scalar::kS8:                                                                          \
        return FORM<int8_t>;                                                                     \
      case Scalar::kS16:                                                                         \
        return FORM<int16_t>;                                                                    \
      case Scalar::kS32:                                                                         \
        return FORM<int32_t>;                                                                    \
      default:                                                                                   \
        return Bytes(t) == 2 ? FORM<uint16_t> : Bytes(t) == 4 ? FORM<uint32_t> : FORM<uint64_t>; \
    }                                                                                            \
  }

bool ToShared(Warp& w, const Instruction& i, Mask m) {  // cvta.to.shared
  ForLanes(m, [&](int l) {
    const uint64_t at = w.r[i.s[0]][l];
    w.r[i.d[0]][l] = at >> 56 == kSharedTag >> 56 ? at & 0xFFFFFFFF : at;
  });
  return true;
}
bool FromShared(Warp& w, const Instruction& i, Mask m) {  // cvta.shared
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = kSharedTag | (w.r[i.s[0]][l] & 0xFFFFFFFF); });
  return true;
}
bool MapToRank(Warp& w, const Instruction& i, Mask m) {  // mapa
  ForLanes(m, [&](int l) {
    const uint64_t rank = Get<uint32_t>(w.r[i.s[1]], l);
    if (rank >= w.block->cluster->blocks.size()) Fail(i, "no block of this rank in the cluster");
    const uint64_t at = w.r[i.s[0]][l];
    const uint64_t tag = at >> 56 == kSharedTag >> 56 ? kSharedTag : 0;
    w.r[i.d[0]][l] = tag | (at & 0xFFFFFF) | (rank + 1) << 24;
  });
  return true;
}

// Copies wait as long as they may: until their group is waited for.
bool CopyAsync(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const int bytes = static_cast<int>(i.immediate),
              valid = i.s.size() > 3 ? std::min<int>(bytes, Get<uint32_t>(w.r[i.s[3]], l)) : bytes;
    const uint64_t to = (w.r[i.s[0]][l] + static_cast<uint64_t>(i.type2 == Scalar::kNone ? 0 : 0)) & 0xFFFFFFFF;
    const uint64_t from = w.r[i.s[1]][l];
    if (from % bytes != 0) Fail(i, "global address is not aligned");
    Shared(w, to, bytes, i);
    w.copies[l].push_back({static_cast<uint32_t>(to), reinterpret_cast<const uint8_t*>(from), bytes, valid});
  });
  return true;
}
void Arrive(Warp& w, const std::vector<PendingCopy>& copies, const Instruction& i) {
  for (const PendingCopy& c : copies) {
    uint8_t* to = Shared(w, c.to, c.bytes, i);
    std::memset(to, 0, c.bytes);
    if (c.valid > 0) std::memcpy(to, c.from, c.valid);
  }
}
bool CommitCopies(Warp& w, const Instruction&, Mask m) {
  ForLanes(m, [&](int l) {
    w.groups[l].push_back(std::move(w.copies[l]));
    w.copies[l].clear();
  });
  return true;
}
bool WaitCopies(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    if (i.flags & kHi) {  // wait_all
      w.groups[l].push_back(std::move(w.copies[l]));
      w.copies[l].clear();
    }
    while (static_cast<int64_t>(w.groups[l].size()) > i.immediate) {
      Arrive(w, w.groups[l].front(), i);
      w.groups[l].pop_front();
    }
  });
  return true;
}

// Control -----------------------------------------------------------------------------------------------------------

bool Nothing(Warp&, const Instruction&, Mask) { return true; }
bool Yield(Warp& w, const Instruction&, Mask) {
  w.yields = true;
  return true;
}
bool Trap(Warp&, const Instruction& i, Mask) { Fail(i, "trap"); }
bool Clock(Warp& w, const Instruction& i, Mask m) {
  static uint64_t now = 0;
  ++now;
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = now; });
  return true;
}

// A barrier of a block; of bar.red the sums come with it. Lanes arrive once and wait for the phase's end.
bool BlockBarrier(Warp& w, const Instruction& i, Mask m) {
  const int first = __builtin_ctz(m);
  const int reducing = static_cast<int>(i.immediate);  // 0 none, 1 or, 2 and, 3 popc
  const size_t id_at = 0;
  const int id = static_cast<int>(Get<uint32_t>(w.r[i.s[id_at]], first));
  if (id < 0 || id >= 16) Fail(i, "no such barrier");
  Barrier& b = w.block->barriers[id];
  const bool counted = i.flags & kHi;
  const int expected = counted ? static_cast<int>(Get<uint32_t>(w.r[i.s[1]], first)) : w.block->alive;
  if (counted && expected % kLanes != 0) Fail(i, "a barrier of no whole warps");
  const Mask fresh = m & ~w.waiting;
  if (fresh != 0) {
    b.arrived += __builtin_popcount(fresh);
    if (reducing != 0) {
      if (b.gathered == 0) b.reduced = reducing == 2;
      b.gathered += __builtin_popcount(fresh);
      ForLanes(fresh, [&](int l) {
        const bool p = (w.r[i.s.back()][l] != 0) != static_cast<bool>(i.flags & kNegate);
        b.reduced = reducing == 1 ? b.reduced || p : reducing == 2 ? b.reduced && p : b.reduced + p;
      });
    }
    ForLanes(fresh, [&](int l) { w.waits_for[l] = b.phase; });
    w.waiting |= fresh;
    if (b.arrived > expected) Fail(i, "more threads at a barrier than it expects");
  }
  if (b.arrived == expected && b.phase == w.waits_for[first]) {
    b.arrived = 0;
    b.gathered = 0;
    b.result = b.reduced;
    ++b.phase;
  }
  if (i.flags & kWrap) {  // bar.arrive does not wait
    w.waiting &= ~m;
    return true;
  }
  if (b.phase == w.waits_for[first]) return false;
  w.waiting &= ~m;
  if (reducing != 0) ForLanes(m, [&](int l) { w.r[i.d[0]][l] = b.result; });
  return true;
}

bool ClusterArrive(Warp& w, const Instruction&, Mask m) {
  Barrier& b = w.block->cluster->barrier;
  ForLanes(m, [&](int l) { w.cluster_phase[l] = b.phase; });
  b.arrived += __builtin_popcount(m);
  if (b.arrived == w.block->cluster->alive) {
    b.arrived = 0;
    ++b.phase;
  }
  return true;
}
bool ClusterWait(Warp& w, const Instruction&, Mask m) {
  return w.block->cluster->barrier.phase > w.cluster_phase[__builtin_ctz(m)];
}

// Of a warp's lanes with each other. All lanes that an instruction names must be at it.
void Together(const Instruction& i, Warp& w, Mask named, Mask here) {
  if ((named & w.alive & ~here) != 0) Fail(i, "lanes that the instruction names are elsewhere");
}

bool Shuffle(Warp& w, const Instruction& i, Mask m) {  // mode in immediate: up, down, bfly, idx
  Reg values;
  std::memcpy(values, w.r[i.s[0]], sizeof(Reg));
  Together(i, w, Get<uint32_t>(w.r[i.s[3]], __builtin_ctz(m)), m);
  ForLanes(m, [&](int l) {
    const int b = Get<uint32_t>(w.r[i.s[1]], l) & 31, c = Get<uint32_t>(w.r[i.s[2]], l);
    const int segment = c >> 8 & 31, clamp = c & 31;
    const int most = (l & segment) | (clamp & ~segment), least = l & segment;
    int from = l;
    bool inside = true;
    switch (i.immediate) {
      case 0:
        from = l - b;
        inside = from >= most;
        break;
      case 1:
        from = l + b;
        inside = from <= most;
        break;
      case 2:
        from = l ^ b;
        inside = from <= most;
        break;
      default:
        from = least | (b & ~segment);
        inside = from <= most;
    }
    if (!inside) from = l;
    if (inside && !(m >> from & 1)) Fail(i, "a shuffle from a lane that is not there");
    Put<uint32_t>(w.r[i.d[0]], l, static_cast<uint32_t>(values[from]));
    if (i.d.size() > 1) w.r[i.d[1]][l] = inside;
  });
  return true;
}

bool Vote(Warp& w, const Instruction& i, Mask m) {  // immediate: all, any, uni, ballot
  const Mask named = Get<uint32_t>(w.r[i.s[1]], __builtin_ctz(m));
  Together(i, w, named, m);
  Mask yes = 0;
  ForLanes(m & named,
           [&](int l) { yes |= Mask{((w.r[i.s[0]][l] != 0) != static_cast<bool>(i.flags & kNegate))} << l; });
  const Mask all = m & named;
  ForLanes(m, [&](int l) {
    w.r[i.d[0]][l] = i.immediate == 0   ? yes == all
                     : i.immediate == 1 ? yes != 0
                     : i.immediate == 2 ? yes == all || yes == 0
                                        : yes;
  });
  return true;
}
bool ActiveMask(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = m; });
  return true;
}
bool MatchAny(Warp& w, const Instruction& i, Mask m) {
  Reg values;
  std::memcpy(values, w.r[i.s[0]], sizeof(Reg));
  ForLanes(m, [&](int l) {
    Mask same = 0;
    ForLanes(m, [&](int k) { same |= Mask{values[k] == values[l]} << k; });
    w.r[i.d[0]][l] = same;
  });
  return true;
}
bool Elect(Warp& w, const Instruction& i, Mask m) {
  const int leader = __builtin_ctz(m);
  ForLanes(m, [&](int l) {
    w.r[i.d[0]][l] = leader;
    if (i.d.size() > 1) w.r[i.d[1]][l] = l == leader;
  });
  return true;
}
bool Reduce(Warp& w, const Instruction& i, Mask m) {  // redux.sync; immediate: add min max and or xor
  const bool is_signed = i.type == Scalar::kS32;
  int64_t out = 0;
  bool first = true;
  ForLanes(m, [&](int l) {
    const int64_t v = is_signed ? int64_t{Get<int32_t>(w.r[i.s[0]], l)} : int64_t{Get<uint32_t>(w.r[i.s[0]], l)};
    if (first)
      out = v;
    else
      out = i.immediate == 0   ? out + v
            : i.immediate == 1 ? std::min(out, v)
            : i.immediate == 2 ? std::max(out, v)
            : i.immediate == 3 ? out & v
            : i.immediate == 4 ? out | v
                               : out ^ v;
    first = false;
  });
  ForLanes(m, [&](int l) { Put<uint32_t>(w.r[i.d[0]], l, static_cast<uint32_t>(out)); });
  return true;
}
bool WarpBarrier(Warp& w, const Instruction& i, Mask m) {
  const Mask named = Get<uint32_t>(w.r[i.s[0]], __builtin_ctz(m));
  return (named & w.alive & ~m) == 0;
}

// Transaction barriers in shared memory: phase, threads that are missing, threads of a phase, bytes that are missing.
struct Transactions {
  uint64_t phase : 1, missing : 15, count : 15, pad : 1;
  int64_t bytes : 32;
};
static_assert(sizeof(Transactions) == 8);

Transactions& BarrierAt(Warp& w, const Instruction& i, int l) {
  return *reinterpret_cast<Transactions*>(
      Shared(w, (w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate)) & 0xFFFFFFFF, 8, i));
}
void Complete(Transactions& b) {
  if (b.missing == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.missing = b.count;
  }
}

bool BarrierInit(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    Transactions& b = BarrierAt(w, i, l);
    const uint32_t count = Get<uint32_t>(w.r[i.s[1]], l);
    b = {0, count, count, 0, 0};
  });
  return true;
}
// mbarrier.arrive, with bytes that are expected too; mbarrier.expect_tx does not arrive.
bool BarrierArrive(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    Transactions& b = BarrierAt(w, i, l);
    if (!i.d.empty()) w.r[i.d[0]][l] = b.phase;
    if (i.flags & kHi) b.bytes += Get<int32_t>(w.r[i.s[1]], l);
    if (i.flags & kWrap) {
      const uint32_t count = !(i.flags & kHi) && i.s.size() > 1 ? Get<uint32_t>(w.r[i.s[1]], l) : 1;
      if (b.missing < count) Fail(i, "more arrive than the barrier expects");
      b.missing -= count;
    }
    Complete(b);
  });
  return true;
}
// Whether the phase of this parity has ended; if not, others get their turn.
bool BarrierTest(Warp& w, const Instruction& i, Mask m) {
  bool missing = false;
  ForLanes(m, [&](int l) {
    const bool done = BarrierAt(w, i, l).phase != (w.r[i.s[1]][l] & 1);
    w.r[i.d[0]][l] = done;
    missing |= !done;
  });
  (missing ? w.yields : w.passed) = true;
  return true;
}
bool StoreAsync(Warp& w, const Instruction& i, Mask m) {  // st.async
  const int count = static_cast<int>(i.s.size()) - 2, each = Bytes(i.type);
  ForLanes(m, [&](int l) {
    uint8_t* to = Shared(w, (w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate)) & 0xFFFFFFFF, each * count, i);
    for (int k = 0; k < count; ++k) std::memcpy(to + k * each, &w.r[i.s[1 + k]][l], each);
    BytesArrive(w, w.r[i.s.back()][l], each * count, i);
  });
  return true;
}

// Binding -----------------------------------------------------------------------------------------------------------

std::vector<std::string> Split(const std::string& s, char at) {
  std::vector<std::string> out;
  size_t begin = 0;
  while (true) {
    const size_t end = s.find(at, begin);
    out.push_back(s.substr(begin, end - begin));
    if (end == std::string::npos) return out;
    begin = end + 1;
    if (at == '.' && s[begin] == ':') ++begin;
  }
}

std::string Trim(const std::string& s) {
  const size_t a = s.find_first_not_of(" \t\n\r"), b = s.find_last_not_of(" \t\n\r");
  return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}

}  // namespace

void BytesArrive(Warp& w, uint64_t barrier, int64_t bytes, const Instruction& i) {
  Transactions& b = *reinterpret_cast<Transactions*>(Shared(w, barrier & 0xFFFFFFFF, 8, i));
  b.bytes -= bytes;
  Complete(b);
}

bool Operands::Has(std::string_view word) const { return std::find(words.begin(), words.end(), word) != words.end(); }

void Operands::Destination(size_t k) {
  for (const std::string& name : List(k)) i.d.push_back(names.Register(name));
}
void Operands::Source(size_t k) {
  for (const std::string& name : List(k)) {
    if (name[0] == '!') i.flags |= kNegate;
    i.s.push_back(names.Register(name[0] == '!' ? name.substr(1) : name));
  }
}
void Operands::Memory(size_t k) {
  std::string text = all.at(k);
  text = Trim(text.substr(1, text.find_last_of(']') - 1));
  i.immediate = 0;
  if (const size_t plus = text.find('+'); plus != std::string::npos) {
    i.immediate = std::stoll(text.substr(plus + 1), nullptr, 0);
    text = Trim(text.substr(0, plus));
  }
  i.s.push_back(names.Register(text));
}
std::vector<std::string> Operands::List(size_t k) const {
  std::string text = all.at(k);
  std::vector<std::string> out;
  if (text[0] == '{') {
    for (const std::string& part : Split(text.substr(1, text.size() - 2), ',')) out.push_back(Trim(part));
  } else if (text.find('|') != std::string::npos) {
    for (const std::string& part : Split(text, '|')) out.push_back(Trim(part));
  } else {
    out.push_back(text);
  }
  return out;
}

void Bind(Instruction& i, const std::string& opcode, const std::vector<std::string>& operands, Names& names) {
  Operands o{i, Split(opcode, '.'), operands, names};
  const std::string head = o.words[0];
  std::vector<Scalar> types;
  for (const std::string& word : o.words)
    if (const Scalar t = ScalarOf(word); t != Scalar::kNone) types.push_back(t);
  if (!types.empty()) i.type = types[0];
  if (types.size() > 1) i.type2 = types[1];
  const auto has = [&](std::string_view word) { return o.Has(word); };
  if (has("ftz")) i.flags |= kFtz;
  if (has("sat")) i.flags |= kSat;
  if (has("rm")) i.flags |= kRm;
  if (has("rp")) i.flags |= kRp;
  if (has("rz")) i.flags |= kRz;
  if (has("relu")) i.flags |= kRelu;
  const bool is_float = IsFloat(i.type) || i.type == Scalar::kF16x2 || i.type == Scalar::kBF16x2;
  const auto plain = [&](size_t inputs) {
    o.Destination(0);
    for (size_t k = 1; k <= inputs; ++k) o.Source(k);
  };
  // Where the code is elsewhere.
  if (head == "bra" || head == "brx") {
    for (size_t k = 0; k < operands.size(); ++k) o.Source(k);
    i.flags = head == "brx";
    i.run = BranchMarker;
    return;
  }
  if (head == "exit" || head == "ret") {
    i.run = ExitMarker;
    return;
  }
  if (BindMatrices(o)) return;

  if (is_float) {
    struct Entry {
      const char* name;
      Run run;
      size_t inputs;
    };
    static const Entry kFloats[] = {
        {"add", Floats<FAdd>, 2},   {"sub", Floats<FSub>, 2},          {"mul", Floats<FMul>, 2},
        {"div", Floats<FDiv>, 2},   {"fma", Floats<FFma>, 3},          {"mad", Floats<FFma>, 3},
        {"neg", Floats<FNeg>, 1},   {"abs", Floats<FAbs>, 1},          {"sqrt", Floats<FSqrt>, 1},
        {"rcp", Floats<FRcp>, 1},   {"rsqrt", Floats<FRsqrt>, 1},      {"ex2", Floats<FExp2>, 1},
        {"lg2", Floats<FLog2>, 1},  {"sin", Floats<FSin>, 1},          {"cos", Floats<FCos>, 1},
        {"tanh", Floats<FTanh>, 1}, {"copysign", Floats<FCopysign>, 2}};
    for (const Entry& e : kFloats) {
      if (head == e.name) {
        i.run = e.run;
        return plain(e.inputs);
      }
    }
    if (head == "max" || head == "min") {
      if (operands.size() == 4 && head == "max")
        i.run = Floats<FMax3>;
      else if (has("NaN"))
        i.run = head == "max" ? Floats<FMaxNan> : Floats<FMinNan>;
      else
        i.run = head == "max" ? Floats<FMax> : Floats<FMin>;
      return plain(operands.size() - 1);
    }
    if (head == "testp") {
      i.run = TestProperty;
      i.modifiers = {o.words[1]};
      return plain(1);
    }
  }
  if (head == "add" || head == "sub" || head == "addc" || head == "subc") {
    if (has("cc") || head.size() == 4) {
      i.immediate = (head.size() == 4) | has("cc") << 1 | (head[0] == 's') << 2;
      i.run = AddCarry;
    } else {
      i.run = head == "add" ? FOR_INTEGERS(Integers2, IAdd)(i.type) : FOR_INTEGERS(Integers2, ISub)(i.type);
    }
    return plain(2);
  }
  if (head == "mul" || head == "mad" || head == "mul24" || head == "mad24") {
    if (has("cc") || head == "madc") throw Error("carries of mad");
    const bool three = head[1] == 'a';
    if (has("wide"))
      i.run = three ? FOR_INTEGERS(Integers3, IMadWide)(i.type) : FOR_INTEGERS(Integers2, IMulWide)(i.type);
    else if (has("hi"))
      i.run = three ? FOR_INTEGERS(Integers3, IMadHi)(i.type) : FOR_INTEGERS(Integers2, IMulHi)(i.type);
    else
      i.run = three ? FOR_INTEGERS(Integers3, IMadLo)(i.type) : FOR_INTEGERS(Integers2, IMulLo)(i.type);
    return plain(three ? 3 : 2);
  }
  struct Pair {
    const char* name;
    Run (*two)(Scalar);
  };
  static const Pair kTwo[] = {{"div", FOR_INTEGERS(Integers2, IDiv)}, {"rem", FOR_INTEGERS(Integers2, IRem)},
                              {"min", FOR_INTEGERS(Integers2, IMin)}, {"max", FOR_INTEGERS(Integers2, IMax)},
                              {"and", FOR_INTEGERS(Integers2, IAnd)}, {"or", FOR_INTEGERS(Integers2, IOr)},
                              {"xor", FOR_INTEGERS(Integers2, IXor)}};
  for (const Pair& p : kTwo) {
    if (head == p.name) {
      i.run = p.two(i.type);
      return plain(2);
    }
  }
  static const Pair kOne[] = {{"not", FOR_INTEGERS(Integers1, INot)},   {"cnot", nullptr},
                              {"neg", FOR_INTEGERS(Integers1, INeg)},   {"abs", FOR_INTEGERS(Integers1, IAbs)},
                              {"popc", FOR_INTEGERS(Integers1, IPopc)}, {"clz", FOR_INTEGERS(Integers1, IClz)},
                              {"brev", FOR_INTEGERS(Integers1, IBrev)}};
  for (const Pair& p : kOne) {
    if (head == p.name && p.two != nullptr) {
      i.run = i.type == Scalar::kPred ? NotPredicate : p.two(i.type);
      return plain(1);
    }
  }
  if (head == "shl" || head == "shr") {
    i.flags = head == "shl" ? kLeft : 0;
    i.run = ShiftRun;
    return plain(2);
  }
  if (head == "shf") {
    i.flags = (has("l") ? kLeft : 0) | (has("wrap") ? kWrap : 0);
    i.run = FunnelShift;
    return plain(3);
  }
  if (head == "prmt" && o.words.size() == 2) {
    i.run = Permute;
    return plain(3);
  }
  if (head == "lop3") {
    i.run = operands.size() > 5 ? Lop3Predicate : Lop3;
    i.immediate = has("and");
    return plain(operands.size() - 1);
  }
  if (head == "bfe") {
    i.run = ExtractBits;
    return plain(3);
  }
  if (head == "bfind") {
    if (IsSigned(i.type)) throw Error("signed numbers");
    i.immediate = has("shiftamt");
    i.run = HighestBit;
    return plain(1);
  }
  if (head == "bfi") {
    i.run = InsertBits;
    return plain(4);
  }
  if (head == "selp") {
    i.run = Select;
    return plain(3);
  }
  if (head == "dp4a") {
    i.run = DotProduct;
    return plain(3);
  }
  if (head == "setp") {
    static const std::map<std::string, int> kRelations = {
        {"eq", kEq},       {"ne", kNe},       {"lt", kLt},       {"le", kLe},       {"gt", kGt},
        {"ge", kGe},       {"lo", kLt},       {"ls", kLe},       {"hi", kGt},       {"hs", kGe},
        {"equ", kEq | 16}, {"neu", kNe | 16}, {"ltu", kLt | 16}, {"leu", kLe | 16}, {"gtu", kGt | 16},
        {"geu", kGe | 16}, {"num", kNum},     {"nan", kIsNan}};
    i.immediate = kRelations.at(o.words[1]);
    const int combine = has("and") ? kWithAnd : has("or") ? kWithOr : has("xor") ? kWithXor : kNothing;
    i.immediate |= combine << 8;
    i.run = Compare;
    return plain(combine == kNothing ? 2 : 3);
  }
  if (head == "cvt") {
    if (i.type == Scalar::kF16x2 || i.type == Scalar::kBF16x2) {
      if (has("e4m3x2") || has("e5m2x2")) {
        i.run = FromFloat8Pair;
        i.immediate = has("e5m2x2");
        return plain(1);
      }
      i.run = ConvertPair;
      return plain(2);
    }
    if (has("e4m3x2") || has("e5m2x2")) {
      i.run = ToFloat8Pair;
      i.immediate = has("e5m2x2");
      return plain(2);
    }
    if (has("tf32")) {
      i.run = ConvertTf32;
      i.immediate = has("rna");
      return plain(1);
    }
    i.immediate = has("rni") ? 0 : has("rzi") ? 1 : has("rmi") ? 2 : has("rpi") ? 3 : -1;
    i.run = Convert;
    return plain(1);
  }
  if (head == "mov") {
    i.run = Move;
    return plain(1);
  }
  if (head == "cvta") {
    const bool shared = has("shared") || has("shared::cta");
    i.run = !shared ? Move : has("to") ? ToShared : FromShared;
    return plain(1);
  }
  if (head == "mapa") {
    i.run = MapToRank;
    return plain(2);
  }
  if (head == "ld" || head == "ldu" || (head == "st" && !has("async"))) {
    const bool store = head == "st";
    o.Memory(store ? 0 : 1);
    if (store)
      o.Source(1);
    else
      o.Destination(0);
    const Space space = has("shared") || has("shared::cta") || has("shared::cluster") ? kSharedSpace
                        : has("global")                                               ? kGlobal
                        : has("local")                                                ? kLocal
                        : has("param")                                                ? kParam
                        : has("const")                                                ? kGlobal
                                                                                      : kGeneric;
    i.flags = space;
    i.run = store ? FOR_MEMORY(Store)(i.type) : FOR_MEMORY(Load)(i.type);
    if (!store && (has("volatile") || has("relaxed") || has("acquire"))) i.modifiers = {"shared with others"};
    return;
  }
  if (head == "st") {  // st.async
    o.Memory(0);
    const int64_t offset = i.immediate;
    o.Source(1);
    o.Memory(2);
    i.immediate = offset;
    i.run = StoreAsync;
    return;
  }
  if (head == "cp" && has("async") && !has("bulk")) {
    if (has("commit_group")) {
      i.run = CommitCopies;
    } else if (has("wait_group") || has("wait_all")) {
      i.flags = has("wait_all") ? kHi : 0;
      i.immediate = has("wait_all") ? 0 : std::stoll(operands[0]);
      i.run = WaitCopies;
    } else {
      o.Memory(0);
      if (i.immediate != 0) throw Error("an offset");
      o.Memory(1);
      if (i.immediate != 0) throw Error("an offset");
      for (size_t k = 2; k < operands.size(); ++k) o.Source(k);
      i.immediate = std::stoll(operands[2]);
      i.run = CopyAsync;
    }
    return;
  }
  if (head == "bar" && has("warp")) {
    o.Source(0);
    i.run = WarpBarrier;
    return;
  }
  if (head == "bar" || (head == "barrier" && !has("cluster"))) {
    i.immediate = 0;
    size_t k = 0;
    i.flags = has("arrive") ? kWrap : 0;
    if (has("red")) {
      o.Destination(k++);
      i.immediate = has("or") ? 1 : has("and") ? 2 : 3;
    }
    o.Source(k++);
    const size_t last = operands.size() - has("red");
    if (k < last) {
      i.flags |= kHi;
      o.Source(k++);
    }
    if (has("red")) o.Source(k);
    i.run = BlockBarrier;
    return;
  }
  if (head == "barrier") {
    i.run = has("arrive") ? ClusterArrive : ClusterWait;
    return;
  }
  if (head == "shfl") {
    i.immediate = has("up") ? 0 : has("down") ? 1 : has("bfly") ? 2 : 3;
    i.run = Shuffle;
    return plain(4);
  }
  if (head == "vote") {
    i.immediate = has("all") ? 0 : has("any") ? 1 : has("uni") ? 2 : 3;
    i.run = Vote;
    return plain(2);
  }
  if (head == "match") {
    i.run = MatchAny;
    return plain(2);
  }
  if (head == "activemask") {
    i.run = ActiveMask;
    return plain(0);
  }
  if (head == "elect") {
    i.run = Elect;
    return plain(1);
  }
  if (head == "redux") {
    i.immediate = has("add") ? 0 : has("min") ? 1 : has("max") ? 2 : has("and") ? 3 : has("or") ? 4 : 5;
    i.run = Reduce;
    return plain(2);
  }
  if (head == "mbarrier") {
    if (has("init")) {
      o.Memory(0);
      o.Source(1);
      i.run = BarrierInit;
    } else if (has("try_wait") || has("test_wait")) {
      o.Destination(0);
      o.Memory(1);
      o.Source(2);
      i.run = BarrierTest;
    } else if (has("arrive") || has("expect_tx")) {
      const bool both = has("arrive") && has("expect_tx");
      i.flags = (has("arrive") ? kWrap : 0) | (has("expect_tx") ? kHi : 0);
      size_t k = 0;
      if (has("arrive") && operands[0][0] != '[') {
        if (operands[0] != "_") o.Destination(0);
        ++k;
      }
      o.Memory(k++);
      if (k < operands.size())
        o.Source(k);
      else if (both)
        throw Error("no bytes");
      i.run = BarrierArrive;
    } else if (has("inval")) {
      i.run = Nothing;
    } else {
      throw Error("unknown instruction");
    }
    return;
  }
  if (head == "nanosleep") {
    i.run = Yield;
    return;
  }
  if (head == "trap" || head == "brkpt") {
    i.run = Trap;
    return;
  }
  if (head == "fence" || head == "membar" || head == "setmaxnreg" || head == "griddepcontrol" || head == "prefetch" ||
      head == "prefetchu" || head == "applypriority" || head == "discard") {
    i.run = Nothing;
    return;
  }
  throw Error("unknown instruction");
}

}  // namespace emulator
