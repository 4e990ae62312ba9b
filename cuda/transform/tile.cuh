// Results whose innermost dimension is not the input's: transposition through
// shared memory.
//
// x is the innermost dimension of the result, y that of the input. A block
// takes a box of both. It reads runs of the input (along y; along all of the
// box, where the input's next dimension is x and the box holds all of y) in
// aligned 16-byte accesses, which may take a few bytes before and after, into
// shared memory as they are; and writes runs of the result (along x, or along
// all of the box) in aligned 16-byte accesses, collecting elements from shared
// memory. So neither odd extents nor few channels cost more than the ends of
// the runs.
//
// Shared memory: byte b of the box is at b + b / 128 * pad where runs are the
// whole box, else rows have an odd pitch: in both, the elements that a warp
// collects lie in distinct banks.
#pragma once

#include "cuda/transform/rows.cuh"

namespace jaxdnn::transform {

struct Tile {
  // The box, and the extents and valid ranges of its dimensions.
  int box_x, box_y, x_extent, y_extent, x_begin, x_end, y_begin, y_end;
  FastDiv x_tiles, y_tiles;
  int64_t x_in_stride;
  int y_out_stride;
  int chunks;       // 16-byte accesses of a run of the input.
  int out_vectors;  // 16-byte accesses of a run of the result.
  int pitch;        // Bytes of shared memory from one x to the next.
  int lanes_log2;   // Rows of the result that a warp writes together.
  FastDiv by_chunks, by_out_vectors, by_x;
  const char *in_first, *in_last;  // The input's memory.
  int outer_rank;
  struct {
    FastDiv extent;
    int begin, end;
    int64_t in_stride;
    int out_stride;
  } outer[kMaxRank];
};

template <int kBytes>
constexpr int kGranule = kBytes > 4 ? kBytes : 4;

__host__ __device__ constexpr int Spread(int b, int granule) { return b + (b >> 7) * granule; }

template <bool kInRun, bool kOutRun, class Op>
__global__ void __launch_bounds__(kThreads) TileKernel(const Tile t, const Op op, const typename Op::In* in) {
  using In = typename Op::In;
  constexpr int kSize = sizeof(In), kN = Op::kVector, kGrain = kGranule<kSize>;
  extern __shared__ __align__(16) char shared[];
  // Where a byte that is `b` bytes behind the start of its aligned run lies.
  const auto place = [](int b) { return kInRun ? Spread(b, kGrain) : b; };

  // The box.
  int64_t in_offset = 0;
  int out_offset = 0;
  bool outside = false;
  int tile_x, tile_y, rest = t.x_tiles.Div(blockIdx.x, &tile_x);
  rest = t.y_tiles.Div(rest, &tile_y);
  for (int d = 0; d < t.outer_rank; ++d) {
    int i;
    rest = t.outer[d].extent.Div(rest, &i);
    outside |= i < t.outer[d].begin || i >= t.outer[d].end;
    in_offset += i * t.outer[d].in_stride;
    out_offset += i * t.outer[d].out_stride;
  }
  const int x0 = tile_x * t.box_x, y0 = tile_y * t.box_y;
  const int nx = min(t.box_x, t.x_extent - x0), ny = min(t.box_y, t.y_extent - y0);
  const int xa = outside ? nx : max(t.x_begin - x0, 0), xb = outside ? nx : min(t.x_end - x0, nx);
  const int ya = max(t.y_begin - y0, 0), yb = min(t.y_end - y0, ny);
  const bool all_x = xa == 0 && xb == nx, all_y = ya == 0 && yb == ny;
  const In* base = in + in_offset + x0 * t.x_in_stride + y0;
  const uint32_t base_low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base));
  const uint32_t row_low = kInRun ? 0 : static_cast<uint32_t>(t.x_in_stride) * kSize;
  const auto start_of = [&](int x) { return (base_low + x * row_low) & 15; };

  // In. Where the box meets padding, element by element; rows that are nothing
  // but padding are filled.
  if (!all_y || (kInRun && !all_x)) {
    for (int x = threadIdx.x / 32; x < nx; x += kThreads / 32)
      for (int y = threadIdx.x % 32; y < ny; y += 32) {
        const bool inside = x >= xa && x < xb && y >= ya && y < yb;
        const In v = inside ? base[x * t.x_in_stride + y] : op.pad_bits;
        *reinterpret_cast<In*>(shared + place(start_of(x) + x * t.pitch + y * kSize)) = v;
      }
  } else {
    for (int x = 0; x < nx; ++x) {
      if (x == xa) x = max(xa, xb);
      if (x >= nx) break;
      for (int y = threadIdx.x; y < ny; y += kThreads)
        *reinterpret_cast<In*>(shared + place(start_of(x) + x * t.pitch + y * kSize)) = op.pad_bits;
    }
    const int slots = kInRun ? t.chunks : (xb - xa) * t.chunks;
    const int run = (kInRun ? nx * ny : ny) * kSize;
    constexpr int kUnroll = 4;
    for (int first = threadIdx.x; first < slots; first += kThreads * kUnroll) {
      uint4 v[kUnroll];
      int to[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int slot = first + u * kThreads;
        to[u] = -1;
        if (slot >= slots) continue;
        int k = slot, x = 0;
        if (!kInRun) x = xa + t.by_chunks.Div(slot, &k);
        const int low = start_of(x);
        if (k * 16 >= low + run) continue;
        const char* p = reinterpret_cast<const char*>(base + (kInRun ? 0 : x * t.x_in_stride)) - low + k * 16;
        if (p >= t.in_first && p + 16 <= t.in_last) {
          to[u] = (kInRun ? 0 : x * t.pitch) + k * 16;
          v[u] = *reinterpret_cast<const uint4*>(p);
        } else {
          for (int i = max(low - k * 16, 0); i < min(low + run - k * 16, 16); i += kSize)
            *reinterpret_cast<In*>(shared + place((kInRun ? 0 : x * t.pitch) + k * 16 + i)) =
                *reinterpret_cast<const In*>(p + i);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (to[u] < 0) continue;
        char* p = shared + place(to[u]);
        if constexpr (kGrain == 4) {
          reinterpret_cast<uint32_t*>(p)[0] = v[u].x;
          reinterpret_cast<uint32_t*>(p)[1] = v[u].y;
          reinterpret_cast<uint32_t*>(p)[2] = v[u].z;
          reinterpret_cast<uint32_t*>(p)[3] = v[u].w;
        } else if constexpr (kGrain == 8) {
          reinterpret_cast<uint2*>(p)[0] = make_uint2(v[u].x, v[u].y);
          reinterpret_cast<uint2*>(p)[1] = make_uint2(v[u].z, v[u].w);
        } else {
          *reinterpret_cast<uint4*>(p) = v[u];
        }
      }
    }
  }
  __syncthreads();

  // Out.
  const int out_base = out_offset + y0 * t.y_out_stride + x0;
  const int run = kOutRun ? nx * ny : nx;
  const int lanes = 1 << t.lanes_log2;
  const int slots = (kOutRun ? 1 : (ny + lanes - 1) / lanes * lanes) * t.out_vectors;
  for (int slot = threadIdx.x; slot < slots; slot += kThreads) {
    int k = slot, y = 0;
    if (!kOutRun) {
      y = t.by_out_vectors.Div(slot >> t.lanes_log2, &k) * lanes + (slot & (lanes - 1));
      if (y >= ny) continue;
    }
    const int start = out_base + y * t.y_out_stride;
    const int low = static_cast<int>(reinterpret_cast<uintptr_t>(op.out + start) & 15) / sizeof(typename Op::Out);
    const int q = k * kN - low;  // Of the run.
    if (q >= run) continue;
    int x = q;
    if (kOutRun && q >= 0) y = t.by_x.Div(q, &x);
    typename Op::Value value[kN];
    int b = x * t.pitch + y * kSize;
    uint32_t shift = base_low + x * row_low;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (q + j >= 0 && q + j < run)
        value[j] = op.Prepare(*reinterpret_cast<const In*>(shared + place(b + (shift & 15))));
      b += t.pitch;
      shift += row_low;
      ++x;
      if (kOutRun && x == nx) {
        x = 0;
        b += kSize - nx * t.pitch;
        shift = base_low;
      }
    }
    if (q >= 0 && q + kN <= run) {
      op.Store(start + q, value);
    } else {
#pragma unroll
      for (int j = 0; j < kN; ++j)
        if (q + j >= 0 && q + j < run) op.Store(start + q + j, value[j]);
    }
  }
}

}  // namespace jaxdnn::transform
