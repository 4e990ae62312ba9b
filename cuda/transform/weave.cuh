// A few planes woven into one, or that one taken apart: images of two to four channels between channels first and last.
//
// A thread has a vector of each plane, and exchanges their elements in its registers: every access is a whole vector,
// and no thread waits for another.
#pragma once

#include <algorithm>

#include "cuda/transform/rows.cuh"

namespace jaxdnn::transform {

constexpr int kFewestPlanes = 2, kMostPlanes = 4;

struct Weave {
  int64_t planes, length;  // in elements
  bool weaves;             // or takes apart
};

// A thread's vectors of the woven plane lie apart from its neighbours', and writing them so takes longer than reading.
// Measured: of elements of 4 bytes, a quarter longer than the tiles of tile.cuh take.
template <class B>
constexpr bool kWeavesToo = sizeof(B) == 2;

// Whether that is all of `p`, and planes are whole vectors.
template <class B>
bool IsWeave(const Problem& p, Weave* weave) {
  constexpr int kVector = 16 / sizeof(B);
  if (p.rank != 2 && p.rank != 3) return false;
  const Dim &outer = p.dims[p.rank - 2], &inner = p.dims[p.rank - 1];
  weave->weaves = inner.extent <= kMostPlanes;
  weave->planes = weave->weaves ? inner.extent : outer.extent;
  weave->length = weave->weaves ? outer.extent : inner.extent;
  bool fits = (kWeavesToo<B> || !weave->weaves) && outer.stride == 1 && inner.stride == outer.extent &&
              weave->planes >= kFewestPlanes && weave->planes <= kMostPlanes && weave->length % kVector == 0 &&
              p.offset % kVector == 0 && (p.rank == 2 || p.dims[0].stride == weave->planes * weave->length);
  for (int d = 0; d < p.rank; ++d) fits &= p.dims[d].begin == 0 && p.dims[d].end == p.dims[d].extent;
  return fits;
}

template <int kPlanes, bool kWeaves, class B>
__global__ void __launch_bounds__(kThreads, 4) WeaveKernel(FastDiv vectors, int total, const B* in, B* out) {
  constexpr int V = 16 / sizeof(B);
  using Vector = Vec<B, V>;
  const int id = blockIdx.x * kThreads + threadIdx.x;
  if (id >= total) return;
  int vector;
  const int64_t image = vectors.Div(id, &vector), length = vectors.divisor;
  const int64_t apart = image * kPlanes * length + vector, woven = (image * length + vector) * kPlanes;
  const int64_t from = kWeaves ? apart : woven, to = kWeaves ? woven : apart;
  const int64_t from_step = kWeaves ? length : 1, to_step = kWeaves ? 1 : length;
  Vector x[kPlanes], y[kPlanes];
#pragma unroll
  for (int c = 0; c < kPlanes; ++c) x[c] = LoadConstant(reinterpret_cast<const Vector*>(in) + from + c * from_step);
#pragma unroll
  for (int i = 0; i < V; ++i)
#pragma unroll
    for (int c = 0; c < kPlanes; ++c) {
      const int at = i * kPlanes + c;
      if constexpr (kWeaves)
        y[at / V].v[at % V] = x[c].v[i];
      else
        y[c].v[i] = x[at / V].v[at % V];
    }
#pragma unroll
  for (int c = 0; c < kPlanes; ++c) {
    uint4 words;
    memcpy(&words, &y[c], sizeof(words));
    reinterpret_cast<uint4*>(out)[to + c * to_step] = words;
  }
}

// Of `elements` in all.
template <class B>
cudaError_t LaunchWeave(const Weave& weave, int64_t elements, const B* in, B* out, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(B);
  const int64_t threads = elements / (V * weave.planes);
  const auto launch = [&](auto kernel) {
    return LaunchKernel(kernel, CeilDiv(threads, kThreads), kThreads, stream, FastDiv(weave.length / V),
                        static_cast<int>(threads), in, out);
  };
  const auto with_planes = [&](auto planes) {
    if constexpr (kWeavesToo<B>)
      if (weave.weaves) return launch(WeaveKernel<planes(), true, B>);
    return launch(WeaveKernel<planes(), false, B>);
  };
  if (weave.planes == 2) return with_planes(std::integral_constant<int, 2>());
  if (weave.planes == 3) return with_planes(std::integral_constant<int, 3>());
  return with_planes(std::integral_constant<int, 4>());
}

}  // namespace jaxdnn::transform
