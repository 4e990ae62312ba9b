// Square boxes of W = 2 H + 1 cells in two dimensions.
//
// A thread owns N neighbouring elements of a row, and marches down the rows with the last W of its columns in a ring of
// registers, as in columns.cu. A box's sum is the sum down each column, which a thread has in its ring, and then across
// the columns, which neighbouring threads of the block exchange through shared memory: one exchange a row, for the
// cotangent of two sums at once, that of x² and, a row later, that of r = q x g. Every element is read once, but for
// the rows and columns where blocks overlap.
//
// Neighbours across are `inner` elements apart, and a vector holds N of the elements between; or inner is 1, and a
// vector holds N neighbours across itself (kAcross).
//
// Bound by memory, and for wide boxes by shared memory: a thread reads W - 1 vectors a row and sum, or 2 where kAcross.
#include <algorithm>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/lrn/box.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int kThreads = 256;  // of a block, about
constexpr int kMaxThreads = 384;
constexpr int64_t kEnoughThreads = 132 * 512;
constexpr int kLeastChunk = 16;

// A block takes `slices` neighbouring vectors of each of `columns` columns of each of `groups` planes. A plane's
// columns are all there, behind `margin` empty ones that separate it from its neighbour; or they are one of several
// strips, which overlap by what its outermost columns cannot sum.
struct Tiles {
  int64_t outer, plane, row, step;  // planes; elements of a plane, of a row, and from a column to the next
  int64_t vectors;                  // of a column
  int height, width;
  int groups, columns, slices;
  int origin, useful;  // columns before the first that has a result, and those that have
  int64_t slice_tiles;
  int strips, chunks, chunk;

  __host__ __device__ int Lanes() const { return groups * columns * slices; }
  int Threads() const { return static_cast<int>(CeilDiv(Lanes(), 32)) * 32; }
  int64_t Blocks() const { return CeilDiv(outer, groups) * chunks * strips * slice_tiles; }
};

template <Map kMap, int kH, int kN, bool kIsAcross>
struct Traits {
  static constexpr int H = kH, N = kN, W = 2 * H + 1, U = W + 1;
  static constexpr bool kAcross = kIsAcross;
  static constexpr int kSums = kMap == Map::kForward ? 1 : 2;
  // Rows from an element's arrival to its result, and rows and columns that a result sees.
  static constexpr int kLag = kMap == Map::kCotangent ? 2 * H + 1 : H;
  static constexpr int kSight = kMap == Map::kCotangent ? 2 * H : H;
  // Columns that an exchange reaches: vectors where they lie across.
  static constexpr int kMargin = kAcross ? (H + N - 1) / N : H;
};

