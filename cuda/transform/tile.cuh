// Results whose innermost dimension is not the input's: transposition through shared memory.
//
// x is the innermost dimension of the result, y that of the input. A block takes a box of both, reads it in runs of the
// input and writes it in runs of the result, 16 bytes an access, and changes from one order to the other in shared
// memory with few bank conflicts. Three kernels:
//
// SquareKernel: all runs are aligned, and long in both orders. Rows of 128 bytes, 16-byte chunks swizzled by x.
//
// RunKernel: rows of the result are short, and those of a box one run. The elements of an access go where they belong
// in that run, which shared memory holds as it will lie in memory.
//
// TileKernel: the rest. An access may take a few bytes before and after its run, and lands in shared memory as it is.
// A run goes on over the whole box where the box holds all of its dimension and the next one is the box's other. Where
// rows of the result begin anywhere, a vector of one is the box's that it begins in, for which the box reads a few
// columns beyond: many channels or few, odd extents or even, only the ends of rows are written element by element.
#pragma once

#include "cuda/transform/rows.cuh"

namespace jaxdnn::transform {

struct Tile {
  // The box, and the extents and valid ranges of its dimensions.
  int box_x, box_y, x_extent, y_extent, x_begin, x_end, y_begin, y_end;
  FastDiv x_tiles, y_tiles;
  int64_t x_in_stride;
  int y_out_stride;
  int outer_rank;
  struct {
    FastDiv extent;
    int begin, end;
    int64_t in_stride;
    int out_stride;
  } outer[kMaxRank];
};

// How RunKernel and TileKernel go over a box.
struct Runs {
  int chunks;       // 16-byte accesses of a run of the input.
  int out_vectors;  // 16-byte accesses of a run of the result.
  int pitch;        // Bytes of shared memory from one x to the next.
  int beyond;       // Columns that a box reads past its own.
  int lanes_log2;   // Rows of the result that a warp writes together; of RunKernel, accesses of a run side by side.
  FastDiv by_chunks, by_out_vectors, by_x;
  const char *in_first, *in_last;  // The input's memory.
};

// The first element of a block's box.
struct Corner {
  int x, y, out_offset;
  int64_t in_offset;
  bool outside;  // All of it is padding.

  __device__ Corner(const Tile& t, int block) : out_offset(0), in_offset(0), outside(false) {
    int tile_x, tile_y, rest = t.x_tiles.Div(block, &tile_x);
    rest = t.y_tiles.Div(rest, &tile_y);
    for (int d = 0; d < t.outer_rank; ++d) {
      int i;
      rest = t.outer[d].extent.Div(rest, &i);
      outside |= i < t.outer[d].begin || i >= t.outer[d].end;
      in_offset += i * t.outer[d].in_stride;
      out_offset += i * t.outer[d].out_stride;
    }
    x = tile_x * t.box_x;
    y = tile_y * t.box_y;
    in_offset += x * t.x_in_stride + y;
    out_offset += y * t.y_out_stride + x;
  }
};

constexpr int kSquareRows = 128;  // The extent of a box in x; in y it is 128 bytes.

// Every 16 bytes of the input, counted along y, are inside or padding, and so are those of the result along x.
template <class Op>
__global__ void __launch_bounds__(kThreads, 6) SquareKernel(const Tile t, const Op op, const typename Op::In* in) {
  using In = typename Op::In;
  constexpr int kIn = 16 / sizeof(In), kOut = Op::kVector, kChunks = 8;
  __shared__ uint4 shared[kSquareRows * kChunks];
  const Corner at(t, blockIdx.x);
  const In* base = in + at.in_offset;

  constexpr int kLoads = kSquareRows * kChunks / kThreads;
  uint4 v[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int x = threadIdx.x / kChunks + u * (kThreads / kChunks), y = threadIdx.x % kChunks * kIn;
    const bool inside =
        !at.outside && at.x + x >= t.x_begin && at.x + x < t.x_end && at.y + y >= t.y_begin && at.y + y < t.y_end;
    v[u] = inside ? __ldg(reinterpret_cast<const uint4*>(base + x * t.x_in_stride + y)) : op.pad_chunk;
  }
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int x = threadIdx.x / kChunks + u * (kThreads / kChunks), chunk = threadIdx.x % kChunks;
    shared[x * kChunks + (chunk ^ (x / kOut % kChunks))] = v[u];
  }
  __syncthreads();

