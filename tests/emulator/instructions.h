// What the files that define instructions share.
#pragma once

#include "emulator.h"

namespace emulator {

// An instruction's words and operands, and how they become registers.
struct Operands {
  Instruction& i;
  std::vector<std::string> words;
  const std::vector<std::string>& all;
  Names& names;

  bool Has(std::string_view word) const;
  void Destination(size_t k);  // a register, "{a, b}" or "p|q"
  void Source(size_t k);
  void Memory(size_t k);  // "[address+offset]"
  std::vector<std::string> List(size_t k) const;
};

// Instructions on matrices and tiles.
bool BindMatrices(Operands& o);

// Counts bytes as arrived at a transaction barrier in shared memory.
void BytesArrive(Warp& w, uint64_t barrier, int64_t bytes, const Instruction& i);

// The scheduler does these.
bool BranchMarker(Warp& w, const Instruction& i, Mask m);
bool ExitMarker(Warp& w, const Instruction& i, Mask m);

}  // namespace emulator
