// Forward convolution, and data gradient without stride, of float32 on the CUDA cores, where a sum has few terms: of
// few channels.
//
// With few channels a line of the window is a run of memory. So a block brings the patch of the operand that its pixels
// meet to shared memory as it lies, once, with zeros for the padding, where the filter's part of the block's columns is
// for good; then every thread goes over the terms of eight pixels and eight columns. While it multiplies, the next
// tile's patch is on its way.
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/patch.cuh"
#include "cuda/conv/simt.h"

namespace jaxdnn::conv {
namespace {

struct PatchParams {
  Patches patches;
  int window[2];  // planes and lines
  int columns, depth, slice_tiles;
  int64_t images;
  bool reversed, whole;  // the taps; columns, and all arrays, are in fours
  int64_t filter_batch, filter_tap, filter_channel, filter_column;
  FastDiv by_slice, by_column, by_channel;
  Epilogue epilogue;
};

// So many of four numbers, or all in one access.
__device__ inline Four LoadFour(const float* from, bool whole, int count) {
  if (whole) return *reinterpret_cast<const Four*>(from);
  Four v = {};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (j < count) v.v[j] = from[j];
  return v;
}

template <int kAcross>
__global__ void __launch_bounds__(kPatchThreads, 4)
    DataPatchKernel(const __grid_constant__ PatchParams q, const float* in, const float* filter, float* out) {
  constexpr int kEach = kPatchEach, kDown = kPatchThreads / kAcross, kColumns = kAcross * kEach;
  extern __shared__ __align__(16) float memory[];
  float* const weights = memory + kColumns;  // after the bias
  float* const patches = weights + q.depth * kColumns;
  int slice, column_tile;
  const int64_t problem = q.by_column.Div(q.by_slice.Div(static_cast<int>(blockIdx.x), &slice), &column_tile);
  const int first_column = column_tile * kColumns;
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const int begin = slice * q.slice_tiles, end = min(begin + q.slice_tiles, q.patches.tiles);

  // The first of four of the thread's columns.
  const auto column_of = [=](int four) { return four * 4 * kAcross + across * 4; };
  const Patches& p = q.patches;
  const auto bring = [&](int tile) {
    if (tile < end) p.Bring(in, p.Of(tile, problem * q.images), patches + (tile & 1) * p.size);
    CommitCopies();
  };
  bring(begin);

  for (int i = threadIdx.x; i < kColumns; i += kPatchThreads) {
    const bool exists = q.epilogue.bias != nullptr && first_column + i < q.columns;
    memory[i] = exists ? static_cast<const float*>(q.epilogue.bias)[problem * q.columns + first_column + i] : 0;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < q.depth * kColumns; i += kPatchThreads) {
    int channel;
    const int column = first_column + i % kColumns, tap = q.by_channel.Div(i / kColumns, &channel);
    const int at = q.reversed ? q.depth / p.channels - 1 - tap : tap;
    weights[Place(i)] = column < q.columns ? filter[problem * q.filter_batch + at * q.filter_tap +
                                                    channel * q.filter_channel + column * q.filter_column]
                                           : 0;
  }

  // Where the first terms of the thread's pixels are in a patch.
  int base[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    int column;
    const int row = p.by_width.Div(j * kDown + down, &column);
    base[j] = row < p.rows ? p.Number(row, column) : 0;
  }
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    bring(tile + 1);
    WaitForCopies<1>();
    __syncthreads();
    const float* const patch = patches + (tile & 1) * p.size;
    float sums[kEach][kEach];
#pragma unroll
    for (int four = 0; four < kEach / 4; ++four)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][four * 4 + j] = memory[column_of(four) + j];
    const float* w = weights + across * 4;
    const auto term = [&](const float* const(&x)[kEach], int e) {
      float columns[kEach];
#pragma unroll
      for (int four = 0; four < kEach / 4; ++four) {
        const Four read = *reinterpret_cast<const Four*>(w + e * kColumns + four * 4 * kAcross);
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[four * 4 + j] = read.v[Place(j)];
      }
      // To and fro, so that from one product to the next only one operand changes.
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float pixel = x[i][e];
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
          const int j = i % 2 == 0 ? n : kEach - 1 - n;
          sums[i][j] += pixel * columns[j];
        }
      }
    };
#pragma unroll 1
    for (int plane = 0; plane < q.window[0]; ++plane)
