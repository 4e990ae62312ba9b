#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {
namespace {

constexpr int kChunk = 16;  // bytes that are always read and written together

// Throws unless so many bytes of shared memory are there.
void Check(const char* instruction, uint64_t address, uint64_t bytes, uint64_t alignment, size_t size) {
  const std::string at = std::string(instruction) + " at shared address " + std::to_string(address);
  if (address % alignment != 0) throw std::runtime_error(at + ", which is not on " + std::to_string(alignment));
  if (address + bytes > size) throw std::runtime_error(at + ", beyond the block's " + std::to_string(size) + " bytes");
}

// Numbers
// --------------------------------------------------------------------------------------------------------------------

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

int Bytes(Type type) {
  switch (type) {
    case Type::kTF32:
      return 4;
    case Type::kBF16:
    case Type::kF16:
      return 2;
    default:
      return 1;
  }
}

bool IsInteger(Type type) { return type == Type::kS8 || type == Type::kU8; }

// Of a sign, an exponent and so many bits of mantissa, with subnormals. `top` is the exponent of infinities and NaNs.
float FromParts(uint32_t bits, int exponent_bits, int mantissa_bits, uint32_t top) {
  const uint32_t sign = bits >> (exponent_bits + mantissa_bits) << 31;
  const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == top) return FromBits(sign | 0x7f800000 | mantissa << (23 - mantissa_bits));
  if (exponent > 0) return FromBits(sign | (exponent - bias + 127) << 23 | mantissa << (23 - mantissa_bits));
  const float value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return sign ? -value : value;
}

float Value(Type type, const uint8_t* from) {
  uint16_t bits;
  uint32_t word;
  switch (type) {
    case Type::kBF16:
      std::memcpy(&bits, from, sizeof(bits));
      return FromBits(uint32_t{bits} << 16);
    case Type::kF16:
      std::memcpy(&bits, from, sizeof(bits));
      return FromParts(bits, 5, 10, 31);
    case Type::kTF32:  // the low bits are not looked at
      std::memcpy(&word, from, sizeof(word));
      return FromBits(word & ~0x1fffu);
    case Type::kS8:
      return static_cast<int8_t>(*from);
    case Type::kU8:
      return *from;
    case Type::kE4M3:  // no infinities, and one NaN of each sign
      return (*from & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN() : FromParts(*from, 4, 3, 16);
    default:
      return FromParts(*from, 5, 2, 31);
  }
}

// Products
// --------------------------------------------------------------------------------------------------------------------

constexpr int kRows = 16, kTermBytes = 32;

using Line = float[kTermBytes];  // terms of a row of a, or of a column of b

// The terms that 16 bytes of registers hold: a lane has 4 bytes of each row, 4 (lane % 4) and on. PTX ISA, "Matrix
// fragments for mma.m16n8k...": they are alike in bytes for all types.
void Unpack(Type type, const uint32_t* lanes, int row, int first_byte, Line* lines) {
  const int each = Bytes(type);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; i += each) {
      uint8_t word[4];
      std::memcpy(word, &lanes[lane], sizeof(word));
      lines[row + lane / 4][(first_byte + lane % 4 * 4 + i) / each] = Value(type, word + i);
    }
}

// Registers of a: rows 0 to 7 of the first 16 bytes, rows 8 to 15, and the same of the next 16 bytes.
void UnpackRows(Type type, const uint32_t (*a)[32], int registers, Line* rows) {
  for (int i = 0; i < registers; ++i) Unpack(type, a[i], i % 2 * 8, i / 2 * kChunk, rows);
}

