// Filter gradient of few input channels, by strips (strips.h).
//
// Rows of the product are elements of the window, columns features, and the sum runs over pixels. A block has all rows,
// or those of some lines of the window, and goes over tiles of a slice of the pixels; its warps share the rows, and
// where there are more warps, each tile's pixels. Operand A is the strips' transpose: two words, of two pixels, are
// exchanged into two pairs of pixels, of two rows.
#include "cuda/conv/few_channels.cuh"
#include "cuda/conv/few_channels.h"
#include "cuda/conv/filter.cuh"

namespace jaxdnn::conv {
namespace {

template <class In_, int kUnits_, int kWarpsDown_, int kWarpsAcross_, int kFeatures_, int kPixels_>
struct FewTile {
  using In = In_;
  static constexpr int kUnits = kUnits_;  // of 16 rows a warp
  static constexpr int kWarpsDown = kWarpsDown_, kWarpsAcross = kWarpsAcross_, kFeatures = kFeatures_;
  static constexpr int kPixels = kPixels_ * 2 / sizeof(In);
  // That share a multiprocessor: as many as keep their sums in registers.
  static constexpr int kBlocks = kUnits * kFeatures > 128 ? 2 : kUnits * kFeatures > 64 ? 3 : 4;
  static constexpr int kThreads = 32 * kWarpsDown * kWarpsAcross;
  static constexpr int kWords = kWarpsDown * kUnits * (sizeof(In) == 4 ? 16 : 8);
  static constexpr int kStep = 2 * kChunk<In>;  // pixels of a product
  static constexpr int kPitch = kFeatures + 4;  // of sums in shared memory
  using Cotangent = OperandTile<In, kFeatures, kPixels, false>;
  using Columns = Fragments<Cotangent, kFeatures, kStep, true>;
  using Sums = float[kUnits][kFeatures / 8][4];
};

struct FewParams {
  int lines;  // of the window in a block
  FastDiv column_tiles, row_tiles, splits;
  int strip_bytes;
  int y_bytes;  // of a copy
  int64_t result_size;
};

// A thread's words of a unit: one of two rows, or two.
template <class In>
constexpr int kWordsOfUnit = sizeof(In) == 4 ? 2 : 1;

template <class T>
__device__ StripWord WordOf(const StripParams& q, int of_class, int unit, int which) {
  const int first = (threadIdx.x / 32 % T::kWarpsDown * T::kUnits + unit) * kWordsOfUnit<typename T::In> * 8;
  return StripWord::Make<typename T::In>(q, of_class, first + which * 8 + threadIdx.x % 32 / 4);
}

// sums += the product over a step's pixels, whose windows begin at `places`. Unless all exist, words of those that do
// not are masked: the cotangent's zeros would not make up for an infinity.
template <class T, class Exists>
__device__ __forceinline__ void Multiply(uint32_t strips, const int* places,
                                         const int (&offsets)[T::kUnits][kWordsOfUnit<typename T::In>],
                                         const typename T::Columns& columns, uint32_t cotangent, bool all,
                                         const Exists& exists, typename T::Sums& sums) {
  using In = typename T::In;
  constexpr bool kPairs = sizeof(In) == 2;
  constexpr int kCount = kPairs ? 4 : 2;
  const int t = threadIdx.x % 4;
  const auto pixel = [&](int i) { return kPairs ? 2 * t + i % 2 + i / 2 * 8 : t + 4 * i; };
  uint32_t place[kCount], mask[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    place[i] = strips + places[pixel(i)];
    mask[i] = 0xFFFFFFFFu;
  }
  if (!all) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (!exists(pixel(i))) mask[i] = 0;
  }
  const auto word = [&](int i, int offset) { return LoadWord(place[i] + offset) & mask[i]; };
  uint32_t a[T::kUnits][4];
#pragma unroll
  for (int u = 0; u < T::kUnits; ++u) {
    if constexpr (kPairs) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t w0 = word(2 * half, offsets[u][0]), w1 = word(2 * half + 1, offsets[u][0]);
        a[u][2 * half] = __byte_perm(w0, w1, 0x5410);
        a[u][2 * half + 1] = __byte_perm(w0, w1, 0x7632);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[u][i] = word(i / 2, offsets[u][i % 2]);
      RoundToTf32(a[u]);
    }
  }
#pragma unroll
  for (int j = 0; j < T::kFeatures / 16; ++j) {
    uint32_t b[4];
    columns.Load(b, cotangent, j, 0);
    if constexpr (!kPairs) RoundToTf32(b);
#pragma unroll
    for (int u = 0; u < T::kUnits; ++u) {
      Mma<In>(sums[u][2 * j], a[u], b[0], b[1]);
      Mma<In>(sums[u][2 * j + 1], a[u], b[2], b[3]);
    }
  }
}

