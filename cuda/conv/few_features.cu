// Forward convolution of few features, and the data gradients that are one.
//
// Results of one to eight channels are a product of eight columns, whose arithmetic is little for the bytes it reads:
// all of the operand, once. So each warp works by itself, as in grouped.cu: it goes down the lines of 32 columns of the
// result, and the operand's lines come through a ring in its own part of shared memory, copies running ahead, a slice
// of the channels at a time where they are many. For each column of the window a line's fragments are loaded, and
// multiplied into the sums of all lines of the result that the line belongs to. The filter is too large for registers;
// the block has it in shared memory in the order of the fragments, and two fragments of 16 pixels share what a lane
// loads of it.
//
// A line of 3x3 windows on 64 bfloat16 channels takes 24 ldmatrix, 36 loads of the filter and 72 products, of some 430
// instructions, for its 4 KB. Those take a multiprocessor some 230 cycles at its share of memory; shared memory is busy
// for about 200 of them, and each scheduler for 110.
//
// A line's results are contiguous, some tens of elements. They go through shared memory, so that lanes store
// neighbours.
#include "cuda/conv/few_features.cuh"
#include "cuda/conv/few_features.h"
#include "cuda/conv/mma.h"

namespace jaxdnn::conv {
namespace {

// A line's slice at `slot`, times the filter at `filter`. `pixel` are those of the lane's rows of the fragments.
template <class T>
__device__ __forceinline__ void MultiplySlice(const FewFeaturesParams& q, uint32_t slot,
                                              const unsigned (&pixel)[T::kParts], const uint2* filter, int steps,
                                              typename T::Sums& sums) {
  const int height = T::kAnyHeight ? q.window_height : T::kRows, step_words = height * 32;
  const int chunk = threadIdx.x % 32 / 16;
#pragma unroll 1
  for (int s = 0; s < q.window_width; ++s) {
    uint32_t place[T::kParts];
#pragma unroll
    for (int i = 0; i < T::kParts; ++i) place[i] = slot + T::Places::At(pixel[i] + s, chunk);
    const auto multiply = [&](int step) {
      uint32_t a[T::kParts][4];
#pragma unroll
      for (int i = 0; i < T::kParts; ++i) {
        LoadMatrices<false>(a[i], place[i] ^ (32 * step));
        if constexpr (sizeof(typename T::In) == 4) RoundToTf32(a[i]);
      }
      const uint2* const words = filter + step * step_words;
#pragma unroll
      for (int j = 0; j < T::kRows; ++j) {
        if (j < height) {
          const uint2 b = words[j * 32];
#pragma unroll
          for (int i = 0; i < T::kParts; ++i) Mma<typename T::In>(sums[j][i], a[i], b.x, b.y);
        }
      }
    };
    if (steps == T::kSteps) {
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step) multiply(step);
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) multiply(step);
    }
    filter += q.steps * step_words;
  }
}

// Where the elements of a line of the block's columns go, counted from the first element of the result's first line; -1
// where there is no such column.
template <class T>
__device__ __forceinline__ void FillPlaces(const FewFeaturesParams& q, const GroupedBlock& block, int problem,
                                           int* to) {
  const int columns = block.Columns(q);
  for (int i = threadIdx.x % 32; i < T::kColumns * q.features; i += 32) {
    int feature, x;
    const int column = q.features_div.Div(i, &feature);
    const int image = q.image_columns.Div(block.first_column + column, &x);
    const int line = (problem * q.images + image) * q.result_height + block.first_line;
    to[i] = column < columns ? (line * q.result_width + x) * q.features + feature : -1;
  }
}

// Puts a line's results side by side.
template <class T>
__device__ __forceinline__ void GatherLine(const FewFeaturesParams& q, const float (&sums)[T::kParts][4], float* line) {
  const int lane = threadIdx.x % 32, feature = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2 * T::kParts; ++i) {
    float* const to = line + (8 * i + lane / 4) * q.features + feature;
    if (feature < q.features) to[0] = sums[i / 2][i % 2 * 2];
    if (feature + 1 < q.features) to[1] = sums[i / 2][i % 2 * 2 + 1];
  }
}

