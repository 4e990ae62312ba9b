// Instructions on matrices: ldmatrix, stmatrix, mma.sync.m16n8 and wgmma.mma_async (a warp's share of it, at once).
#include <algorithm>

#include "instructions.h"

namespace emulator {
namespace {

constexpr int kChunk = 16;  // bytes that are always read and written together

void WholeWarp(Mask m) {
  if (m != ~Mask{0}) throw Error("not all lanes are at it");
}

// Lane 8 k + j gives the address of row j of matrix k.
uint8_t* RowOf(Warp& w, const Instruction& i, size_t k, int row) {
  const uint64_t address = w.r[i.s[0]][8 * k + row] + static_cast<uint64_t>(i.immediate);
  return Shared(w, address & 0xFFFFFFFF, kChunk);
}

// Lane l holds of each matrix the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or, transposed, of column l / 4.
template <bool transposed>
bool LoadMatrices(Warp& w, const Instruction& i, Mask m) {
  WholeWarp(m);
  uint16_t values[4][8][8];
  for (size_t k = 0; k < i.d.size(); ++k)
    for (int row = 0; row < 8; ++row) std::memcpy(values[k][row], RowOf(w, i, k, row), kChunk);
  for (size_t k = 0; k < i.d.size(); ++k)
    for (int l = 0; l < kLanes; ++l) {
      const auto at = [&](int x, int y) { return uint32_t{transposed ? values[k][y][x] : values[k][x][y]}; };
      w.r[i.d[k]][l] = at(l / 4, l % 4 * 2) | at(l / 4, l % 4 * 2 + 1) << 16;
    }
  return true;
}
template <bool transposed>
bool StoreMatrices(Warp& w, const Instruction& i, Mask m) {
  WholeWarp(m);
  for (size_t k = 0; k + 1 < i.s.size(); ++k) {
    uint16_t values[8][8];
    for (int l = 0; l < kLanes; ++l)
      for (int half = 0; half < 2; ++half) {
        const int x = l / 4, y = l % 4 * 2 + half;
        (transposed ? values[y][x] : values[x][y]) = static_cast<uint16_t>(w.r[i.s[k + 1]][l] >> 16 * half);
      }
    for (int row = 0; row < 8; ++row) std::memcpy(RowOf(w, i, k, row), values[row], kChunk);
  }
  return true;
}

void BindLoad(Operands& o) {
  o.Destination(0);
  o.Memory(1);
  o.i.run = o.Has("trans") ? LoadMatrices<true> : LoadMatrices<false>;
}
void BindStore(Operands& o) {
  o.Memory(0);
  o.Source(1);
  o.i.run = o.Has("trans") ? StoreMatrices<true> : StoreMatrices<false>;
}

// Products ----------------------------------------------------------------------------------------------------------

constexpr int kRows = 16, kColumns = 256, kTermBytes = 32;

using Line = float[kTermBytes];  // terms of a row of a, or of a column of b
using Words = uint32_t[kLanes];

// Flags of a product.
enum : uint32_t { kARegisters = 1, kTransposeA = 2, kTransposeB = 4, kNegateA = 8, kNegateB = 16, kSaturate = 32 };

// The terms that a register holds: a lane has 4 bytes of each row, 4 (lane % 4) and on. PTX ISA, "Matrix fragments for
// mma.m16n8k...": they are alike in bytes for all types.
void Unpack(const Warp& w, int r, Scalar type, int row, int first_byte, Line* lines) {
  const int each = Bytes(type);
  for (int l = 0; l < kLanes; ++l)
    for (int byte = 0; byte < 4; byte += each)
      lines[row + l / 4][(first_byte + l % 4 * 4 + byte) / each] =
          FloatOf(type, static_cast<uint32_t>(w.r[r][l]) >> 8 * byte);
}
// Registers of a: rows 0 to 7 of the first 16 bytes, rows 8 to 15, and the same of the next 16 bytes.
void UnpackRows(const Warp& w, const Instruction& i, int count, Line* rows) {
  for (int k = 0; k < count; ++k) Unpack(w, i.s[k], i.type, k % 2 * 8, k / 2 * kChunk, rows);
}

// c += a b, of any number of eights of columns: lane l has of row l / 4 the columns 8 j + 2 (l % 4) + {0, 1} in
// registers 4 j + {0, 1}, and of the row 8 below in 4 j + {2, 3}. Sums are of double, and rounded to float once: the
// tensor cores' own keep fewer bits (of 8-bit floats about 14), so theirs are less accurate. Integers are exact.
void Multiply(const Instruction& i, const Line* rows, const Line* columns, int column_count, int terms, Words* c) {
  const double sign = !(i.flags & kNegateA) == !(i.flags & kNegateB) ? 1 : -1;
  double b[kTermBytes][kColumns];
  for (int column = 0; column < column_count; ++column)
    for (int k = 0; k < terms; ++k) b[k][column] = columns[column][k];
  for (int row = 0; row < kRows; ++row) {
    double sums[kColumns] = {};
    for (int k = 0; k < terms; ++k)
      for (int column = 0; column < column_count; ++column) sums[column] += rows[row][k] * b[k][column];
    for (int column = 0; column < column_count; ++column) {
      uint32_t& to = c[column / 8 * 4 + row / 8 * 2 + column % 2][row % 8 * 4 + column % 8 / 2];
      if (IsFloat(i.type)) {
        const auto total = static_cast<float>(sign * sums[column] + std::bit_cast<float>(to));
        to = std::isnan(total) ? 0x7FFFFFFF : std::bit_cast<uint32_t>(total);
      } else {
        const int64_t total = static_cast<int64_t>(sums[column]) + static_cast<int32_t>(to);
        to = static_cast<uint32_t>(i.flags & kSaturate ? std::clamp<int64_t>(total, INT32_MIN, INT32_MAX) : total);
      }
    }
  }
}

bool WarpProduct(Warp& w, const Instruction& i, Mask m) {  // d, a, b, c
  WholeWarp(m);
  const int b_count = static_cast<int>(i.s.size() - 4) / 3, a_count = 2 * b_count;
  Line rows[kRows], columns[8];
  Words sums[4];
  UnpackRows(w, i, a_count, rows);
  for (int k = 0; k < b_count; ++k) Unpack(w, i.s[a_count + k], i.type2, 0, k * kChunk, columns);
  for (int k = 0; k < 4; ++k)
    for (int l = 0; l < kLanes; ++l) sums[k][l] = static_cast<uint32_t>(w.r[i.s[a_count + b_count + k]][l]);
  Multiply(i, rows, columns, 8, b_count * kChunk / Bytes(i.type), sums);
  for (int k = 0; k < 4; ++k)
    for (int l = 0; l < kLanes; ++l) w.r[i.d[k]][l] = sums[k][l];
  return true;
}

// Where wgmma finds `chunk` of the contiguous dimension of `line` of the other one: K-major, lines are rows or columns
// and chunks are of terms; transposed (MN-major), lines are terms and chunks of 8 rows or columns.
//
// PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout". A line of the swizzle's 32, 64 or 128 bytes (16
// without) has so many chunks side by side; eight lines follow each other; from eight lines to the next, and from the
// chunks of a line to those after them, it is so many bytes: the stride and the leading offset, or the other way round
// of MN-major chunks that are not swizzled. The swizzle exchanges chunks by bits of the final address, so that operands
// may begin with any line, and advance within it.
uint32_t ChunkAddress(uint64_t descriptor, bool transposed, int line, int chunk) {
  const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3FFF) << 4; };
  static constexpr int kChunks[] = {1, 8, 4, 2};
  const int chunks = kChunks[descriptor >> 62];
  if (descriptor >> 49 & 7) throw Error("base offsets are not modelled");
  uint32_t next_eight = field(32), next_chunks = field(16);
  if (transposed && chunks == 1) std::swap(next_eight, next_chunks);
  const uint32_t address = field(0) + line % 8 * chunks * kChunk + line / 8 * next_eight + chunk % chunks * kChunk +
                           chunk / chunks * next_chunks;
  return address ^ (address >> 3 & (chunks - 1) * kChunk);
}

