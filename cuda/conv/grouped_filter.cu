// Filter gradient of small groups with 3x3 windows, and with volumes' windows, of which each plane is one.
//
// For each tap it is a sum, over the pixels of y, of products of eight channels of x by eight of y, or 16 by 16, of
// which those of the same group are wanted. As in grouped.cu each warp works by itself: it goes down the lines of 16
// columns of y, for 32 to 64 bytes of each pixel's channels, and lines of both operands come through a ring in its own
// part of shared memory. Pixels are the products' depth, so a shift of the window is but another address to load from.
// A line of x meets up to three of y, which stay in registers, as do the sums of all taps, until the warp has no more
// lines. Then the warps of a block, which have the same channels, add theirs in shared memory, and a second kernel
// those of the blocks.
//
// Eight channels are half the rows of a product: the window's first two columns share one. Fragments are loaded as
// the products want their registers, which no instruction then moves.
//
// Each plane of a volume's window is a problem by itself, of the same y and planes of x that are so far away, with
// zeros outside.
//
// What bounds it: memory, by design. A line of 16 columns and 64 bytes of channels of both operands takes a
// multiprocessor some 115 cycles at its share of memory. In bfloat16 at stride 1 it takes 8 ldmatrix and 24 products,
// of some 150 instructions, a fourth of that on each scheduler.
#include "cuda/conv/filter.cuh"
#include "cuda/conv/grouped.cuh"
#include "cuda/conv/grouped.h"
#include "cuda/conv/grouped_store.cuh"
#include "cuda/conv/mma.h"
#include "cuda/conv/mma_tile.cuh"

namespace jaxdnn::conv {
namespace {

// Where in a slot of pixels of four 16-byte chunks each chunk is, for loads of single floats: pairs of chunks are
// exchanged so that those of four columns, kStep pixels apart, lie in different banks.
template <int kStep>
struct FloatPlaces {
  static __device__ int At(unsigned pixel, unsigned chunk) {
    return int(((pixel * 4 + chunk) ^ (pixel / 2 % (2 * kStep) * 2)) * 16);
  }
  // Of the pixel as many after that at `place` as k warps bring, a chunk each lane.
  static __device__ constexpr int Further(int place, int k) { return place + k * 8 * 64; }
};

template <class In_, int kGroup, Stride kStride>
struct GroupedFilterTile : GroupedTile<In_, kGroup, kStride> {
  using Base = GroupedTile<In_, kGroup, kStride>;
  using Base::kBytes, Base::kChannels, Base::kChunks, Base::kStep, Base::kTiles, Base::kWarps, Base::kWide;
  using typename Base::In;
  static constexpr bool kFloats = sizeof(In) == 4, kVolumes = true;
  static constexpr int kBlocks = kFloats && kWide ? 2 : 3;  // that share a multiprocessor
  static constexpr int kRows = kWide ? 16 : 8;

  template <int kStep>
  using PlacesOf = std::conditional_t<kFloats, FloatPlaces<kStep>, SlotPlaces<kChunks, kStep>>;
  using Places = PlacesOf<kStep>;

  // A stage of the ring: kStep lines of x, and one of y.
  static constexpr int kColumns = 16, kCopiesOfY = kColumns / Base::kApart, kStages = kStep == 1 ? 5 : 3;
  static constexpr int kStageBytes = kStep * Base::kSlotBytes + kColumns * kBytes;
  // Stages of x after y's last line; lines of y that one of x meets.
  static constexpr int kMoreStages = 2 / kStep, kMeet = kMoreStages + 1;

  // A lane's words of 16 pixels: pairs of 16-bit floats, or one by one. Steps are of the products' depth.
  static constexpr int kWords = kFloats ? 4 : 2, kSteps = kWords / 2, kAddresses = kFloats ? 4 : 1;
  using OfX = uint32_t[3][kSteps][4];  // of two tiles of channels, as the operand's registers follow each other
  using OfY = uint32_t[2][kSteps][2];
  static constexpr int kPairs = kTiles / 2;

  // For a line of the window and two tiles. The 16 rows of x's fragments are, in groups of 16, both tiles' channels, in
  // a fragment for each column of the window. In others, eight of either tile at the first two columns, and both tiles'
  // eight at the third, of which each tile's product has eight rows too many.
  static constexpr int kProducts = kWide ? 6 : 4;
  using Sums = float[3][kPairs][kProducts][4];

