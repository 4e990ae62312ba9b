// Forward convolution of few input channels, by strips (strips.h), and the data gradients that are one.
//
// Rows of the product are pixels, columns features, and its depth goes line by line through the window, a word of a
// line after another. The strips are the operand's matrix already: a thread's words of a fragment are at a pixel's
// place plus a place in the window, which it has in registers and in a small table. Elements that a word holds beside
// the window's own are masked, for the filter's zeros do not make up for an infinity there.
//
// The filter stays in shared memory, in the order of the fragments. A block goes over tiles, and loads one while it
// multiplies another. Columns are assigned to features so that a thread has eight neighbours of them.
#include "cuda/common/convert.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/few_channels.cuh"
#include "cuda/conv/few_channels.h"

namespace jaxdnn::conv {
namespace {

template <int kWarps_, int kHeight_, int kWide, int kBlocks_>
struct FewTile {
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kBlocks = kBlocks_;
  static constexpr int kHeight = kHeight_;                       // of a warp, in units of 16 pixels
  static constexpr int kOctets = kWide, kFeatures = 32 * kWide;  // of eight features a thread
  static constexpr int kPixels = kWarps * kHeight * 16;
  static constexpr int kStepBytes = kFeatures * Strips::kStepWords * 4;  // of the filter
  struct Unit {
    float v[4];
  };
  using Sums = Unit[kHeight * kOctets * 4];  // by 16 pixels, octet, and two of its features
};

// Of shared memory: the filter, the table of words, and strips for two tiles.
struct Layout {
  int steps, table, strips, strip_bytes, bytes;
};

// A thread's eight of 32 features are runs of so many neighbours, so that four threads store 64 bytes next to each
// other.
template <class In>
constexpr int kRun = 16 / sizeof(In);

struct FewParams {
  Epilogue epilogue;
  Layout layout;
  int batch;
  bool whole;             // whether eight features can be stored at once
  int mirrored_channels;  // of a data gradient, whose filter is mirrored [taps, features, channels]; otherwise 0
};

template <class T>
Layout LayoutOf(const Problem& p, const Strips& s) {
  Layout l;
  l.steps = s.Steps(p);
  l.table = s.classes * l.steps * T::kStepBytes;
  l.strips = l.table + s.classes * l.steps * Strips::kStepWords * int(sizeof(uint2));
  l.strip_bytes = int(CeilDiv(s.Bytes(), 16)) * 16;
  l.bytes = l.strips + 2 * l.strip_bytes;
  return l;
}

// The words' places in a window, and masks.
template <class T, class In>
__device__ void FillTable(const StripParams& q, int steps, uint2* table) {
  const int words = steps * Strips::kStepWords;
  for (int i = threadIdx.x; i < q.strips.classes * words; i += T::kThreads) {
    const int of_class = i >= words;
    const StripWord word = StripWord::Make<In>(q, of_class, i - of_class * words);
    uint2 entry = {0, 0};
    if (word.line < q.window_lines) {
      entry.x = word.Offset(q, of_class, sizeof(In));
      for (int e = 0; e < 4 / int(sizeof(In)); ++e)
        if (word.element + e >= 0 && word.element + e < q.window_run)
          entry.y |= sizeof(In) == 4 ? 0xFFFFFFFFu : 0xFFFFu << 16 * e;
    }
    table[i] = entry;
  }
}

// The filter's words, each of one feature, in the order of the fragments. A thread takes eight features of a word.
template <class T, class In>
__device__ void FillFilter(const StripParams& q, const FewParams& r, const In* filter, int first_column, uint32_t* to) {
  constexpr int kPerWord = 4 / sizeof(In), kRuns = T::kFeatures / 8;
  const int steps = r.layout.steps, words = steps * Strips::kStepWords, columns = q.features - first_column;
  const bool mirrored = r.mirrored_channels > 0;
  const bool whole = !mirrored && q.features % 8 == 0 && reinterpret_cast<uintptr_t>(filter) % 16 == 0;
  const int apart = mirrored ? r.mirrored_channels : 1;  // from feature to feature
  filter += int64_t{first_column} * apart;
#pragma unroll 4
  for (int i = threadIdx.x; i < q.strips.classes * words * kRuns; i += T::kThreads) {
    const int t = i % 4, run = i / 4 % kRuns, half = i / 4 / kRuns % 2, step = i / (8 * kRuns);
    const int of_class = step >= steps, index = (step - of_class * steps) * Strips::kStepWords + half * 4 + t;
    const StripWord word = StripWord::Make<In>(q, of_class, index);
    alignas(16) In value[kPerWord][8];
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) {
      const int element = word.element + e;
      const bool valid = word.line < q.window_lines && element >= 0 && element < q.window_run;
      int64_t row = int64_t{word.line} * q.window_run + element;
      if (mirrored) {
        // Taps and channels both in reverse order, and then the channels back in theirs.
        const int channel = element % apart;
        row = int64_t{q.window_lines} * q.window_run - 1 - row;
        row = (row - (apart - 1 - channel)) * q.features + channel;
      } else {
        row *= q.features;
      }
      const In* from = filter + row + int64_t{8} * run * apart;
      if (whole) {
        uint4 v[sizeof(In) / 2] = {};
#pragma unroll
        for (int k = 0; k < int(sizeof(In)) / 2; ++k)
          if (valid && 8 * run < columns) v[k] = __ldg(reinterpret_cast<const uint4*>(from) + k);
        memcpy(value[e], v, sizeof(v));
      } else {
#pragma unroll
        for (int f = 0; f < 8; ++f) value[e][f] = valid && 8 * run + f < columns ? __ldg(from + f * apart) : In(0.f);
      }
    }
#pragma unroll
    for (int f = 0; f < 8; ++f) {
      uint32_t bits[4] = {};
      if constexpr (sizeof(In) == 4) {
        memcpy(bits, &value[0][f], 4);
        RoundToTf32(bits);
      } else {
        const In pair[2] = {value[0][f], value[1][f]};
        memcpy(bits, pair, 4);
      }
      // Feature 32 o + 4 kRun p + kRun t' + 2 j + e is column 2 t' + e of the octet's unit j + kRun / 2 p.
      constexpr int kPart = 4 * kRun<In>;
      const int feature = 8 * (run % 4) + f, in_part = feature % kPart;
      const int unit = feature / kPart * (kRun<In> / 2) + in_part % kRun<In> / 2;
      const int column = in_part / kRun<In> * 2 + f % 2;
      to[((step * T::kOctets * 2 + run / 4 * 2 + unit / 2) * 32 + column * 4 + t) * 4 + unit % 2 * 2 + half] = bits[0];
    }
  }
}

template <class T, class In>
__device__ void Multiply(const int (&place)[T::kHeight][2], uint32_t strips, const uint4* filter, const uint2* table,
                         int steps, typename T::Sums& sums) {
  const int lane = threadIdx.x % 32;
  filter += lane;
  table += lane % 4;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint2 low = table[0], high = table[4];
    uint32_t a[T::kHeight][4];
#pragma unroll
    for (int i = 0; i < T::kHeight; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[i][half] = LoadWord(strips + place[i][half] + low.x) & low.y;
        a[i][2 + half] = LoadWord(strips + place[i][half] + high.x) & high.y;
      }
      if constexpr (sizeof(In) == 4) RoundToTf32(a[i]);
    }
#pragma unroll
    for (int j = 0; j < 2 * T::kOctets; ++j) {
      const uint4 b = filter[j * 32];
#pragma unroll
      for (int i = 0; i < T::kHeight; ++i) {
        Mma<In>(sums[(i * T::kOctets * 2 + j) * 2].v, a[i], b.x, b.y);
        Mma<In>(sums[(i * T::kOctets * 2 + j) * 2 + 1].v, a[i], b.z, b.w);
      }
    }
    filter += T::kStepBytes / 16;
    table += Strips::kStepWords;
  }
}

