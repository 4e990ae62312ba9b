// Bulk copies, which are done at once: of bytes, and of boxes of arrays by the TMA unit; and the driver's encoders of
// tensor maps, under their own names.
#include <cuda.h>

#include <algorithm>

#include "instructions.h"

namespace emulator {
namespace {

constexpr int kChunk = 16;  // bytes that are always read and written together

template <bool store>
bool BulkCopy(Warp& w, const Instruction& i, Mask m) {  // [to], [from], bytes, [barrier] of what goes to shared memory
  ForLanes(m, [&](int l) {
    const auto s = [&](int k) { return w.r[i.s[k]][l]; };
    const uint64_t to = s(0), from = s(1), bytes = static_cast<uint32_t>(s(2));
    if (to % kChunk != 0 || from % kChunk != 0 || bytes % kChunk != 0 || bytes == 0)
      throw Error("a bulk copy that is not of whole 16 bytes");
    uint8_t* const shared = Shared(w, (store ? from : to) & 0xFFFFFFFF, static_cast<int64_t>(bytes));
    if (store) {
      std::memcpy(reinterpret_cast<uint8_t*>(to), shared, bytes);
    } else {
      Transfer(w, s(3), bytes, [=] { std::memcpy(shared, reinterpret_cast<const uint8_t*>(from), bytes); });
    }
  });
  return true;
}
template <bool store>
void BindBulk(Operands& o) {
  for (const size_t k : {0, 1, 3}) {
    if (k == 3 && store) break;
    o.Memory(k);
    if (o.i.immediate != 0) throw Error("an offset");
    if (k == 1) o.Source(2);
  }
  o.i.run = BulkCopy<store>;
}

// What the encoders leave in a CUtensorMap. Dimension 0 is the contiguous one.
struct alignas(64) TensorMap {
  uint8_t* address;
  uint64_t extent[5], stride[5];         // stride in bytes
  uint16_t box[5];                       // of im2col, the channels and the pixels
  int16_t lower[3], upper[3];            // of im2col: width, height, depth
  uint8_t step[5];                       // between neighbours in the box, in elements
  uint8_t rank, element_bytes, swizzle;  // 1, 2, 4 or 8 chunks are exchanged
  bool im2col, tf32, nan;                // whether floats are rounded on their way in; what is beyond the array

