// Square boxes of W = 2 H + 1 cells in two dimensions.
//
// A thread owns N neighbouring elements of a row, and marches down the rows with the last W of its columns in a ring of
// registers, as in columns.cu. A box's sum is the sum down each column, which a thread has in its ring, and then across
// the columns, which neighbouring threads of the block exchange through shared memory: one exchange for every row or
// two, and for the cotangent of two sums at once, that of x² and, an exchange later, that of r = q x g. Every element
// is read once, but for the rows and columns where blocks overlap.
//
// Neighbours across are `inner` elements apart, and a vector holds N of the elements between; or inner is 1, and a
// vector holds N neighbours across itself (kAcross).
//
// Bound by memory, and for wide boxes by shared memory: a thread reads W vectors a row and sum, or 3 where kAcross.
#include <algorithm>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/lrn/box.cuh"

namespace jaxdnn::lrn {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kMaxSlices = 32;
constexpr int kMultiprocessors = 132;
constexpr int kMaxChunks = 8;

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

  int Threads() const { return static_cast<int>(CeilDiv(groups * columns * slices, 32)) * 32; }
  int64_t Blocks() const { return CeilDiv(outer, groups) * chunks * strips * slice_tiles; }
};

template <Map kMap, int kH, int kN, bool kIsAcross>
struct Traits {
  static constexpr int H = kH, N = kN, W = 2 * H + 1;
  static constexpr bool kAcross = kIsAcross, kCotangent = kMap == Map::kCotangent;
  static constexpr int kSums = kCotangent ? 2 : 1;
  // Rows of an exchange, one where longer rings leave no registers for two.
  static constexpr int kRows = kCotangent || H == 3 ? 1 : 2;
  // Rows from an element's arrival to its result, and rows and columns that a result sees.
  static constexpr int kLag = kCotangent ? 2 * H + kRows : H;
  static constexpr int kSight = kCotangent ? 2 * H : H;
  // Slots of the rings, for all rows between the last to arrive and the first to have its result; and so many that two
  // exchanges take turns.
  static constexpr int U = ((kCotangent ? kLag : 2 * H) + 3 * kRows - 1) / (2 * kRows) * (2 * kRows);
  // Columns that an exchange reaches: vectors where they lie across.
  static constexpr int kMargin = kAcross ? (H + N - 1) / N : H;
  // Vectors of an exchange, whose addresses are then constants.
  static constexpr int kPitch = kThreads + 2 * kMargin * (kAcross ? 1 : kMaxSlices);
  // Blocks on a multiprocessor, which the registers are bounded for.
  static constexpr int kResident = kCotangent || H > 1 ? 2 : 3;
};