  static __host__ __device__ constexpr int FragmentOf(int product) {
    return kWide ? product / 2 : product < 2 ? product : 2;
  }
  static __host__ __device__ constexpr int TileOf(int product) { return product % 2; }
  // Of the eight rows in a half of a fragment: the column of the window, and the tile.
  static __host__ __device__ constexpr int ColumnOf(int fragment, int half) {
    return kWide || fragment == 2 ? fragment : half;
  }
  static __host__ __device__ constexpr int TileOf(int fragment, int half) {
    return kWide || fragment == 2 ? half : fragment;
  }

  // A warp's sums in shared memory, where eight rows of a store lie in different banks.
  static constexpr int kPitch = kChannels + 8, kTotals = 9 * kRows * kPitch;
  static constexpr int kSharedBytes = kWarps * std::max(kStages * kStageBytes, kTotals * 4);
};

struct GroupedFilterParams : GroupedParams {
  FastDiv window_planes;
  int splits;
  int64_t result_size;
};

// The cotangent's lines on their way to shared memory.
template <class T>
struct CotangentStrip {
  uint32_t from[T::kCopiesOfY];  // fours of channels
  unsigned there = 0;            // bit k: copy k is of the cotangent

  __device__ CotangentStrip(const GroupedParams& q, const GroupedBlock& block, int problem, int part) {
    const int lane = threadIdx.x % 32, channel = part * T::kChannels + lane % T::kChunks * T::kChunk;
#pragma unroll
    for (int k = 0; k < T::kCopiesOfY; ++k) {
      const int column = lane / T::kChunks + k * T::kApart;
      int x;
      const int image = q.image_columns.Div(block.first_column + column, &x);
      if (column < block.Columns(q) && channel < q.channels) there |= 1u << k;
      from[k] = (uint32_t(problem * q.images + image) * q.result_height + block.first_line) * q.out_line +
                uint32_t(x) * (q.channels / 4u) + channel / 4u;
    }
  }

