// A few planes woven into one, that one taken apart, or given more channels or fewer: images of two to four channels
// between channels first and last, what pads them, and what leaves out the fourth.
//
// A thread has a vector of pixels of each channel, and exchanges their elements in its registers. Its vectors of a
// woven plane lie together, apart from those of its neighbours: the threads of a warp exchange them before they are
// written, so that every access is a whole vector, and neighbours write what lies side by side.
#pragma once

#include <type_traits>

#include "cuda/transform/rows.cuh"

namespace jaxdnn::transform {

// Images of `length` pixels with `in` channels in the input and `out` in the result: the last are padding, or left out.
struct Weave {
  int64_t length;
  int64_t in, out;
  bool from_woven, to_woven;
};

// Whether that is all of `p`, in vectors of `vector` elements, and there is a kernel for it.
inline bool IsWeave(const Problem& p, int vector, Weave* weave) {
  if (p.rank != 2 && p.rank != 3) return false;
  const Dim &outer = p.dims[p.rank - 2], &inner = p.dims[p.rank - 1];
  weave->to_woven = inner.extent <= 8;
  const Dim &channels = weave->to_woven ? inner : outer, &pixels = weave->to_woven ? outer : inner;
  weave->length = pixels.extent;
  const bool cropped = weave->to_woven && channels.extent == 3 && channels.end == 3 && pixels.stride == 4;
  weave->in = cropped ? 4 : channels.end;
  weave->out = channels.extent;
  weave->from_woven = channels.stride == 1 && pixels.stride == weave->in;
  const bool from_apart = pixels.stride == 1 && channels.stride == weave->length;
  const bool padded = weave->in == 3 && weave->to_woven && (weave->out == 4 || weave->out == 8);
  const bool moved =
      weave->in == weave->out && weave->in >= 2 && weave->in <= 4 && weave->from_woven != weave->to_woven;
  bool fits = (weave->from_woven || (from_apart && !cropped)) && (padded || moved || cropped) && channels.begin == 0 &&
              pixels.begin == 0 && pixels.end == pixels.extent && weave->length % vector == 0 && p.offset % vector == 0;
  if (p.rank == 3) {
    const Dim& images = p.dims[0];
    fits &= images.begin == 0 && images.end == images.extent && images.stride == weave->in * weave->length;
  }
  return fits;
}

// Where vector i of a warp's is in shared memory: no two of 8 successive threads, which have as many vectors in a row
// as there are channels, meet in a bank.
template <int kChannels>
__host__ __device__ constexpr int WovenPlace(int i) {
  return kChannels % 2 == 0 ? i + i / 8 : i;
}

// `total` vectors of pixels, `vectors` of them in an image.
template <int kIn, int kOut, bool kFromWoven, bool kToWoven, class Op>
__global__ void __launch_bounds__(kThreads, 4)
    WeaveKernel(FastDiv vectors, int total, const Op op, const typename Op::In* in) {
  using In = typename Op::In;
  constexpr int V = Op::kVector, kLanes = 32;
  const int lane = threadIdx.x % kLanes, first = blockIdx.x * kThreads + threadIdx.x - lane;
  if (first >= total) return;
  const int id = min(first + lane, total - 1);
  int vector;
  const int64_t image = vectors.Div(id, &vector), length = vectors.divisor;
  Vec<In, V> x[kIn], y[kOut];
#pragma unroll
  for (int c = 0; c < kIn; ++c)
    x[c] = LoadVector<V>(in + (kFromWoven ? int64_t{id} * kIn + c : (image * kIn + c) * length + vector) * V);
#pragma unroll
  for (int i = 0; i < V; ++i)
#pragma unroll
    for (int c = 0; c < kOut; ++c) {
      const int from = i * kIn + c, to = i * kOut + c;
      const In pixel = c >= kIn ? op.pad_bits : kFromWoven ? x[from / V].v[from % V] : x[c].v[i];
      if constexpr (kToWoven)
        y[to / V].v[to % V] = pixel;
      else
        y[c].v[i] = pixel;
    }
  const auto store = [&](int64_t to, const Vec<In, V>& v) {
    typename Op::Value value[V];
#pragma unroll
    for (int i = 0; i < V; ++i) value[i] = op.Prepare(v.v[i]);
    op.Store(static_cast<int>(to * V), value);
  };
  if constexpr (kToWoven) {
    __shared__ Vec<In, V> exchange[kThreads / kLanes][WovenPlace<kOut>(kLanes * kOut)];
    auto& mine = exchange[threadIdx.x / kLanes];
#pragma unroll
    for (int c = 0; c < kOut; ++c) mine[WovenPlace<kOut>(lane * kOut + c)] = y[c];
    __syncwarp();
    const int count = min(total - first, kLanes) * kOut;
#pragma unroll
    for (int c = 0; c < kOut; ++c) {
      const int i = c * kLanes + lane;
      if (i < count) store(int64_t{first} * kOut + i, mine[WovenPlace<kOut>(i)]);
    }
  } else if (first + lane < total) {
#pragma unroll
    for (int c = 0; c < kOut; ++c) store((image * kOut + c) * length + vector, y[c]);
  }
}

// Of `elements` in the result.
template <class Op>
cudaError_t LaunchWeave(const Weave& weave, int64_t elements, const Op& op, const typename Op::In* in,
                        cudaStream_t stream) {
  const int64_t vectors = elements / weave.out / Op::kVector;
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, CeilDiv(vectors, kThreads), kThreads, stream, FastDiv(weave.length / Op::kVector),
                        static_cast<int>(vectors), op, in);
  };
  const auto moved = [&](auto to_woven) {
    constexpr bool kTo = to_woven();
    if (weave.in == 2) return launch(WeaveKernel<2, 2, !kTo, kTo, Op>);
    if (weave.in == 3) return launch(WeaveKernel<3, 3, !kTo, kTo, Op>);
    return launch(WeaveKernel<4, 4, !kTo, kTo, Op>);
  };
  const auto padded = [&](auto out) {
    if (weave.from_woven) return launch(WeaveKernel<3, out(), true, true, Op>);
    return launch(WeaveKernel<3, out(), false, true, Op>);
  };
  if (!weave.to_woven) return moved(std::false_type());
  if constexpr (Op::kWeaves) {
    if (weave.in == weave.out) return moved(std::true_type());
    if (weave.out == 3) return launch(WeaveKernel<4, 3, true, true, Op>);
    if (weave.out == 4) return padded(std::integral_constant<int, 4>());
    return padded(std::integral_constant<int, 8>());
  }
  return cudaErrorNotSupported;
}

}  // namespace jaxdnn::transform
