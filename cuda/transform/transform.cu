// Plans a transform: merges dimensions, widens elements, and chooses between copying rows, transposing tiles, weaving
// planes and gathering elements.
//
// Bound by memory: the input is read once and the result written once, whatever the permutation.
#include <algorithm>
#include <cmath>

#include "cuda/transform/tile.cuh"
#include "cuda/transform/weave.cuh"

namespace jaxdnn::transform {
namespace {

// A dense result's row r is at row r of the input's dimensions, all but the innermost.
struct StridedView {
  static constexpr bool kDense = false;

  int rank;
  struct {
    FastDiv extent;
    int begin, end;
    int64_t stride;
  } dims[kMaxRank];  // Innermost first.
  int begin, end;    // Of the innermost dimension, which makes the rows.

  __device__ Row At(int row) const {
    int64_t offset = 0;
    bool inside = true;
#pragma unroll 1
    for (int d = 0; d < rank; ++d) {
      int i = row;
      if (d + 1 < rank) row = dims[d].extent.Div(row, &i);
      inside &= i >= dims[d].begin && i < dims[d].end;
      offset += i * dims[d].stride;
    }
    return {offset, begin, inside ? end : begin};
  }
};

// Dimensions of extent 1 go, and neighbours that are neighbours in the input too become one.
void Merge(Problem* p) {
  Problem merged = *p;
  merged.rank = 0;
  for (int d = 0; d < p->rank; ++d) {
    Dim dim = p->dims[d];
    const bool whole = dim.begin == 0 && dim.end == dim.extent;
    if (dim.extent == 1 && whole) continue;
    if (merged.rank > 0) {
      Dim& outer = merged.dims[merged.rank - 1];
      if (whole && outer.stride == dim.extent * dim.stride) {
        outer = {outer.extent * dim.extent, outer.begin * dim.extent, outer.end * dim.extent, dim.stride};
        continue;
      }
    }
    merged.dims[merged.rank++] = dim;
  }
  if (merged.rank == 0) merged.dims[merged.rank++] = {1, 0, 1, 1};
  *p = merged;
}

// Makes `bytes` the size of an element: the largest that divides all runs of the input and the result.
int Widen(Problem* p, int bytes, const void* x, const void* out) {
  Dim& inner = p->dims[p->rank - 1];
  if (inner.stride != 1) return bytes;
  const auto even = [&] {
    bool all = p->offset % 2 == 0 && inner.extent % 2 == 0 && inner.begin % 2 == 0 && inner.end % 2 == 0;
    for (int d = 0; d + 1 < p->rank; ++d) all &= p->dims[d].stride % 2 == 0;
    return all && reinterpret_cast<uintptr_t>(x) % (2 * bytes) == 0 &&
           reinterpret_cast<uintptr_t>(out) % (2 * bytes) == 0;
  };
  for (; bytes < 16 && even(); bytes *= 2) {
    p->offset /= 2;
    p->x_elements /= 2;
    inner = {inner.extent / 2, inner.begin / 2, inner.end / 2, 1};
    for (int d = 0; d + 1 < p->rank; ++d) p->dims[d].stride /= 2;
  }
  // A row of one element is none: the next dimension is the innermost.
  Merge(p);
  return bytes;
}

int64_t Volume(const Problem& p) {
  int64_t volume = 1;
  for (int d = 0; d < p.rank; ++d) volume *= p.dims[d].extent;
  return volume;
}

template <class Op>
bool Aligned(const Problem& p, const Op& op, const void* x, int n) {
  const Dim& inner = p.dims[p.rank - 1];
  bool all =
      inner.stride == 1 && p.offset % n == 0 && inner.extent % n == 0 && inner.begin % n == 0 && inner.end % n == 0;
  for (int d = 0; d + 1 < p.rank; ++d) all &= p.dims[d].stride % n == 0;
  return all && op.Aligned() && IsVectorAligned(static_cast<const char*>(x));
}

template <class Op>
cudaError_t Rows(const Problem& p, const Op& op, const void* x, cudaStream_t stream) {
  const Dim& inner = p.dims[p.rank - 1];
  StridedView view;
  view.rank = p.rank - 1;
  view.begin = static_cast<int>(inner.begin);
  view.end = static_cast<int>(inner.end);
  int64_t rows = 1;
  for (int d = 0; d < view.rank; ++d) {
    const Dim& dim = p.dims[p.rank - 2 - d];
    view.dims[d] = {FastDiv(dim.extent), static_cast<int>(dim.begin), static_cast<int>(dim.end), dim.stride};
    rows *= dim.extent;
  }
  const auto* in = static_cast<const typename Op::In*>(x) + p.offset;
  if constexpr (Op::kVectors)
    if (Aligned(p, op, x, Op::kVector))
      return LaunchRows<Op::kVector>(view, rows, inner.extent, 1, true, op, in, stream);
  return LaunchRows<0>(view, rows, inner.extent, inner.stride, op.Aligned(), op, in, stream);
}

// The dimension that is innermost in the input, or -1.
int InputInner(const Problem& p) {
  for (int d = 0; d < p.rank; ++d)
    if (p.dims[d].stride == 1) return d;
  return -1;
}

// The box's dimensions in `p`: the innermost, and `y`. Fills all but the box itself.
Tile MakeTile(const Problem& p, int y) {
  const Dim &dx = p.dims[p.rank - 1], &dy = p.dims[y];
  Tile t;
  t.x_extent = static_cast<int>(dx.extent);
  t.x_begin = static_cast<int>(dx.begin);
  t.x_end = static_cast<int>(dx.end);
  t.y_extent = static_cast<int>(dy.extent);
  t.y_begin = static_cast<int>(dy.begin);
  t.y_end = static_cast<int>(dy.end);
  t.x_in_stride = dx.stride;
  t.outer_rank = 0;
  int64_t out_stride = dx.extent;
  for (int d = p.rank - 2; d >= 0; --d) {
    const Dim& dim = p.dims[d];
    if (d == y) {
      t.y_out_stride = static_cast<int>(out_stride);
    } else {
      t.outer[t.outer_rank++] = {FastDiv(dim.extent), static_cast<int>(dim.begin), static_cast<int>(dim.end),
                                 dim.stride, static_cast<int>(out_stride)};
    }
    out_stride *= dim.extent;
  }
  return t;
}

// Divides the result into boxes; returns how many.
int64_t SetBox(const Problem& p, int64_t box_x, int64_t box_y, Tile* t) {
  t->box_x = static_cast<int>(box_x);
  t->box_y = static_cast<int>(box_y);
  const int64_t x_tiles = CeilDiv(t->x_extent, box_x), y_tiles = CeilDiv(t->y_extent, box_y);
  t->x_tiles = FastDiv(x_tiles);
  t->y_tiles = FastDiv(y_tiles);
  return Volume(p) / t->x_extent / t->y_extent * x_tiles * y_tiles;
}

template <class Op>
bool SquareFits(const Problem& p, int y, const Op& op, const void* x) {
  constexpr int kIn = 16 / sizeof(typename Op::In);
  const Dim &dx = p.dims[p.rank - 1], &dy = p.dims[y];
  bool fits = dx.extent % Op::kVector == 0 && p.offset % kIn == 0 && dy.begin % kIn == 0 && dy.end % kIn == 0 &&
              2 * dx.extent >= kSquareRows && dy.extent >= 4 * kIn;  // Half of a box at least.
  for (int d = 0; d < p.rank; ++d) fits &= d == y || p.dims[d].stride % kIn == 0;
  return fits && op.Aligned() && IsVectorAligned(static_cast<const char*>(x));
}

constexpr int64_t kBoxBytes = 16 << 10;  // Of the input, for large arrays.

// An extent in boxes of about `usual`, whole units. Few are made alike: the rest of one would take as long as a whole.
int64_t Divide(int64_t extent, int64_t usual, int64_t unit) {
  if (extent > 4 * usual) return usual;
  const int64_t boxes = CeilDiv(4 * extent, 5 * usual);
  return std::min(extent, CeilDiv(CeilDiv(extent, boxes), unit) * unit);
}

template <class Op>
cudaError_t Tiles(const Problem& p, int y, const Op& op, const void* x, cudaStream_t stream) {
  constexpr int kSize = sizeof(typename Op::In), kOutSize = sizeof(typename Op::Out);
  const Dim &dx = p.dims[p.rank - 1], &dy = p.dims[y];
  const auto* in = static_cast<const typename Op::In*>(x) + p.offset;
  Tile t = MakeTile(p, y);
  if constexpr (Op::kSquares)
    if (SquareFits(p, y, op, x)) {
      const int64_t blocks = SetBox(p, kSquareRows, 128 / kSize, &t);
      return LaunchKernel(SquareKernel<Op>, blocks, kThreads, stream, t, op, in);
    }

  // A run of 256 bytes or more needs no help; a shorter one goes on where the next dimension lies beside it. So does
  // one of the result that begins anywhere, up to twice that.
  const bool in_run = dy.extent * kSize < 256 && dx.stride == dy.extent && dy.begin == 0 && dy.end == dy.extent;
  const bool whole = op.Aligned() && dx.extent % Op::kVector == 0;  // Rows of the result are 16-byte accesses.
  const bool out_run =
      !in_run && y == p.rank - 2 && dx.extent <= kSquareRows && dx.extent * kOutSize < (whole ? 256 : 512);
  bool even = IsVectorAligned(static_cast<const char*>(x)) && p.offset * kSize % 16 == 0;  // And those of the input.
  for (int d = 0; d < p.rank; ++d) even &= d == y || p.dims[d].stride * kSize % 16 == 0;
  const int beyond = whole ? 0 : Op::kVector - 1;
  // Small arrays are divided into many boxes all the same.
  const int64_t bytes = std::clamp<int64_t>(Volume(p) * kSize / 2048, kBoxBytes / 4, kBoxBytes);
  // 16-byte accesses of a run of `bytes`, which may start at any multiple of `size` in the first.
  const auto accesses = [](int64_t bytes, int size) { return static_cast<int>((bytes + 16 - size + 15) / 16); };
  Runs runs;
  runs.in_first = static_cast<const char*>(x);
  runs.in_last = runs.in_first + p.x_elements * kSize;
  const auto launch = [&](auto kernel, int64_t blocks, int64_t shared) {
    return LaunchKernel(kernel, Grid{blocks, kThreads, static_cast<size_t>(shared)}, stream, t, runs, op, in);
  };

  if (out_run) {
    runs.lanes_log2 = dx.extent < 8 ? 3 : 2;
    const int64_t chunks = std::max<int64_t>((bytes / 16 / dx.extent) >> runs.lanes_log2 << runs.lanes_log2, 4);
    const int64_t blocks = SetBox(p, dx.extent, std::min((chunks - !even) * 16 / kSize, dy.extent), &t);
    runs.chunks = accesses(int64_t{t.box_y} * kSize, even ? 16 : kSize);
    runs.by_x = FastDiv(dx.extent);
    return launch(RunKernel<Op>, blocks, (dx.extent * t.box_y + 2 * Op::kVector) * kSize);
  }

  int64_t box_x = Divide(dx.extent, kSquareRows, Op::kVector);
  int64_t box_y = Divide(dy.extent, 128 / kSize * (box_x > kSquareRows / 2 ? 1 : 2), 16 / kSize);
  if (in_run) {
    box_y = dy.extent;
    box_x = (bytes - 16) / (kSize * box_y) - beyond;
    box_x = std::min(std::max<int64_t>(box_x / 16 * 16, 16), dx.extent);
  }
  const int64_t blocks = SetBox(p, box_x, box_y, &t);
  constexpr int kStep = kGap<kSize>;
  runs.beyond = beyond;
  const int columns = std::min(t.box_x + beyond, t.x_extent);
  runs.chunks = accesses(int64_t{in_run ? columns : 1} * t.box_y * kSize, even ? 16 : kSize);
  runs.out_vectors = accesses(t.box_x * kOutSize, kOutSize);
  runs.pitch = in_run ? t.box_y * kSize : runs.chunks * 16 + (runs.chunks * 16 / kStep % 2 == 0 ? kStep : 0);
  runs.lanes_log2 = 0;
  while ((!in_run || t.box_y * kSize >= 128) && 1 << runs.lanes_log2 < std::min(16 / kSize, t.box_y)) ++runs.lanes_log2;
  runs.by_chunks = FastDiv(runs.chunks);
  runs.by_out_vectors = FastDiv(runs.out_vectors);
  const int64_t shared = in_run ? Spread(runs.chunks * 16, kStep) + 16 : columns * runs.pitch;
  return in_run ? launch(TileKernel<true, Op>, blocks, shared) : launch(TileKernel<false, Op>, blocks, shared);
}

// The result of `p` is small enough for 32-bit indices. `tiles` says whether transposition through shared memory works.
template <class Op>
cudaError_t LaunchBox(const Problem& p, const Op& op, const void* x, bool tiles, cudaStream_t stream) {
  if constexpr (Op::kTakesApart)
    if (Weave weave; IsWeave(p, Op::kVector, &weave) && (Op::kWeaves || !weave.to_woven) && op.Aligned() &&
                     IsVectorAligned(static_cast<const char*>(x)))
      return LaunchWeave(weave, Volume(p), op, static_cast<const typename Op::In*>(x) + p.offset, stream);
  if constexpr (Op::kTiles) {
    const int y = InputInner(p);
    const int64_t nx = p.dims[p.rank - 1].extent, ny = y < 0 ? 0 : p.dims[y].extent;
    // Small matrices are gathered: their cache lines stay near.
    if (tiles && y >= 0 && y != p.rank - 1 && std::max({nx, ny, nx * ny / 16}) >= 64) return Tiles(p, y, op, x, stream);
  }
  return Rows(p, op, x, stream);
}

// Launches over boxes of at most kMaxLaunch elements, each one range of the result.
template <class Op>
cudaError_t Launch(const Problem& p, const Op& op, const void* x, bool tiles, cudaStream_t stream) {
  const int64_t volume = Volume(p);
  if (volume <= kMaxLaunch) return LaunchBox(p, op, x, tiles, stream);
  int d = 0;
  while (p.dims[d].extent == 1) ++d;
  const int64_t inner = volume / p.dims[d].extent;
  int64_t step = std::max<int64_t>(kMaxLaunch / inner, 1);
  if (step > kSquareRows) step -= step % kSquareRows;  // What was aligned stays so.
  for (int64_t start = 0; start < p.dims[d].extent; start += step) {
    Problem box = p;
    Dim& dim = box.dims[d];
    dim.extent = std::min(step, dim.extent - start);
    dim.begin = std::clamp<int64_t>(dim.begin - start, 0, dim.extent);
    dim.end = std::clamp<int64_t>(dim.end - start, 0, dim.extent);
    box.offset += start * dim.stride;
    if (const cudaError_t status = Launch(box, op.After(start * inner), x, tiles, stream); status != cudaSuccess)
      return status;
  }
  return cudaSuccess;
}

template <int kBytes>
cudaError_t LaunchCopy(const Problem& p, const Element& pad, const void* x, void* out, cudaStream_t stream) {
  using B = Bits<kBytes>;
  const Copy<kBytes> op = {static_cast<B*>(out), pad.As<B>(), pad.As<B>(), pad.As<uint4>()};
  return Launch(p, op, x, true, stream);
}

template <int kIn, int kOut>
cudaError_t LaunchConvert(const Problem& p, const void* x, const void* y, void* out, cudaStream_t stream) {
  using Op = Convert<kIn, kOut>;
  using Value = typename Op::Value;
  const Element pad(p.pad, p.in);
  Op op;
  op.out = static_cast<typename Op::Out*>(out);
  op.y = static_cast<const typename Op::Out*>(y);
  op.in_type = p.in;
  op.out_type = p.out;
  op.pad = static_cast<Value>(p.pad);
  op.alpha = static_cast<Value>(p.alpha);
  op.beta = static_cast<Value>(p.beta);
  op.pad_bits = pad.As<typename Op::In>();
  op.pad_chunk = pad.As<uint4>();
  // Tiles hold input elements, padding included, and write whole lines of y and the result.
  const bool exact = static_cast<Value>(pad.value) == op.pad || std::isnan(op.pad);
  const bool alike = !y || reinterpret_cast<uintptr_t>(y) % 16 == reinterpret_cast<uintptr_t>(out) % 16;
  return Launch(p, op, x, exact && alike, stream);
}

template <int kIn>
cudaError_t LaunchConvertFrom(const Problem& p, const void* x, const void* y, void* out, cudaStream_t stream) {
  switch (SizeOf(p.out)) {
    case 1:
      return LaunchConvert<kIn, 1>(p, x, y, out, stream);
    case 2:
      return LaunchConvert<kIn, 2>(p, x, y, out, stream);
    case 4:
      return LaunchConvert<kIn, 4>(p, x, y, out, stream);
    default:
      return LaunchConvert<kIn, 8>(p, x, y, out, stream);
  }
}

}  // namespace

cudaError_t Transform(const Problem& problem, const void* x, const void* y, void* out, cudaStream_t stream) {
  Problem p = problem;
  if (Volume(p) == 0) return cudaSuccess;
  Merge(&p);
  const int bytes = SizeOf(p.in);
  if (p.in == p.out && p.alpha == 1 && !y) {
    const Element pad(p.pad, p.in);
    switch (Widen(&p, bytes, x, out)) {
      case 1:
        return LaunchCopy<1>(p, pad, x, out, stream);
      case 2:
        return LaunchCopy<2>(p, pad, x, out, stream);
      case 4:
        return LaunchCopy<4>(p, pad, x, out, stream);
      case 8:
        return LaunchCopy<8>(p, pad, x, out, stream);
      default:
        return LaunchCopy<16>(p, pad, x, out, stream);
    }
  }
  switch (bytes) {
    case 1:
      return LaunchConvertFrom<1>(p, x, y, out, stream);
    case 2:
      return LaunchConvertFrom<2>(p, x, y, out, stream);
    case 4:
      return LaunchConvertFrom<4>(p, x, y, out, stream);
    default:
      return LaunchConvertFrom<8>(p, x, y, out, stream);
  }
}

}  // namespace jaxdnn::transform
