// Filter gradient of small groups with 3x3 windows.
//
// For each tap it is a sum, over the pixels of y, of products of eight channels of x by eight of y, or 16 by 16, of
// which those of the same group are wanted. As in grouped.cu each warp works by itself: it goes down the lines of 16
// columns of y, for 32 to 64 bytes of each pixel's channels, and lines of both operands come through a ring in its own
// part of shared memory. Pixels are the products' depth, so a shift of the window is but another address to load from.
// A line of x meets up to three of y, which stay in registers, as do the sums of all taps, until the warp has no more
// lines. Then the warps of a block, which have the same channels, add theirs in shared memory, and a second kernel
// those of the blocks.
//
// Eight channels are half the rows of a product: the window's first two columns share one.
//
// What bounds it: memory, by design. A line of 16 columns and 64 bytes of channels of both operands takes a
// multiprocessor some 115 cycles at its share of memory. In bfloat16 at stride 1 it takes 8 ldmatrix and 36 products,
// of some 100 instructions, a fourth of that on each scheduler.
#include "cuda/conv/filter.cuh"
#include "cuda/conv/grouped.cuh"
#include "cuda/conv/grouped.h"
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

template <class In_, bool kWide_, Stride kStride>
struct GroupedFilterTile : GroupedTile<In_, kWide_, kStride> {
  using Base = GroupedTile<In_, kWide_, kStride>;
  using Base::kBytes, Base::kChannels, Base::kChunks, Base::kStep, Base::kTiles, Base::kWarps, Base::kWide;
  using typename Base::In;
  static constexpr bool kFloats = sizeof(In) == 4;
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

  // A lane's words of 16 pixels: two in a row for 16-bit floats, or one.
  static constexpr int kParts = kFloats ? 4 : 2, kAddresses = kFloats ? 4 : 1;
  using Pixels = uint32_t[2][kParts];  // of two tiles of channels
  static constexpr int kPairs = kTiles / 2;

  // By line of the window. Of groups of 16 the products are the window's columns by two tiles; of others, two by tile,
  // whose rows are those of two columns of the window.
  static constexpr int kProducts = kWide ? 6 : 4;
  using Sums = float[3][kPairs][kProducts][4];

  // The block's sums: rows are of a tap and channel of the group.
  static constexpr int kTotals = 9 * kRows * kChannels;
  static constexpr int kSharedBytes = std::max(kWarps * kStages * kStageBytes, kTotals * 4);
};

struct GroupedFilterParams : GroupedParams {
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

// Loads 16 pixels of a pair of tiles: address(i, unit) is the lane's, in unit 2 * pair, of 32 bytes of channels, and
// following ones; of its i-th four pixels where they are floats.
template <class T, class Address>
__device__ __forceinline__ void LoadPixels(const Address& address, int pair, typename T::Pixels& pixels) {
  if constexpr (T::kFloats) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < T::kParts; ++i) pixels[j][i] = LoadWord(address(i, 2 * pair + j));
      RoundToTf32(pixels[j]);
    }
  } else {
    uint32_t r[4];
    LoadMatrices<true>(r, address(0, pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) pixels[i / 2][i % 2] = r[i];
  }
}

// sums += the products of a line of x, whose columns are shifted by those of the window, and one of y.
template <class T>
__device__ __forceinline__ void MultiplyLines(const typename T::Pixels (&x)[3], const typename T::Pixels& y,
                                              float (&sums)[T::kProducts][4]) {
#pragma unroll
  for (int k = 0; k < T::kParts; k += 2) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const auto multiply = [&](int product, const uint32_t (&first)[T::kParts], const uint32_t* second) {
        const uint32_t a[] = {first[k], second ? second[k] : 0, first[k + 1], second ? second[k + 1] : 0};
        Mma<typename T::In>(sums[product], a, y[j][k], y[j][k + 1]);
      };
      if constexpr (T::kWide) {
#pragma unroll
        for (int s = 0; s < 3; ++s) multiply(2 * s + j, x[s][0], x[s][1]);
      } else {
        multiply(2 * j, x[0][j], x[1][j]);
        multiply(2 * j + 1, x[2][j], nullptr);
      }
    }
  }
}

