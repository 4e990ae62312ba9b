// Moves, loads, stores and asynchronous copies.
#include <algorithm>
#include <utility>

#include "instructions.h"

namespace emulator {

uint8_t* Shared(Warp& w, uint64_t address, int64_t bytes) {
  Block* block = w.block;
  if (const uint64_t rank = address >> 24 & 0xFF; rank > 0) {
    if (rank > block->cluster->blocks.size()) throw Error("shared memory of no block of the cluster");
    block = block->cluster->blocks[rank - 1].get();
  }
  const int64_t offset = address & 0xFFFFFF;
  if (offset + bytes > block->shared_bytes || offset < kSharedBase)
    throw Error("shared address " + std::to_string(offset) + " of " + std::to_string(bytes) + " bytes is beyond " +
                std::to_string(block->shared_bytes));
  if (offset % std::min<int64_t>(bytes, 16) != 0)
    throw Error("shared address " + std::to_string(offset) + " is not aligned");
  return block->shared + offset;
}

namespace {

bool Move(Warp& w, const Instruction& i, Mask m) {
  const size_t parts = std::max(i.s.size(), i.d.size());
  const int bits = 8 * Bytes(i.type) / static_cast<int>(parts);
  const uint64_t ones = ~uint64_t{0} >> (64 - bits);
  ForLanes(m, [&](int l) {
    if (parts == 1) {
      w.r[i.d[0]][l] = w.r[i.s[0]][l];
    } else if (i.d.size() == 1) {
      uint64_t v = 0;
      for (size_t k = 0; k < parts; ++k) v |= (w.r[i.s[k]][l] & ones) << bits * k;
      w.r[i.d[0]][l] = v;
    } else {
      const uint64_t v = w.r[i.s[0]][l];
      for (size_t k = 0; k < parts; ++k) w.r[i.d[k]][l] = v >> bits * k & ones;
    }
  });
  return true;
}

// Time goes on whenever somebody looks.
bool Clock(Warp& w, const Instruction& i, Mask m) {
  static uint64_t now = 0;
  now += 1000;
  ForLanes(m, [&](int l) { w.r[i.d[0]][l] = now; });
  return true;
}
void BindMove(Operands& o) {
  const bool clock = o.all[1].starts_with("%clock") || o.all[1] == "%globaltimer";
  if (!clock) return o.Plain(Move);
  o.Destination(0);
  o.i.run = Clock;
}

// Flags: the address is of shared memory, or of any.
enum : uint32_t { kOfShared = 1, kOfAny = 2 };

uint8_t* Address(Warp& w, const Instruction& i, int l, int64_t bytes) {
  const uint64_t at = w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate);
  if (i.flags & kOfShared || (i.flags & kOfAny && IsShared(at))) return Shared(w, at & 0xFFFFFFFF, bytes);
  if (IsShared(at)) throw Error("a shared address where another is wanted");
  if (at < 4096) throw Error("null address");
  if (at % bytes != 0) throw Error("address is not aligned");
  return reinterpret_cast<uint8_t*>(at);
}

template <class T>
bool Load(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    T values[8];
    const size_t bytes = i.d.size() * sizeof(T);
    std::memcpy(values, Address(w, i, l, bytes), bytes);
    for (size_t k = 0; k < i.d.size(); ++k) Put(w.r[i.d[k]], l, values[k]);
  });
  return true;
}
template <class T>
bool Store(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    T values[8];
    const size_t count = i.s.size() - 1;
    for (size_t k = 0; k < count; ++k) values[k] = Get<T>(w.r[i.s[k + 1]], l);
    std::memcpy(Address(w, i, l, count * sizeof(T)), values, count * sizeof(T));
  });
  return true;
}

template <bool store>
void BindAccess(Operands& o) {
  o.Memory(store ? 0 : 1);
  store ? o.Source(1) : o.Destination(0);
  if (o.Has("shared") || o.Has("shared::cta") || o.Has("shared::cluster"))
    o.i.flags |= kOfShared;
  else if (!o.Has("global") && !o.Has("local") && !o.Has("param") && !o.Has("const"))
    o.i.flags |= kOfAny;
  o.i.run =
      WithInteger(o.i.type, [](auto zero) -> Run { return store ? Store<decltype(zero)> : Load<decltype(zero)>; });
}

bool MapToRank(Warp& w, const Instruction& i, Mask m) {  // mapa
  ForLanes(m, [&](int l) {
    const uint64_t rank = Get<uint32_t>(w.r[i.s[1]], l), at = w.r[i.s[0]][l];
    if (rank >= w.block->cluster->blocks.size()) throw Error("no block of this rank in the cluster");
    w.r[i.d[0]][l] = (IsShared(at) ? kSharedTag : 0) | (at & 0xFFFFFF) | (rank + 1) << 24;
  });
  return true;
}

// Copies wait as long as they may: until their group is waited for.
bool CopyAsync(Warp& w, const Instruction& i, Mask m) {  // [to], [from], bytes, how many are not zeros
  ForLanes(m, [&](int l) {
    const auto s = [&](int k) { return Get<uint32_t>(w.r[i.s[k]], l); };
    const uint32_t bytes = s(2), valid = i.s.size() > 3 ? std::min(bytes, s(3)) : bytes;
    const uint64_t from = w.r[i.s[1]][l];
    if (from % bytes != 0) throw Error("global address is not aligned");
    Shared(w, s(0), bytes);
    w.copies[l].push_back({s(0), reinterpret_cast<const uint8_t*>(from), bytes, valid});
  });
  return true;
}
void BindCopy(Operands& o) {
  for (size_t k = 0; k < 2; ++k) {
    o.Memory(k);
    if (o.i.immediate != 0) throw Error("an offset");
  }
  for (size_t k = 2; k < o.all.size(); ++k) o.Source(k);
  o.i.run = CopyAsync;
}

bool CommitCopies(Warp& w, const Instruction&, Mask m) {
  ForLanes(m, [&](int l) { w.groups[l].push_back(std::exchange(w.copies[l], {})); });
  return true;
}
bool WaitCopies(Warp& w, const Instruction& i, Mask m) {  // until so many groups are left
  ForLanes(m, [&](int l) {
    for (; w.groups[l].size() > w.r[i.s[0]][l]; w.groups[l].pop_front())
      for (const PendingCopy& c : w.groups[l].front()) c.Perform(Shared(w, c.to, c.bytes));
  });
  return true;
}

}  // namespace

const Table kMemory = {
    {"mov", BindMove},
    {"ld", BindAccess<false>},
    {"st", BindAccess<true>},
    {"cvta", Plain<Move>},
    {"cvta.to.shared", Bitwise<uint64_t>([](auto at) { return IsShared(at) ? at & 0xFFFFFFFF : at; })},
    {"cvta.shared", Bitwise<uint64_t>([](auto at) { return kSharedTag | (at & 0xFFFFFFFF); })},
    {"mapa", Plain<MapToRank>},
    {"cp.async.ca", BindCopy},
    {"cp.async.cg", BindCopy},
    {"cp.async.commit_group", [](Operands& o) { o.i.run = CommitCopies; }},
    {"cp.async.wait_group",
     [](Operands& o) {
       o.Source(0);
       o.i.run = WaitCopies;
     }},
    {"prefetch", Ignore},
};

}  // namespace emulator
