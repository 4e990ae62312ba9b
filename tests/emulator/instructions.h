// What the files that define instructions share.
#pragma once

#include <cstring>
#include <functional>
#include <type_traits>

#include "emulator.h"

namespace emulator {

// An instruction's words and operands, and how they become registers.
struct Operands {
  Instruction& i;
  std::vector<std::string> words;
  const std::vector<std::string>& all;
  Names& names;
  std::vector<Scalar> types;  // the words that are one

  bool Has(std::string_view word) const;
  void Destination(size_t k);  // a register, "{a, b}" or "p|q"
  void Source(size_t k);
  void Memory(size_t k);  // "[address+offset]", the offset into i.immediate
  // The first operand is written, the others are read.
  void Plain(Run run, int64_t immediate = 0);
};

// What fills in an instruction, by the words that its opcode begins with; more words go before fewer.
using Binder = void (*)(Operands&);
using Table = std::map<std::string, Binder, std::less<>>;
extern const Table kArithmetic, kBits, kConversions, kMemory, kControl, kWarp, kTransactions, kMatrices, kBoxes;

// A table's entry for what has its operands in order.
template <Run run, int64_t immediate = 0>
void Plain(Operands& o) {
  o.Plain(run, immediate);
}
// For what has nothing to do here.
inline void Ignore(Operands& o) {
  o.i.run = [](Warp&, const Instruction&, Mask) { return true; };
}

constexpr uint32_t kNegate = 1u << 31;  // in an instruction's flags: its last source, a predicate, has a "!"

template <class T>
T Get(const Reg& r, int lane) {
  T value;
  std::memcpy(&value, &r[lane], sizeof(T));
  return value;
}
template <class T>
void Put(Reg& r, int lane, T value) {
  if constexpr (std::is_integral_v<T>) {
    r[lane] = static_cast<uint64_t>(value);  // signs are extended: a load may fill a wider register
  } else {
    r[lane] = 0;
    std::memcpy(&r[lane], &value, sizeof(T));
  }
}
inline bool Predicate(const Warp& w, const Instruction& i, int source, int lane) {
  return (w.r[i.s[source]][lane] != 0) != ((i.flags & kNegate) != 0);
}

template <class F>
void ForLanes(Mask lanes, F f) {
  if (lanes == ~Mask{0}) {
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) f(__builtin_ctz(lanes));
  }
}

// f of a zero of the integer type that is like t in width and sign.
template <class F>
auto WithInteger(Scalar t, F f) {
  if (Bytes(t) == 1) return IsSigned(t) ? f(int8_t{}) : f(uint8_t{});
  if (Bytes(t) == 2) return IsSigned(t) ? f(int16_t{}) : f(uint16_t{});
  if (Bytes(t) == 4) return IsSigned(t) ? f(int32_t{}) : f(uint32_t{});
  return IsSigned(t) ? f(int64_t{}) : f(uint64_t{});
}

// op(s[0], s[1], ...) of as many sources as it takes, of what `get` makes of them.
template <class T, class Op, class Get>
auto Call(Op op, Get get) {
  if constexpr (std::is_invocable_v<Op, T>)
    return op(get(0));
  else if constexpr (std::is_invocable_v<Op, T, T>)
    return op(get(0), get(1));
  else if constexpr (std::is_invocable_v<Op, T, T, T>)
    return op(get(0), get(1), get(2));
  else
    return op(get(0), get(1), get(2), get(3));
}

// d = op(s...), of registers as T.
template <class T, class Op>
bool Each(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    Put(w.r[i.d[0]], l, static_cast<T>(Call<T>(Op{}, [&](int k) { return Get<T>(w.r[i.s[k]], l); })));
  });
  return true;
}
// The same, of what the low bits of the sources give the low bits of; higher ones become 0.
template <class Op>
bool EachModulo(Warp& w, const Instruction& i, Mask m) {
  const uint64_t ones = ~uint64_t{0} >> (64 - (i.type == Scalar::kPred ? 1 : 8 * Bytes(i.type)));
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = Call<uint64_t>(Op{}, [&](int k) { return w.r[i.s[k]][l]; }) & ones; });
  return true;
}

// Entries of these: of one type, of the integer type that the instruction says, of any, modulo its range.
template <class T, class Op>
Binder Bitwise(Op) {
  return Plain<Each<T, Op>>;
}
template <class Op>
Binder Integers(Op) {
  return [](Operands& o) { o.Plain(WithInteger(o.i.type, [](auto zero) -> Run { return Each<decltype(zero), Op>; })); };
}
template <class Op>
Binder Modulo(Op) {
  return Plain<EachModulo<Op>>;
}

inline bool IsShared(uint64_t address) { return address >> 56 == kSharedTag >> 56; }

// A copy whose bytes a transaction barrier in shared memory counts. It arrives when somebody looks at the barrier,
// which is as late as it may, or at once, where the warp's cluster is one of such.
void Transfer(Warp& w, uint64_t barrier, int64_t bytes, std::function<void()> copy);

// The scheduler does these.
bool Branch(Warp& w, const Instruction& i, Mask m);
bool Exit(Warp& w, const Instruction& i, Mask m);

}  // namespace emulator