  // Eight threads write 128 bytes of a row of the result, or of as many rows as elements share a 32-bit word.
  constexpr int kWord = sizeof(In) > 4 ? sizeof(In) : 4, kRows = kWord / sizeof(In), kColumns = 128 / kWord;
  constexpr int kItems = kColumns * (kSquareRows / (kOut * 8)), kTeams = kThreads / 8;
  const int lane = threadIdx.x % 8;
#pragma unroll
  for (int first = 0; first < kItems; first += kTeams) {
    const int item = first + threadIdx.x / 8;
    if (kItems % kTeams != 0 && item >= kItems) break;
    const int column = item % kColumns, x = (item / kColumns * 8 + lane) * kOut, y = column * kRows;
    if (at.x + x >= t.x_extent || at.y + y >= t.y_extent) continue;
    const char* from =
        reinterpret_cast<const char*>(shared + x * kChunks + (column * kWord / 16 ^ lane)) + column * kWord % 16;
    Bits<kWord> word[kOut];
#pragma unroll
    for (int j = 0; j < kOut; ++j) word[j] = *reinterpret_cast<const Bits<kWord>*>(from + j * 128);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r > 0 && at.y + y + r >= t.y_extent) break;
      typename Op::Value value[kOut];
#pragma unroll
      for (int j = 0; j < kOut; ++j) value[j] = op.Prepare(Part<In>(word[j], r));
      op.Store(at.out_offset + (y + r) * t.y_out_stride + x, value);
    }
  }
}

// In shared memory a run of the whole box has a gap after every 128 bytes; rows have an odd pitch instead. A gap is an
// element, or a bank.
template <int kBytes>
constexpr int kGap = kBytes > 4 ? kBytes : 4;

__host__ __device__ constexpr int Spread(int b, int gap) { return b + (b >> 7) * gap; }

// The box holds all of x, and the result's next dimension is y.
template <class Op>
__global__ void __launch_bounds__(kThreads)
    RunKernel(const Tile t, const Runs runs, const Op op, const typename Op::In* in) {
  using In = typename Op::In;
  constexpr int kSize = sizeof(In), kIn = 16 / kSize, kN = Op::kVector, kUnroll = 4;
  extern __shared__ __align__(16) char shared[];
  const Corner at(t, blockIdx.x);
  const int nx = t.x_extent, ny = min(t.box_y, t.y_extent - at.y), length = nx * ny;
  const int xa = at.outside ? nx : t.x_begin, xb = at.outside ? nx : t.x_end;
  const int ya = max(t.y_begin - at.y, 0), yb = min(t.y_end - at.y, ny);
  const In* base = in + at.in_offset;
  // The run begins where it does in its first 16 bytes of memory.
  const int low = static_cast<int>(reinterpret_cast<uintptr_t>(op.out + at.out_offset) & 15) / sizeof(typename Op::Out);
  In* const run = reinterpret_cast<In*>(shared) + low;

  if (xa > 0 || xb < nx || ya > 0 || yb < ny) {
#pragma unroll 1
    for (int i = threadIdx.x; i < length; i += kThreads) run[i] = op.pad_bits;
    __syncthreads();
  }
  // A few accesses of a run of the input side by side, for the sectors' sake, then those of the next: the elements of
  // many, one run's, would often meet in a bank.
  const int side = 1 << runs.lanes_log2, slots = (runs.chunks + side - 1) / side * side * nx;
  for (int first = threadIdx.x; first < slots; first += kThreads * kUnroll) {
    uint4 v[kUnroll];
    int x[kUnroll], y[kUnroll];  // Of the access's first element; y is beyond the box where there is none.
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int slot = first + u * kThreads;
      const int k = (runs.by_x.Div(slot >> runs.lanes_log2, &x[u]) << runs.lanes_log2) + (slot & (side - 1));
      const char* row = reinterpret_cast<const char*>(base + x[u] * t.x_in_stride);
      const int before = static_cast<int>(reinterpret_cast<uintptr_t>(row) & 15);
      y[u] = k * kIn - before / kSize;
      if (slot >= slots || x[u] < xa || x[u] >= xb || y[u] + kIn <= ya || y[u] >= yb) {
        y[u] = ny;
        continue;
      }
      const char* p = row - before + k * 16;
      if (p >= runs.in_first && p + 16 <= runs.in_last) {
        v[u] = __ldg(reinterpret_cast<const uint4*>(p));
      } else {
#pragma unroll 1
        for (int i = max(y[u], ya); i < min(y[u] + kIn, yb); ++i)
          run[i * nx + x[u]] = reinterpret_cast<const In*>(row)[i];
        y[u] = ny;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (y[u] >= ny) continue;
      In* to = run + (y[u] * nx + x[u]);
      if (y[u] >= ya && y[u] + kIn <= yb) {
#pragma unroll
        for (int i = 0; i < kIn; ++i) to[i * nx] = Part<In>(v[u], i);
      } else {
#pragma unroll
        for (int i = 0; i < kIn; ++i)
          if (y[u] + i >= ya && y[u] + i < yb) to[i * nx] = Part<In>(v[u], i);
      }
    }
  }
  __syncthreads();

  for (int q = static_cast<int>(threadIdx.x) * kN - low; q < length; q += kThreads * kN) {
    if (q >= 0 && q + kN <= length) {
      const Vec<In, kN> v = LoadVector<kN>(run + q);
      typename Op::Value value[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) value[j] = op.Prepare(v.v[j]);
      op.Store(at.out_offset + q, value);
    } else {
#pragma unroll 1
      for (int i = max(q, 0); i < min(q + kN, length); ++i) op.Store(at.out_offset + i, op.Prepare(run[i]));
    }
  }
}

