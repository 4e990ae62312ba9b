// The statistics of rows of vectors, of any length.
#include "cuda/loss/spread.cuh"
#include "cuda/loss/state.cuh"
#include "cuda/softmax/held.cuh"

namespace jaxdnn::loss {
namespace {

// Groups of lanes, blocks or clusters (held.cuh of softmax) take V vectors a thread at a time.
template <class T, int V>
__global__ void __launch_bounds__(kThreads, V <= 4 ? (sizeof(T) == 2 ? 6 : 5) : 4)
    LongRowsKernel(const __grid_constant__ softmax::HeldRows r, const __grid_constant__ TypedTargets<T> t,
                   softmax::Shape shape, const T* x, Results<T> results) {
  using A = Accumulator<T>;
  using Op = softmax::ForwardOp<T>;
  constexpr int L = kVecLength<T>;
  using P = Packed<T, L>;
  __shared__ softmax::Exchange<Op> exchange;
  const bool shared = r.width <= 32;
  const int lane = shared ? threadIdx.x & (r.width - 1) : threadIdx.x;
  const int rank = r.shares == 1 ? 0 : static_cast<int>(blockIdx.x % r.shares);
  const int64_t wanted = shared ? (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> (31 - __clz(r.width))
                                : blockIdx.x / static_cast<unsigned>(r.shares);
  const int64_t row = min(wanted, r.rows - 1);  // all lanes of a warp take part
  if (r.shares > 1) softmax::OpenExchange(exchange, r.shares);
  const T* const from = x + row * r.n;
  const int head = static_cast<int>(-(row * r.n) & (L - 1));
  const int vectors = (r.n - head) / L, first = rank * r.width + lane, step = r.width * r.shares;
  A edge = -softmax::kInfinity<A>;
  const int edge_at = lane < head ? lane : vectors * L + lane;
  const bool has_edge = first < 32 && edge_at < r.n;
  if (has_edge) edge = static_cast<A>(from[edge_at]);

  softmax::MaxSum<A> own[1] = {{kLowest<A>, A(0)}};
  const auto raise = [&](A to) {
    to = fminf(Max{}(own[0].m, to), t.largest);
    own[0].s *= Origin<T>(to).From(Origin<T>(own[0].m));
    own[0].m = to;
  };
  for (int start = first; start < vectors; start += V * step) {
    P v[V][1];
#pragma unroll
    for (int s = 0; s < V; ++s) {
      v[s][0] = softmax::Filled<Op, T, L>(0);
      if (start + s * step < vectors) v[s][0] = reinterpret_cast<const P*>(from + head)[start + s * step];
    }
    raise(softmax::MaxOf<T, L>(v));
    softmax::MaxSum<A> now[1] = {own[0]};
    Op{true}.Exponentiate(now, [&](auto&& visit) {
#pragma unroll
      for (int s = 0; s < V; ++s) {
        if (s > 0 && start - lane + s * step >= vectors) break;
        A wide[1][L];
        Widen<T, L>(v[s][0], wide[0]);
        visit(wide);
      }
    });
    own[0].s += now[0].s;
  }
  if (has_edge) {
    raise(edge);
    own[0].s += Origin<T>(own[0].m).Exp(edge);
  }
  if (shared) {
    Op::Combine(own, softmax::ShuffleReduce{31 - __clz(r.width)});
  } else {
    if (r.shares > 1) ClusterWait();
    own[0] = softmax::CombineBlocks<Op>(own[0], exchange, r.shares, rank);
  }
  if (first == 0 && wanted == row) WriteRow(own[0], t, shape, row, x, results);
}

}  // namespace

template <class T>
cudaError_t RunLongRows(const softmax::Shape& shape, const TypedTargets<T>& t, const T* x, const Results<T>& results,
                        cudaStream_t stream, bool* done) {
  softmax::Device device;
  if (const cudaError_t e = softmax::CurrentDevice(&device); e != cudaSuccess) return e;
  // Of a few rows that are very long, clusters would leave most multiprocessors without work.
  const bool few = 2 * shape.outer * device.max_cluster < device.multiprocessors && shape.n > int64_t{1} << 18;
  *done = t.mask.data == nullptr && !few && shape.n < softmax::kMaxHeldRow;
  if (!*done) return cudaSuccess;
  constexpr int L = kVecLength<T>;
  const int64_t vectors = shape.n / L;
  const auto run = [&](auto held) {
    constexpr int V = decltype(held)::value;
    softmax::HeldRows r = {shape.outer, static_cast<int>(shape.n), 1, 1, 0};
    while (r.width < 32 && (shape.n % L != 0 || r.width * V < vectors)) r.width *= 2;
    if (vectors > 32 * V) {
      r.width = 32 * static_cast<int>(std::min<int64_t>(kThreads / 32, CeilDiv(vectors, 32 * V)));
      // More blocks than run at once would be of no use.
      while (2 * r.shares <= device.max_cluster && int64_t{r.shares} * r.width * V < vectors &&
             2 * shape.outer * r.shares * r.width <= int64_t{1024} * device.multiprocessors)
        r.shares *= 2;
    }
    const Grid grid = r.width <= 32 ? Grid{CeilDiv(shape.outer * r.width, kThreads), kThreads}
                                    : Grid{shape.outer * r.shares, r.width, 0, r.shares};
    return LaunchKernel(LongRowsKernel<T, V>, grid, stream, r, t, shape, x, results);
  };
  if (vectors <= 32 * 4) return run(std::integral_constant<int, 4>{});
  return run(std::integral_constant<int, 8>{});
}

template cudaError_t RunLongRows(const softmax::Shape&, const TypedTargets<float>&, const float*, const Results<float>&,
                                 cudaStream_t, bool*);
template cudaError_t RunLongRows(const softmax::Shape&, const TypedTargets<__half>&, const __half*,
                                 const Results<__half>&, cudaStream_t, bool*);
template cudaError_t RunLongRows(const softmax::Shape&, const TypedTargets<__nv_bfloat16>&, const __nv_bfloat16*,
                                 const Results<__nv_bfloat16>&, cudaStream_t, bool*);

}  // namespace jaxdnn::loss
