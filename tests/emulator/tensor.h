// What the PTX instructions on matrices and tensor boxes do, on the host's memory: ldmatrix, stmatrix, mma.sync,
// wgmma.mma_async (a warp's share) and cp.async.bulk.tensor; and the driver's encoders of tensor maps, which tensor.cc
// defines under their own names (cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col).
//
// `shared` is a block's window of shared memory, of `size` bytes: a 32-bit shared address is an offset in it. Registers
// are [register][lane]. What the hardware would fault on, and what is not modelled, throws std::runtime_error.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace emulator {

// Of the factors of a product. Integers' sums are s32, the others' f32.
enum class Type { kBF16, kF16, kTF32, kS8, kU8, kE4M3, kE5M2 };

// ldmatrix and stmatrix .m8n8.x{count}.b16: lane 8 i + j gives the address of row j of matrix i.
void LoadMatrix(const uint8_t* shared, size_t size, const uint32_t (&addresses)[32], int count, bool transposed,
                uint32_t (*r)[32]);
void StoreMatrix(uint8_t* shared, size_t size, const uint32_t (&addresses)[32], int count, bool transposed,
                 const uint32_t (*r)[32]);

// mma.sync.aligned.m16n8k{k}.row.col: d = a b + c.
struct Mma {
  int k;
  Type a, b;
  bool saturate = false;  // .satfinite, of integers
};
int RowRegisters(const Mma&);  // of a; b has half as many, c and d have 4
void Multiply(const Mma&, uint32_t (*d)[32], const uint32_t (*a)[32], const uint32_t (*b)[32], const uint32_t (*c)[32]);

// wgmma.mma_async.m64n{n}k{32 bytes}: d += a b, or d = a b where not scale_d.
struct Wgmma {
  int n;
  Type a, b;
  bool scale_d = true;
  int scale_a = 1, scale_b = 1;                   // or -1
  bool transpose_a = false, transpose_b = false;  // MN-major, of 16 bits only
  bool saturate = false;
};
// The 16 rows that warp 0 ... 3 of the warpgroup has: n / 2 registers of d. What it has of a is in 4 registers,
// or described where they are null.
void MultiplyWarp(const Wgmma&, int warp, uint32_t (*d)[32], const uint32_t (*a_registers)[32], uint64_t a_descriptor,
                  uint64_t b_descriptor, const uint8_t* shared, size_t size);

// What the encoders leave in a CUtensorMap. Dimension 0 is the contiguous one.
struct alignas(64) TensorMap {
  uint8_t* address;
  uint64_t extent[5], stride[5];         // stride in bytes
  uint16_t box[5];                       // of im2col, the channels and the pixels
  int16_t lower[3], upper[3];            // of im2col: width, height, depth
  uint8_t step[5];                       // between neighbours in the box, in elements
  uint8_t rank, element_bytes, swizzle;  // 1, 2, 4 or 8 chunks of 16 bytes are exchanged
  bool im2col, tf32, nan;                // whether floats are rounded on their way in; what is beyond the array
};
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

// cp.async.bulk.tensor.{rank}d between the box at `coordinates`, and shared memory from `address` on. Offsets of im2col
// are of width, height, depth.
void LoadTile(const TensorMap&, const int32_t* coordinates, uint8_t* shared, size_t size, uint32_t address);
void StoreTile(const TensorMap&, const int32_t* coordinates, const uint8_t* shared, size_t size, uint32_t address);
void LoadIm2col(const TensorMap&, const int32_t* coordinates, const uint16_t* offsets, uint8_t* shared, size_t size,
                uint32_t address);

// Bytes that one of these moves, which a load adds to its barrier, also for elements beyond the array.
uint32_t BoxBytes(const TensorMap&);

}  // namespace emulator
