// Packs operands of unaligned channels of 16 bits.
//
// A block has 128 rows and up to 16 chunks of each. The aligned chunks that those lie in come to shared memory side by
// side, as they do in memory; then neighbouring threads, which have neighbouring rows, shift and store chunk after
// chunk.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/conv/unaligned_pack.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kThreads = 256, kRows = 128, kMostChunks = 16;

struct PackedArray {
  const void *begin, *end;
  uint4* packed;
  int64_t first_pixel, pitch;
  Edges edges[2];
  int rows, pad[2], channels;     // rows that are no zeros
  int all_chunks, chunks;         // of a block
  FastDiv items_div, groups_div;  // aligned chunks of a row; blocks of the same rows
};

struct PackParams {
  FastDiv line_div, lines_div;  // pixels of a line, lines of a plane
  int first_blocks;             // those of the first array
  PackedArray arrays[2];
};

__global__ void __launch_bounds__(kThreads) PackRowsKernel(const __grid_constant__ PackParams params) {
  using Element = uint16_t;
  constexpr int kVec = kVecLength<Element>, kAtOnce = 4, kSize = sizeof(Element);
  extern __shared__ uint4 aligned[];
  __shared__ int64_t elements[kRows];  // where a row's channels begin, or -1
  int block = blockIdx.x;
  const bool is_second = block >= params.first_blocks;
  if (is_second) block -= params.first_blocks;
  const PackedArray& q = params.arrays[is_second];
  const auto *const begin = static_cast<const Element*>(q.begin), *const end = static_cast<const Element*>(q.end);
  int group;
  const int first_row = q.groups_div.Div(block, &group) * kRows;
  const int first_channel = group * q.chunks * kVec;
  const int chunks = min(q.chunks, q.all_chunks - group * q.chunks);
  if (threadIdx.x < kRows) {
    const int row = first_row + threadIdx.x;
    int x, y;
    const int line = params.line_div.Div(row, &x), plane = params.lines_div.Div(line, &y);
    x -= q.pad[1], y -= q.pad[0];
    const bool exists = q.edges[1].FindAny(&x) & q.edges[0].FindAny(&y) & (row < q.rows);
    const int64_t pixel = q.first_pixel + (int64_t{plane} * q.edges[0].extent + y) * q.edges[1].extent + x;
    elements[threadIdx.x] = exists ? pixel * q.channels + first_channel : -1;
  }
  __syncthreads();

  const int items = q.items_div.divisor, of_row = min(chunks * kVec, q.channels - first_channel) * kSize;
  for (int from = threadIdx.x; from < kRows * items; from += kThreads * kAtOnce) {
    uint4 chunk[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int item;
      const int row = q.items_div.Div(from + i * kThreads, &item);
      const int64_t element = elements[min(row, kRows - 1)];
      const char* const first = reinterpret_cast<const char*>(begin + element);
      const char* const at = first - reinterpret_cast<uintptr_t>(first) % 16 + 16 * item;
      if (row >= kRows || element < 0 || at >= first + of_row) continue;
      if (at >= reinterpret_cast<const char*>(begin) && at + 16 <= reinterpret_cast<const char*>(end)) {
        chunk[i] = __ldg(reinterpret_cast<const uint4*>(at));
      } else {  // the array's first or last elements
        uint32_t words[4] = {};
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          const Element* const one = reinterpret_cast<const Element*>(at) + k;
          if (one >= begin && one < end) words[k * kSize / 4] |= uint32_t{__ldg(one)} << k * kSize % 4 * 8;
        }
        chunk[i] = {words[0], words[1], words[2], words[3]};
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (from + i * kThreads < kRows * items) aligned[from + i * kThreads] = chunk[i];
  }
  __syncthreads();

  const int mine = threadIdx.x % kRows, half = (chunks + 1) / 2, from = threadIdx.x / kRows * half;
  const int to = min(from + half, chunks);
  if (first_row + mine >= q.pitch || from >= to) return;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(begin + max(elements[mine], int64_t{0})) % 16);
  const bool two = shift & 8, one = shift & 4;
  const uint4* const line = aligned + mine * items;
  uint4* const out = q.packed + (int64_t{group} * q.chunks + from) * q.pitch + first_row + mine;
  uint32_t words[8];
  const auto load = [&](uint32_t* word, int i) {
    const uint4 chunk = line[min(i, items - 1)];
    word[0] = chunk.x, word[1] = chunk.y, word[2] = chunk.z, word[3] = chunk.w;
  };
  load(words, from);
#pragma unroll 2
  for (int i = from; i < to; ++i) {
    load(words + 4, i + 1);
    uint32_t some[6], v[4];
#pragma unroll
    for (int k = 0; k < 6; ++k) some[k] = two ? words[k + 2] : words[k];
#pragma unroll
    for (int k = 0; k < 5; ++k) some[k] = one ? some[k + 1] : some[k];
    const int bytes = of_row - 16 * i;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = __funnelshift_r(some[k], some[k + 1], shift % 4 * 8);
      v[k] &= bytes >= 4 * k + 4 ? ~0u : bytes <= 4 * k ? 0u : 0xFFFFu;
      words[k] = words[k + 4];
    }
    out[(i - from) * q.pitch] = {v[0], v[1], v[2], v[3]};
  }
}

// Says how an array is packed; returns in how many blocks.
int64_t PlanArray(const UnalignedRows& rows, const Packing& p, PackedArray* q) {
  const PackedRows to = RowsOf(p, rows);
  const int64_t of_block = CeilDiv(to.chunks, CeilDiv(to.chunks, kMostChunks));
  q->begin = p.array;
  q->end = static_cast<const char*>(p.array) +
           p.all_planes * p.edges[0].extent * p.edges[1].extent * p.channels * int64_t(sizeof(uint16_t));
  q->packed = static_cast<uint4*>(p.packed);
  q->first_pixel = p.first_plane * p.edges[0].extent * p.edges[1].extent;
  q->pitch = to.pitch;
  q->rows = to.rows;
  for (int d = 0; d < 2; ++d) {
    q->edges[d] = p.edges[d];
    q->pad[d] = int(p.pad[d]);
  }
  q->channels = int(p.channels);
  q->all_chunks = to.chunks;
  q->chunks = int(of_block);
  q->items_div = FastDiv((q->chunks + 1) | 1);  // odd, so that rows lie in different banks
  const int64_t groups = CeilDiv(to.chunks, q->chunks);
  q->groups_div = FastDiv(groups);
  return CeilDiv(to.pitch, kRows) * groups;
}

}  // namespace

cudaError_t PackRows(const UnalignedRows& rows, const Packing (&packings)[2], cudaStream_t stream) {
  PackParams q = {};
  q.line_div = FastDiv(rows.line);
  q.lines_div = FastDiv(rows.lines);
  const int64_t blocks = PlanArray(rows, packings[0], &q.arrays[0]);
  const int64_t more = PlanArray(rows, packings[1], &q.arrays[1]);
  q.first_blocks = int(blocks);
  const auto most = std::max(q.arrays[0].items_div.divisor, q.arrays[1].items_div.divisor);
  const Grid grid = {blocks + more, kThreads, size_t{kRows} * most * 16};
  // Multiprocessors keep the division of their memory for the next kernel, which needs most of it as shared.
  const cudaError_t e = cudaFuncSetAttribute(PackRowsKernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  return e != cudaSuccess ? e : LaunchKernel(PackRowsKernel, grid, stream, q);
}

}  // namespace jaxdnn::conv
