// Instructions on bits.
#include <algorithm>

#include "instructions.h"

namespace emulator {
namespace {

// Of words of 32 or 64 bits.
template <class Op>
Binder Words(Op) {
  return [](Operands& o) { o.Plain(Bytes(o.i.type) == 8 ? Each<uint64_t, Op> : Each<uint32_t, Op>); };
}
template <class T>
T ShiftRight(T a, T by) {
  const auto n = std::make_unsigned_t<T>(by);
  return n < 8 * sizeof(T) ? a >> n : a < 0 ? -1 : 0;
}

template <class T>
T Reversed(T a) {
  T out = 0;
  for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) out = out << 1 | (a >> bit & 1);
  return out;
}

uint32_t Permute(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t out = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t pick = selector >> 4 * k & 15;
    uint32_t byte = both >> 8 * (pick & 7) & 0xFF;
    if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
    out |= byte << 8 * k;
  }
  return out;
}

// Two words side by side, shifted.
uint32_t Funnel(uint32_t low, uint32_t high, uint32_t by, bool left, bool wrap) {
  const uint64_t both = uint64_t{high} << 32 | low;
  const uint32_t n = wrap ? by & 31 : std::min(by, 32u);
  return static_cast<uint32_t>(left ? both >> (32 - n) : both >> n);
}

uint32_t Lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t out = 0;
  for (int k = 0; k < 8; ++k)
    if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return out;
}

bool Lop3Predicate(Warp& w, const Instruction& i, Mask m) {  // lop3.or.b32 d|p, a, b, c, table, q
  ForLanes(m, [&](int l) {
    const auto s = [&](int k) { return Get<uint32_t>(w.r[i.s[k]], l); };
    const uint32_t out = Lop3(s(0), s(1), s(2), s(3));
    const bool q = Predicate(w, i, 4, l);
    w.r[i.d[0]][l] = out;
    w.r[i.d[1]][l] = i.immediate ? out != 0 && q : out != 0 || q;
  });
  return true;
}

// The bits from `at` on, `length` of them; beyond a's own, and beyond those, its sign.
template <class T>
T Extract(T a, T at, T length) {
  constexpr int kBits = 8 * sizeof(T);
  const int begin = at & 0xFF, end = std::min(begin + static_cast<int>(length & 0xFF), kBits);
  if (begin >= end) return (length & 0xFF) != 0 && a < 0 ? -1 : 0;
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(U(a) << (kBits - end)) >> (kBits - end + begin);
}

template <class T>
T Insert(T a, T b, T at, T length) {
  constexpr unsigned kBits = 8 * sizeof(T);
  const unsigned begin = at & 0xFF, count = length & 0xFF;
  if (begin >= kBits || count == 0) return b;
  const T ones = (count >= kBits ? ~T{0} : (T{1} << count) - 1) << begin;
  return (b & ~ones) | (a << begin & ones);
}

bool HighestBit(Warp& w, const Instruction& i, Mask m) {  // bfind, of unsigned numbers
  ForLanes(m, [&](int l) {
    const uint64_t a = Bytes(i.type) == 8 ? w.r[i.s[0]][l] : Get<uint32_t>(w.r[i.s[0]], l);
    const int at = std::bit_width(a) - 1;
    w.r[i.d[0]][l] = static_cast<uint32_t>(i.immediate && at >= 0 ? 8 * Bytes(i.type) - 1 - at : at);
  });
  return true;
}

}  // namespace

const Table kBits = {
    {"and", Modulo([](auto a, auto b) { return a & b; })},
    {"or", Modulo([](auto a, auto b) { return a | b; })},
    {"xor", Modulo([](auto a, auto b) { return a ^ b; })},
    {"not", Modulo([](auto a) { return ~a; })},
    {"shl", Modulo([](auto a, auto by) { return by < 64 ? a << by : 0; })},
    {"shr", Integers([](auto a, auto by) { return ShiftRight(a, by); })},
    {"shf.l.wrap", Bitwise<uint32_t>([](auto a, auto b, auto by) { return Funnel(a, b, by, true, true); })},
    {"shf.r.wrap", Bitwise<uint32_t>([](auto a, auto b, auto by) { return Funnel(a, b, by, false, true); })},
    {"shf.l.clamp", Bitwise<uint32_t>([](auto a, auto b, auto by) { return Funnel(a, b, by, true, false); })},
    {"shf.r.clamp", Bitwise<uint32_t>([](auto a, auto b, auto by) { return Funnel(a, b, by, false, false); })},
    {"prmt.b32", Bitwise<uint32_t>([](auto a, auto b, auto selector) { return Permute(a, b, selector); })},
    {"lop3", Bitwise<uint32_t>([](auto a, auto b, auto c, auto table) { return Lop3(a, b, c, table); })},
    {"lop3.or", Plain<Lop3Predicate, 0>},
    {"lop3.and", Plain<Lop3Predicate, 1>},
    {"bfe", Integers([](auto a, auto at, auto length) { return Extract(a, at, length); })},
    {"bfi", Words([](auto a, auto b, auto at, auto length) { return Insert(a, b, at, length); })},
    {"bfind.u32", Plain<HighestBit, 0>},
    {"bfind.u64", Plain<HighestBit, 0>},
    {"bfind.shiftamt.u32", Plain<HighestBit, 1>},
    {"bfind.shiftamt.u64", Plain<HighestBit, 1>},
    {"popc", Words([](auto a) { return std::popcount(a); })},
    {"clz", Words([](auto a) { return std::countl_zero(a); })},
    {"brev", Words([](auto a) { return Reversed(a); })},
    {"selp", Bitwise<uint64_t>([](auto a, auto b, auto p) { return p ? a : b; })},
};

}  // namespace emulator
