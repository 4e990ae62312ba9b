// Channels-first windows of K x K cells, S apart, wherever rows begin.
//
// A block brings some planes, or a band of rows of one, to shared memory as they lie in global memory, in asynchronous
// 16-byte copies, and leaves its results there, from where they go out in 16-byte stores. A thread takes L neighbouring
// outputs and walks down a strip of rows. It loads words: elements of 16 bits that begin within one are put together
// from two.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pool/band.cuh"
#include "cuda/pool/forward.cuh"
#include "cuda/pool/rows.cuh"
#include "cuda/pool/windows.cuh"

namespace jaxdnn::pool {

struct Planes {
  int images, rows, strip, across;
  int in, out;  // elements in shared memory
  int64_t blocks;
  FastDiv by_band, by_across, by_strip;

  bool Plan(const Geometry& g, int64_t item, int l, int k, int s) {
    constexpr int64_t kBytes = 20 << 10;  // of the input
    const int64_t most = kBytes / item, plane = int64_t{g.in[1]} * g.in[2], e = 16 / item;
    images = 1, rows = g.out[1];
    if (plane <= most) {
      constexpr int64_t kBlocksWanted = 132 * 8;
      images = static_cast<int>(std::clamp<int64_t>(g.batch * g.in[0] / kBlocksWanted, 1, most / plane));
    } else {
      const int64_t fits = (most / g.in[2] - k) / s + 1;
      if (most / g.in[2] < k || fits < 2) return false;
      rows = static_cast<int>(CeilDiv(g.out[1], CeilDiv(g.out[1], fits)));
    }
    const int64_t in_rows = std::min(g.in[1], (rows - 1) * s + k), bands = CeilDiv(g.out[1], rows);
    in = static_cast<int>(CeilDiv((images - 1) * plane + in_rows * g.in[2] + 4 * e, e) * e);
    out = static_cast<int>(CeilDiv(int64_t{images} * rows * g.out[2] + 2 * e, e) * e);
    across = static_cast<int>(CeilDiv(g.out[2], l));
    int64_t least = INT64_MAX;
    for (int n = 1; n <= std::min(rows, 32); ++n) {
      const int64_t cost = CeilDiv(images * CeilDiv(rows, n) * across, kThreads) * (n + 2);
      if (cost < least) least = cost, strip = n;
    }
    blocks = CeilDiv(g.batch * g.in[0], images) * bands;
    by_band = FastDiv(bands), by_across = FastDiv(across), by_strip = FastDiv(CeilDiv(rows, strip));
    return blocks <= INT32_MAX;
  }
};

// A vector of elements from any place in shared memory, with the element on either side.
template <class T, int V>
__device__ RowVector<T, V> LoadAnywhere(const T* p) {
  RowVector<T, V> v;
  if constexpr (sizeof(T) == 4) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(p);
    v.left = words[-1], v.right = words[V];
#pragma unroll
    for (int i = 0; i < V; ++i) v.own[i] = words[i];
  } else {
    const bool odd = reinterpret_cast<uintptr_t>(p) & 2;
    const unsigned* const words = reinterpret_cast<const unsigned*>(p - (odd ? 1 : 2));
    unsigned w[V / 2 + 2];
#pragma unroll
    for (int i = 0; i < V / 2 + 2; ++i) w[i] = words[i];
    const unsigned which = odd ? 0x5432 : 0x7654;
    v.left = odd ? w[0] << 16 : w[0];
#pragma unroll
    for (int i = 0; i < V / 2; ++i) v.own[i] = __byte_perm(w[i], w[i + 1], which);
    v.right = __byte_perm(w[V / 2], w[V / 2 + 1], which);
  }
  return v;
}

// Where a vector lies in the input, as masks: it may reach beyond the end of its row.
template <class T, int V>
struct RowMask {
  static constexpr int kWords = sizeof(T) * V / 4, kEach = 4 / sizeof(T);
  unsigned left, own[kWords], right;

  __device__ RowMask(int begin, int width) {
    left = begin > 0 ? ~0u : 0, right = begin + V < width ? ~0u : 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int live = width - begin - i * kEach;
      own[i] = live >= kEach ? ~0u : live > 0 ? 0xFFFFu : 0;
    }
  }
  __device__ void Apply(RowVector<T, V>& v, unsigned outside) const {
    const auto pick = [&](unsigned word, unsigned mask) { return (word & mask) | (outside & ~mask); };
    v.left = pick(v.left, left), v.right = pick(v.right, right);
#pragma unroll
    for (int i = 0; i < kWords; ++i) v.own[i] = pick(v.own[i], own[i]);
  }
};

