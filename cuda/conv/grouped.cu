// Forward convolution and data gradient of small groups with 3x3 windows.
//
// A product of 16 pixels by eight channels is so small that nothing but memory should count. So each warp works by
// itself: it goes down the lines of 16 columns of the result, for 32 to 64 bytes of each pixel's channels, whose filter
// it has in registers. The operand's lines come through a ring in its own part of shared memory, copies running some
// lines ahead. Each is read three times, once for every column of the window, and multiplied into the sums of all lines
// of the result that it belongs to. No warp waits for another, and columns of several images lie side by side, so that
// widths need not be multiples of 16.
#include "cuda/common/convert.cuh"
#include "cuda/conv/grouped.cuh"
#include "cuda/conv/grouped.h"
#include "cuda/conv/mma.h"

namespace jaxdnn::conv {
namespace {

template <class T>
__device__ int WarpIndex() {
  return blockIdx.x * T::kWarps + threadIdx.x / 32;
}

// sums += those of one tap and tile.
template <class T>
__device__ __forceinline__ void MultiplyTile(float (&sums)[4], const uint32_t (&a)[T::kFragments][4],
                                             const uint32_t* b, int tile) {
  using In = typename T::In;
  if constexpr (T::kWords == 1) {
    Mma<In>(sums, a[tile / 2][tile % 2 * 2], a[tile / 2][tile % 2 * 2 + 1], b[0]);
  } else if constexpr (!T::kWide) {
    Mma<In>(sums, a[tile], b[0], b[1]);
  } else {
#pragma unroll
    for (int f = 0; f < T::kFragments; ++f) Mma<In>(sums, a[f], b[2 * f], b[2 * f + 1]);
  }
}

// A line of the operand times the filter, into the sums of those lines of the result it belongs to. `place` are the
// lane's addresses in a slot, by tap; kParity is the line's, counted from the first that a result reads.
template <class T, int kParity>
__device__ __forceinline__ void MultiplyLine(uint32_t slot, const int (&place)[T::kTaps], const GroupedFilter<T>& filter,
                                             typename T::Sums (&sums)[T::kLines]) {
#pragma unroll
  for (int s = 0; s < T::kTaps; ++s) {
    uint32_t a[T::kFragments][4];
#pragma unroll
    for (int f = 0; f < T::kFragments; ++f) {
      LoadMatrices<false>(a[f], (slot + place[s]) ^ (32 * f));
      if constexpr (sizeof(typename T::In) == 4) RoundToTf32(a[f]);
    }
#pragma unroll
    for (int r = 0; r < T::kTaps; ++r) {
      if ((r + kParity) % T::kStep != 0) continue;
      auto& line = sums[T::kStep == 1 ? T::kTaps - 1 - r : r == 0];
#pragma unroll
      for (int j = 0; j < T::kTiles; ++j) MultiplyTile<T>(line[j], a, &filter.words[3 * r + s][j * T::kWords], j);
    }
  }
}

// The next line of the result comes first.
template <class T>
__device__ __forceinline__ void NextLine(typename T::Sums (&sums)[T::kLines]) {
#pragma unroll
  for (int i = 0; i < T::kLines; ++i)
#pragma unroll
    for (int j = 0; j < T::kTiles; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[i][j][k] = i + 1 < T::kLines ? sums[i + 1][j][k] : 0;
}

// Exchanges words between the lanes whose numbers differ in `bit`: the lower gets both lanes' `a`, the upper both `b`.
__device__ __forceinline__ void Exchange(uint32_t& a, uint32_t& b, int bit) {
  const bool upper = threadIdx.x & bit;
  const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, bit);
  (upper ? a : b) = got;
}

// Four neighbouring lanes have words of the same kTiles tiles, in order; lane t gets four (or two) words of one tile.
template <int kTiles>
__device__ __forceinline__ void Transpose(uint32_t (&words)[kTiles]) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) Exchange(words[j], words[j + 1], 1);
  if constexpr (kTiles == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) Exchange(words[j], words[j + 2], 2);
  }
}

