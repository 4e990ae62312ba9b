// Forward convolution to few features, also over a dilated input, and the data gradients that are one.
//
// Each pixel of the operand is multiplied with all of the window at once: the product's rows are a line's pixels, its
// columns the values that they add to the result, a line of the window after another. A block goes down the lines of
// its pixels. A line's values of one line of the window belong to one line of the result, so that those of the next
// lines are open sums in registers; with a stride several are finished by each of the operand's lines. Along a line,
// values of neighbouring pixels belong to the same elements. They go through shared memory, and a lane adds those of an
// element, two lines of the result at once. Planes of a volume's result are images, whose pixels have the channels of
// all planes of the operand that the window's meet.
//
// A line of 128 pixels of 64 bfloat16 channels for a 7x7 window on three, with stride 2, is 672 products of 16x8x16,
// for 16 KB in and 3 KB out.
#include "cuda/conv/few_features.cuh"
#include "cuda/conv/few_features.h"
#include "cuda/conv/mma.h"

namespace jaxdnn::conv {
namespace {

// A part of the lines of the window from `first` on, 8 values of each, times a slice of a warp's pixels at `pixels`.
template <class T>
__device__ __forceinline__ void MultiplySlice(uint32_t pixels, uint32_t filter, const int (&lines)[(T::kLines + 1) / 2],
                                              int steps, int first, typename T::Sums& sums) {
  const auto multiply = [&](int step, auto all) {
    uint32_t a[T::kBlocks][4];
#pragma unroll
    for (int i = 0; i < T::kBlocks; ++i) {
      LoadMatrices<false>(a[i], (pixels ^ 32 * step) + i * 16 * kFewSlotBytes);
      if constexpr (sizeof(typename T::In) == 4) RoundToTf32(a[i]);
    }
#pragma unroll
    for (int line = 0; line < T::kLines; line += 2) {
      if (!decltype(all)::value && line + 1 < first) continue;
      uint32_t b[4];
      LoadMatrices<false>(b, filter + (lines[line / 2] ^ 32 * step));
      if constexpr (sizeof(typename T::In) == 4) RoundToTf32(b);
#pragma unroll
      for (int i = 0; i < T::kBlocks; ++i) Mma<typename T::In>(sums[line][i], a[i], b[0], b[1]);
      if (line + 1 < T::kLines) {
#pragma unroll
        for (int i = 0; i < T::kBlocks; ++i) Mma<typename T::In>(sums[line + 1][i], a[i], b[2], b[3]);
      }
    }
  };
  if (first > 0) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) multiply(step, std::false_type());
  } else if (steps == T::kSteps) {
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) multiply(step, std::true_type());
  } else {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) multiply(step, std::true_type());
  }
}

// Values of a column and the next one, of one or two lines of the result.
__device__ __forceinline__ void StoreValues(uint32_t shared, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(first), "f"(second) : "memory");
}
__device__ __forceinline__ void StoreValues(uint32_t shared, float2 first, float2 second) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(first.x), "f"(first.y), "f"(second.x),
               "f"(second.y)
               : "memory");
}

__device__ __forceinline__ void AddValues(uint32_t shared, float (&sums)[1]) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared) : "memory");
  sums[0] += value;
}
__device__ __forceinline__ void AddValues(uint32_t shared, float (&sums)[2]) {
  float first, second;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(shared) : "memory");
  sums[0] += first;
  sums[1] += second;
}

