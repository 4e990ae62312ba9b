// Adds up the slices of a filter gradient that the kernels before it have left in the workspace, in their order.
#include "cuda/conv/filter.cuh"

namespace jaxdnn::conv {
namespace {

// Stores partial[0][i] + partial[1][i] + ..., of four neighbours by as many threads of a block as there are `parts`:
// each has every parts-th slice, kAtOnce of them on their way.
constexpr int kNeighbours = 4, kSumThreads = 256, kAtOnce = 8;
template <class Sum, class Store>
__global__ void SumSlicesKernel(const Sum* partial, int64_t size, int splits, int parts,
                                const __grid_constant__ Store store) {
  using Four = Vec<Sum, kNeighbours>;
  __shared__ Four of_parts[kSumThreads];
  const int fours = kSumThreads / parts, four = threadIdx.x % fours, part = threadIdx.x / fours;
  const int64_t first = (blockIdx.x * int64_t{fours} + four) * kNeighbours;
  Four sum = {};
  const auto add = [&](const Four& more) {
#pragma unroll
    for (int k = 0; k < kNeighbours; ++k) sum.v[k] += more.v[k];
  };
  if (first >= size) {
  } else if (size % kNeighbours == 0) {
    for (int s = part; s < splits; s += kAtOnce * parts) {
      Four slices[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (s + i * parts < splits)
          slices[i] = *reinterpret_cast<const Four*>(partial + (s + i * parts) * size + first);
#pragma unroll
      for (const Four& slice : slices) add(slice);
    }
  } else {
    for (int s = part; s < splits; s += parts)
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k)
        if (first + k < size) sum.v[k] += partial[s * size + first + k];
  }
  if (parts > 1) {
    of_parts[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0) return;
#pragma unroll 2
    for (int other = 1; other < parts; ++other) add(of_parts[other * fours + four]);
  }
  if (first >= size) return;
  if constexpr (Store::kInOrder) {
    Vec<decltype(store.Value(0, sum.v[0])), kNeighbours> out;
    if (size % kNeighbours == 0 && reinterpret_cast<uintptr_t>(store.out) % sizeof(out) == 0) {
#pragma unroll
      for (int k = 0; k < kNeighbours; ++k) out.v[k] = store.Value(first + k, sum.v[k]);
      *reinterpret_cast<decltype(out)*>(store.out + first) = out;
      return;
    }
  }
#pragma unroll 1
  for (int k = 0; k < kNeighbours; ++k) {
    if (first + k < size) store(first + k, sum.v[0]);
#pragma unroll
    for (int i = 1; i < kNeighbours; ++i) sum.v[i - 1] = sum.v[i];
  }
}

template <class Sum, class Store>
cudaError_t LaunchSumSlices(const Sum* partial, int64_t size, int64_t splits, const Store& store, cudaStream_t stream) {
  // Threads beyond which more of them do not help.
  constexpr int64_t kEnough = int64_t{1} << 17, kMostParts = 32;
  const int64_t fours = CeilDiv(size, kNeighbours);
  int64_t parts = 1;
  while (parts < kMostParts && parts * kAtOnce < splits && parts * fours < kEnough) parts *= 2;
  return LaunchKernel(SumSlicesKernel<Sum, Store>, CeilDiv(fours * parts, kSumThreads), kSumThreads, stream, partial,
                      size, int(splits), int(parts), store);
}

template <class In, class Out>
cudaError_t SumTo(Out* out, const Problem& p, const void* partial, int64_t splits, bool checked, const void* x,
                  const void* y, cudaStream_t stream) {
  const auto sum = [&](auto store) {
    return LaunchSumSlices(static_cast<const Accumulator<In>*>(partial), p.FilterSize(), splits, store, stream);
  };
  const auto *of_x = static_cast<const In*>(x), *of_y = static_cast<const In*>(y);
  const FilterParams q = MakeFilterParams(p, splits, 1, 1, 1);
  if (p.exchanged && !checked) return sum(StoreExchanged<In, Out>{q, of_x, of_y, out});
  if constexpr (sizeof(In) < 8)
    return sum(StoreChecked<In, Out>{q, of_x, of_y, out, checked});
  else
    return sum(StoreInOrder<Out>{out});
}

}  // namespace

cudaError_t SumSlices(const Problem& p, const void* partial, int64_t splits, bool checked, const void* x, const void* y,
                      void* out, cudaStream_t stream) {
  return VisitDType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    return p.out == p.in ? SumTo<In>(static_cast<In*>(out), p, partial, splits, checked, x, y, stream)
                         : SumTo<In>(static_cast<Accumulator<In>*>(out), p, partial, splits, checked, x, y, stream);
  });
}

}  // namespace jaxdnn::conv