// `count` rows or columns from the `first` on.
void ReadLines(Warp& w, Scalar type, uint64_t descriptor, bool transposed, int first, int count, Line* lines) {
  const int each = Bytes(type), in_chunk = kChunk / each, terms = kTermBytes / each;
  for (int outer = 0; outer < (transposed ? terms : count); ++outer)
    for (int inner = 0; inner < (transposed ? count : terms); inner += in_chunk) {
      const uint32_t address = ChunkAddress(descriptor, transposed, transposed ? outer : first + outer,
                                            ((transposed ? first : 0) + inner) / in_chunk);
      const uint8_t* const from = Shared(w, address, kChunk);
      for (int e = 0; e < in_chunk; ++e) {
        uint32_t bits = 0;
        std::memcpy(&bits, from + e * each, each);
        (transposed ? lines[inner + e][outer] : lines[outer][inner + e]) = FloatOf(type, bits);
      }
    }
}

bool GroupProduct(Warp& w, const Instruction& i, Mask m) {  // d, a or its descriptor, b's, whether d is added
  WholeWarp(m);
  const int column_count = 2 * static_cast<int>(i.d.size());
  Line rows[kRows], columns[kColumns];
  Words sums[128] = {};
  if (i.flags & kARegisters)
    UnpackRows(w, i, 4, rows);
  else
    ReadLines(w, i.type, w.r[i.s[0]][0], i.flags & kTransposeA, kRows * (w.index % 4), kRows, rows);
  ReadLines(w, i.type2, w.r[*(i.s.end() - 2)][0], i.flags & kTransposeB, 0, column_count, columns);
  for (size_t k = 0; k < i.d.size(); ++k)
    for (int l = 0; l < kLanes; ++l) sums[k][l] = w.r[i.s.back()][0] ? static_cast<uint32_t>(w.r[i.d[k]][l]) : 0;
  Multiply(i, rows, columns, column_count, kTermBytes / Bytes(i.type), sums);
  for (size_t k = 0; k < i.d.size(); ++k)
    for (int l = 0; l < kLanes; ++l) w.r[i.d[k]][l] = sums[k][l];
  return true;
}