// Stores eight features of a pixel, of which those below `columns` exist; run by run where that is a number of eights.
template <int kRun, class Out>
__device__ void StoreEight(Out* to, const float (&v)[8], bool whole, int columns) {
  constexpr int kN = 16 / sizeof(Out);
#pragma unroll
  for (int i = 0; i < 8; i += kN) {
    const int at = i / kRun * 4 * kRun + i % kRun;
    if (whole) {
      float part[kN];
#pragma unroll
      for (int k = 0; k < kN; ++k) part[k] = v[i + k];
      if (at < columns) StorePacked<Out, kN>(to + at, Narrow<Out, kN>(part));
    } else {
#pragma unroll
      for (int k = 0; k < kN; ++k)
        if (at + k < columns) to[at + k] = static_cast<Out>(v[i + k]);
    }
  }
}

// v += those of an array, if there is one.
template <int kRun, class Out>
__device__ void AddEight(float (&v)[8], const void* array, int64_t offset, bool whole, int columns) {
  if (array == nullptr) return;
  constexpr int kN = 16 / sizeof(Out);
  const Out* from = static_cast<const Out*>(array) + offset;
#pragma unroll
  for (int i = 0; i < 8; i += kN) {
    const int at = i / kRun * 4 * kRun + i % kRun;
    if (whole) {
      if (at >= columns) continue;
      const auto more = *reinterpret_cast<const Vec<Out, kN>*>(from + at);
#pragma unroll
      for (int k = 0; k < kN; ++k) v[i + k] += static_cast<float>(more.v[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kN; ++k)
        if (at + k < columns) v[i + k] += static_cast<float>(from[at + k]);
    }
  }
}

// Of the warp's pixels, which are its class's from `index` on.
template <class T, int kRun, class Out>
__device__ void Store(const StripParams& q, const FewParams& r, const StripTile& tile, int64_t problem, int of_class,
                      int index, int first_feature, typename T::Sums& sums, Out* out) {
  const int lane = threadIdx.x % 32, feature = first_feature + lane % 4 * kRun, columns = q.features - feature;
  const int64_t first = problem * q.y_problem + tile.FirstPixel(q);
  // Of a pixel of unit i: its offset in the result, or -1.
  const auto locate = [&](int i, int half) -> int64_t {
    const StripPixel pixel(q, of_class, index + 16 * i + 8 * half + lane / 4);
    const bool valid = pixel.line < q.strips.height && tile.Contains(q, pixel.line, pixel.column);
    return valid ? (first + pixel.line * q.y[2] + pixel.column) * q.features + feature : -1;
  };
  const activation::Kind kind = r.epilogue.activation.kind;
  if (kind == activation::Kind::kIdentity || kind == activation::Kind::kRelu) {
    const float least = kind == activation::Kind::kRelu ? 0 : -INFINITY;
    float bias[T::kOctets][8] = {};
#pragma unroll
    for (int o = 0; o < T::kOctets; ++o)
      AddEight<kRun, Out>(bias[o], r.epilogue.bias, problem * q.features + feature + 32 * o, r.whole, columns - 32 * o);
#pragma unroll
    for (int i = 0; i < 2 * T::kHeight; ++i) {
      const int64_t at = locate(i / 2, i % 2);
      if (at < 0) continue;
#pragma unroll
      for (int o = 0; o < T::kOctets; ++o) {
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = sums[(i / 2 * T::kOctets + o) * 4 + k / 2].v[i % 2 * 2 + k % 2] + bias[o][k];
        AddEight<kRun, Out>(v, r.epilogue.residual, at + 32 * o, r.whole, columns - 32 * o);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = activation::MaxOrNan(v[k], least);
        StoreEight<kRun>(out + at + 32 * o, v, r.whole, columns - 32 * o);
      }
    }
    return;
  }
  // Other activations are too much code to have more than once.
#pragma unroll 1
  for (int i = 0; i < T::kHeight * T::kOctets; ++i) {
    const int o = i % T::kOctets;
    float v[2][8];
    int64_t at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at[half] = locate(i / T::kOctets, half);
#pragma unroll
      for (int k = 0; k < 8; ++k) v[half][k] = sums[k / 2].v[2 * half + k % 2];
      AddEight<kRun, Out>(v[half], r.epilogue.bias, problem * q.features + feature + 32 * o, r.whole, columns - 32 * o);
      if (at[half] >= 0)
        AddEight<kRun, Out>(v[half], r.epilogue.residual, at[half] + 32 * o, r.whole, columns - 32 * o);
    }
    ActivateInTurn<Out, 4>(reinterpret_cast<float (&)[16]>(v), r.epilogue.activation);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (at[half] >= 0) StoreEight<kRun>(out + at[half] + 32 * o, v[half], r.whole, columns - 32 * o);
    Rotate<4>(sums);
  }
}