// The channel, of a part's, with which a lane's run of neighbours begins after that.
template <class T>
__device__ int FirstOfRun() {
  const int t = threadIdx.x % 4;
  return T::kTiles == 4 ? 8 * t : t % 2 * 8 + t / 2 * 4;
}

// The lane's two pixels of a finished line of the result.
template <class T>
struct GroupedStore {
  uint32_t to[2];  // fours of channels
  bool valid[2];

  __device__ GroupedStore(const GroupedParams& q, const GroupedBlock& block, int problem, int part) {
    const int channel = part * T::kChannels + FirstOfRun<T>(), columns = block.Columns(q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = threadIdx.x % 32 / 4 + 8 * half;
      int x;
      const int image = q.image_columns.Div(block.first_column + column, &x);
      valid[half] = column < columns && channel < q.channels;
      const uint32_t line = uint32_t(problem * q.images + image) * q.image_lines.divisor + block.first_line;
      to[half] = line * q.out_line + (uint32_t(x) * q.channels + channel) / 4;
    }
  }
  __device__ void Advance(const GroupedParams& q) {
    to[0] += q.out_line;
    to[1] += q.out_line;
  }
};

// The run of a pixel, as floats.
template <class T>
__device__ __forceinline__ void RunOf(const typename T::Sums& sums, int half, float (&run)[2 * T::kTiles]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    uint32_t words[T::kTiles];
#pragma unroll
    for (int j = 0; j < T::kTiles; ++j) words[j] = __float_as_uint(sums[j][2 * half + e]);
    Transpose(words);
#pragma unroll
    for (int j = 0; j < T::kTiles; ++j) run[2 * j + e] = __uint_as_float(words[j]);
  }
}

template <class Out, int kRun>
__device__ __forceinline__ void StoreRun(Out* out, const float (&run)[kRun]) {
  constexpr int kN = kRun * int(sizeof(Out)) > 16 ? 16 / int(sizeof(Out)) : kRun;
#pragma unroll
  for (int i = 0; i < kRun; i += kN) {
    float part[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k) part[k] = run[i + k];
    StorePacked<Out, kN>(out + i, Narrow<Out, kN>(part));
  }
}

template <class T, class Out>
__device__ __forceinline__ void StoreLine(const GroupedStore<T>& store, const typename T::Sums& sums, Out* out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Out* const to = out + uint64_t{store.to[half]} * 4;
    if constexpr (sizeof(Out) == 2) {
      // Rounded first: half as many words to exchange.
      Packed<Out, 2 * T::kTiles> packed;
#pragma unroll
      for (int j = 0; j < T::kTiles; ++j) packed.v[j] = NarrowPair<Out>(sums[j][2 * half], sums[j][2 * half + 1]);
      Transpose(packed.v);
      if (store.valid[half]) StorePacked<Out, 2 * T::kTiles>(to, packed);
    } else {
      float run[2 * T::kTiles];
      RunOf<T>(sums, half, run);
      if (store.valid[half]) StoreRun(to, run);
    }
  }
}

template <int kRun, class Out>
__device__ __forceinline__ void AddRun(float (&run)[kRun], const void* array, uint64_t offset) {
  constexpr int kN = kRun * int(sizeof(Out)) > 16 ? 16 / int(sizeof(Out)) : kRun;
#pragma unroll
  for (int i = 0; i < kRun; i += kN) Add<Out>(reinterpret_cast<float(&)[kN]>(run[i]), array, offset + i);
}

