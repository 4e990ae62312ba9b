// How few rows are spread over the device that few_rows_forward.cu does not take: without a scale, so short that
// several share a warp, or so long that a cluster shares one.
#pragma once

#include <type_traits>

#include "cuda/layer_norm/rows.cuh"

namespace jaxdnn::layer_norm {

// Rows so few that all of them run at once are spread over as many threads as there is room for: each has 32 bytes of
// its row, or up to 128, and a block shares it, or else a cluster of blocks, as few as possible.
template <class T, int L>
constexpr int kFew = 32 / (L * sizeof(T));
// Blocks of 512 threads that a multiprocessor holds, where each keeps so many vectors.
template <class T, int L, int V>
constexpr int kFewBlocks = V <= 2 * kFew<T, L> ? 2 : 1;

// Calls f with how many vectors a thread keeps, and the spread; false if there are too many rows.
template <class T, int L, class F>
bool SpreadFew(const Shape& shape, int64_t n, const Device& device, F&& f) {
  const int64_t rows = shape.problems * shape.rows;
  const auto fits = [&](auto keep, int threads, int max_cluster) {
    constexpr int V = decltype(keep)::value;
    const Spread s = SpreadRows(n, V, 256, threads, max_cluster);
    if (s.steps == 0 || (V > 2 * kFew<T, L> && s.cluster == 1)) return false;
    // Of larger clusters no whole number fills a group of multiprocessors.
    const int64_t blocks = device.multiprocessors * (kFewBlocks<T, L, V> * 512 / s.Threads());
    if (rows > blocks / s.cluster * s.groups * (s.cluster > 2 ? 0.9 : 1)) return false;
    f(keep, s);
    return true;
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, kFew<T, L>> few;
  constexpr std::integral_constant<int, 2 * few> more;
  constexpr std::integral_constant<int, sizeof(T) == 4 ? 4 * few : 2 * few> most;
  constexpr int64_t kShort = 2048;  // elements that a block has before a second vector of each thread
  if (n <= 32 || (shape.n <= kShort && rows <= device.multiprocessors))
    return AreFew(shape, n, device) && fits(one, 512, 1);
  if (n <= 512 * few) return fits(few, 512, 1) || (n >= 128 && fits(more, 512, 1));
  return fits(few, 256, device.max_cluster) || fits(few, 512, device.max_cluster) ||
         fits(more, 256, device.max_cluster) || fits(more, 512, device.max_cluster) ||
         fits(most, 512, device.max_cluster);
}

}  // namespace jaxdnn::layer_norm
