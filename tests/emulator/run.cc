// Runs grids: blocks, warps, and the paths of a warp's lanes.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>

#include "instructions.h"

namespace emulator {
namespace {

constexpr int kSlice = 20000;           // instructions before other warps have their turn
constexpr int kShortSlice = 200;        // at most, in an order that is shuffled
constexpr int kPolling = 64;            // instructions of who looks again and again whether it may go on, at most
constexpr int64_t kPatience = 100'000;  // turns of all warps before it is a deadlock

// The instruction that is executed, for who debugs a kernel that reads or writes beyond its arrays.
struct Place {
  const Kernel* kernel;
  const Instruction* instruction;
};
Place place;

void Report(int) {
  std::fprintf(stderr, "a bad address in: %s (kernel %s)\n", place.instruction->text.c_str(),
               place.kernel->name.c_str());
  std::abort();
}
struct Reporting {
  decltype(std::signal(SIGSEGV, Report)) before = std::signal(SIGSEGV, Report);
  ~Reporting() { std::signal(SIGSEGV, before); }
};

Dim Unravel(int64_t linear, Dim extent) {
  return {static_cast<uint32_t>(linear % extent.x), static_cast<uint32_t>(linear / extent.x % extent.y),
          static_cast<uint32_t>(linear / extent.x / extent.y)};
}

uint32_t Special(const std::string& name, const Warp& w, uint32_t lane, Dim grid, Dim block) {
  const auto rank = static_cast<uint32_t>(w.block->rank);
  const auto blocks = static_cast<uint32_t>(w.block->cluster->blocks.size());
  const uint32_t bit = uint32_t{1} << lane;
  const std::pair<const char*, Dim> vectors[] = {
      {"%tid.", Unravel(w.index * kLanes + lane, block)},
      {"%ntid.", block},
      {"%ctaid.", w.block->id},
      {"%nctaid.", grid},
      {"%cluster_ctaid.", {rank, 0, 0}},
      {"%cluster_nctaid.", {blocks, 1, 1}},
      {"%clusterid.", {w.block->id.x / blocks, w.block->id.y, w.block->id.z}},
      {"%nclusterid.", {grid.x / blocks, grid.y, grid.z}}};
  for (const auto& [head, d] : vectors)
    if (name.starts_with(head)) return name.back() == 'x' ? d.x : name.back() == 'y' ? d.y : d.z;
  const std::pair<const char*, uint32_t> scalars[] = {{"%nsmid", kMultiprocessors},
                                                      {"%smid", w.block->id.x % kMultiprocessors},
                                                      {"%laneid", lane},
                                                      {"%warpid", w.index},
                                                      {"%cluster_ctarank", rank},
                                                      {"%cluster_nctarank", blocks},
                                                      {"%lanemask_lt", bit - 1},
                                                      {"%lanemask_le", 2 * bit - 1},
                                                      {"%lanemask_eq", bit},
                                                      {"%lanemask_gt", ~(2 * bit - 1)},
                                                      {"%lanemask_ge", ~(bit - 1)}};
  for (const auto& [known, value] : scalars)
    if (name == known) return value;
  throw Error("unknown special register " + name);
}

class Grid {
 public:
  Grid(const Kernel& kernel, Dim grid, Dim block, int cluster, int64_t dynamic_shared, void** parameters)
      : kernel_(kernel),
        grid_(grid),
        block_(block),
        cluster_(cluster),
        shared_bytes_(kernel.shared_bytes + dynamic_shared),
        parameters_((kernel.parameter_bytes + 7) / 8 + 1) {
    for (size_t k = 0; k < kernel.parameters.size(); ++k)
      std::memcpy(reinterpret_cast<uint8_t*>(parameters_.data()) + kernel.parameters[k].first, parameters[k],
                  kernel.parameters[k].second);
    if (grid.x % cluster != 0) throw Error("a grid of no whole clusters");
    if (const char* seed = std::getenv("EMULATOR_SEED")) {
      shuffled_ = true;
      random_.seed(std::strtoul(seed, nullptr, 0));
    }
  }