template <class T, class In>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FewChannelsKernel(const __grid_constant__ StripParams q, const __grid_constant__ FewParams r, const In* x,
                      const In* filter, bool wide, void* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int workers = gridDim.x / (q.column_tiles * r.batch),
            first_feature = blockIdx.x % q.column_tiles * T::kFeatures;
  const int worker = blockIdx.x / q.column_tiles % workers, problem = blockIdx.x / q.column_tiles / workers;
  x += problem * q.x_problem;
  unsigned char* const strips = shared + r.layout.strips;
  FillStrips<T::kThreads>(q, x, StripTile(q, worker), strips);
  CommitCopies();
  uint2* const table = reinterpret_cast<uint2*>(shared + r.layout.table);
  FillTable<T, In>(q, r.layout.steps, table);
  FillFilter<T>(q, r, filter + problem * q.filter, first_feature, reinterpret_cast<uint32_t*>(shared));

  // A warp's pixels are of one class.
  const int warps = T::kWarps / q.strips.classes, warp = threadIdx.x / 32, of_class = warp >= warps;
  const int index = (warp - of_class * warps) * T::kHeight * 16;
  int place[T::kHeight][2];
#pragma unroll
  for (int i = 0; i < 2 * T::kHeight; ++i) {
    // Pixels that the tile does not have read what the last one does.
    const int at = min(index + 8 * i + int(threadIdx.x % 32 / 4), q.run * q.strips.height - 1);
    place[i / 2][i % 2] = StripPixel(q, of_class, at).Offset(q, of_class, sizeof(In));
  }

  int turn = 0;
  for (int i = worker; i < q.tiles; i += workers, turn ^= 1) {
    WaitForCopies<0>();
    // Every thread's copies are here, and nobody reads the other strips any more.
    __syncthreads();
    if (i + workers < q.tiles)
      FillStrips<T::kThreads>(q, x, StripTile(q, i + workers), strips + (turn ^ 1) * r.layout.strip_bytes);
    CommitCopies();
    typename T::Sums sums = {};
    const int first_step = of_class * r.layout.steps;
    Multiply<T, In>(place, SharedAddress(strips) + turn * r.layout.strip_bytes,
                    reinterpret_cast<const uint4*>(shared + first_step * T::kStepBytes),
                    table + first_step * Strips::kStepWords, r.layout.steps, sums);
    const StripTile tile(q, i);
    if (sizeof(In) == 4 || wide) {
      Store<T, kRun<In>>(q, r, tile, problem, of_class, index, first_feature, sums, static_cast<float*>(out));
    } else {
      Store<T, kRun<In>>(q, r, tile, problem, of_class, index, first_feature, sums, static_cast<In*>(out));
    }
  }
}