// Reduces windows begin to end of L columns from o2 on and stores them from offset `to`. `plane` is the input at (0,
// 0), which is there up to row `limit`. Returns whether a value was NaN, if State cannot tell which was first.
template <int K, int S, int kLow, class State, class Task>
__device__ bool WalkAlong(const Task& task, const typename Task::Element* plane, int limit, int begin, int end, int o2,
                          int to) {
  using T = typename Task::Element;
  constexpr int L = Task::kWidth, V = L * S, R = (K + S - 1) / S;
  constexpr bool kQuick = State::kQuick;
  const Shape& g = task.g;
  const int width = g.in[2], column = o2 * S, count = min(L, g.out[2] - o2);
  const RowMask<T, V> mask(column, width);
  const unsigned outside = task.Identity().v[0];
  State open[R];
  unsigned most = 0;
  const T* row_at = plane + (begin * S - g.low[1]) * width + column;
#pragma unroll 1
  for (int first = begin; first < end + R - 1; first += R) {
#pragma unroll
    for (int u = 0; u < R; ++u) {
      const int step = first + u, top = step * S - g.low[1], o1 = step - (R - 1);
#pragma unroll
      for (int j = R - 1; j > 0; --j) open[j] = open[j - 1];
      const bool none = top >= g.in[1] || top + K <= 0;
      if constexpr (State::kIndexed && !kQuick) {
        open[0] = State(none ? -1 : max(0, -top) * K);
        if (kLow > 0) open[0].index[0] += column == 0 && !none ? kLow : 0;
      }
#pragma unroll
      for (int r = 0; r < S; ++r) {
        RowVector<T, V> v;
        if (static_cast<unsigned>(top + r) < static_cast<unsigned>(limit)) {
          v = LoadAnywhere<T, V>(row_at);
          mask.Apply(v, outside);
        } else {
          v.left = v.right = outside;
#pragma unroll
          for (unsigned& word : v.own) word = outside;
        }
        row_at += width;
        const auto pick = [&](int k) {
          if constexpr (Task::kWidens)
            return v.template PickWide<S, L>(k - kLow);
          else
            return task.Prepare(v.template Pick<S, L>(k - kLow));
        };
        State row;
        if constexpr (State::kIndexed && !kQuick) {
          row = State(0);
          row.Start(pick(0));
        } else {
          row.Start(pick(0), 0);
        }
        if constexpr (kQuick && kLow > 0) row.index[0] += column == 0 ? kLow : 0;
#pragma unroll
        for (int k = 1; k < K; ++k) row.Take(pick(k), k);
#pragma unroll
        for (int j = 0; j < R; ++j) {
          if (j * S + r >= K) continue;
          if constexpr (kQuick || !State::kIndexed) {
            if (j == 0 && r == 0) {
              open[0] = row;
              open[0].Move(max(0, -top) * K);
              continue;
            }
          }
          open[j].Take(row, (j * S + r) * K);
        }
      }
      if (o1 >= begin && o1 < end) {
        if constexpr (kQuick) {
          open[R - 1].Watch(most);
          const int first_row = top - (R - 1) * S;
          if (first_row >= g.in[1] || first_row + K <= 0) open[R - 1].SetIndex(-1);
        }
        task.FinishEach(open[R - 1], to, o1, o2, count);
        to += g.out[2];
      }
    }
  }
  if constexpr (kQuick) return State::SawNan(most);
  return false;
}

// Copies `length` elements that are aligned alike in both arrays out of shared memory.
template <class T>
__device__ void CopyOut(T* to, const T* from, int length) {
  constexpr int E = kVecLength<T>;
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(T));
  for (int i = static_cast<int>(threadIdx.x) * E - skew; i < length; i += kThreads * E) {
    if (i >= 0 && i + E <= length) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    } else {
      for (int j = max(i, 0); j < min(i + E, length); ++j) to[j] = from[j];
    }
  }
}

