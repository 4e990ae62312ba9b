// The frame's results, forward and in the data gradient, on the CUDA cores: every type and group count.
//
// A warp has 32 channels of the result, or 128 of a depthwise convolution of up to 32 bits, and a thread kPixels pixels
// of its channels, which share what is loaded of the filter. Where they read the operand is worked out once a line of
// taps.
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "cuda/common/convert.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/frame.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kThreads = 128, kPixels = 4, kTileRows = kThreads / 32 * kPixels;

// kChannels neighbours of a thread, or zeros: more than 1 in depthwise convolution, whose operands have as many
// channels.
template <class In, int kChannels>
__device__ void LoadChannels(const In* from, bool valid, Accumulator<In> (&to)[kChannels]) {
  if constexpr (kChannels == 1) {
    to[0] = static_cast<Accumulator<In>>(valid ? *from : In(0));
  } else {
    const auto packed = LoadConstant(reinterpret_cast<const Packed<In, kChannels>*>(from));
    Widen<In, kChannels>(packed, to);
    if (!valid) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) to[i] = 0;
    }
  }
}

template <class In, int kChannels>
__global__ void __launch_bounds__(kThreads, 3)
    FrameSimtKernel(const __grid_constant__ DataParams p, const __grid_constant__ Frame f, const In* in,
                    const In* filter, bool wide, void* out) {
  using Sum = Accumulator<In>;
  __shared__ Row rows[kTileRows];
  FrameBlock block(p, f);
  if (block.first_row >= block.row_count) return;  // not every phase has as many rows as the largest
  const int channel = block.column_tile * 32 * kChannels + threadIdx.x % 32 * kChannels;
  const int first_row = threadIdx.x / 32 * kPixels;
  const bool exists = channel < p.columns;
  int within;
  const int group = p.phase_columns.Div(exists ? channel : 0, &within);
  in += group * p.phase_channels;
  filter += group * p.filter_group + within * p.filter_column;

  Sum sums[kPixels][kChannels] = {};
  block.SetRows(p, f, rows);
#pragma unroll 1
  for (int which = 0, count = block.Readings(); which < count; ++which) {
    __syncthreads();
    block.SetReading(p, f, which, rows);
    __syncthreads();
    const In* const first_tap = filter + block.FilterStart(p);
    int tap[kRank];
#pragma unroll 1
    for (tap[0] = 0; tap[0] < block.phase[0].taps; ++tap[0]) {
#pragma unroll 1
      for (tap[1] = 0; tap[1] < block.phase[1].taps; ++tap[1]) {
        const In* line[kPixels];
        int column[kPixels];
        bool reads[kPixels];
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          const Row& row = rows[first_row + i];
          int at[2];
          reads[i] = row.result >= 0 && exists;
#pragma unroll
          for (int d = 0; d < 2; ++d) {
            at[d] = row.origin[d] + tap[d] * p.tap_distance[d];
            reads[i] &= f.edges[d].Find(&at[d]);
          }
          // Where nothing is read, the first element is loaded.
          const int pixel = (at[0] * f.edges[1].extent + at[1]) * f.edges[2].extent;
          line[i] = reads[i] ? in + row.image + pixel * p.pixel_size : in;
          column[i] = row.origin[2];
        }
        const In* weights = first_tap + tap[0] * p.filter_tap[0] + tap[1] * p.filter_tap[1];
#pragma unroll 1
        for (tap[2] = 0; tap[2] < block.phase[2].taps; ++tap[2]) {
          const In* from[kPixels];
          bool valid[kPixels];
#pragma unroll
          for (int i = 0; i < kPixels; ++i) {
            int at = column[i];
            valid[i] = f.edges[2].Find(&at) && reads[i];
            from[i] = line[i] + (valid[i] ? at : 0) * p.pixel_size;
            column[i] += p.tap_distance[2];
          }
          const In* weight = weights;
          for (int c = 0; c < p.phase_channels; c += kChannels) {
            Sum w[kChannels];
            LoadChannels(weight, true, w);
#pragma unroll
            for (int i = 0; i < kPixels; ++i) {
              Sum x[kChannels];
              LoadChannels(from[i] + c, valid[i], x);
#pragma unroll
              for (int j = 0; j < kChannels; ++j) sums[i][j] += x[j] * w[j];
            }
            weight += p.filter_channel;
          }
          weights += p.filter_tap[2];
        }
      }
    }
  }

  if (!exists) return;
  const auto with_out = [&](const auto& f) {
    if constexpr (sizeof(In) == 2) {
      if (wide) return f(static_cast<float*>(out));
    }
    f(static_cast<In*>(out));
  };
#pragma unroll 1
  for (int i = 0; i < kPixels; ++i) {
    const int64_t pixel = rows[first_row + i].result;
    if (pixel < 0) break;
    const int64_t offset = pixel * p.result_pixel + channel;
    Sum(&v)[kChannels] = sums[0];
    with_out([&](auto* result) {
      using Out = std::remove_pointer_t<decltype(result)>;
      Add<Out>(v, p.epilogue.bias, block.batch * p.result_pixel + channel);
      Add<Out>(v, p.epilogue.residual, offset);
    });
    if (IsNone(p.epilogue)) {
    } else if (sizeof(In) == 2 && wide) {
#pragma unroll
      for (Sum& each : v) each = activation::AnyActivation<Sum>{p.epilogue.activation}.Forward(each);
    } else {
      Activate<In>(v, p.epilogue.activation);
    }
    with_out([&](auto* result) {
      using Out = std::remove_pointer_t<decltype(result)>;
      *reinterpret_cast<Vec<Out, kChannels>*>(result + offset) = Round<Out>(v);
    });
    Rotate<kChannels>(reinterpret_cast<Sum(&)[kPixels * kChannels]>(sums));
  }
}

}  // namespace

int LaunchFrameSimt(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                    cudaStream_t stream) {
  const auto aligned = [](std::initializer_list<const void*> arrays, int bytes) {
    return std::all_of(arrays.begin(), arrays.end(),
                       [=](const void* a) { return reinterpret_cast<uintptr_t>(a) % bytes == 0; });
  };
  constexpr int kMost = 4;
  const bool depthwise = p.in != DType::kF64 && p.channels == 1 && p.features == 1 && p.groups % kMost == 0 &&
                         aligned({operand, filter}, kMost * SizeOf(p.in)) &&
                         aligned({out, epilogue.bias, epilogue.residual}, kMost * SizeOf(p.out));
  return VisitDType(p.in, [&](auto type) {
    using In = typename decltype(type)::type;
    const auto launch = [&](auto channels) {
      // All groups' channels side by side.
      DataParams q = MakeDataParams(p, epilogue, kTileRows, 32 * channels());
      q.columns = int(q.columns * p.groups);
      q.column_tiles = FastDiv(CeilDiv(q.columns, 32 * channels()));
      q.groups = 1;
      q.group_div = FastDiv(1);
      const Frame f = MakeFrame(p, p.images, kTileRows);
      return LaunchKernel(FrameSimtKernel<In, channels()>, FrameBlocks(p, q, f), kThreads, stream, q, f,
                          static_cast<const In*>(operand), static_cast<const In*>(filter), p.out != p.in, out);
    };
    if constexpr (sizeof(In) < 8)
      if (depthwise) return launch(std::integral_constant<int, kMost>());
    return launch(std::integral_constant<int, 1>());
  });
}

}  // namespace jaxdnn::conv