// The same through the epilogue, whose bias of the run begins at `bias`.
template <class T, class Out>
__device__ __forceinline__ void StoreFinished(const Epilogue& epilogue, const GroupedStore<T>& store, int64_t bias,
                                              const typename T::Sums& sums, Out* out) {
  constexpr int kRun = 2 * T::kTiles, kAtOnce = 4;
  float runs[2][kRun];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    RunOf<T>(sums, half, runs[half]);
    if (!store.valid[half]) continue;
    AddRun<kRun, Out>(runs[half], epilogue.bias, bias);
    AddRun<kRun, Out>(runs[half], epilogue.residual, uint64_t{store.to[half]} * 4);
  }
  float(&all)[2 * kRun] = reinterpret_cast<float(&)[2 * kRun]>(runs);
#pragma unroll 1
  for (int turn = 0; turn < 2 * kRun / kAtOnce; ++turn) {
    float some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = all[i];
    Activate<Out>(some, epilogue.activation);
    Rotate<kAtOnce>(all);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) all[2 * kRun - kAtOnce + i] = some[i];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (store.valid[half]) StoreRun(out + uint64_t{store.to[half]} * 4, runs[half]);
}

// `so_far`, or NaN if one of the sums is not finite.
template <class T>
__device__ __forceinline__ float ZeroOrNan(const typename T::Sums& sums, float so_far) {
#pragma unroll
  for (int j = 0; j < T::kTiles; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) so_far = fmaf(sums[j][k], 0, so_far);
  return so_far;
}

// Zeros of the filter do not make up for an infinity of another group: computes a worker's results that met one again,
// of their own group's terms alone. Rarely called, hence out of line, when nothing is in registers any more.
template <class T, bool kFinish, class Out>
__device__ __noinline__ void Repair(const GroupedParams& q, const typename T::In* in, const typename T::In* filter,
                                    Out* out) {
  const GroupedWork work(q, WarpIndex<T>());
  filter += work.problem * q.filter_problem;
  __syncwarp();  // after every lane's stores
  for (int at = work.first_line; at < work.end_line; ++at) {
    const GroupedBlock block(q, at, at + 1);
    for (int i = threadIdx.x % 32; i < block.Columns(q) * T::kChannels; i += 32) {
      const int channel = work.part * T::kChannels + i % T::kChannels, n = channel % 8;
      if (channel >= q.channels) continue;
      int x;
      const int64_t image = work.problem * q.images + q.image_columns.Div(block.first_column + i / T::kChannels, &x);
      float sum = 0, others = 0;
      for (int tap = 0; tap < 9; ++tap) {
        const int row = block.first_line * T::kStep - q.pad_h + tap / 3, column = x * T::kStep - q.pad_w + tap % 3;
        if (row < 0 || row >= q.height || column < 0 || column >= q.width) continue;
        const typename T::In* const eight = in + ((image * q.height + row) * q.width + column) * q.channels + channel - n;
        for (int k = 0; k < 8; ++k) {
          const float value = static_cast<float>(eight[k]);
          if (k >> q.group_log == n >> q.group_log) {
            sum += value * static_cast<float>(filter[FilterPlace(q, tap, channel - n, k, n)]);
          } else {
            others += value * 0;
          }
        }
      }
      if (others == 0) continue;
      const int64_t to = ((image * q.image_lines.divisor + block.first_line) * q.image_columns.divisor + x) * q.channels;
      float v[] = {sum};
      if constexpr (kFinish) {
        Add<Out>(v, q.epilogue.bias, int64_t{work.problem} * q.channels + channel);
        Add<Out>(v, q.epilogue.residual, to + channel);
        Activate<Out>(v, q.epilogue.activation);
      }
      out[to + channel] = static_cast<Out>(v[0]);
    }
  }
}