  // Begins to copy the next line, if it is `needed`.
  __device__ void Copy(const GroupedParams& q, const typename T::In* y, uint32_t slot, bool needed) {
    if (needed) {
      const int lane = threadIdx.x % 32;
      const int place = T::template PlacesOf<1>::At(lane / T::kChunks, lane % T::kChunks);
#pragma unroll
      for (int k = 0; k < T::kCopiesOfY; ++k) {
        CopyAsync<16>(slot + T::template PlacesOf<1>::Further(place, k), y + uint64_t{from[k]} * 4, there >> k & 1);
        from[k] += q.out_line;
      }
    }
    CommitCopies();
  }
};

// Loads 16 pixels of y, of a pair of tiles, whose first word's address is the lane's.
template <class T>
__device__ __forceinline__ void LoadY(uint32_t address, int pair, typename T::OfY& y) {
  if constexpr (T::kFloats) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = LoadWord((address ^ (32 * (2 * pair + j))) + i * (4 * T::kBytes));
      RoundToTf32(r);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[j][i / 2][i % 2] = r[i];
    }
  } else {
    uint32_t r[4];
    LoadMatrices<true>(r, address ^ (32 * pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i / 2][0][i % 2] = r[i];
  }
}

// Loads those of x, shifted by the columns of the window, of the line at `slot`.
template <class T>
__device__ __forceinline__ void LoadX(uint32_t slot, const int (&place)[3][T::kAddresses], int pair,
                                      typename T::OfX& x) {
#pragma unroll
  for (int f = 0; f < 3; ++f) {
    if constexpr (T::kFloats) {
#pragma unroll
      for (int i = 0; i < T::kWords; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          x[f][i / 2][i % 2 * 2 + half] =
              LoadWord((slot + place[T::ColumnOf(f, half)][i]) ^ (32 * (2 * pair + T::TileOf(f, half))));
#pragma unroll
      for (int k = 0; k < T::kSteps; ++k) RoundToTf32(x[f][k]);
    } else {
      LoadMatrices<true>(x[f][0], (slot + place[f][0]) ^ (32 * pair));
    }
  }
}

// sums += the products of a line of x and one of y.
template <class T>
__device__ __forceinline__ void MultiplyLines(const typename T::OfX& x, const typename T::OfY& y,
                                              float (&sums)[T::kProducts][4]) {
#pragma unroll
  for (int k = 0; k < T::kSteps; ++k)
#pragma unroll
    for (int i = 0; i < T::kProducts; ++i)
      Mma<typename T::In>(sums[i], x[T::FragmentOf(i)][k], y[T::TileOf(i)][k][0], y[T::TileOf(i)][k][1]);
}

// Stores the lane's sums that belong to one group: rows are of a tap and channel of the group, columns features.
template <class T>
__device__ __forceinline__ void StoreSums(const typename T::Sums& sums, int group_log, float* to) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2, in_group = (1 << group_log) - 1;
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#pragma unroll
    for (int pair = 0; pair < T::kPairs; ++pair) {
#pragma unroll
      for (int product = 0; product < T::kProducts; ++product) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int f = T::FragmentOf(product), s = T::ColumnOf(f, half);
          if (!T::kWide && T::TileOf(f, half) != T::TileOf(product)) continue;
          const int channel = row + 8 * (2 * pair + T::TileOf(f, half));
          const int feature = column + 8 * (2 * pair + T::TileOf(product));
          const auto& sum = sums[r][pair][product];
          if (channel >> group_log == feature >> group_log)
            *reinterpret_cast<float2*>(to + (((3 * r + s) << group_log) + (channel & in_group)) * T::kPitch +
                                       feature) = {sum[2 * half], sum[2 * half + 1]};
        }
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    GroupedFilterKernel(const __grid_constant__ GroupedFilterParams q, const typename T::In* x, const typename T::In* y,
                        bool wide, void* out) {
  using In = typename T::In;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const GroupedWork work(q, blockIdx.x);
  int window_plane;
  const int problem = q.window_planes.Div(work.problem, &window_plane);
  const uint32_t ring = SharedAddress(shared) + warp * (T::kStages * T::kStageBytes);
  constexpr int kAhead = T::kStages - 1, kOfY = T::kStep * T::kSlotBytes;

  // Columns that there are not have zeros of y, which must not meet an infinity: the slots' last pixel is 0.
  for (int i = lane; i < T::kStages * T::kStep * T::kChunks; i += 32) {
    const int line = i / T::kChunks, slot = line / T::kStep * T::kStageBytes + line % T::kStep * T::kSlotBytes;
    CopyAsync<16>(ring + slot + T::Places::At(T::kPixels - 1, i % T::kChunks), x, false);
  }
  CommitCopies();  // or a warp without lines would wait for none of these before its sums

  typename T::Sums sums = {};
  // Of floats, a lane's word of a tile's eight; of others, it gives the address of a tile's pixel.
  const int in_chunk = T::kFloats ? lane / 4 % 4 * 4 : 0;
  const int y_place = T::template PlacesOf<1>::At(lane % (T::kFloats ? 4 : 16), lane / 16) + in_chunk;
  for (int at = work.first_line; at < work.end_line;) {
    const GroupedBlock block(q, at, work.end_line);
    at += block.lines;
    GroupedStrip<T> x_strip(q, block, problem, work.part, window_plane);
    CotangentStrip<T> y_strip(q, block, problem, work.part);
    const int x_lines = block.LinesRead<T>(), stages = block.lines + T::kMoreStages;
    const auto copy = [&](uint32_t stage, int index) {
#pragma unroll
      for (int a = 0; a < T::kStep; ++a) x_strip.Copy(q, x, stage + a * T::kSlotBytes, index * T::kStep + a < x_lines);
      y_strip.Copy(q, y, stage + kOfY, index < block.lines);
    };
    // Nobody reads the lines of the columns before any more.
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) copy(ring + i * T::kStageBytes, i);

    int x_place[3][T::kAddresses];
#pragma unroll
    for (int i = 0; i < T::kAddresses; ++i) {
      const int column = T::kFloats ? lane % 4 + 4 * i : lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
      const int pixel = x_strip.Padded(q, block.first_column + column) - x_strip.Padded(q, block.first_column);
#pragma unroll
      for (int f = 0; f < 3; ++f) {
        const int s = T::kFloats ? f : T::ColumnOf(f, half), chunk = T::kFloats ? lane / 16 : T::TileOf(f, half);
        x_place[f][i] = T::Places::At(column < block.Columns(q) ? pixel + s : T::kPixels - 1, chunk) + in_chunk;
      }
    }

    typename T::OfY of_y[T::kMeet][T::kPairs];
    uint32_t stage = ring;
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      WaitForCopies<(kAhead - 1) * (T::kStep + 1)>();
      // Every lane's copies are here, and nobody reads the stage before any more.
      __syncwarp();
      copy(stage == ring ? ring + kAhead * T::kStageBytes : stage - T::kStageBytes, index + kAhead);
#pragma unroll
      for (int pair = 0; pair < T::kPairs; ++pair) {
        if (index < block.lines) LoadY<T>(stage + kOfY + y_place, pair, of_y[0][pair]);
#pragma unroll
        for (int a = 0; a < T::kStep; ++a) {
          typename T::OfX of_x;
          LoadX<T>(stage + a * T::kSlotBytes, x_place, pair, of_x);
#pragma unroll
          for (int r = a; r < 3; r += T::kStep) {
            const int ago = (r - a) / T::kStep;
            if (static_cast<unsigned>(index - ago) < static_cast<unsigned>(block.lines))
              MultiplyLines<T>(of_x, of_y[ago][pair], sums[r][pair]);
          }
        }
      }
#pragma unroll
      for (int ago = T::kMeet - 1; ago > 0; --ago)
#pragma unroll
        for (int pair = 0; pair < T::kPairs; ++pair)
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < T::kWords; ++i) of_y[ago][pair][j][i / 2][i % 2] = of_y[ago - 1][pair][j][i / 2][i % 2];
      stage = stage == ring + kAhead * T::kStageBytes ? ring : stage + T::kStageBytes;
    }
  }
  WaitForCopies<0>();
  __syncthreads();

  float* const totals = reinterpret_cast<float*>(shared);
  StoreSums<T>(sums, q.group_log, totals + warp * T::kTotals);
  __syncthreads();
  const int rows = 9 << q.group_log, first = work.part * T::kChannels;
  const int64_t result = q.parts.Div(blockIdx.x) % q.splits * q.result_size + problem * q.filter_problem +
                         int64_t{window_plane} * rows * q.channels + first;
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0;
#pragma unroll 2
  for (int i = 4 * threadIdx.x; i < rows * T::kChannels; i += 4 * T::kThreads) {
    const int row = i / T::kChannels, feature = i % T::kChannels;
    if (first + feature >= q.channels) continue;
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      const float4 more = *reinterpret_cast<const float4*>(totals + w * T::kTotals + row * T::kPitch + feature);
      sum[0] += more.x;
      sum[1] += more.y;
      sum[2] += more.z;
      sum[3] += more.w;
    }
    const int64_t to = result + int64_t{row} * q.channels + feature;
    const auto store = [&](auto* at) {
      using Out = std::remove_pointer_t<decltype(at)>;
      if (aligned) return StoreRun(at, sum);
#pragma unroll
      for (int k = 0; k < 4; ++k) at[k] = static_cast<Out>(sum[k]);
    };
    if (wide) {
      store(static_cast<float*>(out) + to);
    } else {
      store(static_cast<In*>(out) + to);
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const Config& config, const void* x, const void* y, void* out, void* workspace,
                       cudaStream_t stream) {
  using In = typename T::In;
  const bool partial = UsesWorkspace(p, config.splits);
  GroupedFilterParams q = {MakeGroupedParams<T>(p, T::kPixels - 1), FastDiv(p.window[0]), int(config.splits),
                           p.FilterSize()};
  ShareLines(&q, config.splits * T::kWarps);
  const Grid grid = {int64_t{q.parts.divisor} * config.splits * p.batch * p.window[0], T::kThreads, T::kSharedBytes};
  const cudaError_t status =
      LaunchKernel(GroupedFilterKernel<T>, grid, stream, q, static_cast<const In*>(x), static_cast<const In*>(y),
                   partial || p.out != p.in, partial ? workspace : out);
  if (!partial || status != cudaSuccess) return status;
  return SumSlices(p, workspace, config.splits, false, x, y, out, stream);
}

}  // namespace

cudaError_t LaunchGroupedFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                void* workspace, cudaStream_t stream) {
  if (!IsVectorAligned(x, y)) {
    Config other = config;
    other.tile = Tile::kMma128x64;
    return LaunchFilterMma(p, other, x, y, out, workspace, stream);
  }
  return VisitSingleDType(p.in, [&](auto in) {
    const auto with_stride = [&](auto group) {
      using In = typename decltype(in)::type;
      constexpr int kGroup = decltype(group)::value;
      return p.stride[2] == 1
                 ? LaunchTile<GroupedFilterTile<In, kGroup, Stride::kOne>>(p, config, x, y, out, workspace, stream)
                 : LaunchTile<GroupedFilterTile<In, kGroup, Stride::kTwo>>(p, config, x, y, out, workspace, stream);
    };
    return p.channels == 16 ? with_stride(std::integral_constant<int, 16>())
                            : with_stride(std::integral_constant<int, 8>());
  });
}

}  // namespace jaxdnn::conv