#pragma unroll 1
      for (int line = 0; line < q.window[1]; ++line) {
        const float* x[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) x[i] = patch + base[i] + p.Line(plane, line);
        int e = 0;
#pragma unroll 1
        for (; e + 4 <= p.length; e += 4) {
#pragma unroll
          for (int u = 0; u < 4; ++u) term(x, u);
#pragma unroll
          for (int i = 0; i < kEach; ++i) x[i] += 4;
          w += 4 * kColumns;
        }
#pragma unroll 1
        for (; e < p.length; ++e) {
          term(x, 0);
#pragma unroll
          for (int i = 0; i < kEach; ++i) ++x[i];
          w += kColumns;
        }
      }
    __syncthreads();  // the patch may be overwritten

    const auto t = p.Of(tile, problem * q.images);
    const int64_t first_pixel = p.Pixel(t);
    // Calls f(pixel's sums, where they go, how many exist) for every four of them.
    const auto each_four = [&](const auto& f) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        int column;
        const int row = p.by_width.Div(i * kDown + down, &column);
        if (row >= p.rows || t.row + row >= p.out[1] || t.column + column >= p.out[2]) continue;
        const int64_t pixel = (first_pixel + int64_t{row} * p.out[2] + column) * q.columns;
#pragma unroll
        for (int four = 0; four < kEach / 4; ++four) {
          const int channel = first_column + column_of(four);
          if (channel < q.columns)
            f(*reinterpret_cast<Four*>(&sums[i][four * 4]), pixel + channel, q.columns - channel);
        }
      }
    };
    if (q.epilogue.residual != nullptr)
      each_four([&](Four& v, int64_t at, int count) {
        const auto more = LoadFour(static_cast<const float*>(q.epilogue.residual) + at, q.whole, count);
#pragma unroll
        for (int j = 0; j < 4; ++j) v.v[j] += more.v[j];
      });
    auto& all = reinterpret_cast<float (&)[kEach * kEach]>(sums);
    if (q.epilogue.activation.kind == activation::Kind::kRelu) {
#pragma unroll
      for (float& each : all) each = activation::Relu<float>{}.Forward(each);
    } else if (q.epilogue.activation.kind != activation::Kind::kIdentity) {
#pragma unroll 1
      for (int i = 0; i < kEach * kEach / 4; ++i) {
        Activate<float>(reinterpret_cast<float (&)[4]>(all), q.epilogue.activation);
        Turn<4>(all);
      }
    }
    each_four([&](const Four& v, int64_t at, int count) {
      if (q.whole) {
        *reinterpret_cast<Four*>(out + at) = v;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < count) out[at + j] = v.v[j];
      }
    });
  }
}

}  // namespace

cudaError_t LaunchDataPatch(const Problem& p, const void* operand, const void* filter, void* out,
                            const Epilogue& epilogue, cudaStream_t stream) {
  const bool forward = p.direction == Direction::kForward;
  const PatchShape s = PatchShapeOf(p);
  PatchParams q = {Patches(p, forward, s.tile), {int(p.window[0]), int(p.window[1])}};
  q.columns = int(GemmOf(p).columns), q.depth = int(s.depth);
  q.slice_tiles = int(CeilDiv(s.tile.tiles, s.slices));
  q.reversed = !forward;
  q.whole = q.columns % 4 == 0 && IsVectorAligned(out, epilogue.bias, epilogue.residual);
  q.filter_tap = p.channels * p.features, q.filter_batch = p.Taps() * q.filter_tap;
  q.filter_channel = forward ? p.features : 1, q.filter_column = forward ? 1 : p.features;
  q.images = p.images;
  q.by_slice = FastDiv(s.slices), q.by_column = FastDiv(CeilDiv(q.columns, s.columns));
  q.by_channel = FastDiv(q.patches.channels);
  q.epilogue = epilogue;
  const Grid grid = {p.batch * q.by_column.divisor * s.slices, kPatchThreads, size_t(s.shared_bytes)};
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, grid, stream, q, static_cast<const float*>(operand), static_cast<const float*>(filter),
                        static_cast<float*>(out));
  };
  if (s.across == 1) return launch(DataPatchKernel<1>);
  if (s.across == 4) return launch(DataPatchKernel<4>);
  return launch(DataPatchKernel<8>);
}

}  // namespace jaxdnn::conv