// Calls f(sum, tap, channel, feature) for the lane's sums that belong to one group; channels and features are a part's.
template <class T, class F>
__device__ __forceinline__ void VisitSums(typename T::Sums& sums, int group_log, const F& f) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#pragma unroll
    for (int pair = 0; pair < T::kPairs; ++pair) {
#pragma unroll
      for (int product = 0; product < T::kProducts; ++product) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int s = T::kWide ? product / 2 : product % 2 * 2 + i / 2;
          const int tile = 2 * pair + (T::kWide ? product % 2 : product / 2);
          const int channel = row + 8 * (T::kWide ? i / 2 : tile), feature = column + i % 2 + 8 * tile;
          if (s < 3 && channel >> group_log == feature >> group_log)
            f(sums[r][pair][product][i], 3 * r + s, channel, feature);
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
  int part;
  const int split = q.parts.Div(blockIdx.x, &part);
  const GroupedWork work(q, (split * T::kWarps + warp) * q.parts.divisor + part);
  const uint32_t ring = SharedAddress(shared) + warp * (T::kStages * T::kStageBytes);
  constexpr int kAhead = T::kStages - 1, kOfY = T::kStep * T::kSlotBytes;

  typename T::Sums sums = {};
  // A lane's pixel of a fragment, and what follows the chunk's beginning.
  const int of_lane = lane % (T::kFloats ? 4 : 16), in_chunk = T::kFloats ? lane / 4 % 4 * 4 : 0;
  const int y_place = T::template PlacesOf<1>::At(of_lane, lane / 16) + in_chunk;
  for (int at = work.first_line; at < work.end_line;) {
    const GroupedBlock block(q, at, work.end_line);
    at += block.lines;
    GroupedStrip<T> x_strip(q, block, work.problem, part);
    CotangentStrip<T> y_strip(q, block, work.problem, part);
    const int x_lines = block.LinesRead<T>(), stages = block.lines + T::kMoreStages;
    const auto copy = [&](uint32_t stage, int index) {
#pragma unroll
      for (int a = 0; a < T::kStep; ++a) x_strip.Copy(q, x, stage + a * T::kSlotBytes, index * T::kStep + a < x_lines);
      y_strip.Copy(q, y, stage + kOfY, index < block.lines);
    };
    // Nobody reads the lines of the columns before any more.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy(ring + i * T::kStageBytes, i);

    // Columns that there are not have zeros of y, which must not meet an infinity: the slot's last pixel is 0.
    int x_place[3][T::kAddresses];
#pragma unroll
    for (int i = 0; i < T::kAddresses; ++i) {
      const int column = of_lane + 4 * i;
      const int pixel = x_strip.Padded(q, block.first_column + column) - x_strip.Padded(q, block.first_column);
#pragma unroll
      for (int s = 0; s < 3; ++s)
        x_place[s][i] = T::Places::At(column < block.Columns(q) ? pixel + s : T::kPixels - 1, lane / 16) + in_chunk;
    }

    typename T::Pixels of_y[T::kMeet][T::kPairs];
    uint32_t stage = ring;
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      WaitForCopies<(kAhead - 1) * (T::kStep + 1)>();
      // Every lane's copies are here, and nobody reads the stage before any more.
      __syncwarp();
      copy(stage == ring ? ring + kAhead * T::kStageBytes : stage - T::kStageBytes, index + kAhead);
#pragma unroll
      for (int pair = 0; pair < T::kPairs; ++pair) {
        const auto of_y_line = [&](int i, int unit) {
          return ((stage + kOfY + y_place) ^ (32 * unit)) + i * (4 * T::kBytes);
        };
        if (index < block.lines) LoadPixels<T>(of_y_line, pair, of_y[0][pair]);
#pragma unroll
        for (int a = 0; a < T::kStep; ++a) {
          typename T::Pixels of_x[3];
#pragma unroll
          for (int s = 0; s < 3; ++s) {
            const auto of_x_line = [&](int i, int unit) {
              return (stage + a * T::kSlotBytes + x_place[s][i]) ^ (32 * unit);
            };
            LoadPixels<T>(of_x_line, pair, of_x[s]);
          }
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
            for (int i = 0; i < T::kParts; ++i) of_y[ago][pair][j][i] = of_y[ago - 1][pair][j][i];
      stage = stage == ring + kAhead * T::kStageBytes ? ring : stage + T::kStageBytes;
    }
  }
  WaitForCopies<0>();
  __syncthreads();

  // The warps' sums, one after the other.
  float* const total = reinterpret_cast<float*>(shared);
  const int group_log = q.group_log, in_group = (1 << group_log) - 1;
  for (int w = 0; w < T::kWarps; ++w) {
    if (w == warp) {
      VisitSums<T>(sums, group_log, [&](float sum, int tap, int channel, int feature) {
        float* const to = total + ((tap << group_log) + (channel & in_group)) * T::kChannels + feature;
        *to = w > 0 ? *to + sum : sum;
      });
    }
    __syncthreads();
  }
  const int rows = 9 << group_log, first = part * T::kChannels;
  const int64_t result = split % q.splits * q.result_size + work.problem * q.filter_problem + first;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * T::kChannels; i += T::kThreads) {
    const int row = i / T::kChannels, feature = i % T::kChannels;
    if (first + feature >= q.channels) continue;
    const int64_t to = result + int64_t{row} * q.channels + feature;
    if (wide) {
      static_cast<float*>(out)[to] = total[i];
    } else {
      static_cast<In*>(out)[to] = static_cast<In>(total[i]);
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const Config& config, const void* x, const void* y, void* out, void* workspace,
                       cudaStream_t stream) {
  using In = typename T::In;
  const bool split = config.splits > 1;
  GroupedFilterParams q = {MakeGroupedParams<T>(p, T::kPixels - 1), int(config.splits), p.FilterSize()};
  ShareLines(&q, config.splits * T::kWarps);
  const Grid grid = {int64_t{q.parts.divisor} * config.splits * p.batch, T::kThreads, T::kSharedBytes};
  const cudaError_t status = LaunchKernel(GroupedFilterKernel<T>, grid, stream, q, static_cast<const In*>(x),
                                          static_cast<const In*>(y), split || p.out != p.in, split ? workspace : out);
  if (!split || status != cudaSuccess) return status;
  const float* partial = static_cast<const float*>(workspace);
  return p.out == p.in ? SumSlices(partial, static_cast<In*>(out), q.result_size, q.splits, stream)
                       : SumSlices(partial, static_cast<float*>(out), q.result_size, q.splits, stream);
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
    const auto with_stride = [&](auto wide) {
      using In = typename decltype(in)::type;
      constexpr bool kWide = decltype(wide)::value;
      return p.stride[2] == 1
                 ? LaunchTile<GroupedFilterTile<In, kWide, Stride::kOne>>(p, config, x, y, out, workspace, stream)
                 : LaunchTile<GroupedFilterTile<In, kWide, Stride::kTwo>>(p, config, x, y, out, workspace, stream);
    };
    return p.channels == 16 ? with_stride(std::true_type()) : with_stride(std::false_type());
  });
}

}  // namespace jaxdnn::conv