  int RowBytes() const { return box[0] * element_bytes; }
  // Elements of a box in a dimension: those that steps reach. Dimension 0 has none.
  int Count(int k) const { return k == 0 || im2col ? box[k] : (box[k] + step[k] - 1) / step[k]; }
  // Also for elements beyond the array.
  uint32_t BoxBytes() const {
    uint32_t bytes = element_bytes;
    for (int k = 0; k < (im2col ? 2 : rank); ++k) bytes *= Count(k);
    return bytes;
  }
};
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

// Copies one row of a box, to or from `address` in shared memory; `at` says where its first element is in the array,
// which it may leave on all sides.
void CopyRow(const TensorMap& map, const int64_t (&at)[5], bool store, uint8_t* shared, uint32_t address) {
  const int bytes = map.RowBytes();
  bool exists = true;
  uint8_t* elements = map.address + at[0] * map.element_bytes;
  for (int k = 1; k < map.rank; ++k) {
    exists &= at[k] >= 0 && static_cast<uint64_t>(at[k]) < map.extent[k];
    elements += at[k] * static_cast<int64_t>(map.stride[k]);
  }
  const auto inside = [&](int64_t element) {
    return exists ? static_cast<int>(std::clamp<int64_t>(element, 0, map.box[0])) * map.element_bytes : 0;
  };
  const int begin = inside(-at[0]), end = std::max(begin, inside(static_cast<int64_t>(map.extent[0]) - at[0]));
  const auto place = [&](int k) {  // the swizzle goes by the address (PTX ISA, "Swizzling modes")
    const uint32_t plain = address + k;
    return shared + (plain ^ (plain >> 3 & (map.swizzle - 1) * kChunk));
  };

  alignas(8) uint8_t row[256 * 8] = {};
  if (store) {
    for (int k = 0; k < bytes; k += kChunk) std::memcpy(row + k, place(k), kChunk);
    if (begin < end) std::memcpy(elements + begin, row + begin, end - begin);
    return;
  }
  if (map.nan)
    for (int k = 0; k < bytes; ++k) row[k] = (k + 1) % map.element_bytes == 0 ? 0x7F : 0xFF;
  if (begin < end) std::memcpy(row + begin, elements + begin, end - begin);
  for (int k = begin; map.tf32 && k < end; k += 4) {
    uint32_t word;
    std::memcpy(&word, row + k, sizeof(word));
    if ((word & 0x7F800000) != 0x7F800000) word = RoundToTf32(word);  // NaNs stay
    std::memcpy(row + k, &word, sizeof(word));
  }
  for (int k = 0; k < bytes; k += kChunk) std::memcpy(place(k), row + k, kChunk);
}

void CopyTile(const TensorMap& map, const std::array<int32_t, 5>& coordinates, bool store, uint8_t* shared,
              uint32_t address) {
  int index[5] = {};
  for (const uint32_t end = address + map.BoxBytes(); address < end; address += map.RowBytes()) {
    int64_t at[5] = {};
    for (int k = 0; k < map.rank; ++k) at[k] = coordinates[k] + int64_t{index[k]} * map.step[k];
    CopyRow(map, at, store, shared, address);
    for (int k = 1; k < map.rank && ++index[k] == map.Count(k); ++k) index[k] = 0;
  }
}

// PTX ISA, "im2col mode": base pixels go through the bounding box, width first, from the lower corner to the array's
// last index plus the upper one, in every image; every one is read `offsets` (of width, height, depth) further on, or
// written where it is.
void CopyIm2col(const TensorMap& map, const std::array<int32_t, 5>& coordinates, const std::array<uint16_t, 3>& offsets,
                bool store, uint8_t* shared, uint32_t address) {
  const int images = map.rank - 1;
  int64_t base[5];
  std::copy(coordinates.begin(), coordinates.end(), base);
  for (int pixel = 0; pixel < map.box[1]; ++pixel, address += map.RowBytes()) {
    int64_t at[5];
    std::copy(base, base + 5, at);
    for (int k = 1; k < images; ++k) at[k] += offsets[k - 1];
    CopyRow(map, at, store, shared, address);
    int k = 1;
    for (; k < images; ++k) {
      base[k] += map.step[k];
      if (base[k] < static_cast<int64_t>(map.extent[k]) + map.upper[k - 1]) break;
      base[k] = map.lower[k - 1];
    }
    if (k == images) base[images] += map.step[images];
  }
}

enum : uint32_t { kIm2col = 1, kStore = 2 };  // flags; the rank is in i.immediate

bool BoxCopy(Warp& w, const Instruction& i,
             Mask m) {  // [to], map, coordinates, [barrier], offsets; or map, ..., [from]
  const bool store = i.flags & kStore, im2col = i.flags & kIm2col;
  ForLanes(m, [&](int l) {
    size_t k = store ? 0 : 1;
    const auto next = [&] { return w.r[i.s[k++]][l]; };
    const TensorMap& map = *reinterpret_cast<const TensorMap*>(next());
    if (map.rank != i.immediate) throw Error("a tensor map of another rank");
    if (map.im2col != im2col) throw Error("a tensor map of the other mode");
    if (map.RowBytes() % kChunk != 0 || (map.swizzle > 1 && map.RowBytes() != map.swizzle * kChunk))
      throw Error("rows of " + std::to_string(map.RowBytes()) + " bytes are not modelled with this swizzle");
    std::array<int32_t, 5> coordinates = {};
    std::array<uint16_t, 3> offsets = {};
    for (int d = 0; d < map.rank; ++d) coordinates[d] = static_cast<int32_t>(next());
    const uint64_t last = next(), address = (store ? last : w.r[i.s[0]][l]) & 0xFFFFFFFF;
    const uint32_t offset = address & 0xFFFFFF;
    if (offset % 128 != 0) throw Error("shared address " + std::to_string(offset) + " is not on 128");
    uint8_t* const shared = Shared(w, address, map.BoxBytes()) - offset;
    for (int d = 0; im2col && !store && d + 2 < map.rank; ++d) offsets[d] = static_cast<uint16_t>(next());
    const auto copy = [=, &map] {
      im2col ? CopyIm2col(map, coordinates, offsets, store, shared, offset)
             : CopyTile(map, coordinates, store, shared, offset);
    };
    store ? copy() : Transfer(w, last, map.BoxBytes(), copy);
  });
  return true;
}

void BindBox(Operands& o) {
  const bool store = o.Has("bulk_group");
  if (o.Has("multicast::cluster") || o.Has("cta_group::1")) throw Error("multicast");
  // "[map, {coordinates}]" is two operands.
  const auto map = [&](const std::string& text) {
    const size_t comma = text.find(',');
    const std::vector<std::string> parts = {text.substr(0, comma) + "]",
                                            text.substr(text.find('{'), text.find('}') - text.find('{') + 1)};
    Operands inner{o.i, {}, parts, o.names, {}};
    inner.Memory(0);
    const size_t before = o.i.s.size();
    inner.Source(1);
    return static_cast<int64_t>(o.i.s.size() - before);
  };
  if (!store) o.Memory(0);
  const int64_t rank = map(o.all.at(store ? 0 : 1));
  o.Memory(store ? 1 : 2);
  if (o.Has("im2col_no_offs")) o.i.flags |= kIm2col;
  if (o.Has("im2col")) {
    o.i.flags |= kIm2col;
    o.Source(3);
  }
  if (store) o.i.flags |= kStore;
  o.i.immediate = rank;
  o.i.run = BoxCopy;
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
  for (cuuint32_t k = 0; k < rank; ++k) {
    if (extent[k] == 0 || extent[k] > uint64_t{1} << 32 || step[k] == 0 || step[k] > 8) return false;
    if (k > 0 && (stride[k - 1] % 16 != 0 || stride[k - 1] >= uint64_t{1} << 40)) return false;
    map->extent[k] = extent[k];
    map->stride[k] = k > 0 ? stride[k - 1] : kBytes[type];
    map->step[k] = static_cast<uint8_t>(step[k]);
    map->box[k] = 1;
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

bool FitsSwizzle(const TensorMap& map) { return map.swizzle == 1 || map.RowBytes() <= map.swizzle * kChunk; }

}  // namespace

const Table kBoxes = {
    {"cp.async.bulk.shared::cluster", BindBulk<false>},
    {"cp.async.bulk.shared::cta", BindBulk<false>},
    {"cp.async.bulk.global", BindBulk<true>},
    {"cp.async.bulk.tensor", BindBox},
    {"cp.async.bulk.prefetch", Ignore},
    {"cp.async.bulk.commit_group", Ignore},
    {"cp.async.bulk.wait_group", Ignore},
};

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
  for (cuuint32_t k = 0; k < rank; ++k) {
    if (box[k] == 0 || box[k] > 256) return CUDA_ERROR_INVALID_VALUE;
    map.box[k] = static_cast<uint16_t>(box[k]);
  }
  if (map.RowBytes() % 16 != 0 || !emulator::FitsSwizzle(map)) return CUDA_ERROR_INVALID_VALUE;
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
  for (cuuint32_t k = 0; k < rank - 2; ++k) {
    const bool empty = static_cast<int64_t>(extent[k + 1]) + upper[k] <= lower[k];
    if (empty || std::min(lower[k], upper[k]) < -limit || std::max(lower[k], upper[k]) >= limit)
      return CUDA_ERROR_INVALID_VALUE;
    map.lower[k] = static_cast<int16_t>(lower[k]);
    map.upper[k] = static_cast<int16_t>(upper[k]);
  }
  map.box[0] = static_cast<uint16_t>(channels);
  map.box[1] = static_cast<uint16_t>(pixels);
  map.im2col = true;
  if (!emulator::FitsSwizzle(map)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}