template <class T, bool kFinish, class Out>
__global__ void __launch_bounds__(T::kThreads, kFinish ? 3 : T::kBlocks)
    GroupedKernel(const __grid_constant__ GroupedParams q, const typename T::In* in, const typename T::In* filter,
                  Out* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  const GroupedWork work(q, WarpIndex<T>());
  if (work.problem >= q.batch) return;
  const uint32_t ring = SharedAddress(shared) + threadIdx.x / 32 * (T::kSlots * T::kSlotBytes);
  constexpr int kAhead = T::kSlots - 1;

  int at = work.first_line;
  GroupedBlock block(q, at, work.end_line);
  GroupedStrip<T> strip(q, block, work.problem, work.part);
  const auto begin = [&] {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) strip.Copy(q, in, ring + i * T::kSlotBytes);
  };
  begin();
  const GroupedFilter<T> words(q, filter + work.problem * q.filter_problem, work.part);

  float not_finite = 0;  // or NaN
  while (true) {
    // Rows of a fragment are columns; those that there are not read what the last one does.
    int place[T::kTaps];
    const int lane = threadIdx.x % 32, row = min(lane % 16, block.Columns(q) - 1);
    const int pixel = strip.Padded(q, block.first_column + row) - strip.Padded(q, block.first_column);
#pragma unroll
    for (int s = 0; s < T::kTaps; ++s) place[s] = T::Place(pixel + s, lane / 16);
    GroupedStore<T> store(q, block, work.problem, work.part);
    typename T::Sums sums[T::kLines] = {};
    uint32_t slot = ring;

    const auto line = [&](int index, auto parity) {
      WaitForCopies<kAhead - 1>();
      // Every lane's copies are here, and nobody reads the line before any more.
      __syncwarp();
      strip.Copy(q, in, slot == ring ? ring + kAhead * T::kSlotBytes : slot - T::kSlotBytes);
      MultiplyLine<T, decltype(parity)::value>(slot, place, words, sums);
      slot = slot == ring + kAhead * T::kSlotBytes ? ring : slot + T::kSlotBytes;
      if constexpr (decltype(parity)::value == 0) {
        if (index >= 0) {
          if constexpr (!T::kWide) not_finite = ZeroOrNan<T>(sums[0], not_finite);
          if constexpr (kFinish) {
            const int channel = work.part * T::kChannels + FirstOfRun<T>();
            StoreFinished<T>(q.epilogue, store, int64_t{work.problem} * q.channels + channel, sums[0], out);
          } else {
            StoreLine<T>(store, sums[0], out);
          }
          store.Advance(q);
        }
        NextLine<T>(sums);
      }
    };
    // So many that sums return to the registers they began in.
    constexpr int kUnrolled = kFinish ? T::kStep : T::kStep == 1 ? 3 : 4;
    at += block.lines;
    // Counted from the line that finishes the first of the result.
    const int lines = (block.lines - 1) * T::kStep + 1;
#pragma unroll 1
    for (int index = 1 - T::kTaps; index < lines;) {
#pragma unroll
      for (int k = 0; k < kUnrolled; ++k) {
        if (index >= lines) break;
        if (T::kStep == 1 || k % 2 == 0) {
          line(index++, std::integral_constant<int, 0>());
        } else {
          line(index++, std::integral_constant<int, 1>());
        }
      }
    }
    if (at >= work.end_line) break;
    __syncwarp();
    block = GroupedBlock(q, at, work.end_line);
    strip = GroupedStrip<T>(q, block, work.problem, work.part);
    begin();
  }
  if constexpr (!T::kWide) {
    const bool repair = q.group_log < 3 && __any_sync(0xFFFFFFFFu, not_finite != 0);
    if (repair) Repair<T, kFinish>(q, in, filter, out);
  }
}

int Log2(int64_t n) { return n > 1 ? 1 + Log2(n / 2) : 0; }

// The most columns of a warp whose pixels fit into a slot.
template <class T>
int ColumnsOfWarp(int64_t images, int64_t width) {
  for (int64_t n = 16;; --n) {
    const int64_t touched = std::min(images, 1 + CeilDiv(n - 1, width));
    if (n * T::kStep + touched * T::kOverlap <= T::kPixels) return int(n);
  }
}