// d = a b + c, of any number of eights of columns: lane l has of row l / 4 the columns 8 j + 2 (l % 4) + {0, 1} in
// registers 4 j + {0, 1}, and of the row 8 below in 4 j + {2, 3}. Sums are of double, and rounded to float once: the
// tensor cores' own keep fewer bits (of 8-bit floats about 14), so theirs are less accurate. Integers are exact.
void Product(const Line* rows, const Line* columns, int column_count, int terms, double sign, bool integers,
             bool saturate, const uint32_t (*c)[32], uint32_t (*d)[32]) {
  for (int j = 0; j < column_count; ++j)
    for (int i = 0; i < kRows; ++i) {
      const int at = j / 8 * 4 + i / 8 * 2 + j % 2, lane = i % 8 * 4 + j % 8 / 2;
      double sum = 0;
      for (int k = 0; k < terms; ++k) sum += static_cast<double>(rows[i][k]) * columns[j][k];
      sum *= sign;
      if (integers) {
        int64_t total = static_cast<int64_t>(sum) + (c ? static_cast<int32_t>(c[at][lane]) : 0);
        if (saturate) total = std::clamp<int64_t>(total, INT32_MIN, INT32_MAX);
        d[at][lane] = static_cast<uint32_t>(total);
      } else {
        const float total = static_cast<float>(sum + (c ? FromBits(c[at][lane]) : 0.0));
        d[at][lane] = std::isnan(total) ? 0x7fffffff : ToBits(total);
      }
    }
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
  const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
  static constexpr int kChunks[] = {1, 8, 4, 2};
  const int chunks = kChunks[descriptor >> 62];
  if (descriptor >> 49 & 7) throw std::runtime_error("wgmma: base offsets are not modelled");
  uint32_t next_eight = field(32), next_chunks = field(16);
  if (transposed && chunks == 1) std::swap(next_eight, next_chunks);
  const uint32_t address = field(0) + line % 8 * chunks * kChunk + line / 8 * next_eight + chunk % chunks * kChunk +
                           chunk / chunks * next_chunks;
  return address ^ (address >> 3 & (chunks - 1) * kChunk);
}

// `count` rows or columns from the `first` on.
void ReadLines(Type type, uint64_t descriptor, bool transposed, int first, int count, const uint8_t* shared,
               size_t size, Line* lines) {
  const int each = Bytes(type), in_chunk = kChunk / each, terms = kTermBytes / each;
  if (transposed && each != 2) throw std::runtime_error("wgmma: only 16-bit operands can be transposed");
  const auto chunk_at = [&](int line, int chunk) {
    const uint32_t address = ChunkAddress(descriptor, transposed, line, chunk);
    Check("wgmma", address, kChunk, kChunk, size);
    return shared + address;
  };
  if (transposed) {
    for (int k = 0; k < terms; ++k)
      for (int i = 0; i < count; i += in_chunk) {
        const uint8_t* const from = chunk_at(k, (first + i) / in_chunk);
        for (int e = 0; e < in_chunk; ++e) lines[i + e][k] = Value(type, from + e * each);
      }
  } else {
    for (int i = 0; i < count; ++i)
      for (int k = 0; k < terms; k += in_chunk) {
        const uint8_t* const from = chunk_at(first + i, k / in_chunk);
        for (int e = 0; e < in_chunk; ++e) lines[i][k + e] = Value(type, from + e * each);
      }
  }
}

// Tensor boxes
// --------------------------------------------------------------------------------------------------------------------

