// How blocks share rows that start anywhere in a vector. Those a period apart start equally far into one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {

// The spread for rows that start anywhere in a vector, of L elements. Their edges take less than 2 L threads.
inline Spread SpreadShifted(int64_t elements, int L, int keep, int most, int max_cluster) {
  return SpreadRows(std::max<int64_t>(32, elements / L), keep, std::min(256, most), most, max_cluster);
}

// Blocks, or clusters, for each problem's rows: `most`, but such that the rows of a thread are a multiple of the period
// apart, if it has several.
inline int64_t SplitRows(int64_t most, const Shape& shape, const Spread& spread, int64_t period) {
  const int64_t unit = std::max<int64_t>(1, period / spread.groups);
  if (most * spread.groups >= shape.rows) return most;
  return std::min(std::max(unit, most / unit * unit), shape.rows);
}

// Whether such a multiple leaves so many without work that they had better take shares of the rows in the order of
// where they start. Rows side by side are then written at other times, and the memory that they share twice.
inline bool TakesShares(int64_t parts, int64_t most, const Shape& shape, const Spread& spread) {
  return spread.groups == 1 && most < shape.rows && (most - parts) * 12 > most;
}

// The rows of one of `parts` blocks, or clusters, in runs of rows a period apart: its share of all rows in the order of
// where they start. Without shares, which is with a period of 1, it has one run, from `first` on.
struct Runs {
  int64_t rows, begin, end, first, last, before = 0;  // before: rows in that order before the next run's start
  int period, start = -1;

  __device__ Runs(int64_t rows, int part, int parts, int period, int64_t first)
      : rows(rows),
        begin(rows * part / parts),
        end(rows * (part + 1) / parts),
        first(first),
        last(rows),
        period(period) {}
  __device__ bool HasShares() const { return period > 1; }
  __device__ bool Next() {
    if (!HasShares()) return ++start == 0;
    while (++start < period && before < end) {
      const int64_t count = (rows - start + period - 1) >> (__ffs(period) - 1);
      first = start + max(begin - before, int64_t{0}) * period;
      last = start + min(end - before, count) * period;
      before += count;
      if (first < last) return true;
    }
    return false;
  }
};

}  // namespace jaxdnn::layer_norm