// The sum over the neighbours across, where `lane` points at a thread's own vector of the exchange.
template <class S, class A>
__device__ void SumAcross(const Vec<A, S::N>* lane, int slices, A (&sum)[S::N]) {
  constexpr int N = S::N, H = S::H;
  if constexpr (S::kAcross) {
    A e[3 * N];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const Vec<A, N> v = lane[k - 1];
#pragma unroll
      for (int j = 0; j < N; ++j) e[k * N + j] = v.v[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum[j] = e[N + j - H];
#pragma unroll
      for (int d = 1 - H; d <= H; ++d) sum[j] += e[N + j + d];
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = 0;
#pragma unroll
    for (int d = -H; d <= H; ++d) {
      const Vec<A, N> v = lane[d * slices];
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += v.v[j];
    }
  }
}

template <Map kMap, class S, class T>
__global__ void __launch_bounds__(kMaxThreads)
    BoxKernel(const __grid_constant__ Tiles tiles, Response<T> response, const T* __restrict__ t,
              const T* __restrict__ x, T* __restrict__ out) {
  using A = Accumulator<T>;
  using Held = Packed<T, S::N>;
  constexpr int H = S::H, N = S::N, U = S::U, kSums = S::kSums;
  constexpr bool kCotangent = kMap == Map::kCotangent;
  // Rows whose loads are in flight.
  constexpr int kAhead = sizeof(T) == 2 ? U : U / 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const int margin = S::kMargin * tiles.slices, pitch = tiles.Lanes() + 2 * margin;
  auto* exchange = reinterpret_cast<Vec<A, N>*>(shared);  // [2][kSums][pitch]

  int64_t block = blockIdx.x;
  const int64_t slice_tile = block % tiles.slice_tiles;
  block /= tiles.slice_tiles;
  const int strip = static_cast<int>(block % tiles.strips);
  block /= tiles.strips;
  const int first = static_cast<int>(block % tiles.chunks) * tiles.chunk;
  const int last = min(tiles.height, first + tiles.chunk);
  block /= tiles.chunks;
  const int lane = threadIdx.x, slice = lane % tiles.slices, column = lane / tiles.slices % tiles.columns;
  const int group = lane / (tiles.slices * tiles.columns);
  const int64_t outer = block * tiles.groups + group, vector = slice_tile * tiles.slices + slice;
  const int across = strip * tiles.useful - tiles.origin + column;
  const bool exists =
      group < tiles.groups && outer < tiles.outer && vector < tiles.vectors && across >= 0 && across < tiles.width;
  const bool results = exists && column >= tiles.origin && column < tiles.origin + tiles.useful;
  const int64_t base = outer * tiles.plane + across * tiles.step + vector * N;
  const auto inside = [&](int row) { return exists && row >= 0 && row < tiles.height; };
  const auto load = [&](const T* p, int row) {
    return inside(row) ? *reinterpret_cast<const Held*>(p + base + row * tiles.row) : Held{};
  };

  // What lies beyond the outermost lanes is zero.
  for (int i = lane; i < 2 * kSums * 2 * margin; i += blockDim.x) {
    const int at = i % (2 * margin);
    exchange[i / (2 * margin) * pitch + (at < margin ? at : tiles.Lanes() + at)] = Vec<A, N>{};
  }

  Held in[kAhead], with[kAhead];
  const int begin = first - S::kSight;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    in[i] = load(x, begin + i);
    if constexpr (kMap != Map::kForward) with[i] = load(t, begin + i - (kCotangent ? H : 0));
  }
  // Slot i holds what step i of U brought: c and t as they come, r and D^-beta g when their energy is known.
  A c[U][N] = {}, w[U][N] = {}, r[U][N] = {}, u[U][N] = {};
  for (int rows = begin; rows < last + S::kLag; rows += U) {
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const int now = (i + U - H) % U, done = (i + U - S::kLag) % U, row = rows + i;
      Widen<T>(in[i % kAhead], c[i]);
      if constexpr (kMap != Map::kForward) Widen<T>(with[i % kAhead], w[i]);
      in[i % kAhead] = load(x, row + kAhead);
      if constexpr (kMap != Map::kForward) with[i % kAhead] = load(t, row + kAhead - (kCotangent ? H : 0));

      Vec<A, N> down[kSums] = {};
#pragma unroll
      for (int k = 0; k < U; ++k)
#pragma unroll
        for (int j = 0; j < N; ++j) {
          // All slots but the one that is a window old; of r, but the one to come.
          if (k != (i + 1) % U) down[0].v[j] += c[k][j] * c[k][j];
          if constexpr (kMap == Map::kTangent)
            if (k != (i + 1) % U) down[1].v[j] += c[k][j] * w[k][j];
          if constexpr (kCotangent)
            if (k != now) down[1].v[j] += r[k][j];
        }
      Vec<A, N>* own = exchange + i % 2 * kSums * pitch + margin + lane;
      if (lane < tiles.Lanes())
#pragma unroll
        for (int s = 0; s < kSums; ++s) own[s * pitch] = down[s];
      __syncthreads();
      // Threads past the lanes have nothing there to read.
      if (lane < tiles.Lanes()) {
        A energy[N], product[N], result[N];
        SumAcross<S>(own, tiles.slices, energy);
        if constexpr (kSums == 2) SumAcross<S>(own + pitch, tiles.slices, product);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          A q;
          const A gain = response.Gain(response.Divisor(energy[j]), &q);
          if constexpr (kMap == Map::kForward) result[j] = c[now][j] * gain;
          if constexpr (kMap == Map::kTangent) result[j] = w[now][j] * gain - q * c[now][j] * product[j];
          if constexpr (kCotangent) {
            u[i][j] = w[i][j] * gain;
            // Beyond the borders q may be infinite.
            r[now][j] = inside(row - H) ? q * (c[now][j] * w[i][j]) : A(0);
            // u came H steps after its element.
            result[j] = u[(i + U - H - 1) % U][j] - c[done][j] * product[j];
          }
        }
        const int target = row - S::kLag;
        if (results && target >= first && target < last)
          *reinterpret_cast<Held*>(out + base + target * tiles.row) = Narrow<T, N>(result);
      }
    }
  }
}