// Copies one row of a box, which is `row` bytes after the box's begin in shared memory; `at` says where its first
// element is in the array, which it may leave on all sides.
void CopyRow(const TensorMap& map, const int64_t (&at)[5], bool load, uint8_t* shared, uint32_t address) {
  const int bytes = map.box[0] * map.element_bytes;
  bool exists = true;
  uint8_t* line = map.address;
  for (int i = 1; i < map.rank; ++i) {
    exists &= at[i] >= 0 && static_cast<uint64_t>(at[i]) < map.extent[i];
    line += at[i] * static_cast<int64_t>(map.stride[i]);
  }
  const auto inside = [&](int64_t element) {
    return exists ? static_cast<int>(std::clamp<int64_t>(element, 0, map.box[0])) * map.element_bytes : 0;
  };
  const int begin = inside(-at[0]), end = std::max(begin, inside(static_cast<int64_t>(map.extent[0]) - at[0]));
  const auto place = [&](int i) {  // the swizzle goes by the address (PTX ISA, "Swizzling modes")
    const uint32_t plain = address + i;
    return shared + (plain ^ (plain >> 3 & (map.swizzle - 1) * kChunk));
  };

  alignas(8) uint8_t row[256 * 8] = {};
  uint8_t* const elements = line + at[0] * map.element_bytes;
  if (!load) {
    for (int i = 0; i < bytes; i += kChunk) std::memcpy(row + i, place(i), kChunk);
    if (begin < end) std::memcpy(elements + begin, row + begin, end - begin);
    return;
  }
  if (map.nan)
    for (int i = 0; i < bytes; ++i) row[i] = (i + 1) % map.element_bytes == 0 ? 0x7f : 0xff;
  if (begin < end) std::memcpy(row + begin, elements + begin, end - begin);
  if (map.tf32)
    for (int i = begin; i < end; i += 4) {  // to nearest, ties to even; infinities and NaNs stay
      uint32_t word;
      std::memcpy(&word, row + i, sizeof(word));
      if ((word & 0x7f800000) != 0x7f800000) word = (word + 0xfff + (word >> 13 & 1)) & ~0x1fffu;
      std::memcpy(row + i, &word, sizeof(word));
    }
  for (int i = 0; i < bytes; i += kChunk) std::memcpy(place(i), row + i, kChunk);
}

// Elements of a box in a dimension: those that steps reach. Dimension 0 has none.
int Count(const TensorMap& map, int i) { return i == 0 ? map.box[0] : (map.box[i] + map.step[i] - 1) / map.step[i]; }

// Throws where the instruction does not fit the map, or the map's box the shared memory.
void CheckBox(const char* instruction, const TensorMap& map, bool im2col, size_t size, uint32_t address) {
  const int bytes = map.box[0] * map.element_bytes;
  if (map.im2col != im2col) throw std::runtime_error(std::string(instruction) + ": the map is of the other mode");
  if (bytes % kChunk != 0 || (map.swizzle > 1 && bytes != map.swizzle * kChunk))
    throw std::runtime_error(std::string(instruction) + ": rows of " + std::to_string(bytes) +
                             " bytes are not modelled with this swizzle");
  Check(instruction, address, BoxBytes(map), 128, size);
}

void CopyTile(const TensorMap& map, const int32_t* coordinates, bool load, uint8_t* shared, uint32_t address) {
  int index[5] = {};
  const uint32_t end = address + BoxBytes(map);
  for (; address < end; address += map.box[0] * map.element_bytes) {
    int64_t at[5] = {};
    for (int i = 0; i < map.rank; ++i) at[i] = coordinates[i] + int64_t{index[i]} * map.step[i];
    CopyRow(map, at, load, shared, address);
    for (int i = 1; i < map.rank && ++index[i] == Count(map, i); ++i) index[i] = 0;
  }
}

// What both encoders want; cuda.h documents it.
bool Encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* extent,
            const cuuint64_t* stride, const cuuint32_t* step, CUtensorMapSwizzle swizzle,
            CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill, TensorMap* map) {
  static constexpr int kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // by CUtensorMapDataType
  if (reinterpret_cast<uintptr_t>(out) % 64 != 0 || reinterpret_cast<uintptr_t>(address) % 16 != 0) return false;
  if (type < 0 || type > CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ || rank < 1 || rank > 5) return false;
  if (promotion < 0 || promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B) return false;
  if (fill < 0 || fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA) return false;
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && type < CU_TENSOR_MAP_DATA_TYPE_FLOAT16) return false;
  *map = {};
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (extent[i] == 0 || extent[i] > uint64_t{1} << 32 || step[i] == 0 || step[i] > 8) return false;
    if (i > 0 && (stride[i - 1] % 16 != 0 || stride[i - 1] >= uint64_t{1} << 40)) return false;
    map->extent[i] = extent[i];
    map->stride[i] = i > 0 ? stride[i - 1] : kBytes[type];
    map->step[i] = static_cast<uint8_t>(step[i]);
    map->box[i] = 1;
  }
  map->address = static_cast<uint8_t*>(address);
  map->rank = static_cast<uint8_t>(rank);
  map->element_bytes = static_cast<uint8_t>(kBytes[type]);
  map->swizzle = static_cast<uint8_t>(1 << swizzle);
  map->tf32 = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  return true;
}

