// Runs grids: blocks, warps, and the paths of a warp's lanes.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>

#include "instructions.h"

namespace emulator {

bool BranchMarker(Warp&, const Instruction&, Mask) { return true; }
bool ExitMarker(Warp&, const Instruction&, Mask) { return true; }

namespace {

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

constexpr int kSlice = 20000;           // instructions before other warps have their turn
constexpr int kPolling = 64;            // instructions of who looks again and again whether it may go on, at most
constexpr int64_t kPatience = 100'000;  // turns of all warps before it is a deadlock

uint32_t Special(const std::string& name, const Warp& w, int lane, Dim grid, Dim block) {
  const int thread = w.index * kLanes + lane;
  const auto part = [&](const Dim& d) {
    switch (name.back()) {
      case 'x':
        return d.x;
      case 'y':
        return d.y;
      default:
        return d.z;
    }
  };
  const auto at = [&](Dim d, uint32_t linear) {
    switch (name.back()) {
      case 'x':
        return linear % d.x;
      case 'y':
        return linear / d.x % d.y;
      default:
        return linear / d.x / d.y;
    }
  };
  const auto begins = [&](const char* head) { return name.compare(0, std::strlen(head), head) == 0; };
  const auto blocks = static_cast<uint32_t>(w.block->cluster->blocks.size());
  if (begins("%tid")) return at(block, thread);
  if (begins("%ntid")) return part(block);
  if (begins("%ctaid")) return part(w.block->id);
  if (begins("%nctaid")) return part(grid);
  if (name == "%nsmid") return 132;  // as runtime.cc says
  if (name == "%smid") return w.block->id.x % 132;
  if (name == "%laneid") return lane;
  if (name == "%warpid") return w.index;
  if (name == "%cluster_ctarank" || name == "%cluster_ctaid.x") return w.block->rank;
  if (name == "%cluster_nctarank" || name == "%cluster_nctaid.x") return blocks;
  if (begins("%cluster_ctaid")) return 0;
  if (begins("%cluster_nctaid")) return 1;
  if (name == "%clusterid.x") return w.block->id.x / blocks;
  if (name == "%nclusterid.x") return grid.x / blocks;
  if (name == "%lanemask_lt") return (uint32_t{1} << lane) - 1;
  if (name == "%lanemask_le") return ((uint32_t{1} << lane) - 1) | uint32_t{1} << lane;
  if (name == "%lanemask_eq") return uint32_t{1} << lane;
  if (name == "%lanemask_gt") return ~((uint32_t{2} << lane) - 1);
  if (name == "%lanemask_ge") return ~((uint32_t{1} << lane) - 1);
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
  }

  void Run() {
    int64_t next = 0, waited = 0;
    const int64_t clusters = grid_.Count() / cluster_;
    while (next < clusters || !running_.empty()) {
      bool moved = false;  // by more than looking whether it may
      for (auto cluster = running_.begin(); cluster != running_.end();) {
        for (const auto& block : (*cluster)->blocks)
          for (const auto& warp : block->warps) moved |= Slice(*warp);
        cluster = (*cluster)->alive == 0 ? running_.erase(cluster) : std::next(cluster);
      }
      if (moved)
        waited = 0;
      else if (next < clusters)
        Begin(next++);
      else if (!running_.empty() && ++waited > kPatience)
        Deadlock();
    }
  }