template <class S>
Tiles Tile(const Problem& p, int item) {
  constexpr int N = S::N;
  Tiles t = {};
  t.outer = p.outer * p.extent[0];
  t.height = p.extent[1];
  t.row = p.extent[2] * p.inner;
  t.plane = t.height * t.row;
  t.width = S::kAcross ? p.extent[2] / N : p.extent[2];
  t.step = S::kAcross ? N : p.inner;
  t.vectors = S::kAcross ? 1 : p.inner / N;
  // Sectors are 32 bytes; half of one will do where that keeps a row in one block.
  const auto slices = [&](int bytes) {
    return std::clamp<int64_t>(bytes / (N * item), 1, std::min<int64_t>(t.vectors, 8));
  };
  const int64_t whole = t.width + S::kMargin;
  if (whole * slices(16) <= kMaxThreads) {
    t.columns = static_cast<int>(whole);
    t.slices = static_cast<int>(std::clamp<int64_t>(kThreads / whole, slices(16), t.vectors));
    t.groups = static_cast<int>(std::clamp<int64_t>(kThreads / (whole * t.slices), 1, t.outer));
    t.origin = S::kMargin;
    t.useful = t.width;
    t.strips = 1;
  } else {
    const int sight = S::kAcross ? (S::kSight + N - 1) / N : S::kSight;
    t.slices = static_cast<int>(slices(32));
    t.columns = kThreads / t.slices;
    t.groups = 1;
    t.origin = sight;
    t.useful = t.columns - 2 * sight;
    t.strips = static_cast<int>(CeilDiv(t.width, t.useful));
  }
  t.slice_tiles = CeilDiv(t.vectors, t.slices);
  t.chunks = 1;
  const int64_t wanted = CeilDiv(kEnoughThreads, std::max<int64_t>(t.Blocks() * t.Threads(), 1));
  t.chunk = static_cast<int>(CeilDiv(t.height, std::clamp<int64_t>(wanted, 1, CeilDiv(t.height, kLeastChunk))));
  t.chunks = static_cast<int>(CeilDiv(t.height, t.chunk));
  return t;
}

template <Map kMap, int H, int N, bool kAcross, class T>
cudaError_t Launch(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  using S = Traits<kMap, H, N, kAcross>;
  const Tiles tiles = Tile<S>(p, sizeof(T));
  const size_t vectors = 2 * S::kSums * (tiles.Lanes() + 2 * S::kMargin * tiles.slices);
  const Grid grid = {tiles.Blocks(), tiles.Threads(), vectors * sizeof(Vec<Accumulator<T>, N>)};
  return LaunchKernel(BoxKernel<kMap, S, T>, grid, stream, tiles, Response<T>(p), t, x, out);
}

template <Map kMap, int H, class T>
cudaError_t LaunchReach(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  constexpr int kWide = sizeof(T) == 8 ? 2 : 4;
  if (IsVectorAligned(t, x, out)) {
    if (p.inner % kWide == 0) return Launch<kMap, H, kWide, false>(p, t, x, out, stream);
    if constexpr (H <= kWide)
      if (p.inner == 1 && p.extent[2] % kWide == 0) return Launch<kMap, H, kWide, true>(p, t, x, out, stream);
  }
  return Launch<kMap, H, 1, false>(p, t, x, out, stream);
}

template <Map kMap, class T>
cudaError_t LaunchMap(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  switch (p.after[2]) {
    case 1:
      return LaunchReach<kMap, 1>(p, t, x, out, stream);
    case 2:
      return LaunchReach<kMap, 2>(p, t, x, out, stream);
    case 3:
      return LaunchReach<kMap, 3>(p, t, x, out, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool IsBox(const Problem& p) {
  const int reach = p.after[2];
  return p.before[0] == 0 && p.after[0] == 0 && p.after[1] == reach && p.before[1] == reach && p.before[2] == reach &&
         reach >= 1 && reach <= 3;
}

cudaError_t LaunchBox(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                      cudaStream_t stream) {
  return VisitDType(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *with = static_cast<const T*>(t), *in = static_cast<const T*>(x);
    T* result = static_cast<T*>(out);
    switch (map) {
      case Map::kForward:
        return LaunchMap<Map::kForward>(p, with, in, result, stream);
      case Map::kTangent:
        return LaunchMap<Map::kTangent>(p, with, in, result, stream);
      case Map::kCotangent:
        return LaunchMap<Map::kCotangent>(p, with, in, result, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxdnn::lrn