template <class T, class In>
cudaError_t LaunchTile(const Problem& problem, const void* x, const void* w, void* y, const Epilogue& epilogue,
                       cudaStream_t stream) {
  const Problem p = AsForward(problem);
  if (p.images * p.YPixels() * p.features == 0) return cudaSuccess;
  Strips strips;
  if (!strips.Fit(p, T::kPixels, Alignment(x))) return cudaErrorInvalidValue;
  const StripParams q = MakeStripParams(p, strips, T::kFeatures);
  FewParams r;
  r.epilogue = epilogue;
  r.layout = LayoutOf<T>(p, strips);
  r.batch = int(p.batch);
  r.mirrored_channels = problem.direction == Direction::kForward ? 0 : int(p.channels);
  r.whole = p.features % 8 == 0 && IsVectorAligned(y, epilogue.bias, epilogue.residual);
  const auto kernel = FewChannelsKernel<T, In>;
  Grid grid = {0, T::kThreads, size_t(r.layout.bytes)};
  int64_t resident;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  const int64_t each = int64_t{q.column_tiles} * r.batch;
  grid.blocks = each * std::min<int64_t>(q.tiles, std::max<int64_t>(1, resident / each));
  return LaunchKernel(kernel, grid, stream, q, r, static_cast<const In*>(x), static_cast<const In*>(w), p.out != p.in,
                      y);
}

template <class In>
cudaError_t LaunchType(const Problem& p, const void* x, const void* w, void* y, const Epilogue& epilogue,
                       cudaStream_t stream) {
  return AsForward(p).features > 32
             ? LaunchTile<FewTile<8, 2, 2, 2>, In>(p, x, w, y, epilogue, stream)
             : LaunchTile<FewTile<4, 4, 1, sizeof(In) == 4 ? 3 : 4>, In>(p, x, w, y, epilogue, stream);
}

}  // namespace

cudaError_t LaunchFewChannelsData(const Problem& p, const void* operand, const void* filter, void* out,
                                  const Epilogue& epilogue, cudaStream_t stream) {
  return VisitSingleDType(p.in, [&](auto in) {
    return LaunchType<typename decltype(in)::type>(p, operand, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
