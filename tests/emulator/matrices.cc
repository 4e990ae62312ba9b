// Instructions on matrices and tiles: from registers and addresses to what tensor.h computes.
#include <cstring>

#include "instructions.h"
#include "tensor.h"

namespace emulator {
namespace {

using Words = uint32_t[kLanes];

void Gather(const Warp& w, const std::vector<int>& registers, size_t first, size_t count, Words* words) {
  for (size_t k = 0; k < count; ++k)
    for (int l = 0; l < kLanes; ++l) words[k][l] = static_cast<uint32_t>(w.r[registers[first + k]][l]);
}
void Scatter(Warp& w, const std::vector<int>& registers, size_t count, const Words* words) {
  for (size_t k = 0; k < count; ++k)
    for (int l = 0; l < kLanes; ++l) w.r[registers[k]][l] = words[k][l];
}
void WholeWarp(const Instruction& i, Mask m) {
  if (m != ~Mask{0}) Fail(i, "not all lanes are at it");
}

Type TypeNamed(const std::string& name) {
  static const std::map<std::string, Type> kTypes = {{"bf16", Type::kBF16}, {"f16", Type::kF16}, {"tf32", Type::kTF32},
                                                     {"s8", Type::kS8},     {"u8", Type::kU8},   {"e4m3", Type::kE4M3},
                                                     {"e5m2", Type::kE5M2}};
  const auto found = kTypes.find(name);
  if (found == kTypes.end()) throw Error("unknown element type " + name);
  return found->second;
}
// The element types of the operands are the words after "row.col" and the result's type, or after the shape and it.
std::vector<Type> ElementTypes(const std::vector<std::string>& words) {
  std::vector<Type> out;
  bool result = true;
  for (const std::string& word : words) {
    if (word == "f32" || word == "s32") {
      result = false;
    } else if (!result && (word == "bf16" || word == "f16" || word == "tf32" || word == "s8" || word == "u8" ||
                           word == "e4m3" || word == "e5m2")) {
      out.push_back(TypeNamed(word));
    }
  }
  if (out.size() != 2) throw Error("unknown element types");
  return out;
}

bool LoadMatrices(Warp& w, const Instruction& i, Mask m) {
  WholeWarp(i, m);
  uint32_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l)
    addresses[l] = static_cast<uint32_t>(w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate));
  Words words[4];
  LoadMatrix(w.block->shared, w.block->shared_bytes, addresses, static_cast<int>(i.d.size()), i.flags, words);
  Scatter(w, i.d, i.d.size(), words);
  return true;
}
bool StoreMatrices(Warp& w, const Instruction& i, Mask m) {
  WholeWarp(i, m);
  uint32_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l)
    addresses[l] = static_cast<uint32_t>(w.r[i.s[0]][l] + static_cast<uint64_t>(i.immediate));
  Words words[4];
  Gather(w, i.s, 1, i.s.size() - 1, words);
  StoreMatrix(w.block->shared, w.block->shared_bytes, addresses, static_cast<int>(i.s.size()) - 1, i.flags, words);
  return true;
}

bool WarpProduct(Warp& w, const Instruction& i, Mask m) {
  WholeWarp(i, m);
  const Mma shape = {static_cast<int>(i.immediate & 0xFF), static_cast<Type>(i.immediate >> 8 & 0xF),
                     static_cast<Type>(i.immediate >> 12 & 0xF), i.flags != 0};
  const size_t rows = RowRegisters(shape);
  Words a[8], b[4], c[4], d[4];
  Gather(w, i.s, 0, rows, a);
  Gather(w, i.s, rows, rows / 2, b);
  Gather(w, i.s, rows + rows / 2, 4, c);
  Multiply(shape, d, a, b, c);
  Scatter(w, i.d, 4, d);
  return true;
}

// Flags of a warpgroup's product.
enum : uint32_t { kARegisters = 1, kTransposeA = 2, kTransposeB = 4, kNegateA = 8, kNegateB = 16, kSaturate = 32 };

