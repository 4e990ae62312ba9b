// An interpreter of PTX, so that the kernels can be tested where there is no GPU.
//
// The kernels' own PTX runs (of compute_90a, and of compute_80 where Hopper's machine code is made of that), a warp at
// a time: an instruction is executed for all lanes of the warp that are at it. Where lanes diverge, those with the
// lowest program counter go first, which brings them together again where their paths meet. Warps take turns where one
// has to wait, or after some thousand instructions. Blocks begin in order; a further one begins when all before it wait
// or have ended. With a number as EMULATOR_SEED in the environment, the order is shuffled by it, turns are short, and
// blocks begin while others run.
//
// What is modelled: registers, the memory spaces, barriers of all kinds, clusters, asynchronous copies (which arrive as
// late as they may), the TMA unit, matrix instructions. What is not: time, the order of memory accesses between threads
// beyond program order, and rounding of the approximate functions, which are those of the C library, rounded once.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "numbers.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr int kMultiprocessors = 132;  // of an H200, as is all that the runtime says
using Mask = uint32_t;                 // of lanes
using Reg = uint64_t[kLanes];          // one register of all lanes; narrower ones use the low bits

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Instruction;
// Returns false where lanes have to wait; the instruction is then executed again.
using Run = bool (*)(Warp&, const Instruction&, Mask);

constexpr int kNoRegister = -1;

struct Instruction {
  Run run = nullptr;
  int guard = kNoRegister;  // a predicate
  bool negated = false;
  Scalar type = Scalar::kNone, type2 = Scalar::kNone;
  uint32_t flags = 0;
  int64_t immediate = 0;  // of memory: an offset; of a branch: where to; else what the instruction wants
  std::vector<int> d, s;  // registers that it writes and reads
  std::string text;
};

// A function with what it calls written out in its place.
struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  int registers = 0, max_threads = 1024;
  std::vector<std::pair<int, uint64_t>> constants;           // registers that always hold a number
  std::vector<std::pair<int, std::string>> specials;         // registers that hold %tid.x and the like
  std::vector<std::pair<int, int64_t>> locals;               // registers that hold the address of local memory
  std::vector<std::pair<int, int64_t>> parameter_addresses;  // registers that hold the address of a parameter
  int64_t local_bytes = 0, parameter_bytes = 0, shared_bytes = 0;
  std::vector<std::pair<int64_t, int64_t>> parameters;  // offset and size
  std::vector<std::vector<int>> tables;                 // targets of brx.idx
};

// One compilation unit's PTX; functions are decoded when they are wanted.
class Module {
 public:
  explicit Module(const std::string& text);
  const Kernel& Find(const std::string& name);

 private:
  friend class Decoder;
  struct Function {
    std::string_view results, parameters, attributes, body;
  };
  std::string text_;
  std::map<std::string, Function> functions_;
  std::vector<std::string> variables_;  // declarations outside of functions
  std::map<std::string, std::vector<uint8_t>> globals_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  int64_t Count() const { return int64_t{x} * y * z; }
};

// Runs a grid to its end. Parameters are as the kernel has them, one pointer each.
void Launch(const Kernel& kernel, Dim grid, Dim block, int cluster, int64_t dynamic_shared, void** parameters);

// What the executing side of instructions needs --------------------------------------------------------------------

struct Block;

// A named barrier of a block, or a cluster's.
struct Barrier {
  int arrived = 0;
  uint64_t phase = 0;
  int reduced = 0, result = 0;  // of bar.red: of this phase's predicates, and the last phase's
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Warp>> warps;  // of all blocks, in the order in which they have their turns
  Barrier barrier;
  int alive = 0;       // threads
  bool early = false;  // whether copies that a transaction barrier counts arrive at once
  std::vector<std::pair<const void*, std::function<void()>>> in_flight;  // else, by barrier
};

struct Block {
  Cluster* cluster = nullptr;
  int rank = 0;
  Dim id;
  std::unique_ptr<uint8_t[]> storage;
  uint8_t* shared = nullptr;
  int64_t shared_bytes = 0;
  std::array<Barrier, 16> barriers;
  int alive = 0;
};

// Lanes that are at one instruction.
struct Path {
  uint32_t pc;
  Mask lanes;
};

struct PendingCopy {
  uint32_t to;
  const uint8_t* from;
  uint32_t bytes, valid;

  void Perform(uint8_t* shared) const {
    std::memset(shared, 0, bytes);
    if (valid > 0) std::memcpy(shared, from, valid);
  }
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  Mask alive = 0;
  std::unique_ptr<Reg[]> storage;
  Reg* r = nullptr;
  std::vector<Path> paths;  // by pc; the first is executed
  std::vector<uint8_t> local;
  // Asynchronous copies of each lane that are not in a group yet, and groups that nobody has waited for.
  std::array<std::vector<PendingCopy>, kLanes> copies;
  std::array<std::deque<std::vector<PendingCopy>>, kLanes> groups;
  // Of each lane, the phase of the barrier it waits for, if any.
  std::array<uint64_t, kLanes> waits_for{};
  Mask waiting = 0;
  std::array<uint64_t, kLanes> cluster_phase{};
  bool yields = false;  // set by an instruction after which others should run
  bool passed = false;  // set by one that was waited for
};

// Shared memory of the warp's block or its cluster. Checks what can be checked.
constexpr int64_t kSharedBase = 1024;  // where a block's shared memory begins
constexpr uint64_t kSharedTag = uint64_t{0x5E} << 56;
uint8_t* Shared(Warp& w, uint64_t address, int64_t bytes);

// How a name or a number of the text becomes a register.
class Names {
 public:
  virtual int Register(const std::string& operand) = 0;
  virtual ~Names() = default;
};

// Fills in what executes an instruction, given its opcode, the dotted words after it, and its operands.
void Bind(Instruction& i, const std::string& opcode, const std::vector<std::string>& operands, Names& names);

}  // namespace emulator