// Stores them `offset` elements after their places.
template <class Out>
__device__ __forceinline__ void StoreLine(const FewFeaturesParams& q, const float* line, const int* places, int columns,
                                          int64_t bias, int offset, Out* out) {
  const int lane = threadIdx.x % 32, all = columns * q.features;
  if (!q.finish) {
#pragma unroll 4
    for (int i = lane; i < all; i += 32)
      if (places[i] >= 0) out[places[i] + offset] = static_cast<Out>(line[i]);
    return;
  }
#pragma unroll 1
  for (int i = lane; i < all; i += 32) {
    if (places[i] < 0) continue;
    const int at = places[i] + offset;
    int feature;
    q.features_div.Div(i, &feature);
    float v[] = {line[i]};
    Add<Out>(v, q.epilogue.bias, bias + feature);
    Add<Out>(v, q.epilogue.residual, at);
    Activate<Out>(v, q.epilogue.activation);
    out[at] = static_cast<Out>(v[0]);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FewFeaturesKernel(const __grid_constant__ FewFeaturesParams q, const typename T::In* in,
                      const typename T::In* filter, void* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  // A block's warps are of one problem.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const GroupedWork work(q, blockIdx.x * T::kWarps + warp);
  const uint32_t ring = SharedAddress(shared) + warp * (T::kSlots * T::kSlotBytes);
  unsigned char* const results = shared + T::kWarps * T::kSlots * T::kSlotBytes;
  float* const line_results = reinterpret_cast<float*>(results + warp * T::kResultBytes);
  int* const places = reinterpret_cast<int*>(line_results + T::kResults);
  uint2* const words = reinterpret_cast<uint2*>(results + T::kWarps * T::kResultBytes);
  FillFilter<T>(q, filter + work.problem * q.filter_problem, words);
  __syncthreads();

  const int height = T::kAnyHeight ? q.window_height : T::kRows;
  for (int at = work.first_line; at < work.end_line;) {
    const GroupedBlock block(q, at, work.end_line);
    const int lines = block.lines + height - 1, items = lines * q.slices;
    at += block.lines;
    // Nobody reads the lines and places of the columns before any more.
    __syncwarp();
    FewFeaturesStrip<T> strip(q, block, work.problem);
    constexpr int kAhead = T::kSlots - 1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) strip.Copy(q, in, ring + i * T::kSlotBytes, i < items);
    FillPlaces<T>(q, block, work.problem, places);
    // Rows of a fragment are columns; those that there are not read what the last one does.
    unsigned pixel[T::kParts];
#pragma unroll
    for (int i = 0; i < T::kParts; ++i) {
      const int column = block.first_column + min(16 * i + lane % 16, block.Columns(q) - 1);
      pixel[i] = strip.Padded(q, column) - strip.Padded(q, block.first_column);
      // Else the compiler prefers to compute them again for each column of the window.
      asm volatile("" : "+r"(pixel[i]));
    }

    typename T::Sums sums = {};
    uint32_t slot = ring;
    int item = 0, offset = 0;
#pragma unroll 1
    for (int line = 0; line < lines; ++line) {
#pragma unroll 1
      for (int slice = 0; slice < q.slices; ++slice, ++item) {
        WaitForCopies<kAhead - 1>();
        // Every lane's copies are here, and nobody reads the slice before any more.
        __syncwarp();
        constexpr int kLast = kAhead * T::kSlotBytes;
        strip.Copy(q, in, slot == ring ? ring + kLast : slot - T::kSlotBytes, item + kAhead < items);
        const int first = slice * T::kSteps;
        MultiplySlice<T>(q, slot, pixel, words + first * height * 32 + lane, min(T::kSteps, q.steps - first), sums);
        slot = slot == ring + kLast ? ring : slot + T::kSlotBytes;
      }
      if (line >= height - 1) {
        GatherLine<T>(q, sums[0], line_results);
        __syncwarp();
        const int64_t bias = int64_t{work.problem} * q.features;
        if (sizeof(typename T::In) == 4 || q.wide) {
          StoreLine(q, line_results, places, q.columns, bias, offset, static_cast<float*>(out));
        } else {
          StoreLine(q, line_results, places, q.columns, bias, offset, static_cast<typename T::In*>(out));
        }
        offset += q.result_width * q.features;
      }
      // The next line of the result comes first.
#pragma unroll
      for (int j = 0; j < T::kRows; ++j)
#pragma unroll
        for (int i = 0; i < T::kParts; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[j][i][k] = j + 1 < T::kRows ? sums[j + 1][i][k] : 0;
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& problem, const void* operand, const void* filter, void* out,
                       const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  const Problem p = AsForward(problem);
  FewFeaturesParams q = {};
  q.epilogue = epilogue;
  q.finish = !IsNone(epilogue);
  q.wide = p.out != p.in;
  q.batch = int(p.batch);
  q.images = int(p.images);
  q.height = int(p.x[1]);
  q.width = int(p.x[2]);
  q.pad_h = int(p.pad[1]);
  q.pad_w = int(p.pad[2]);
  q.result_height = int(p.y[1]);
  q.result_width = int(p.y[2]);
  q.image_lines = FastDiv(p.y[1]);
  q.image_columns = FastDiv(p.y[2]);
  const int overlap = int(p.window[2]) - 1;
  q.padded_width = FastDiv(p.y[2] + overlap);
  q.all_columns = int(p.images * p.y[2]);
  q.columns = ColumnsOfWarp(T::kColumns, 1, overlap, T::kPixels, p.images, p.y[2]);
  q.channels = int(p.channels);
  q.features = int(p.features);
  q.features_div = FastDiv(p.features);
  q.mirrored = problem.direction == Direction::kDataGradient;
  q.window_height = int(p.window[1]);
  q.window_width = int(p.window[2]);
  q.steps = int(FewFeaturesSteps(p));
  q.slices = int(CeilDiv(q.steps, T::kSteps));
  q.filter_problem = p.Taps() * p.channels * p.features;
  q.in_line = uint32_t(p.x[2] * p.channels / 4);

  const auto kernel = FewFeaturesKernel<T>;
  Grid grid = {0, T::kThreads, size_t(T::kWarps * T::kWarpBytes + FewFeaturesFilterBytes(p))};
  int64_t resident;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  // A worker's lines should be some more than it reads besides.
  constexpr int kLeastLines = 4;
  const int64_t lines = CeilDiv(q.all_columns, q.columns) * p.y[1];
  const int64_t places = std::max<int64_t>(1, resident / p.batch);
  const int64_t blocks = std::min(places, CeilDiv(lines, kLeastLines * T::kWarps)), workers = blocks * T::kWarps;
  q.parts = FastDiv(1);
  q.workers = FastDiv(workers);
  q.lines = int(lines / workers);
  q.more_lines = int(lines % workers);
  grid.blocks = blocks * p.batch;
  return LaunchKernel(kernel, grid, stream, q, static_cast<const In*>(operand), static_cast<const In*>(filter), out);
}

template <class In>
cudaError_t LaunchType(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                       cudaStream_t stream) {
  const auto with_chunks = [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    const auto launch = [&](auto tile) {
      return LaunchTile<typename decltype(tile)::type>(p, operand, filter, out, epilogue, stream);
    };
    if (p.window[1] == 3) return launch(TypeTag<FewFeaturesTile<In, 3, false, kChunks>>());
    if (p.window[1] == 5) return launch(TypeTag<FewFeaturesTile<In, 5, false, kChunks>>());
    return launch(TypeTag<FewFeaturesTile<In, kFewMostWindow, true, kChunks>>());
  };
  using Widest = FewFeaturesTile<In, 3, false, 8>;
  const bool wide = p.DepthChannels() * int64_t{sizeof(In)} > Widest::kBytes / 2 &&
                    FewFeaturesFilterBytes(AsForward(p)) <= Widest::kMostFilterBytes;
  return wide ? with_chunks(std::integral_constant<int, Widest::kChunks>())
              : with_chunks(std::integral_constant<int, Widest::kChunks / 2>());
}

}  // namespace

cudaError_t LaunchFewFeatures(const Problem& p, const void* operand, const void* filter, void* out,
                              const Epilogue& epilogue, cudaStream_t stream) {
  if (!IsVectorAligned(operand)) {
    const Config config = {Tile::kMma128x64, 1, 0, 0};
    return LaunchDataMma(p, config, operand, filter, out, epilogue, stream);
  }
  return VisitSingleDType(p.in, [&](auto in) {
    return LaunchType<typename decltype(in)::type>(p, operand, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