template <int K, int S, int kLow, class Task>
__global__ void __launch_bounds__(kThreads)
    PlanesKernel(const __grid_constant__ Task task, const __grid_constant__ Planes planes) {
  using T = typename Task::Element;
  constexpr int E = kVecLength<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const Shape& g = task.g;
  int band;
  const int64_t image = int64_t{planes.by_band.Div(static_cast<int>(blockIdx.x), &band)} * planes.images;
  const int images = static_cast<int>(min(int64_t{planes.images}, g.batch * g.in[0] - image));
  const int top = band * planes.rows, bottom = min(top + planes.rows, g.out[1]);
  int r0 = max(0, top * S - g.low[1]), r1 = min(g.in[1], (bottom - 1) * S - g.low[1] + K);
  if (planes.images > 1) r0 = 0, r1 = g.in[1];
  const int in_plane = g.in[1] * g.in[2], out_plane = g.out[1] * g.out[2];
  const T* const from = task.x + image * in_plane + r0 * g.in[2];
  T* const x = reinterpret_cast<T*>(memory) + E + reinterpret_cast<uintptr_t>(from) % 16 / sizeof(T);
  CopyRun(x, from, r1 > r0 ? (images - 1) * in_plane + (r1 - r0) * g.in[2] : 0, threadIdx.x, kThreads);

  const int64_t first = image * out_plane + top * g.out[2];
  const int length = (images - 1) * out_plane + (bottom - top) * g.out[2];
  Task local = task;
  T* const y = reinterpret_cast<T*>(memory) + planes.in;
  local.y = y + reinterpret_cast<uintptr_t>(task.y + first) % 16 / sizeof(T);
  uint8_t* index = nullptr;
  if constexpr (Task::State::kIndexed) {
    index = static_cast<uint8_t*>(task.index) + first;
    local.index = reinterpret_cast<uint8_t*>(y + planes.out) + reinterpret_cast<uintptr_t>(index) % 16;
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
  const int strips = static_cast<int>(planes.by_strip.divisor), items = images * strips * planes.across;
  for (int item = threadIdx.x; item < items; item += kThreads) {
    int place, strip;
    const int n = planes.by_strip.Div(planes.by_across.Div(item, &place), &strip);
    const int begin = top + strip * planes.strip, end = min(begin + planes.strip, bottom);
    const T* const plane = x + n * in_plane - r0 * g.in[2];
    const int o2 = place * Task::kWidth, to = n * out_plane + (begin - top) * g.out[2] + o2;
    if (WalkAlong<K, S, kLow, typename Task::Quick>(local, plane, r1, begin, end, o2, to))
      WalkAlong<K, S, kLow, typename Task::State>(local, plane, r1, begin, end, o2, to);
  }
  __syncthreads();
  CopyOut(task.y + first, local.y, length);
  if constexpr (Task::State::kIndexed) CopyOut(index, static_cast<const uint8_t*>(local.index), length);
}

// Launches PlanesKernel for task(width), or otherwise().
template <class Otherwise, class MakeTask>
cudaError_t LaunchPlanes(const Geometry& g, Otherwise&& otherwise, cudaStream_t stream, MakeTask&& make) {
  auto task = make();
  using Task = decltype(task);
  using T = typename Task::Element;
  const bool fits = g.channels == 1 && g.batch > 0 && g.in[0] > 0 && g.in[1] > 0 && g.in[2] > 0 && g.out[1] > 0 &&
                    g.out[2] > 0 && int64_t{g.in[1]} * g.in[2] < INT32_MAX / 2;
  if (!fits || int64_t{g.out[2] - 1} * g.stride[2] - g.low[2] >= g.in[2]) return otherwise();
  const auto launch = [&](auto k, auto s, auto low) {
    Planes planes;
    if (!planes.Plan(g, sizeof(T), Task::kWidth, k, s)) return otherwise();
    const size_t bytes = (planes.in + planes.out) * sizeof(T) + (Task::State::kIndexed ? planes.out + 32 : 0);
    const Grid grid = {planes.blocks, kThreads, bytes};
    return LaunchKernel(PlanesKernel<k(), s(), low(), Task>, grid, stream, task, planes);
  };
  // Measured: windows further apart are better off in bands.
  const auto visit = [&](auto k, auto s) {
    if constexpr (s() == 1) {
      if (g.low[2] == 1) return launch(k, s, std::integral_constant<int, 1>{});
    }
    return otherwise();
  };
  return VisitSquare<false>(g, visit, otherwise);
}

}  // namespace jaxdnn::pool