template <class T, bool kFinish, class Out>
cudaError_t LaunchTile(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  using In = typename T::In;
  const bool forward = p.direction == Direction::kForward;
  const int64_t *in = forward ? p.x : p.y, *result = forward ? p.y : p.x, channels = p.groups * p.channels;
  GroupedParams q = {};
  q.epilogue = epilogue;
  q.image_columns = FastDiv(result[2]);
  q.image_lines = FastDiv(result[1]);
  q.padded_width = FastDiv(result[2] * T::kStep + T::kOverlap);
  q.batch = int(p.batch);
  q.images = int(p.images);
  q.height = int(in[1]);
  q.width = int(in[2]);
  q.pad_h = int(forward ? p.pad[1] : 2 - p.pad[1]);
  q.pad_w = int(forward ? p.pad[2] : 2 - p.pad[2]);
  q.all_columns = int(p.images * result[2]);
  q.columns = ColumnsOfWarp<T>(p.images, result[2]);
  q.channels = int(channels);
  q.group_log = Log2(p.channels);
  q.gradient = !forward;
  q.filter_problem = 9 * p.channels * channels;
  q.in_line = uint32_t(in[2] * channels / 4);
  q.out_line = uint32_t(result[2] * channels / 4);

  const auto kernel = GroupedKernel<T, kFinish, Out>;
  Grid grid = {0, T::kThreads, T::kSharedBytes};
  int64_t resident;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  // A worker's lines should be some more than it reads besides.
  constexpr int kLeastLines = 4;
  const int64_t parts = CeilDiv(channels, T::kChannels), lines = CeilDiv(q.all_columns, q.columns) * result[1];
  const int64_t places = std::max<int64_t>(1, resident * T::kWarps / (parts * p.batch));
  const int64_t workers = std::min(places, CeilDiv(lines, kLeastLines));
  q.parts = FastDiv(parts);
  q.workers = FastDiv(workers);
  q.lines = int(lines / workers);
  q.more_lines = int(lines % workers);
  grid.blocks = CeilDiv(parts * workers * p.batch, T::kWarps);
  return LaunchKernel(kernel, grid, stream, q, static_cast<const In*>(operand), static_cast<const In*>(filter),
                      static_cast<Out*>(out));
}

template <class In>
cudaError_t LaunchType(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  const auto with_out = [&](auto tile, auto type) {
    using T = typename decltype(tile)::type;
    using Out = typename decltype(type)::type;
    return IsNone(epilogue) ? LaunchTile<T, false, Out>(p, operand, filter, out, epilogue, stream)
                            : LaunchTile<T, true, Out>(p, operand, filter, out, epilogue, stream);
  };
  const auto with_tile = [&](auto tile) {
    if (p.out == p.in) return with_out(tile, TypeTag<In>());
    return with_out(tile, TypeTag<float>());
  };
  const auto with_stride = [&](auto wide) {
    constexpr bool kWide = decltype(wide)::value;
    return p.stride[2] == 1 ? with_tile(TypeTag<GroupedTile<In, kWide, Stride::kOne>>())
                            : with_tile(TypeTag<GroupedTile<In, kWide, Stride::kTwo>>());
  };
  return p.channels == 16 ? with_stride(std::true_type()) : with_stride(std::false_type());
}

}  // namespace

cudaError_t LaunchGrouped(const Problem& p, const void* operand, const void* filter, void* out,
                          const Epilogue& epilogue, cudaStream_t stream) {
  if (!IsVectorAligned(operand, static_cast<const void*>(out), epilogue.bias, epilogue.residual)) {
    const Config config = {Tile::kMma128x64, 1, 0, 0};
    return LaunchDataMma(p, config, operand, filter, out, epilogue, stream);
  }
  return VisitSingleDType(p.in, [&](auto in) {
    return LaunchType<typename decltype(in)::type>(p, operand, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