// Adds up the pixels' values of kCount lines of the result, and stores them `offset` elements after the places.
template <class In, int kCount>
__device__ __forceinline__ void StoreLines(const FewFeaturesParams& q, uint32_t values, const int2* elements,
                                           int offset, int problem, void* out) {
  constexpr int kAtOnce = 4;
  const auto with_out = [&](const auto& f) {
    if (sizeof(In) == 4 || q.wide)
      f(static_cast<float*>(out));
    else
      f(static_cast<In*>(out));
  };
#pragma unroll 1
  for (int base = threadIdx.x; base < q.elements; base += kAtOnce * blockDim.x) {
    int places[kAtOnce];
    uint32_t from[kAtOnce];
    float sums[kAtOnce][kCount] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = base + k * blockDim.x;
      const int2 element = elements[min(i, q.elements - 1)];
      places[k] = i < q.elements ? element.x : -1;
      from[k] = values + element.y;
    }
#pragma unroll 1
    for (int j = 0; j < q.reach_w; ++j) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k, from[k - 1] += q.back_bytes) AddValues(from[k], sums[k]);
    }
    if (kCount > 1 || !q.finish) {
      with_out([&](auto* typed) {
        using Out = std::remove_pointer_t<decltype(typed)>;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          Out* const to = typed + (places[k] + offset);
#pragma unroll
          for (int line = 0; line < kCount; ++line)
            if (places[k] >= 0) to[line * q.result_width] = static_cast<Out>(sums[k][line]);
        }
      });
      continue;
    }
    if constexpr (kCount == 1) {
#pragma unroll 1
      for (int k = 0; k < kAtOnce; ++k) {
        if (const int at = places[0] + offset; places[0] >= 0) {
          int feature;
          q.features_div.Div(places[0], &feature);
          float v[] = {sums[0][0]};
          with_out([&](auto* typed) {
            using Out = std::remove_pointer_t<decltype(typed)>;
            Add<Out>(v, q.epilogue.bias, int64_t{problem} * q.features + feature);
            Add<Out>(v, q.epilogue.residual, problem * q.out_problem + at);
          });
          Activate<float, false>(v, q.epilogue.activation);
          with_out([&](auto* typed) { typed[at] = static_cast<std::remove_pointer_t<decltype(typed)>>(v[0]); });
        }
        Rotate<kCount>(reinterpret_cast<float (&)[kAtOnce * kCount]>(sums));
        Rotate<1>(places);
      }
    }
  }
}

// Stores line `line` of the result, whose values are at `values`, and if there are `both` the next one, whose values
// are beside: those that there are.
template <class In>
__device__ __forceinline__ void StoreResult(const FewFeaturesParams& q, uint32_t values, const int2* elements, int line,
                                            bool both, int problem, void* out) {
  const int first = max(line, 0), end = min(line + (both ? 2 : 1), q.result_height);
  if (end - first == 2 && !q.finish)
    return StoreLines<In, 2>(q, values, elements, first * q.result_width, problem, out);
#pragma unroll 1
  for (int i = first; i < end; ++i)
    StoreLines<In, 1>(q, values + (i - line) * 4, elements, i * q.result_width, problem, out);
}

