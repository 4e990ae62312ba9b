// The frame's terms in the filter gradient on the CUDA cores: every type and group count.
//
// A block has one tap, kThreads elements of it, and a slice of the frame's pixels. Its threads look up as many pixels
// at a time, of which those stay, in order, that the tap has an element beyond an edge for.
#include "cuda/conv/frame.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kThreads = 128;

template <class In>
__global__ void __launch_bounds__(kThreads)
    FrameFilterSimtKernel(const __grid_constant__ FilterParams p, const __grid_constant__ Frame f, const In* x,
                          const In* y, Accumulator<In>* partial) {
  using Sum = Accumulator<In>;
  __shared__ int64_t from_x[kThreads], from_y[kThreads];
  __shared__ int found[kThreads / 32];
  int rest = blockIdx.x;
  const int tile = rest % p.column_tiles;
  rest /= p.column_tiles;
  const int taps = p.rows / static_cast<int>(p.channels.divisor), tap = rest % taps;
  rest /= taps;
  const int slice = rest % p.splits;
  const int64_t batch = rest / p.splits;

  // The element's channels in the arrays.
  const int element = tile * kThreads + static_cast<int>(threadIdx.x), pixel_y = static_cast<int>(p.y_pixel);
  const bool exists = element < p.columns;
  const int channel = exists ? element / pixel_y : 0, feature = exists ? element % pixel_y : 0;
  x += p.group_columns.Div(feature) * static_cast<int>(p.channels.divisor) + channel;
  y += feature;

  int distance[kRank];
  p.taps_box.Split(tap, distance);
#pragma unroll
  for (int d = 0; d < kRank; ++d) distance[d] *= p.axis[d].tap_step;
  const int64_t end = min((slice + 1) * p.slice, p.pixels);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pixels = p.image_pixels.divisor;
  const int64_t y_image = int64_t{f.extent[0]} * f.extent[1] * f.extent[2];
  Sum sum = 0;
#pragma unroll 1
  for (int64_t begin = slice * p.slice; begin < end; begin += kThreads) {
    const int64_t pixel = min(begin + threadIdx.x, end - 1);
    const int64_t image = batch * p.images + pixel / pixels;
    const FramePixel at(p, f, static_cast<int>(pixel % pixels));
    const int beyond = FindBeyond(f, at.origin, distance);
    const bool mine = beyond >= 0 && begin + threadIdx.x < end;
    const unsigned mask = __ballot_sync(0xFFFFFFFFu, mine);
    __syncthreads();
    if (lane == 0) found[warp] = __popc(mask);
    __syncthreads();
    int place = __popc(mask & ((1u << lane) - 1)), count = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      place += w < warp ? found[w] : 0;
      count += found[w];
    }
    if (mine) {
      from_x[place] = image * p.x_image + beyond * p.x_pixel;
      from_y[place] = (image * y_image + at.number) * p.y_pixel;
    }
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < count; ++i) sum += static_cast<Sum>(x[from_x[i]]) * static_cast<Sum>(y[from_y[i]]);
  }
  if (exists) partial[slice * p.result_size + (batch * taps + tap) * p.columns + element] = sum;
}

}  // namespace

int LaunchFrameFilterSimt(const Problem& p, int64_t slices, const void* x, const void* y, void* partial,
                          cudaStream_t stream) {
  return VisitDType(p.in, [&](auto type) {
    using In = typename decltype(type)::type;
    const Frame f = MakeFrame(p, 1, 1);
    FilterParams q = MakeFrameFilterParams(p, f, slices, 1, 1, kThreads);
    // Columns are the elements of a tap.
    q.columns = int(p.channels * p.groups * p.features);
    q.column_tiles = int(CeilDiv(q.columns, kThreads));
    return LaunchKernel(FrameFilterSimtKernel<In>, p.batch * slices * p.Taps() * q.column_tiles, kThreads, stream, q, f,
                        static_cast<const In*>(x), static_cast<const In*>(y), static_cast<Accumulator<In>*>(partial));
  });
}

}  // namespace jaxdnn::conv