bool GroupProduct(Warp& w, const Instruction& i, Mask m) {
  WholeWarp(i, m);
  Wgmma shape;
  shape.n = static_cast<int>(i.immediate & 0xFFFF);
  shape.a = static_cast<Type>(i.immediate >> 16 & 0xF);
  shape.b = static_cast<Type>(i.immediate >> 20 & 0xF);
  shape.scale_a = i.flags & kNegateA ? -1 : 1;
  shape.scale_b = i.flags & kNegateB ? -1 : 1;
  shape.transpose_a = i.flags & kTransposeA;
  shape.transpose_b = i.flags & kTransposeB;
  shape.saturate = i.flags & kSaturate;
  size_t k = 0;
  Words a[4], d[128];
  const bool registers = i.flags & kARegisters;
  uint64_t a_descriptor = 0;
  if (registers) {
    Gather(w, i.s, 0, 4, a);
    k = 4;
  } else {
    a_descriptor = w.r[i.s[k++]][0];
  }
  const uint64_t b_descriptor = w.r[i.s[k++]][0];
  shape.scale_d = w.r[i.s[k]][0] != 0;
  Gather(w, i.d, 0, i.d.size(), d);
  MultiplyWarp(shape, w.index % 4, d, registers ? a : nullptr, a_descriptor, b_descriptor, w.block->shared,
               w.block->shared_bytes);
  Scatter(w, i.d, i.d.size(), d);
  return true;
}

// Bulk copies. They are asked for by single threads, and are here done at once.
bool BulkCopy(Warp& w, const Instruction& i, Mask m) {  // to shared memory: [to], [from], bytes, [barrier]
  for (; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const uint64_t to = w.r[i.s[0]][l] & 0xFFFFFFFF, from = w.r[i.s[1]][l];
    const int64_t bytes = static_cast<uint32_t>(w.r[i.s[2]][l]);
    if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0 || bytes == 0)
      Fail(i, "a bulk copy that is not of whole 16 bytes");
    std::memcpy(Shared(w, to, 16, i), reinterpret_cast<const uint8_t*>(from), 16);
    if (bytes > 16) std::memcpy(Shared(w, to, bytes, i), reinterpret_cast<const uint8_t*>(from), bytes);
    BytesArrive(w, w.r[i.s[3]][l], bytes, i);
  }
  return true;
}
bool BulkStore(Warp& w, const Instruction& i, Mask m) {  // [to], [from], bytes
  for (; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const uint64_t to = w.r[i.s[0]][l], from = w.r[i.s[1]][l] & 0xFFFFFFFF;
    const int64_t bytes = static_cast<uint32_t>(w.r[i.s[2]][l]);
    if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0) Fail(i, "a bulk copy that is not of whole 16 bytes");
    std::memcpy(reinterpret_cast<uint8_t*>(to), Shared(w, from, bytes, i), bytes);
  }
  return true;
}

// How many coordinates, and what is asked for.
enum : uint32_t { kIm2col = 1, kToGlobal = 2 };

bool TensorCopy(Warp& w, const Instruction& i, Mask m) {
  const size_t rank = static_cast<size_t>(i.immediate);
  for (; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    size_t k = 0;
    const uint64_t shared = i.flags & kToGlobal ? 0 : w.r[i.s[k++]][l] & 0xFFFFFFFF;
    const auto* map = reinterpret_cast<const TensorMap*>(w.r[i.s[k++]][l]);
    int32_t coordinates[5] = {};
    for (size_t d = 0; d < rank; ++d) coordinates[d] = static_cast<int32_t>(w.r[i.s[k++]][l]);
    if (map->rank != rank) Fail(i, "a tensor map of another rank");
    if (i.flags & kToGlobal) {
      StoreTile(*map, coordinates, w.block->shared, w.block->shared_bytes, static_cast<uint32_t>(w.r[i.s[k]][l]));
      continue;
    }
    const uint64_t barrier = w.r[i.s[k++]][l];
    Block& block = shared >> 24 == 0 ? *w.block : *w.block->cluster->blocks.at((shared >> 24) - 1);
    const auto address = static_cast<uint32_t>(shared & 0xFFFFFF);
    if (i.flags & kIm2col) {
      uint16_t offsets[3] = {};
      for (size_t d = 0; d + 2 < rank; ++d) offsets[d] = static_cast<uint16_t>(w.r[i.s[k++]][l]);
      LoadIm2col(*map, coordinates, offsets, block.shared, block.shared_bytes, address);
    } else {
      LoadTile(*map, coordinates, block.shared, block.shared_bytes, address);
    }
    BytesArrive(w, barrier, BoxBytes(*map), i);
  }
  return true;
}