// A later line of the window comes first. Sums of lines that it does not have are of no use.
template <class T, int kCount>
__device__ __forceinline__ void NextLines(const FewFeaturesParams& q, typename T::Sums& sums) {
#pragma unroll
  for (int i = 0; i < T::kLines; ++i)
#pragma unroll
    for (int j = 0; j < T::kBlocks; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        sums[i][j][k] = i + kCount < T::kLines && i + kCount < q.window_height ? sums[i + kCount][j][k] : 0;
}

template <class T>
__global__ void __launch_bounds__(T::kMostThreads)
    FewFeaturesKernel(const __grid_constant__ FewFeaturesParams q, const typename T::In* in,
                      const typename T::In* filter, void* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int strip = warp / q.parts, part = warp - strip * q.parts;
  const int slot_bytes = q.pixels * kFewSlotBytes;
  const int slice_bytes = ((q.window_height - 1) * q.run + 8 * q.parts) * kFewSlotBytes;
  const uint32_t ring = SharedAddress(shared);
  unsigned char* const filter_lines = shared + kFewSlots * slot_bytes;
  unsigned char* const value_lines = filter_lines + q.window_depth * q.slices * slice_bytes;
  const int value_bytes = q.pixels * q.row_bytes;
  int2* const elements = reinterpret_cast<int2*>(value_lines + value_bytes);
  int* const from = reinterpret_cast<int*>(elements + q.elements);
  int at, end;
  const int problem = q.work.Of(blockIdx.x, &at, &end);
  in += problem * q.in_problem;
  const bool floats = sizeof(typename T::In) == 4 || q.wide;
  out = static_cast<char*>(out) + problem * q.out_problem * (floats ? sizeof(float) : sizeof(typename T::In));
  asm volatile("" : "+l"(out));  // else the compiler prefers to compute it again for each element
  // The data gradient's planes are in reverse order, as a forward convolution's.
  for (int plane = 0; plane < q.window_depth; ++plane) {
    const int from = q.mirrored ? q.window_depth - 1 - plane : plane;
    FillFilter<T>(q, filter + problem * q.filter_problem + int64_t{from} * q.window_height * q.run * q.channels,
                  filter_lines + plane * q.slices * slice_bytes);
  }
  // Columns that no value is stored to are added too.
  if (q.reach_w * q.cell_elements > 8 * q.parts)
    for (int i = threadIdx.x * 16; i < value_bytes; i += blockDim.x * 16)
      *reinterpret_cast<float4*>(value_lines + i) = make_float4(0, 0, 0, 0);

  // The lane's rows of the matrices that it loads: of its pixels, and of the values of two lines of the window.
  const int of_pixels = T::Places::At(strip * kFewPixels + lane % 16, lane / 16);
  int of_lines[(T::kLines + 1) / 2];
#pragma unroll
  for (int i = 0; i < (T::kLines + 1) / 2; ++i) {
    const int line = min(2 * i + lane / 16, q.window_height - 1);
    of_lines[i] = T::Places::At(line * q.run + 8 * part + lane % 8, lane / 8 % 2);
  }
  const int column = 8 * part + 2 * (lane % 4);
  const bool pairs = q.stride_h > 1;
  const uint32_t values = SharedAddress(value_lines);
  const uint32_t to = values + (strip * kFewPixels + lane / 4) * q.row_bytes + column * (pairs ? 8 : 4);

  while (at < end) {
    const FewFeaturesBlock block(q, at, end);
    at += block.end_cell - block.first_cell;
    // Nobody reads the places and slots of the columns before any more.
    __syncthreads();
    FillPlaces(q, block, from);
    __syncthreads();
    const int first_line = block.first_cell - (q.reach_h - 1);
    int next_line = max(first_line, 0), next_plane = 0, next_slice = 0;
    const int end_line = min(block.end_cell, q.height);
    const auto copy = [&](uint32_t slot) {
      if (next_line < end_line) {
        CopySlice<T>(q, in, from + next_plane * q.pixels, next_line, next_slice, slot);
        if (++next_slice == q.slices) {
          next_slice = 0;
          if (++next_plane == q.window_depth) next_plane = 0, ++next_line;
        }
      }
      CommitCopies();
    };
    constexpr int kAhead = kFewSlots - 1;
    uint32_t slot = ring;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) copy(ring + i * slot_bytes);
    FillElements(q, block, elements);

    typename T::Sums sums = {};
#pragma unroll 1
    for (int line = first_line; line < block.end_cell; ++line) {
      if (line >= 0 && line < end_line) {
        const int first = (block.first_cell - line) * q.stride_h;  // of the window's lines that results are left of
        int slice = 0;                                             // of the plane's
#pragma unroll 1
        for (int i = 0; i < q.window_depth * q.slices; ++i) {
          WaitForCopies<kAhead - 1>();
          // Everyone's copies are here, and nobody reads the slice before any more.
          __syncthreads();
          copy(slot == ring ? ring + kAhead * slot_bytes : slot - slot_bytes);
          MultiplySlice<T>(slot + of_pixels, SharedAddress(filter_lines) + i * slice_bytes, of_lines,
                           min(T::kSteps, q.steps - slice * T::kSteps), first, sums);
          slice = slice + 1 == q.slices ? 0 : slice + 1;
          slot = slot == ring + kAhead * slot_bytes ? ring : slot + slot_bytes;
        }
      }
#pragma unroll 1
      for (int i = 0; i < q.stride_h; i += 2) {
        const bool both = i + 1 < q.stride_h;
        if (line >= block.first_cell) {
          // Nobody reads the values before any more. Of an operand's line, everyone has waited for its copies.
          if (i > 0 || line < 0 || line >= end_line) __syncthreads();
          const bool more = i > 0 || q.window_height > 1;  // else the second is no line of the window
#pragma unroll
          for (int k = 0; k < 2 * T::kBlocks; ++k) {
            const uint32_t place = to + 8 * k * q.row_bytes;
            const float (&a)[4] = sums[0][k / 2], (&b)[4] = sums[1][k / 2];
            const int n = k % 2 * 2;
            if (pairs) {
              StoreValues(place, column < q.run ? make_float2(a[n], more ? b[n] : 0) : float2(),
                          column + 1 < q.run ? make_float2(a[n + 1], more ? b[n + 1] : 0) : float2());
            } else {
              StoreValues(place, column < q.run ? a[n] : 0, column + 1 < q.run ? a[n + 1] : 0);
            }
          }
          __syncthreads();
          const int y = line * q.stride_h - q.before_h + i;
          StoreResult<typename T::In>(q, values, elements, y, both, problem, out);
        }
        if (both) {
          NextLines<T, 2>(q, sums);
        } else {
          NextLines<T, 1>(q, sums);
        }
      }
    }
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& problem, const void* operand, const void* filter, void* out,
                       const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  const Problem p = AsForward(problem);
  const FewFeaturesPlan plan(p);
  const FewAxis &lines = plan.lines, &columns = plan.columns;
  FewFeaturesParams q = {};
  q.epilogue = epilogue;
  q.finish = !IsNone(epilogue);
  q.wide = p.out != p.in;
  q.mirrored = problem.direction == Direction::kDataGradient;
  q.images = int(p.images * p.y[0]);
  q.planes = FastDiv(p.y[0]);
  q.depth = int(p.x[0]);
  q.window_depth = int(plan.planes);
  q.pad_d = int(p.pad[0]);
  q.height = int(p.x[1]);
  q.width = int(p.x[2]);
  q.channels = int(p.channels);
  q.features = int(p.features);
  q.result_height = int(p.y[1]);
  q.result_width = int(p.y[2] * p.features);
  q.window_height = int(p.window[1]);
  q.steps = int(plan.steps);
  q.slices = int(plan.slices);
  q.run = int(plan.run);
  q.parts = int(plan.parts);
  q.row_bytes = int(plan.RowBytes());
  q.back_bytes = int(columns.stride * p.features * plan.ValueBytes() - plan.RowBytes());
  q.value_log = plan.ValueBytes() == 8 ? 3 : 2;
  q.pixels = int(plan.Pixels());
  q.cells = int(plan.cells);
  q.elements = int(plan.Elements(p));
  q.reach_h = int(lines.reach);
  q.reach_w = int(columns.reach);
  q.stride_h = int(lines.stride);
  q.cell_elements = int(columns.stride * p.features);
  q.first_cell_h = int(lines.first_cell);
  q.first_cell_w = int(columns.first_cell);
  q.before_h = int(lines.before);
  q.before_w = int(columns.before * p.features);
  q.cell_div = FastDiv(q.cell_elements);
  q.features_div = FastDiv(p.features);
  q.channels_div = FastDiv(p.channels);
  q.places = FastDiv(plan.Places());
  q.pixel_chunks = int(p.channels / T::kChunk);
  q.line_chunks = int(p.x[2] * q.pixel_chunks);
  q.in_problem = p.images * p.XPixels() * p.channels;
  q.filter_problem = p.Taps() * p.channels * p.features;
  q.out_problem = p.images * p.YPixels() * p.features;

  const auto kernel = FewFeaturesKernel<T>;
  Grid grid = {0, int(32 * plan.strips * plan.parts), size_t(plan.SharedBytes(p))};
  int64_t resident;
  if (const cudaError_t e = ResidentBlocks(kernel, grid, &resident); e != cudaSuccess) return e;
  q.work = FewFeaturesWork(FewFeaturesPieces(plan.tiles, lines, resident, p.batch), lines.cells);
  grid.blocks = q.work.workers.divisor * p.batch;
  return LaunchKernel(kernel, grid, stream, q, static_cast<const In*>(operand), static_cast<const In*>(filter), out);
}

}  // namespace

cudaError_t LaunchFewFeatures(const Problem& p, const void* operand, const void* filter, void* out,
                              const Epilogue& epilogue, cudaStream_t stream) {
  if (!IsVectorAligned(operand) || !IsVectorAligned(filter)) {
    const Config config = {Tile::kMma128x64, 1, 0, 0};
    return LaunchDataMma(p, config, operand, filter, out, epilogue, stream);
  }
  return VisitSingleDType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    const auto launch = [&](auto tile) {
      return LaunchTile<typename decltype(tile)::type>(p, operand, filter, out, epilogue, stream);
    };
    return p.window[1] <= kFewFewLines ? launch(TypeTag<FewFeaturesTile<In, kFewFewLines>>())
                                       : launch(TypeTag<FewFeaturesTile<In, kFewMostLines>>());
  });
}

}  // namespace jaxdnn::conv
