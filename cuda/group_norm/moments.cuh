// Mean and variance without cancellation.
//
// All values of a group are taken relative to one of them, its pivot, so that the means which are merged are small
// numbers of full relative precision: a group with mean 1e4 and deviation 1e-2 loses nothing. Squares are summed about
// a mean that is near: a thread's about its first value, a block's about the block's mean, a team's about that of a
// block.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/team.cuh"

namespace jaxdnn::group_norm {

// Of n values relative to the pivot: their mean, and the sum of squares about it.
template <class A>
struct Moments {
  A n, mean, squares;
};

// The values of a thread at one place of its vectors, relative to the first of them: its distance to their mean is at
// most sqrt(n) deviations, which bounds the cancellation in squares - sum^2 / n by n roundings.
template <class A>
struct Shifted {
  A first, sum, squares;

  __device__ void Add(A x) {
    const A d = x - first;
    sum += d;
    squares += d * d;
  }
  __device__ A MeanAbout(A pivot, A inverse) const { return (first - pivot) + sum * inverse; }
  // Squares about a mean that is `d` away from that of these n values.
  __device__ A SquaresAbout(A d, A n, A inverse) const { return (squares - sum * sum * inverse) + n * d * d; }
};

// The moments of a group from those of the team's blocks, by the lanes of a warp: about the first block's mean, which
// is at most sqrt(blocks) deviations away.
template <class A>
__device__ Moments<A> MergeBlocks(const Moments<A>* partial, int blocks, int stride) {
  constexpr int kUnroll = 4;
  const A origin = LoadRemote(partial).mean;
  A sum[3] = {};
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < blocks; first += 32 * kUnroll) {
    Moments<A> m[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Moments<A>* p = partial + int64_t{first + 32 * i} * stride;
      const bool exists = first + 32 * i < blocks;
      m[i] = exists ? LoadRemote(p) : Moments<A>{};
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const A d = m[i].n > A(0) ? m[i].mean - origin : A(0);
      sum[0] += m[i].n;
      sum[1] += m[i].n * d;
      sum[2] += m[i].squares + m[i].n * d * d;
    }
  }
  Reduce(sum, Add{}, {0, 5}, static_cast<A*>(nullptr));
  const A d = sum[1] / sum[0];
  return {sum[0], origin + d, sum[2] - sum[1] * d};
}

// A group's statistics: x less its mean is (x - mean) - rest, in which the first difference is exact near the mean.
template <class A>
struct Statistics {
  A mean, rest, rstd;

  Statistics() = default;
  __device__ Statistics(const Moments<A>& m, A pivot, A epsilon) {
    mean = pivot + m.mean;
    // The rounding error of the sum: exact in this order, from the larger summand.
    rest = fabs(pivot) >= fabs(m.mean) ? (pivot - mean) + m.mean : (m.mean - mean) + pivot;
    const A variance = m.squares / m.n;
    rstd = A(1) / sqrt((variance < A(0) ? A(0) : variance) + epsilon);
  }
};

}  // namespace jaxdnn::group_norm
