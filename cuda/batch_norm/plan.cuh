// The choice of a tiling, on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cuda/batch_norm/tiling.cuh"

namespace jaxdnn::batch_norm {

// Chooses how many blocks, at most `limit`, share the `steps` of a channel: those that leave the multiprocessors least
// idle at the end of `wave` blocks at a time, if a block's beginning and end cost as much as kOverhead steps, and
// another kernel to merge what several have as much as kMerge.
inline void Split(Tiling* t, int64_t steps, int64_t limit, int64_t wave) {
  constexpr int64_t kOverhead = 4, kMerge = 8;
  const bool merges = limit < kNoLimit && t->copies == 1;
  const int64_t blocks = t->outer * t->tiles;
  limit = std::max<int64_t>(1, std::min({limit, CeilDiv(steps, kOverhead), CeilDiv(4 * wave, blocks)}));
  int64_t least = 0, best = steps;
  for (int64_t slabs = 1; slabs <= limit; ++slabs) {
    const int64_t each = CeilDiv(steps, slabs);
    const int64_t cost = CeilDiv(blocks * slabs, wave) * (each + kOverhead) + (merges && slabs > 1 ? kMerge : 0);
    if (slabs == 1 || cost < least) least = cost, best = each;
  }
  t->steps = static_cast<int>(best);
  t->slabs = CeilDiv(steps, best);
  t->by_tiles = FastDiv(t->tiles);
  t->by_slabs = FastDiv(t->slabs);
}

// `limit` is how many rows of partial results, of c each, there may be: kNoLimit where there are none.
inline Tiling ByRuns(const Problem& p, int vector, int64_t limit, int64_t wave) {
  Tiling t = {p.outer, p.n, p.c, p.s};
  t.where = static_cast<const uint8_t*>(p.where);
  t.copies = 1;
  t.tiles = p.c;
  t.ragged = p.s % vector != 0;
  const int64_t length = p.s % vector ? (p.s + 2 * vector - 2) / vector : p.s / vector;
  t.length = FastDiv(length);
  Split(&t, CeilDiv(p.n * length, kThreads), limit, wave);
  // A block's indices are 32 bits: where they would not be, blocks go one after the other through what they share.
  const bool turns = p.n * length <= INT32_MAX;
  t.start = turns ? kThreads : int64_t{t.steps} * kThreads;
  t.stride = static_cast<int>(turns ? t.slabs * kThreads : kThreads);
  return t;
}

// A tile of `widest` vectors at most, or of the fewest that hold whole channels.
inline Tiling ByColumns(const Problem& p, int vector, int64_t limit, int64_t wave, int widest) {
  Tiling t = {p.outer, p.n, p.c, p.s};
  t.where = static_cast<const uint8_t*>(p.where);
  t.copies = vector / std::gcd(p.c * p.s, int64_t{vector});
  t.columns = t.copies * p.c * p.s;
  t.rows = CeilDiv(p.n, t.copies);
  // A tile holds whole channels. Those of one column each are narrow: the more rows a tile has, the fewer slabs leave
  // partial results. Of about the greatest width, that which leaves the fewest threads idle.
  const int unit = static_cast<int>(p.s / std::gcd(p.s, int64_t{vector}));
  const int64_t vectors = t.columns / vector, units = CeilDiv(vectors, unit);
  int width = 0, height = 0;
  double best = 0;
  // Where rows begin at any address, those as long as their tile are one stretch of memory.
  const bool stretch =
      p.s == 1 && t.copies > 1 && vectors <= kThreads / 2 && kThreads / vectors * vectors >= kThreads * 3 / 4;
  const int most = std::max(1, (stretch ? kThreads : widest) / unit);
  for (int64_t tiles = CeilDiv(units, most), i = 0; i < (stretch ? 1 : 16) && tiles <= units; ++i, ++tiles) {
    const int w = static_cast<int>(CeilDiv(units, tiles)) * unit;
    const int h = kThreads / w;
    const double used = static_cast<double>(w * h) / kThreads * static_cast<double>(vectors) /
                        static_cast<double>(CeilDiv(vectors, w) * w);
    if (used > best * 1.05) best = used, width = w, height = h;
  }
  t.width = FastDiv(width);
  t.height = FastDiv(height);
  t.tiles = CeilDiv(vectors, width);
  const int channels = width * vector / static_cast<int>(p.s);
  t.lanes = 1;
  while (t.lanes < 32 && 2 * t.lanes * channels <= kThreads) t.lanes *= 2;
  Split(&t, CeilDiv(t.rows, height), limit == kNoLimit ? limit : limit / t.copies, wave);
  return t;
}

template <class M>
struct AccessTag {
  using type = M;
};

// Calls f(AccessTag, Tiling). `limit` as above, `wave` is how many blocks run at once, `aligned` says whether all
// buffers allow 16-byte accesses, `vectors` whether the kernel is built for them.
template <class T, bool kVectors, class F>
cudaError_t VisitTiling(Problem p, bool aligned, int64_t limit, int64_t wave, F&& f) {
  if (p.outer == 0 || p.n == 0 || p.c == 0 || p.s == 0) return cudaSuccess;
  // One channel is one column.
  if (p.c == 1) p.n *= p.s, p.s = 1;
  // Places in a run are 32-bit, also those of the vectors at its ends.
  if (p.s > INT32_MAX - 16) return cudaErrorNotSupported;
  const bool runs = p.s > kLongestColumns;
  const int widest = p.s == 1 ? kTileWidth : kThreads;
  if constexpr (kVectors) {
    constexpr int kV = kVecLength<T>;
    // Every outer index must begin at a vector.
    const bool whole = p.outer == 1 || p.n * p.c * p.s % kV == 0;
    const int64_t copies = kV / std::gcd(p.c * p.s, int64_t{kV});
    if (aligned && whole && !p.where && (runs || copies <= limit))
      return runs ? f(AccessTag<Runs<T, kV>>{}, ByRuns(p, kV, limit, wave))
                  : f(AccessTag<Columns<T, kV>>{}, ByColumns(p, kV, limit, wave, widest));
  }
  return runs ? f(AccessTag<Runs<T, 1>>{}, ByRuns(p, 1, limit, wave))
              : f(AccessTag<Columns<T, 1>>{}, ByColumns(p, 1, limit, wave, widest));
}

}  // namespace jaxdnn::batch_norm
