// Mean and variance without cancellation.
//
// A thread sums its values and their squares relative to the first of them, which is at most sqrt(n) deviations from
// their mean. Those sums are taken to the group's pivot, one of its values, and added up in double precision, which has
// the digits to spare for a pivot that is far from the mean.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/group_norm/team.cuh"

namespace jaxdnn::group_norm {

// The sums of x - pivot and of its square.
using Moments = Pair<double>;

// The values of a thread at one place of its vectors, relative to the first of them.
template <class A>
struct Shifted {
  A first, sum, squares;

  __device__ void Add(A x) {
    const A d = x - first;
    sum += d;
    squares += d * d;
  }
  __device__ Moments About(A pivot, int n) const {
    const double d = first - pivot, s = sum, nd = n * d;
    return {nd + s, squares + d * (2 * s + nd)};
  }
};

// The sum of what the team's blocks have, by 1 << span lanes of a warp, of which each asks for so many at once.
template <int kAtOnce = 4, class A>
__device__ Pair<A> AddBlocks(const Letter<Pair<A>>* partial, int blocks, int stride, int span) {
  const int lanes = 1 << span, lane = threadIdx.x & (lanes - 1);
  Pair<A> sums[1] = {};
  if (blocks <= lanes) {
    if (lane < blocks) sums[0] = partial[int64_t{lane} * stride].Await();
  } else {
    for (int first = lane; first < blocks; first += kAtOnce * lanes) {
      Pair<A> values[kAtOnce];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
          there &= partial[int64_t{min(first + k * lanes, blocks - 1)} * stride].Read(&values[k]);
      } while (!there);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (first + k * lanes < blocks) sums[0] = AddPairs{}(sums[0], values[k]);
    }
  }
  Reduce(sums, AddPairs{}, {0, span}, static_cast<Pair<A>*>(nullptr));
  return sums[0];
}

// The same of one value for every block, in all of its threads: one warp asks for it, as all that ask load memory.
template <class A>
__device__ Pair<A> ExchangeOne(const Team& team, Letter<Pair<A>>* letters, const Pair<A>& own, Pair<A>* scratch) {
  __syncthreads();  // An earlier sum may still be read.
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) letters[team.Rank()].Write(own);
    const Pair<A> sum = AddBlocks(letters, team.size, 1, 5);
    if (threadIdx.x == 0) *scratch = sum;
  }
  __syncthreads();
  return *scratch;
}

// A group's statistics: x less its mean is (x - mean) - rest, in which the first difference is exact near the mean.
template <class A>
struct Statistics {
  A mean, rest, rstd;

  Statistics() = default;
  __device__ Statistics(const Moments& m, double inverse, A pivot, A epsilon) {
    const double off = m.first * inverse, exact = pivot + off, variance = m.second * inverse - off * off;
    mean = static_cast<A>(exact);
    rest = static_cast<A>(exact - mean);
    rstd = A(1) / sqrt(static_cast<A>(variance < 0 ? 0 : variance) + epsilon);
  }
};

// y = f((x - mean) * slope + offset), where slope = rstd * scale, and offset holds the rest of the mean.
template <class A>
struct Affine {
  A mean, slope, offset;

  Affine() = default;
  __device__ Affine(const Statistics<A>& s, A scale, A bias)
      : mean(s.mean), slope(s.rstd * scale), offset(bias - s.rest * slope) {}
  __device__ A operator()(A x) const { return (x - mean) * slope + offset; }
};

}  // namespace jaxdnn::group_norm
