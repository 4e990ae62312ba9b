// Transaction barriers in shared memory.
#include <utility>

#include "instructions.h"

namespace emulator {
namespace {

// A phase, threads that are missing, threads of a phase, and bytes that are missing.
struct Transactions {
  uint64_t phase : 1, missing : 15, count : 15, pad : 1;
  int64_t bytes : 32;
};
static_assert(sizeof(Transactions) == 8);

Transactions& At(Warp& w, uint64_t address) {
  return *reinterpret_cast<Transactions*>(Shared(w, address & 0xFFFFFFFF, 8));
}
Transactions& BarrierOf(Warp& w, const Instruction& i, int l) {
  return At(w, w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate));
}
void Complete(Transactions& b) {
  if (b.missing == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.missing = b.count;
  }
}

bool Init(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    const uint32_t count = Get<uint32_t>(w.r[i.s[1]], l);
    BarrierOf(w, i, l) = {0, count, count, 0, 0};
  });
  return true;
}

enum : uint32_t { kArrives = 1, kExpectsBytes = 2 };  // flags

bool Arrive(Warp& w, const Instruction& i, Mask m) {  // [barrier], bytes or threads
  ForLanes(m, [&](int l) {
    Transactions& b = BarrierOf(w, i, l);
    if (!i.d.empty()) w.r[i.d[0]][l] = b.phase;
    if (i.flags & kExpectsBytes) b.bytes += Get<int32_t>(w.r[i.s[1]], l);
    if (i.flags & kArrives) {
      const uint32_t count = !(i.flags & kExpectsBytes) && i.s.size() > 1 ? Get<uint32_t>(w.r[i.s[1]], l) : 1;
      if (b.missing < count) throw Error("more arrive than the barrier expects");
      b.missing -= count;
    }
    Complete(b);
  });
  return true;
}
void BindArrive(Operands& o) {
  if (o.Has("arrive")) o.i.flags |= kArrives;
  if (o.Has("expect_tx")) o.i.flags |= kExpectsBytes;
  const size_t k = o.all[0][0] != '[';  // the phase comes first, where it is wanted
  if (k > 0) o.Destination(0);
  o.Memory(k);
  if (k + 1 < o.all.size())
    o.Source(k + 1);
  else if (o.i.flags & kExpectsBytes)
    throw Error("no bytes");
  o.i.run = Arrive;
}

// Ends the copies that the lane has begun (memory.cc), and arrives.
bool ArriveAfterCopies(Warp& w, const Instruction& i, Mask m) {
  ForLanes(m, [&](int l) {
    Transactions& b = BarrierOf(w, i, l);
    w.groups[l].push_back(std::exchange(w.copies[l], {}));
    std::vector<std::function<void()>> copies;
    for (const auto& group : std::exchange(w.groups[l], {}))
      for (const PendingCopy& c : group) copies.push_back([to = Shared(w, c.to, c.bytes), c] { c.Perform(to); });
    const auto arrive = [&b, copies] {
      for (const auto& copy : copies) copy();
      if (b.missing == 0) throw Error("more arrive than the barrier expects");
      --b.missing;
      Complete(b);
    };
    Cluster& cluster = *w.block->cluster;
    cluster.early ? arrive() : cluster.in_flight.push_back({&b, arrive});
  });
  return true;
}

// Whether the phase of this parity has ended; if not, others get their turn.
bool Test(Warp& w, const Instruction& i, Mask m) {
  bool missing = false;
  ForLanes(m, [&](int l) {
    Transactions& b = BarrierOf(w, i, l);
    std::erase_if(w.block->cluster->in_flight, [&](const auto& copy) {
      if (copy.first == &b) copy.second();
      return copy.first == &b;
    });
    const bool done = b.phase != (w.r[i.s[1]][l] & 1);
    w.r[i.d[0]][l] = done;
    missing |= !done;
  });
  (missing ? w.yields : w.passed) = true;
  return true;
}
void BindTest(Operands& o) {
  o.Destination(0);
  o.Memory(1);
  o.Source(2);
  o.i.run = Test;
}

bool Store(Warp& w, const Instruction& i, Mask m) {  // st.async [to], values, [barrier]
  const size_t count = i.s.size() - 2, each = Bytes(i.type);
  ForLanes(m, [&](int l) {
    uint8_t* to = Shared(w, (w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate)) & 0xFFFFFFFF, each * count);
    std::array<uint8_t, 16> values;
    for (size_t k = 0; k < count; ++k) std::memcpy(values.data() + k * each, &w.r[i.s[1 + k]][l], each);
    const size_t bytes = each * count;
    Transfer(w, w.r[i.s.back()][l], bytes, [=] { std::memcpy(to, values.data(), bytes); });
  });
  return true;
}
void BindStore(Operands& o) {
  o.Memory(0);
  const int64_t offset = std::exchange(o.i.immediate, 0);
  o.Source(1);
  o.Memory(2);
  if (o.i.immediate != 0) throw Error("an offset of the barrier");
  o.i.immediate = offset;
  o.i.run = Store;
}

}  // namespace

void Transfer(Warp& w, uint64_t barrier, int64_t bytes, std::function<void()> copy) {
  Transactions& b = At(w, barrier);
  const auto arrive = [&b, bytes, copy] {
    copy();
    b.bytes -= bytes;
    Complete(b);
  };
  Cluster& cluster = *w.block->cluster;
  cluster.early ? arrive() : cluster.in_flight.push_back({&b, arrive});
}

const Table kTransactions = {
    {"mbarrier.init",
     [](Operands& o) {
       o.Memory(0);
       o.Source(1);
       o.i.run = Init;
     }},
    {"mbarrier.inval", Ignore},
    {"mbarrier.arrive", BindArrive},
    {"mbarrier.expect_tx", BindArrive},
    {"cp.async.mbarrier.arrive",
     [](Operands& o) {
       if (!o.Has("noinc")) throw Error("without noinc");
       o.Memory(0);
       o.i.run = ArriveAfterCopies;
     }},
    {"mbarrier.try_wait", BindTest},
    {"mbarrier.test_wait", BindTest},
    {"st.async", BindStore},
};

}  // namespace emulator
