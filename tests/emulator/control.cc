// Branches, and barriers of blocks and clusters.
#include "instructions.h"

namespace emulator {
namespace {

bool Trap(Warp&, const Instruction&, Mask) { throw Error("trap"); }

bool Sleep(Warp& w, const Instruction&, Mask) {
  w.yields = true;
  return true;
}

// A barrier of a block. Lanes arrive once and wait for the phase's end.
enum : uint32_t { kCounted = 1, kArrives = 2 };                  // flags: says how many threads; does not wait
enum Reduction : int64_t { kNothing, kAnyOf, kAllOf, kNumber };  // of predicates

bool BlockBarrier(Warp& w, const Instruction& i, Mask m) {  // id, threads, predicate
  const int first = __builtin_ctz(m);
  const uint32_t id = Get<uint32_t>(w.r[i.s[0]], first);
  if (id >= w.block->barriers.size()) throw Error("no such barrier");
  Barrier& b = w.block->barriers[id];
  const int expected = i.flags & kCounted ? Get<int32_t>(w.r[i.s[1]], first) : w.block->alive;
  if (i.flags & kCounted && expected % kLanes != 0) throw Error("a barrier of no whole warps");
  if (const Mask fresh = m & ~w.waiting; fresh != 0) {
    if (b.arrived == 0) b.reduced = i.immediate == kAllOf;
    b.arrived += __builtin_popcount(fresh);
    if (b.arrived > expected) throw Error("more threads at a barrier than it expects");
    ForLanes(fresh, [&](int l) {
      if (i.immediate != kNothing) {
        const bool p = Predicate(w, i, static_cast<int>(i.s.size()) - 1, l);
        b.reduced = i.immediate == kAnyOf ? b.reduced || p : i.immediate == kAllOf ? b.reduced && p : b.reduced + p;
      }
      w.waits_for[l] = b.phase;
    });
    w.waiting |= fresh;
  }
  if (b.arrived == expected && b.phase == w.waits_for[first]) {
    b.arrived = 0;
    b.result = b.reduced;
    ++b.phase;
  }
  if (!(i.flags & kArrives) && b.phase == w.waits_for[first]) return false;
  w.waiting &= ~m;
  if (i.immediate != kNothing) ForLanes(m, [&](int l) { w.r[i.d[0]][l] = b.result; });
  return true;
}

void BindBarrier(Operands& o) {
  const bool reduces = o.Has("red");
  size_t k = 0;
  if (reduces) o.Destination(k++);
  o.Source(k++);
  if (o.Has("arrive")) o.i.flags |= kArrives;
  if (k + reduces < o.all.size()) {
    o.i.flags |= kCounted;
    o.Source(k++);
  }
  if (reduces) o.Source(k);
  o.i.immediate = !reduces ? kNothing : o.Has("or") ? kAnyOf : o.Has("and") ? kAllOf : kNumber;
  o.i.run = BlockBarrier;
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

}  // namespace

bool Branch(Warp&, const Instruction&, Mask) { return true; }
bool Exit(Warp&, const Instruction&, Mask) { return true; }

const Table kControl = {
    {"bra", [](Operands& o) { o.i.run = Branch; }},
    {"brx",
     [](Operands& o) {  // by an index; its table is in i.immediate
       o.Source(0);
       o.i.run = Branch;
     }},
    {"exit", [](Operands& o) { o.i.run = Exit; }},
    {"ret", [](Operands& o) { o.i.run = Exit; }},
    {"trap", [](Operands& o) { o.i.run = Trap; }},
    {"nanosleep", [](Operands& o) { o.i.run = Sleep; }},
    {"bar", BindBarrier},
    {"barrier", BindBarrier},
    {"barrier.cluster.arrive", [](Operands& o) { o.i.run = ClusterArrive; }},
    {"barrier.cluster.wait", [](Operands& o) { o.i.run = ClusterWait; }},
    {"fence", Ignore},
    {"membar", Ignore},
    {"setmaxnreg", Ignore},
    {"griddepcontrol", Ignore},
};

}  // namespace emulator