bool IsModelled(CUtensorMapDataType type, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle) {
  return type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ && type != CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ &&
         interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle >= 0 && swizzle <= CU_TENSOR_MAP_SWIZZLE_128B;
}

bool FitsSwizzle(const TensorMap& map) {
  return map.swizzle == 1 || map.box[0] * map.element_bytes <= map.swizzle * kChunk;
}

}  // namespace

// Lane l holds of each matrix the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or, transposed, of column l / 4.
void LoadMatrix(const uint8_t* shared, size_t size, const uint32_t (&addresses)[32], int count, bool transposed,
                uint32_t (*r)[32]) {
  for (int i = 0; i < count; ++i) {
    uint16_t m[8][8];
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = addresses[8 * i + row];
      Check("ldmatrix", address, kChunk, kChunk, size);
      std::memcpy(m[row], shared + address, kChunk);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int x = lane / 4, y = lane % 4 * 2;
      r[i][lane] = transposed ? m[y][x] | uint32_t{m[y + 1][x]} << 16 : m[x][y] | uint32_t{m[x][y + 1]} << 16;
    }
  }
}

void StoreMatrix(uint8_t* shared, size_t size, const uint32_t (&addresses)[32], int count, bool transposed,
                 const uint32_t (*r)[32]) {
  for (int i = 0; i < count; ++i) {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int half = 0; half < 2; ++half) {
        const int x = lane / 4, y = lane % 4 * 2 + half;
        (transposed ? m[y][x] : m[x][y]) = static_cast<uint16_t>(r[i][lane] >> 16 * half);
      }
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = addresses[8 * i + row];
      Check("stmatrix", address, kChunk, kChunk, size);
      std::memcpy(shared + address, m[row], kChunk);
    }
  }
}

int RowRegisters(const Mma& mma) { return mma.k * Bytes(mma.a) / (kChunk / 2); }

void Multiply(const Mma& mma, uint32_t (*d)[32], const uint32_t (*a)[32], const uint32_t (*b)[32],
              const uint32_t (*c)[32]) {
  Line rows[kRows], columns[8];
  UnpackRows(mma.a, a, RowRegisters(mma), rows);
  for (int i = 0; i < RowRegisters(mma) / 2; ++i) Unpack(mma.b, b[i], 0, i * kChunk, columns);
  Product(rows, columns, 8, mma.k, 1, IsInteger(mma.a), mma.saturate, c, d);
}

void MultiplyWarp(const Wgmma& w, int warp, uint32_t (*d)[32], const uint32_t (*a_registers)[32], uint64_t a_descriptor,
                  uint64_t b_descriptor, const uint8_t* shared, size_t size) {
  Line rows[kRows], columns[256];
  if (a_registers)
    UnpackRows(w.a, a_registers, 4, rows);
  else
    ReadLines(w.a, a_descriptor, w.transpose_a, kRows * warp, kRows, shared, size, rows);
  ReadLines(w.b, b_descriptor, w.transpose_b, 0, w.n, shared, size, columns);
  Product(rows, columns, w.n, kTermBytes / Bytes(w.a), w.scale_a * w.scale_b, IsInteger(w.a), w.saturate,
          w.scale_d ? d : nullptr, d);
}

uint32_t BoxBytes(const TensorMap& map) {
  uint32_t bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= map.im2col ? map.box[i] : Count(map, i);
  return bytes;
}

