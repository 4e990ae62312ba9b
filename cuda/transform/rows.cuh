// Results whose rows are runs of the input: strided views, with padding. A View says where each row lies.
//
// A thread makes 16 bytes of the result at a time. Where each such vector is one aligned run of the input, or none, it
// moves whole, several in flight a thread; else a thread collects its elements one by one, and neighbours share the
// cache lines.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/transform/element.cuh"

namespace jaxdnn::transform {

constexpr int kThreads = 256;
constexpr int kRowThreads = 128;
constexpr int64_t kMaxLaunch = int64_t{1} << 30;  // Elements of one launch, so that indices are 32 bits.

// Element c of a row is in[offset + c * stride] for begin <= c < end, and padding elsewhere.
struct Row {
  int64_t offset;
  int begin, end;
};

// Vectors of kN elements, each of which is wholly inside or wholly padding. The stride is 1.
template <int kN, int kUnroll, class View, class Op>
__global__ void __launch_bounds__(kRowThreads) VectorKernel(const View view, const FastDiv per_row, const Op op,
                                                            const typename Op::In* __restrict__ in, int total) {
  using In = typename Op::In;
  const int first = blockIdx.x * (kRowThreads * kUnroll) + threadIdx.x;
  Vec<In, kN> v[kUnroll];
  bool inside[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int i = first + u * kRowThreads;
    inside[u] = false;
    if (i >= total) continue;
    int c;
    const int row = per_row.Div(i, &c);
    const Row r = view.At(row);
    c *= kN;
    inside[u] = c >= r.begin && c < r.end;
    if (inside[u]) v[u] = LoadVector<kN>(in + r.offset + c);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int i = first + u * kRowThreads;
    if (i >= total) continue;
    typename Op::Value value[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) value[j] = inside[u] ? op.Prepare(v[u].v[j]) : op.pad;
    op.Store(i * kN, value);
  }
}

template <bool kDense, class View, class Op>
__global__ void __launch_bounds__(kRowThreads)
    GatherKernel(const View view, const FastDiv length, const int64_t stride, const bool aligned, const Op op,
                 const typename Op::In* __restrict__ in, int rows) {
  constexpr int kN = Op::kVector;
  const int64_t step = kDense ? 1 : stride;
  const int first = (blockIdx.x * kRowThreads + threadIdx.x) * kN, total = rows * static_cast<int>(length.divisor);
  if (first >= total) return;
  typename Op::Value value[kN];
#pragma unroll
  for (int j = 0; j < kN; ++j) value[j] = op.pad;
  // Row by row, so that the threads of a warp find their next rows together. Element j is number c + j of the row.
  int c, row = length.Div(first, &c);
  for (; row < rows && c + kN > 0; ++row, c -= static_cast<int>(length.divisor)) {
    const Row r = view.At(row);
    const typename Op::In* p = in + r.offset + c * step;
#pragma unroll
    for (int j = 0; j < kN; ++j)
      if (static_cast<unsigned>(c + j - r.begin) < static_cast<unsigned>(r.end - r.begin))
        value[j] = op.Prepare(p[j * step]);
  }
  if (aligned && first + kN <= total) {
    op.Store(first, value);
  } else {
#pragma unroll
    for (int j = 0; j < kN; ++j)
      if (first + j < total) op.Store(first + j, value[j]);
  }
}

// `rows` rows of `length` elements, by vectors of kN if `kN` of them are always one run, else (kN = 0) by elements.
template <int kN, class View, class Op>
cudaError_t LaunchRows(const View& view, int64_t rows, int64_t length, int64_t stride, bool aligned, const Op& op,
                       const void* in, cudaStream_t stream) {
  const auto* x = static_cast<const typename Op::In*>(in);
  const int64_t total = rows * length;
  if constexpr (kN > 0) {
    const auto launch = [&](auto unroll) {
      return LaunchKernel(VectorKernel<kN, unroll(), View, Op>, CeilDiv(total / kN, kRowThreads * unroll()),
                          kRowThreads, stream, view, FastDiv(length / kN), op, x, static_cast<int>(total / kN));
    };
    // Measured: memory is fastest in the order of its addresses, a vector a thread. Of short rows, to find each takes
    // as long as a load, for which another makes up.
    constexpr int kShortRow = 64;
    if constexpr (std::is_same_v<typename Op::In, uint4>)
      if (length / kN < kShortRow) return launch(std::integral_constant<int, 2>{});
    return launch(std::integral_constant<int, 1>{});
  } else {
    const auto launch = [&](auto kernel) {
      return LaunchKernel(kernel, CeilDiv(total, kRowThreads * Op::kVector), kRowThreads, stream, view, FastDiv(length),
                          stride, aligned, op, x, static_cast<int>(rows));
    };
    if constexpr (View::kDense) {
      return launch(GatherKernel<true, View, Op>);
    } else {
      if constexpr (Op::kDense)
        if (stride == 1) return launch(GatherKernel<true, View, Op>);
      return launch(GatherKernel<false, View, Op>);
    }
  }
}

}  // namespace jaxdnn::transform