bool Nothing(Warp&, const Instruction&, Mask) { return true; }

}  // namespace

bool BindMatrices(Operands& o) {
  Instruction& i = o.i;
  const std::string& head = o.words[0];
  if (head == "ldmatrix") {
    o.Destination(0);
    o.Memory(1);
    i.flags = o.Has("trans");
    i.run = LoadMatrices;
    return true;
  }
  if (head == "stmatrix") {
    o.Memory(0);
    o.Source(1);
    i.flags = o.Has("trans");
    i.run = StoreMatrices;
    return true;
  }
  if (head == "mma") {
    const std::string& shape = o.words[3];  // m16n8k16
    if (shape.compare(0, 6, "m16n8k") != 0) throw Error("unknown shape");
    const std::vector<Type> types = ElementTypes(o.words);
    i.immediate =
        std::stoll(shape.substr(6)) | static_cast<int64_t>(types[0]) << 8 | static_cast<int64_t>(types[1]) << 12;
    i.flags = o.Has("satfinite");
    o.Destination(0);
    for (size_t k = 1; k <= 3; ++k) o.Source(k);
    i.run = WarpProduct;
    return true;
  }
  if (head == "wgmma") {
    i.run = Nothing;
    if (!o.Has("mma_async")) return true;
    const std::string& shape = o.words[4];  // m64n96k16
    const size_t n = shape.find('n'), k = shape.find('k');
    const std::vector<Type> types = ElementTypes(o.words);
    const int64_t columns = std::stoll(shape.substr(n + 1, k - n - 1));
    o.Destination(0);
    i.flags = 0;
    size_t at = 1;
    if (o.all[at][0] == '{') i.flags |= kARegisters;
    o.Source(at++);
    o.Source(at++);
    o.Source(at++);
    const auto number = [&](size_t p) { return p < o.all.size() ? std::stoll(o.all[p]) : 0; };
    if (at + 1 < o.all.size()) {
      if (number(at) == -1) i.flags |= kNegateA;
      if (number(at + 1) == -1) i.flags |= kNegateB;
      at += 2;
      if (!(i.flags & kARegisters) && number(at++) == 1) i.flags |= kTransposeA;
      if (number(at) == 1) i.flags |= kTransposeB;
    }
    if (o.Has("satfinite")) i.flags |= kSaturate;
    i.immediate = columns | static_cast<int64_t>(types[0]) << 16 | static_cast<int64_t>(types[1]) << 20;
    if (i.d.size() * 2 != static_cast<size_t>(columns)) throw Error("another number of results");
    i.run = GroupProduct;
    return true;
  }
  if (head == "prefetch" || (head == "cp" && o.Has("prefetch"))) {
    i.run = Nothing;
    return true;
  }
  if (head != "cp" || !o.Has("bulk")) return false;
  i.run = Nothing;
  if (o.Has("commit_group") || o.Has("wait_group")) return true;
  const bool store = o.words[2] == "bulk" && (o.Has("bulk_group"));
  if (!o.Has("tensor")) {
    o.Memory(0);
    o.Memory(1);
    o.Source(2);
    if (!store) o.Memory(3);
    i.run = store ? BulkStore : BulkCopy;
    if (i.immediate != 0) throw Error("an offset");
    return true;
  }
  if (o.Has("multicast::cluster") || o.Has("cta_group::1")) throw Error("multicast");
  // "[map, {coordinates}]" is two operands.
  const auto map = [&](size_t k) {
    const std::string text = o.all.at(k);
    const size_t comma = text.find(',');
    const std::vector<std::string> parts = {"[" + text.substr(1, comma - 1) + "]",
                                            text.substr(text.find('{'), text.find('}') - text.find('{') + 1)};
    Operands inner{i, {}, parts, o.names};
    inner.Memory(0);
    const size_t before = i.s.size();
    inner.Source(1);
    return static_cast<int64_t>(i.s.size() - before);
  };
  int64_t rank;
  if (store) {
    rank = map(0);
    o.Memory(1);
    i.flags = kToGlobal;
  } else {
    o.Memory(0);
    rank = map(1);
    o.Memory(2);
    i.flags = 0;
    if (o.Has("im2col")) {
      i.flags = kIm2col;
      o.Source(3);
    }
  }
  i.immediate = rank;
  i.run = TensorCopy;
  return true;
}

}  // namespace emulator