  void Run() {
    int64_t next = 0, waited = 0;
    const int64_t clusters = grid_.Count() / cluster_;
    while (next < clusters || !running_.empty()) {
      bool moved = false;  // by more than looking whether it may
      for (auto cluster = running_.begin(); cluster != running_.end();) {
        if (shuffled_) std::shuffle((*cluster)->warps.begin(), (*cluster)->warps.end(), random_);
        for (const auto& warp : (*cluster)->warps) moved |= Slice(*warp);
        cluster = (*cluster)->alive == 0 ? running_.erase(cluster) : std::next(cluster);
      }
      waited = moved ? 0 : waited + 1;
      if (next < clusters && (!moved || (shuffled_ && random_() % 8 == 0)))
        Begin(next++);
      else if (!running_.empty() && waited > kPatience)
        Deadlock();
    }
  }

 private:
  void Begin(int64_t index) {
    auto cluster = std::make_unique<Cluster>();
    cluster->early = shuffled_ && random_() % 2 == 0;
    for (int rank = 0; rank < cluster_; ++rank) {
      auto block = std::make_unique<Block>();
      block->cluster = cluster.get();
      block->rank = rank;
      block->id = Unravel(index * cluster_ + rank, grid_);
      block->storage = std::make_unique_for_overwrite<uint8_t[]>(shared_bytes_ + 1024);
      block->shared =
          reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block->storage.get()) + 1023) / 1024 * 1024);
      std::memset(block->shared, 0xFF, shared_bytes_);  // not a number
      block->shared_bytes = shared_bytes_;
      block->alive = static_cast<int>(block_.Count());
      cluster->alive += block->alive;
      cluster->blocks.push_back(std::move(block));
    }
    for (const auto& block : cluster->blocks)
      for (int index = 0; index * kLanes < block_.Count(); ++index) cluster->warps.push_back(NewWarp(*block, index));
    running_.push_back(std::move(cluster));
  }

  std::unique_ptr<Warp> NewWarp(Block& block, int index) {
    auto warp = std::make_unique<Warp>();
    warp->block = &block;
    warp->index = index;
    const int64_t threads = std::min<int64_t>(kLanes, block_.Count() - int64_t{index} * kLanes);
    warp->alive = ~Mask{0} >> (kLanes - threads);
    warp->storage = std::make_unique_for_overwrite<Reg[]>(kernel_.registers);
    warp->r = warp->storage.get();
    std::memset(warp->r, 0xA5, sizeof(Reg) * kernel_.registers);
    warp->paths = {{0, warp->alive}};
    const int64_t local = (kernel_.local_bytes + 15) / 16 * 16;
    warp->local.resize(local * kLanes + 16);
    const auto base = (reinterpret_cast<uint64_t>(warp->local.data()) + 15) / 16 * 16;
    for (int l = 0; l < kLanes; ++l) {
      for (const auto& [r, value] : kernel_.constants) warp->r[r][l] = value;
      for (const auto& [r, name] : kernel_.specials) warp->r[r][l] = Special(name, *warp, l, grid_, block_);
      for (const auto& [r, at] : kernel_.locals) warp->r[r][l] = base + local * l + at;
      for (const auto& [r, at] : kernel_.parameter_addresses)
        warp->r[r][l] = reinterpret_cast<uint64_t>(parameters_.data()) + at;
    }
    return warp;
  }

  // Executes instructions of a warp until it has to wait, ends, or others are due. Whether it came any further.
  bool Slice(Warp& w) {
    const int most = shuffled_ ? 1 + static_cast<int>(random_() % kShortSlice) : kSlice;
    int all = 0;
    w.yields = w.passed = false;
    // Where one path waits, another may go on.
    for (size_t tries = 0; tries < w.paths.size() && all < most && !w.yields;) {
      const int done = Follow(w, tries, most - all);
      all += done;
      tries = done == 0 ? tries + 1 : 0;
    }
    return all > kPolling || w.passed || (all > 0 && !w.yields);
  }

  // Executes instructions of the path at `which`, `most` of them, until it waits; how many there were.
  int Follow(Warp& w, size_t which, int most) {
    Path path = w.paths[which];
    w.paths.erase(w.paths.begin() + static_cast<int64_t>(which));
    for (int done = 0;;) {
      const Instruction& i = kernel_.code[path.pc];
      Mask m = path.lanes;
      if (i.guard != kNoRegister) {
        Mask yes = 0;
        for (int l = 0; l < kLanes; ++l) yes |= Mask{w.r[i.guard][l] != 0} << l;
        m &= i.negated ? ~yes : yes;
      }
      const Mask others = path.lanes & ~m;
      if (m == 0) {
        ++path.pc;
      } else if (i.run == Branch && i.s.empty() && others == 0) {
        path.pc = static_cast<uint32_t>(i.immediate);
        ++done;
      } else if (i.run == Branch || i.run == Exit) {
        i.run == Branch ? Diverge(w, i, m) : Ended(w, m);
        if (others != 0) Put(w, {path.pc + 1, others});
        return done + 1;
      } else if (Execute(w, i, m)) {
        ++path.pc;
        ++done;
      } else {
        Put(w, path);
        return done;
      }
      // Paths that meet go on as one; the one behind goes first.
      const bool behind = which == 0 && !w.paths.empty() && path.pc >= w.paths[0].pc;
      if (behind || done >= most || w.yields) {
        Put(w, path);
        return done;
      }
    }
  }

  bool Execute(Warp& w, const Instruction& i, Mask m) {
    place = {&kernel_, &i};
    try {
      return i.run(w, i, m);
    } catch (const std::exception& e) {
      throw Error(std::string(e.what()) + " in: " + i.text + " (kernel " + kernel_.name + ", block " +
                  std::to_string(w.block->id.x) + ", warp " + std::to_string(w.index) + ")");
    }
  }

  static void Put(Warp& w, Path p) {
    for (Path& other : w.paths) {
      if (other.pc == p.pc && (w.waiting & (other.lanes | p.lanes)) == 0) {
        other.lanes |= p.lanes;
        return;
      }
    }
    const auto after = [](const Path& a, const Path& b) { return a.pc < b.pc; };
    w.paths.insert(std::upper_bound(w.paths.begin(), w.paths.end(), p, after), p);
  }

  // Of lanes that branch: all to one place, or, of brx, where the table says.
  void Diverge(Warp& w, const Instruction& i, Mask m) {
    if (i.s.empty()) return Put(w, {static_cast<uint32_t>(i.immediate), m});
    ForLanes(m, [&](int l) {
      const auto index = Get<uint32_t>(w.r[i.s[0]], l);
      Put(w, {static_cast<uint32_t>(kernel_.tables.at(i.immediate).at(index)), Mask{1} << l});
    });
  }

  static void Ended(Warp& w, Mask m) {
    w.alive &= ~m;
    w.block->alive -= __builtin_popcount(m);
    w.block->cluster->alive -= __builtin_popcount(m);
    // Who has ended is not waited for.
    Barrier& all = w.block->cluster->barrier;
    if (all.arrived > 0 && all.arrived == w.block->cluster->alive) {
      all.arrived = 0;
      ++all.phase;
    }
    if (w.block->cluster->alive == 0 && !w.block->cluster->in_flight.empty()) throw Error("nobody waited for a copy");
  }

  [[noreturn]] void Deadlock() const {
    std::string where;
    for (const auto& cluster : running_)
      for (const auto& warp : cluster->warps)
        for (const Path& p : warp->paths)
          if (where.size() < 2000)
            where += "\n  block " + std::to_string(warp->block->id.x) + " warp " + std::to_string(warp->index) + ": " +
                     kernel_.code[p.pc].text;
    throw Error("no thread can go on in " + kernel_.name + ":" + where);
  }

  const Kernel& kernel_;
  Dim grid_, block_;
  int cluster_;
  int64_t shared_bytes_;
  std::vector<uint64_t> parameters_;
  std::list<std::unique_ptr<Cluster>> running_;
  bool shuffled_ = false;
  std::mt19937 random_;
};

}  // namespace

void Launch(const Kernel& kernel, Dim grid, Dim block, int cluster, int64_t dynamic_shared, void** parameters) {
  const Reporting while_it_runs;
  Grid(kernel, grid, block, cluster, dynamic_shared, parameters).Run();
}

}  // namespace emulator