template <bool kInRun, class Op>
__global__ void __launch_bounds__(kThreads)
    TileKernel(const Tile t, const Runs runs, const Op op, const typename Op::In* in) {
  using In = typename Op::In;
  constexpr int kSize = sizeof(In), kN = Op::kVector;
  extern __shared__ __align__(16) char shared[];
  const Corner at(t, blockIdx.x);
  const int own = min(t.box_x, t.x_extent - at.x);  // Columns, of nx that are read.
  const int nx = min(own + runs.beyond, t.x_extent - at.x), ny = min(t.box_y, t.y_extent - at.y);
  const int xa = at.outside ? nx : max(t.x_begin - at.x, 0), xb = at.outside ? nx : min(t.x_end - at.x, nx);
  const int ya = max(t.y_begin - at.y, 0), yb = min(t.y_end - at.y, ny);
  const bool all_x = xa == 0 && xb == nx, all_y = ya == 0 && yb == ny;
  const In* base = in + at.in_offset;

  // Where a run starts in its first 16 bytes, and where an element lies in shared memory.
  const uint32_t base_low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base));
  const uint32_t row_low = kInRun ? 0 : static_cast<uint32_t>(t.x_in_stride) * kSize;
  const auto start_of = [&](int x) { return static_cast<int>((base_low + x * row_low) & 15); };
  const auto place = [&](int b) { return shared + (kInRun ? Spread(b, kGap<kSize>) : b); };
  const auto element = [&](int x, int y) {
    return reinterpret_cast<In*>(place(start_of(x) + x * runs.pitch + y * kSize));
  };

  if (!all_y || (kInRun && !all_x)) {
    // Where runs meet padding, element by element.
    for (int x = threadIdx.x / 32; x < nx; x += kThreads / 32)
#pragma unroll 1
      for (int y = threadIdx.x % 32; y < ny; y += 32)
        *element(x, y) = x >= xa && x < xb && y >= ya && y < yb ? base[x * t.x_in_stride + y] : op.pad_bits;
  } else {
    // Rows of nothing but padding.
    for (int x = 0; x < nx; ++x) {
      if (x == xa) x = max(xa, xb);
      if (x >= nx) break;
#pragma unroll 1
      for (int y = threadIdx.x; y < ny; y += kThreads) *element(x, y) = op.pad_bits;
    }
    const int slots = (kInRun ? 1 : xb - xa) * runs.chunks;
    const int length = (kInRun ? nx * ny : ny) * kSize;
    // A box of 16 KiB; of rows, each takes some bytes before and after its own.
    constexpr int kUnroll = kInRun ? 4 : 5;
    for (int first = threadIdx.x; first < slots; first += kThreads * kUnroll) {
      uint4 v[kUnroll];
      int to[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int slot = first + u * kThreads;
        to[u] = -1;
        if (slot >= slots) continue;
        int k = slot, x = 0;
        if (!kInRun) x = xa + runs.by_chunks.Div(slot, &k);
        const int low = start_of(x), end = low + length - k * 16;
        if (end <= 0) continue;
        const char* p = reinterpret_cast<const char*>(base + (kInRun ? 0 : x * t.x_in_stride)) - low + k * 16;
        const int b = (kInRun ? 0 : x * runs.pitch) + k * 16;
        if (p >= runs.in_first && p + 16 <= runs.in_last) {
          to[u] = b;
          v[u] = __ldg(reinterpret_cast<const uint4*>(p));
        } else {
#pragma unroll 1
          for (int i = max(low - k * 16, 0); i < min(end, 16); i += kSize)
            *reinterpret_cast<In*>(place(b + i)) = *reinterpret_cast<const In*>(p + i);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (to[u] >= 0) Scatter<kGap<kSize>>(v[u], place(to[u]));
    }
  }
  __syncthreads();

  const int lanes = 1 << runs.lanes_log2, slots = (ny + lanes - 1) / lanes * lanes * runs.out_vectors;
  for (int slot = threadIdx.x; slot < slots; slot += kThreads) {
    int k;
    const int y = runs.by_out_vectors.Div(slot >> runs.lanes_log2, &k) * lanes + (slot & (lanes - 1));
    if (y >= ny) continue;
    const int start = at.out_offset + y * t.y_out_stride;
    const int low = static_cast<int>(reinterpret_cast<uintptr_t>(op.out + start) & 15) / sizeof(typename Op::Out);
    const int q = k * kN - low;  // Of the run.
    if (q >= own || (q < 0 && at.x > 0)) continue;
    if (q >= 0 && q + kN <= nx) {
      typename Op::Value value[kN];
      int b = q * runs.pitch + y * kSize;
      uint32_t shift = base_low + q * row_low;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        value[j] = op.Prepare(*reinterpret_cast<const In*>(place(b + static_cast<int>(shift & 15))));
        b += runs.pitch;
        shift += row_low;
      }
      op.Store(start + q, value);
    } else {
#pragma unroll 1
      for (int i = max(q, 0); i < min(q + kN, nx); ++i) op.Store(start + i, op.Prepare(*element(i, y)));
    }
  }
}

}  // namespace jaxdnn::transform