template <class T, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FewFilterKernel(const __grid_constant__ StripParams q, const __grid_constant__ FewParams r, const In* x,
                    const In* y, bool wide, void* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int places[T::kPixels];
  __shared__ uint32_t pixels[T::kPixels];  // a line and a column of the tile
  __shared__ int distances[T::kPixels];    // from its first pixel, in pixels
  constexpr int kCotangentBytes = T::Cotangent::kBytes, kLineBytes = T::kFeatures * sizeof(In);
  int column_tile, row_tile, split;
  const int problem =
      r.splits.Div(r.row_tiles.Div(r.column_tiles.Div(static_cast<int>(blockIdx.x), &column_tile), &row_tile), &split);
  const int splits = r.splits.divisor, first_feature = column_tile * T::kFeatures, first_line = row_tile * r.lines;
  x += problem * q.x_problem;
  y += problem * q.y_problem * q.features + first_feature;
  const int features = min(q.features - first_feature, T::kFeatures);

  const bool two_classes = q.strips.classes == 2;
  const int class_pixels = two_classes ? T::kPixels / 2 : T::kPixels;
  for (int i = threadIdx.x; i < T::kPixels; i += T::kThreads) {
    const int of_class = i >= class_pixels, index = i - of_class * class_pixels;
    // The pixels of a load are next to each other, which spreads them over the banks.
    const int shuffled = sizeof(In) == 2 ? index / 8 * 8 + index % 2 * 4 + index % 8 / 2 : index;
    const StripPixel pixel(q, of_class, shuffled);
    const bool exists = pixel.line < q.strips.height;
    pixels[i] = exists ? pixel.line << 16 | pixel.column : 0xFFFFFFFFu;
    places[i] = exists ? pixel.Offset(q, of_class, sizeof(In)) : 0;
    distances[i] = exists ? pixel.line * q.y[2] + pixel.column : 0;
  }
  const auto load = [&](int i, int turn) {
    const StripTile tile(q, i);
    FillStrips<T::kThreads>(q, x, tile, shared + 2 * kCotangentBytes + turn * r.strip_bytes);
    const In* from_tile = y + tile.FirstPixel(q) * q.features;
    const int height = min(q.strips.height, q.y[1] - tile.at[1]), width = q.y[2] - tile.at[2];
    unsigned char* const cotangent = shared + turn * kCotangentBytes;
    const auto exists = [&](uint32_t at) { return int(at >> 16) < height && int(at & 0xFFFF) < width; };
    if (r.y_bytes == 16) {
      using Mine = Share<typename T::Cotangent, T::kThreads>;
      const int feature = Mine::Chunk() * kChunk<In>;
      const uint32_t to = SharedAddress(cotangent) + T::Cotangent::Offset(Mine::Line(), Mine::Chunk());
      constexpr int kAtOnce = 4;  // the tables' entries before the copies, which order memory
#pragma unroll 1
      for (int begin = 0; begin < Mine::kCount; begin += kAtOnce) {
        uint32_t at[kAtOnce];
        int distance[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          at[j] = pixels[Mine::Line() + (begin + j) * Mine::kLinesApart];
          distance[j] = distances[Mine::Line() + (begin + j) * Mine::kLinesApart];
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          CopyAsync<16>(to + Mine::Step(begin + j), from_tile + feature + int64_t{distance[j]} * q.features,
                        exists(at[j]) && feature < features);
      }
      return;
    }
    CopyPieces<T::kThreads>(T::kPixels * T::kFeatures, r.y_bytes == 4 ? 4 : 1, y, cotangent,
                            [&](unsigned i, int elements, const In** from, int* to) {
                              const unsigned pieces = T::kFeatures / elements, pixel = min(i / pieces, T::kPixels - 1u);
                              const int feature = i % pieces * elements;
                              *to = T::Cotangent::Offset(pixel, feature / kChunk<In>) +
                                    feature % kChunk<In> * int(sizeof(In));
                              *from = from_tile + feature + int64_t{distances[pixel]} * q.features;
                              return exists(pixels[pixel]) && feature < features;
                            });
  };

  const int group = threadIdx.x / 32 / T::kWarpsDown, groups = two_classes ? T::kWarpsAcross / 2 : T::kWarpsAcross;
  const int of_class = group >= groups;
  // The group's steps of its class, of those that have pixels.
  constexpr int kSteps = T::kPixels / T::kWarpsAcross / T::kStep;
  const int first_step = (group - of_class * groups) * kSteps, count = q.run * q.strips.height;
  int offsets[T::kUnits][kWordsOfUnit<In>];
#pragma unroll
  for (int u = 0; u < T::kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kWordsOfUnit<In>; ++i) {
      StripWord word = WordOf<T>(q, of_class, u, i);
      const bool exists = word.line < r.lines && first_line + word.line < q.window_lines;
      word.line += first_line;
      offsets[u][i] = exists ? word.Offset(q, of_class, sizeof(In)) : 0;
    }
  }
  const typename T::Columns columns(0);
  typename T::Sums sums = {};
  int turn = 1;
#pragma unroll 1
  for (int i = split - splits; i < q.tiles; i += splits, turn ^= 1) {
    WaitForCopies<0>();
    // Every thread's copies are here, and nobody reads the other tile any more.
    __syncthreads();
    if (i + splits < q.tiles) load(i + splits, turn ^ 1);
    CommitCopies();
    if (i < 0) continue;
    const StripTile tile(q, i);
    const bool whole = tile.Contains(q, q.strips.height - 1, q.strips.width - 1);
    const uint32_t strips = SharedAddress(shared) + 2 * kCotangentBytes + turn * r.strip_bytes;
#pragma unroll 1
    for (int step = first_step; step < first_step + kSteps && step * T::kStep < count; ++step) {
      const int first = of_class * class_pixels + step * T::kStep;
      const uint32_t cotangent = SharedAddress(shared) + turn * kCotangentBytes + first * kLineBytes;
      const auto exists = [&](int pixel) {
        const uint32_t at = pixels[first + pixel];
        return int(at >> 16) < q.strips.height && tile.Contains(q, at >> 16, at & 0xFFFF);
      };
      const bool all = whole && (step + 1) * T::kStep <= count;
      Multiply<T>(strips, places + first, offsets, columns, cotangent, all, exists, sums);
    }
  }
  WaitForCopies<0>();
  __syncthreads();

  // The groups' sums, one after the other.
  float* const total = reinterpret_cast<float*>(shared);
#pragma unroll 1
  for (int g = 0; g < T::kWarpsAcross; ++g) {
    if (g == group) {
#pragma unroll
      for (int u = 0; u < T::kUnits; ++u) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          StripWord word = WordOf<T>(q, of_class, u, sizeof(In) == 4 ? half : 0);
          if (sizeof(In) == 2) word.element += half;
          const bool exists = word.line < r.lines && first_line + word.line < q.window_lines && word.element >= 0 &&
                              word.element < q.window_run;
          if (!exists) continue;
          float2* to = reinterpret_cast<float2*>(total + (word.line * q.window_run + word.element) * T::kPitch +
                                                 2 * (threadIdx.x % 4));
#pragma unroll
          for (int j = 0; j < T::kFeatures / 8; ++j) {
            float2 sum = {sums[u][j][2 * half], sums[u][j][2 * half + 1]};
            if (g > 0) sum.x += to[4 * j].x, sum.y += to[4 * j].y;
            to[4 * j] = sum;
          }
        }
      }
    }
    __syncthreads();
  }
  const int rows = min(r.lines, q.window_lines - first_line) * q.window_run;
  const int64_t first =
      split * r.result_size + problem * q.filter + int64_t{first_line} * q.window_run * q.features + first_feature;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * T::kFeatures; i += T::kThreads) {
    const int row = i / T::kFeatures, feature = i % T::kFeatures;
    if (feature >= features) continue;
    const float sum = total[row * T::kPitch + feature];
    const int64_t at = first + row * int64_t{q.features} + feature;
    if (wide) {
      static_cast<float*>(out)[at] = sum;
    } else {
      static_cast<In*>(out)[at] = static_cast<In>(sum);
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const Strips& strips, const Config& config, const void* x, const void* y,
                       void* out, void* workspace, cudaStream_t stream) {
  using In = typename T::In;
  const StripParams q = MakeStripParams(p, strips, T::kFeatures);
  FewParams r;
  r.lines =
      std::min<int>(q.window_lines, T::kWords / std::max(strips.line_words[0], strips.line_words[strips.classes - 1]));
  if (r.lines == 0) return cudaErrorInvalidValue;
  r.column_tiles = FastDiv(q.column_tiles);
  r.row_tiles = FastDiv(CeilDiv(q.window_lines, r.lines));
  r.splits = FastDiv(config.splits);
  r.strip_bytes = int(CeilDiv(strips.Bytes(), 16)) * 16;
  r.y_bytes = int(sizeof(In));
  for (const int bytes : {4, 16})
    if (p.features * sizeof(In) % bytes == 0 && Alignment(y) % bytes == 0) r.y_bytes = bytes;
  r.result_size = p.FilterSize();
  const bool partial = UsesWorkspace(p, config.splits);
  const size_t shared = std::max<size_t>(2 * (T::Cotangent::kBytes + r.strip_bytes),
                                         size_t(r.lines) * q.window_run * T::kPitch * sizeof(float));
  const Grid grid = {p.batch * config.splits * r.row_tiles.divisor * q.column_tiles, T::kThreads, shared};
  const cudaError_t status =
      LaunchKernel(FewFilterKernel<T, In>, grid, stream, q, r, static_cast<const In*>(x), static_cast<const In*>(y),
                   partial || p.out != p.in, partial ? workspace : out);
  if (!partial || status != cudaSuccess) return status;
  return SumSlices(p, workspace, config.splits, false, x, y, out, stream);
}

template <class In, int kFeatures>
cudaError_t LaunchFeatures(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                           void* workspace, cudaStream_t stream) {
  Strips strips;
  if (!strips.Fit(p, FewPixels(p), Alignment(x))) return cudaErrorInvalidValue;
  const int64_t words =
      p.window[0] * p.window[1] * std::max(strips.line_words[0], strips.line_words[strips.classes - 1]);
  constexpr int kUnit = sizeof(In) == 4 ? 16 : 8;
  const auto launch = [&](auto tile) {
    return LaunchTile<typename decltype(tile)::type>(p, strips, config, x, y, out, workspace, stream);
  };
  if (words <= 2 * kUnit) return launch(TypeTag<FewTile<In, 2, 1, 4, kFeatures, 256>>());
  if (words <= 3 * kUnit) return launch(TypeTag<FewTile<In, 3, 1, 4, kFeatures, 256>>());
  if (words <= 5 * kUnit) return launch(TypeTag<FewTile<In, 5, 1, 4, kFeatures, 256>>());
  return launch(TypeTag<FewTile<In, 5, 2, 2, kFeatures, 256>>());
}

}  // namespace

cudaError_t LaunchFewChannelsFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                    void* workspace, cudaStream_t stream) {
  if (p.FilterSize() == 0) return cudaSuccess;
  return VisitSingleDType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    return p.features > 32 ? LaunchFeatures<In, 64>(p, config, x, y, out, workspace, stream)
                           : LaunchFeatures<In, 32>(p, config, x, y, out, workspace, stream);
  });
}

}  // namespace jaxdnn::conv