// Of the types, the second and the third are the factors'.
void BindProduct(Operands& o, Run run) {
  if (o.types.size() < 3 || (o.types[0] != Scalar::kF32 && o.types[0] != Scalar::kS32)) throw Error("unknown types");
  o.i.type = o.types[1];
  o.i.type2 = o.types[2];
  if (o.Has("satfinite")) o.i.flags |= kSaturate;
  o.Destination(0);
  for (size_t k = 1; k <= 3; ++k) o.Source(k);
  o.i.run = run;
}
void BindWarpProduct(Operands& o) {
  if (!o.words[3].starts_with("m16n8k")) throw Error("unknown shape");
  BindProduct(o, WarpProduct);
}
void BindGroupProduct(Operands& o) {
  BindProduct(o, GroupProduct);
  const auto is = [&](size_t k, const char* number, uint32_t flag) {
    if (k < o.all.size() && o.all[k] == number) o.i.flags |= flag;
  };
  const bool registers = o.all[1][0] == '{';  // which are not transposed
  if (registers) o.i.flags |= kARegisters;
  is(4, "-1", kNegateA);
  is(5, "-1", kNegateB);
  if (!registers) is(6, "1", kTransposeA);
  is(registers ? 6 : 7, "1", kTransposeB);
  if (o.i.flags & (kTransposeA | kTransposeB) && Bytes(o.i.type) != 2) throw Error("only 16 bits can be transposed");
  if (!o.words[4].starts_with("m64n" + std::to_string(2 * o.i.d.size()) + "k"))
    throw Error("another number of results");
}

}  // namespace

const Table kMatrices = {
    {"ldmatrix", BindLoad}, {"stmatrix", BindStore}, {"mma", BindWarpProduct}, {"wgmma.mma_async", BindGroupProduct},
    {"wgmma", Ignore},
};

}  // namespace emulator