// The sum over the neighbours across, where `lane` points at a thread's own vector of the exchange.
template <class S, class A>
__device__ void SumAcross(const Vec<A, S::N>* lane, int slices, A (&sum)[S::N]) {
  constexpr int N = S::N, H = S::H;
  if constexpr (S::kAcross) {
    constexpr int M = S::kMargin;
    A e[(2 * M + 1) * N];
#pragma unroll
    for (int k = 0; k <= 2 * M; ++k) {
      const Vec<A, N> v = lane[k - M];
#pragma unroll
      for (int j = 0; j < N; ++j) e[k * N + j] = v.v[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum[j] = e[M * N + j - H];
#pragma unroll
      for (int d = 1 - H; d <= H; ++d) sum[j] += e[M * N + j + d];
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

template <class S, class T>
__global__ void __launch_bounds__(kThreads, S::kResident)
    BoxKernel(const __grid_constant__ Tiles tiles, Response<T> response, const T* __restrict__ t,
              const T* __restrict__ x, T* __restrict__ out) {
  using A = Accumulator<T>;
  using Held = Packed<T, S::N>;
  constexpr int H = S::H, N = S::N, W = S::W, U = S::U, kSums = S::kSums, kLag = S::kLag, kRows = S::kRows;
  constexpr bool kCotangent = S::kCotangent;
  constexpr int kAhead = H < 3 ? U / 2 : kCotangent ? 1 : 2;  // rows whose loads are in flight, as registers allow
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int pitch = S::kPitch;
  const int lane = threadIdx.x, margin = S::kMargin * tiles.slices;
  // [2][kRows][kSums][kPitch]: two exchanges take turns, so that one barrier each will do.
  auto* exchange = reinterpret_cast<Vec<A, N>*>(shared) + margin + lane;

  int64_t block = blockIdx.x;
  const int64_t slice_tile = block % tiles.slice_tiles;
  block /= tiles.slice_tiles;
  const int strip = static_cast<int>(block % tiles.strips);
  block /= tiles.strips;
  const int first = static_cast<int>(block % tiles.chunks) * tiles.chunk;
  const int last = min(tiles.height, first + tiles.chunk);
  block /= tiles.chunks;
  const int slice = lane % tiles.slices, column = lane / tiles.slices % tiles.columns;
  const int group = lane / (tiles.slices * tiles.columns);
  const int64_t outer = block * tiles.groups + group, vector = slice_tile * tiles.slices + slice;
  const int across = strip * tiles.useful - tiles.origin + column;
  const bool exists =
      group < tiles.groups && outer < tiles.outer && vector < tiles.vectors && across >= 0 && across < tiles.width;
  const bool results = exists && column >= tiles.origin && column < tiles.origin + tiles.useful;
  const int height = exists ? tiles.height : 0;
  const auto inside = [&](int row) { return row >= 0 && row < height; };

  // What lies beyond the outermost lanes is zero.
  for (int i = lane; i < 2 * kRows * kSums * 2 * margin; i += blockDim.x) {
    const int at = i % (2 * margin);
    reinterpret_cast<Vec<A, N>*>(shared)[i / (2 * margin) * pitch + (at < margin ? at : blockDim.x + at)] = {};
  }

  // Rows to load next, and to store next.
  const int64_t base = outer * tiles.plane + across * tiles.step + vector * N;
  const int begin = first - S::kSight;
  const T* from = x + base + begin * tiles.row;
  const T* with_from = t + base + (begin - H) * tiles.row;
  T* to = out + base + (begin - kLag) * tiles.row;
  Held in[kAhead], with[kAhead];
  const auto load = [&](int i, int row) {
    in[i] = inside(row) ? *reinterpret_cast<const Held*>(from) : Held{};
    from += tiles.row;
    if constexpr (kCotangent) {
      with[i] = inside(row - H) ? *reinterpret_cast<const Held*>(with_from) : Held{};
      with_from += tiles.row;
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, begin + i);

  // Slot i holds what step i of U brought: x as it comes, r and u = D^-beta g when their energy is known.
  A c[U][N] = {}, r[U][N] = {}, u[U][N] = {};
  for (int rows = begin; rows < last + kLag; rows += U) {
#pragma unroll
    for (int i = 0; i < U; i += kRows) {
      Vec<A, N>* const own = exchange + i / kRows % 2 * kRows * kSums * pitch;
      A w[kRows][N];
#pragma unroll
      for (int s = i; s < i + kRows; ++s) {
        Widen<T>(in[s % kAhead], c[s]);
        if constexpr (kCotangent) Widen<T>(with[s % kAhead], w[s - i]);
        load(s % kAhead, rows + s + kAhead);
        Vec<A, N> down[kSums] = {};
#pragma unroll
        for (int k = 0; k < W; ++k)
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const int at = (s + U - k) % U, around = (s + U - kLag + H - k + U) % U;
            down[0].v[j] += c[at][j] * c[at][j];
            if constexpr (kCotangent) down[1].v[j] += r[around][j];
          }
#pragma unroll
        for (int k = 0; k < kSums; ++k) own[((s - i) * kSums + k) * pitch] = down[k];
      }
      __syncthreads();
#pragma unroll
      for (int s = i; s < i + kRows; ++s) {
        const int now = (s + U - H) % U, done = (s + U - kLag) % U, row = rows + s;
        A energy[N], product[N], result[N];
        SumAcross<S>(own + (s - i) * kSums * pitch, tiles.slices, energy);
        if constexpr (kSums == 2) SumAcross<S>(own + ((s - i) * kSums + 1) * pitch, tiles.slices, product);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          A q;
          const A gain = response.Gain(response.Divisor(energy[j]), &q);
          if constexpr (!kCotangent) {
            result[j] = c[now][j] * gain;
          } else {
            u[s][j] = w[s - i][j] * gain;
            // Beyond the borders q may be infinite.
            r[now][j] = inside(row - H) ? q * (c[now][j] * w[s - i][j]) : A(0);
            // u came H steps after its element.
            result[j] = u[(s + U - kLag + H) % U][j] - c[done][j] * product[j];
          }
        }
        if (results && row - kLag >= first && row - kLag < last) StorePacked<T, N>(to, Narrow<T, N>(result));
        to += tiles.row;
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
  if (whole * slices(16) <= kThreads) {
    t.columns = static_cast<int>(whole);
    t.slices =
        static_cast<int>(std::clamp<int64_t>(kThreads / whole, slices(16), std::min<int64_t>(t.vectors, kMaxSlices)));
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
  // Of the numbers of chunks, the one with which the device takes the fewest rows' time.
  int64_t best = INT64_MAX;
  for (int wanted = 1; wanted <= kMaxChunks; ++wanted) {
    Tiles tried = t;
    tried.chunk = static_cast<int>(CeilDiv(t.height, wanted));
    tried.chunks = static_cast<int>(CeilDiv(t.height, tried.chunk));
    const int64_t waves = CeilDiv(tried.Blocks(), kMultiprocessors * S::kResident);
    const int64_t rows = waves * (tried.chunk + S::kSight + S::kLag);
    if (rows < best) best = rows, t.chunk = tried.chunk, t.chunks = tried.chunks;
  }
  return t;
}

template <Map kMap, int H, int N, bool kAcross, class T>
cudaError_t Launch(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  using S = Traits<kMap, H, N, kAcross>;
  const Tiles tiles = Tile<S>(p, sizeof(T));
  constexpr size_t vectors = 2 * S::kRows * S::kSums * S::kPitch;
  const Grid grid = {tiles.Blocks(), tiles.Threads(), vectors * sizeof(Vec<Accumulator<T>, N>)};
  return LaunchKernel(BoxKernel<S, T>, grid, stream, tiles, Response<T>(p), t, x, out);
}

template <Map kMap, int H, class T>
cudaError_t LaunchReach(const Problem& p, const T* t, const T* x, T* out, cudaStream_t stream) {
  // The more rows a ring has, the fewer columns.
  constexpr int kWide = kMap == Map::kForward || H == 1 ? 4 : 2;
  if (IsVectorAligned(t, x, out)) {
    if (p.inner % kWide == 0) return Launch<kMap, H, kWide, false>(p, t, x, out, stream);
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

template <class T>
cudaError_t LaunchType(Map map, const Problem& p, const void* t, const void* x, void* out, cudaStream_t stream) {
  const T *with = static_cast<const T*>(t), *in = static_cast<const T*>(x);
  T* result = static_cast<T*>(out);
  return map == Map::kForward ? LaunchMap<Map::kForward>(p, with, in, result, stream)
                              : LaunchMap<Map::kCotangent>(p, with, in, result, stream);
}

}  // namespace

bool IsBox(Map map, const Problem& p, DType dtype) {
  const int reach = p.after[2];
  return map != Map::kTangent && (dtype == DType::kF32 || dtype == DType::kBF16) && p.before[0] == 0 &&
         p.after[0] == 0 && p.after[1] == reach && p.before[1] == reach && p.before[2] == reach && reach >= 1 &&
         reach <= 3;
}

cudaError_t LaunchBox(Map map, const Problem& p, DType dtype, const void* t, const void* x, void* out,
                      cudaStream_t stream) {
  return dtype == DType::kF32 ? LaunchType<float>(map, p, t, x, out, stream)
                              : LaunchType<__nv_bfloat16>(map, p, t, x, out, stream);
}

}  // namespace jaxdnn::lrn