 private:
  void Begin(int64_t index) {
    auto cluster = std::make_unique<Cluster>();
    for (int rank = 0; rank < cluster_; ++rank) {
      auto block = std::make_unique<Block>();
      const int64_t linear = index * cluster_ + rank;
      block->cluster = cluster.get();
      block->rank = rank;
      block->id = {static_cast<uint32_t>(linear % grid_.x), static_cast<uint32_t>(linear / grid_.x % grid_.y),
                   static_cast<uint32_t>(linear / grid_.x / grid_.y)};
      block->storage = std::make_unique<uint8_t[]>(shared_bytes_ + 1024);
      block->shared =
          reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block->storage.get()) + 1023) / 1024 * 1024);
      std::memset(block->shared, 0xFF, shared_bytes_);  // not a number
      block->shared_bytes = shared_bytes_;
      block->alive = static_cast<int>(block_.Count());
      cluster->alive += block->alive;
      cluster->blocks.push_back(std::move(block));
    }
    for (const auto& block : cluster->blocks)
      for (int index = 0; index * kLanes < block_.Count(); ++index) AddWarp(*block, index);
    running_.push_back(std::move(cluster));
  }

  void AddWarp(Block& block, int index) {
    auto warp = std::make_unique<Warp>();
    warp->block = &block;
    warp->kernel = &kernel_;
    warp->index = index;
    const int64_t threads = std::min<int64_t>(kLanes, block_.Count() - int64_t{index} * kLanes);
    warp->alive = threads == kLanes ? ~Mask{0} : (Mask{1} << threads) - 1;
    warp->storage = std::make_unique<Reg[]>(kernel_.registers);
    warp->r = warp->storage.get();
    std::memset(warp->r, 0xA5, sizeof(Reg) * kernel_.registers);
    warp->paths = {{0, warp->alive}};
    const int64_t local = (kernel_.local_bytes + 15) / 16 * 16;
    warp->local.resize(local * kLanes + 16);
    const auto base = (reinterpret_cast<uint64_t>(warp->local.data()) + 15) / 16 * 16;
    for (int l = 0; l < kLanes; ++l) {
      for (const auto& [r, value] : kernel_.constants) warp->r[r][l] = value;
      for (const auto& [r, name] : kernel_.specials)
        if (name != "%clock" && name != "%clock64" && name != "%globaltimer")
          warp->r[r][l] = Special(name, *warp, l, grid_, block_);
      for (const auto& [r, at] : kernel_.locals) warp->r[r][l] = base + local * l + at;
      for (const auto& [r, at] : kernel_.parameter_addresses)
        warp->r[r][l] = reinterpret_cast<uint64_t>(parameters_.data()) + at;
    }
    block.warps.push_back(std::move(warp));
  }

  // Executes instructions of a warp until it has to wait, ends, or others are due. Whether it came any further.
  bool Slice(Warp& w) {
    int all = 0;
    w.yields = w.passed = false;
    // Where one path waits, another may go on.
    for (size_t tries = 0; tries < w.paths.size() && all < kSlice && !w.yields;) {
      const int done = Path_(w, tries);
      all += done;
      tries = done == 0 ? tries + 1 : 0;
    }
    return all > kPolling || w.passed || (all > 0 && !w.yields);
  }

  // Of the path at `which`, until it waits; the number of instructions.
  int Path_(Warp& w, size_t which) {
    Path path = w.paths[which];
    w.paths.erase(w.paths.begin() + static_cast<int64_t>(which));
    int done = 0;
    const auto put = [&](Path p) {
      for (Path& other : w.paths) {
        if (other.pc == p.pc && (w.waiting & (other.lanes | p.lanes)) == 0) {
          other.lanes |= p.lanes;
          return;
        }
      }
      w.paths.insert(
          std::upper_bound(w.paths.begin(), w.paths.end(), p, [](const Path& a, const Path& b) { return a.pc < b.pc; }),
          p);
    };
    while (true) {
      const Instruction& i = kernel_.code[path.pc];
      Mask m = path.lanes;
      if (i.guard != kNoRegister) {
        Mask yes = 0;
        for (int l = 0; l < kLanes; ++l) yes |= Mask{w.r[i.guard][l] != 0} << l;
        m &= i.negated ? ~yes : yes;
      }
      if (m == 0) {
        ++path.pc;
      } else if (i.run == BranchMarker) {
        ++done;
        if (i.flags) {  // brx.idx
          for (Mask rest = m; rest != 0;) {
            const uint64_t index = w.r[i.s[0]][__builtin_ctz(rest)];
            Mask same = 0;
            for (int l = 0; l < kLanes; ++l) same |= Mask{(rest >> l & 1) != 0 && w.r[i.s[0]][l] == index} << l;
            put({static_cast<uint32_t>(kernel_.tables.at(i.immediate).at(index & 0xFFFFFFFF)), same});
            rest &= ~same;
          }
          if (path.lanes & ~m) put({path.pc + 1, path.lanes & ~m});
          return done;
        }
        if (m == path.lanes) {
          path.pc = static_cast<uint32_t>(i.immediate);
        } else {
          put({static_cast<uint32_t>(i.immediate), m});
          put({path.pc + 1, path.lanes & ~m});
          return done;
        }
      } else if (i.run == ExitMarker) {
        w.alive &= ~m;
        Ended(*w.block, __builtin_popcount(m));
        if (path.lanes & ~m) put({path.pc + 1, path.lanes & ~m});
        return done + 1;
      } else {
        bool ended;
        place = {&kernel_, &i};
        try {
          ended = i.run(w, i, m);
        } catch (const Error& e) {
          throw Error(std::string(e.what()) + " (kernel " + kernel_.name + ", block " + std::to_string(w.block->id.x) +
                      ", warp " + std::to_string(w.index) + ")");
        } catch (const std::exception& e) {
          throw Error(std::string(e.what()) + " in: " + i.text + " (kernel " + kernel_.name + ", block " +
                      std::to_string(w.block->id.x) + ", warp " + std::to_string(w.index) + ")");
        }
        if (!ended) {
          put(path);
          return done;
        }
        ++path.pc;
        ++done;
      }
      // Paths that meet go on as one; the one behind goes first.
      if (!w.paths.empty() && path.pc >= w.paths[0].pc && which == 0) {
        put(path);
        return done;
      }
      if (done >= kSlice || w.yields) {
        put(path);
        return done;
      }
    }
  }

  static void Ended(Block& block, int threads) {
    block.alive -= threads;
    block.cluster->alive -= threads;
    // Who has ended is not waited for.
    Barrier& all = block.cluster->barrier;
    if (all.arrived > 0 && all.arrived == block.cluster->alive) {
      all.arrived = 0;
      ++all.phase;
    }
  }

  [[noreturn]] void Deadlock() const {
    std::string where;
    for (const auto& cluster : running_)
      for (const auto& block : cluster->blocks)
        for (const auto& warp : block->warps)
          for (const Path& p : warp->paths)
            if (where.size() < 2000)
              where += "\n  block " + std::to_string(block->id.x) + " warp " + std::to_string(warp->index) + ": " +
                       kernel_.code[p.pc].text;
    throw Error("no thread can go on in " + kernel_.name + ":" + where);
  }

  const Kernel& kernel_;
  Dim grid_, block_;
  int cluster_;
  int64_t shared_bytes_;
  std::vector<uint64_t> parameters_;
  std::list<std::unique_ptr<Cluster>> running_;
};

}  // namespace

void Launch(const Kernel& kernel, Dim grid, Dim block, int cluster, int64_t dynamic_shared, void** parameters) {
  const auto before = std::signal(SIGSEGV, Report);
  try {
    Grid(kernel, grid, block, cluster, dynamic_shared, parameters).Run();
  } catch (...) {
    std::signal(SIGSEGV, before);
    throw;
  }
  std::signal(SIGSEGV, before);
}

}  // namespace emulator
