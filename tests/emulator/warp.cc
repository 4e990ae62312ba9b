// What the lanes of a warp do together. Lanes that an instruction names and that are elsewhere are waited for.
#include <algorithm>

#include "instructions.h"

namespace emulator {
namespace {

Mask Named(Warp& w, const Instruction& i, size_t source, Mask here) {
  return Get<uint32_t>(w.r[i.s[source]], __builtin_ctz(here));
}
bool AllHere(const Warp& w, Mask named, Mask here) { return (named & w.alive & ~here) == 0; }

enum Mode : int64_t { kUp, kDown, kButterfly, kIndex };

template <Mode mode>
bool Shuffle(Warp& w, const Instruction& i, Mask m) {  // d|p, a, b, c, lanes
  if (!AllHere(w, Named(w, i, 3, m), m)) return false;
  Reg values;
  std::memcpy(values, w.r[i.s[0]], sizeof(Reg));
  ForLanes(m, [&](int l) {
    const int b = w.r[i.s[1]][l] & 31, c = static_cast<int>(w.r[i.s[2]][l]), segment = c >> 8 & 31;
    const int first = l & segment, last = first | (c & 31 & ~segment);
    const int from = mode == kUp ? l - b : mode == kDown ? l + b : mode == kButterfly ? l ^ b : first | (b & ~segment);
    const bool inside = mode == kUp ? from >= last : from <= last;
    if (inside && !(m >> from & 1)) throw Error("a shuffle from a lane that is not there");
    w.r[i.d[0]][l] = static_cast<uint32_t>(values[inside ? from : l]);
    if (i.d.size() > 1) w.r[i.d[1]][l] = inside;
  });
  return true;
}

// op(lanes whose predicate holds, lanes that vote).
template <class Op>
bool Vote(Warp& w, const Instruction& i, Mask m) {
  const Mask named = Named(w, i, 1, m), all = m & named;
  if (!AllHere(w, named, m)) return false;
  Mask yes = 0;
  ForLanes(all, [&](int l) { yes |= Mask{Predicate(w, i, 0, l)} << l; });
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = Op{}(yes, all); });
  return true;
}
template <class Op>
Binder Votes(Op) {
  return Plain<Vote<Op>>;
}

// The least or the greatest of the lanes' integers.
template <bool kGreatest>
bool Reduction(Warp& w, const Instruction& i, Mask m) {
  const Mask named = Named(w, i, 1, m), all = m & named;
  if (!AllHere(w, named, m)) return false;
  const auto value = [&](int l) {
    const auto bits = static_cast<uint32_t>(w.r[i.s[0]][l]);
    return i.type == Scalar::kS32 ? int64_t{static_cast<int32_t>(bits)} : int64_t{bits};
  };
  int64_t best = value(__builtin_ctz(all));
  ForLanes(all, [&](int l) { best = kGreatest ? std::max(best, value(l)) : std::min(best, value(l)); });
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = static_cast<uint32_t>(best); });
  return true;
}

// The lowest of the lanes that are named is the one. d|p, lanes
bool Elect(Warp& w, const Instruction& i, Mask m) {
  const Mask named = Named(w, i, 0, m);
  if (!AllHere(w, named, m)) return false;
  const int elected = __builtin_ctz(m & named);
  ForLanes(m, [&](int l) {
    w.r[i.d[0]][l] = elected;
    w.r[i.d[1]][l] = l == elected;
  });
  return true;
}

bool WarpBarrier(Warp& w, const Instruction& i, Mask m) { return AllHere(w, Named(w, i, 0, m), m); }

}  // namespace

const Table kWarp = {
    {"shfl.sync.up", Plain<Shuffle<kUp>>},
    {"shfl.sync.down", Plain<Shuffle<kDown>>},
    {"shfl.sync.bfly", Plain<Shuffle<kButterfly>>},
    {"shfl.sync.idx", Plain<Shuffle<kIndex>>},
    {"redux.sync.min", Plain<Reduction<false>>},
    {"redux.sync.max", Plain<Reduction<true>>},
    {"vote.sync.all", Votes([](Mask yes, Mask all) { return yes == all; })},
    {"vote.sync.any", Votes([](Mask yes, Mask) { return yes != 0; })},
    {"vote.sync.uni", Votes([](Mask yes, Mask all) { return yes == all || yes == 0; })},
    {"vote.sync.ballot", Votes([](Mask yes, Mask) { return yes; })},
    {"elect.sync", Plain<Elect>},
    {"bar.warp",
     [](Operands& o) {
       o.Source(0);
       o.i.run = WarpBarrier;
     }},
};

}  // namespace emulator