void LoadTile(const TensorMap& map, const int32_t* coordinates, uint8_t* shared, size_t size, uint32_t address) {
  CheckBox("cp.async.bulk.tensor (load)", map, false, size, address);
  CopyTile(map, coordinates, true, shared, address);
}

void StoreTile(const TensorMap& map, const int32_t* coordinates, const uint8_t* shared, size_t size, uint32_t address) {
  CheckBox("cp.async.bulk.tensor (store)", map, false, size, address);
  CopyTile(map, coordinates, false, const_cast<uint8_t*>(shared), address);
}

// PTX ISA, "im2col mode": base pixels go through the bounding box, width first, from the lower corner to the array's
// last index plus the upper one, in every image; every one is read `offsets` further on.
void LoadIm2col(const TensorMap& map, const int32_t* coordinates, const uint16_t* offsets, uint8_t* shared, size_t size,
                uint32_t address) {
  CheckBox("cp.async.bulk.tensor (im2col)", map, true, size, address);
  const int images = map.rank - 1;
  int64_t base[5] = {};
  std::copy(coordinates, coordinates + map.rank, base);
  for (int pixel = 0; pixel < map.box[1]; ++pixel, address += map.box[0] * map.element_bytes) {
    int64_t at[5];
    std::copy(base, base + 5, at);
    for (int i = 1; i < images; ++i) at[i] += offsets[i - 1];
    CopyRow(map, at, true, shared, address);
    int i = 1;
    for (; i < images; ++i) {
      base[i] += map.step[i];
      if (base[i] < static_cast<int64_t>(map.extent[i]) + map.upper[i - 1]) break;
      base[i] = map.lower[i - 1];
    }
    if (i == images) base[images] += map.step[images];
  }
}

}  // namespace emulator

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                        const cuuint64_t* extent, const cuuint64_t* stride, const cuuint32_t* box,
                                        const cuuint32_t* step, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
  emulator::TensorMap map;
  if (!emulator::IsModelled(type, interleave, swizzle)) return CUDA_ERROR_NOT_SUPPORTED;
  if (!emulator::Encode(out, type, rank, address, extent, stride, step, swizzle, promotion, fill, &map))
    return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (box[i] == 0 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  if (map.box[0] * map.element_bytes % 16 != 0 || !emulator::FitsSwizzle(map)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTensorMapEncodeIm2col(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                         const cuuint64_t* extent, const cuuint64_t* stride, const int* lower,
                                         const int* upper, cuuint32_t channels, cuuint32_t pixels,
                                         const cuuint32_t* step, CUtensorMapInterleave interleave,
                                         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                         CUtensorMapFloatOOBfill fill) {
  static constexpr int kCorner[] = {32768, 128, 16};  // by the number of dimensions of space
  emulator::TensorMap map;
  if (!emulator::IsModelled(type, interleave, swizzle)) return CUDA_ERROR_NOT_SUPPORTED;
  if (rank < 3 || channels == 0 || channels > 256 || pixels == 0 || pixels > 1024 ||
      !emulator::Encode(out, type, rank, address, extent, stride, step, swizzle, promotion, fill, &map))
    return CUDA_ERROR_INVALID_VALUE;
  const int limit = kCorner[rank - 3];
  for (cuuint32_t i = 0; i < rank - 2; ++i) {
    const bool empty = static_cast<int64_t>(extent[i + 1]) + upper[i] <= lower[i];
    if (empty || std::min(lower[i], upper[i]) < -limit || std::max(lower[i], upper[i]) >= limit)
      return CUDA_ERROR_INVALID_VALUE;
    map.lower[i] = static_cast<int16_t>(lower[i]);
    map.upper[i] = static_cast<int16_t>(upper[i]);
  }
  map.box[0] = static_cast<uint16_t>(channels);
  map.box[1] = static_cast<uint16_t>(pixels);
  map.im2col = true;
  if (!emulator::FitsSwizzle(map)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}
