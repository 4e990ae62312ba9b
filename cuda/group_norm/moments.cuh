// Mean and variance without cancellation.
//
// All values of a group are taken relative to one of them, its pivot, so that the means which are merged are small
// numbers of full relative precision: a group with mean 1e4 and deviation 1e-2 loses nothing.
#pragma once

namespace jaxdnn::group_norm {

// Of n values relative to the pivot: their mean, and the sum of squares about it. Merging is commutative to the bit.
template <class A>
struct Moments {
  A n, mean, squares;
};

struct Merge {
  template <class A>
  __device__ Moments<A> operator()(const Moments<A>& a, const Moments<A>& b) const {
    const A n = a.n + b.n;
    const A inverse = n > A(0) ? A(1) / n : A(0);
    const A d = b.mean - a.mean;
    return {n, (a.n * a.mean + b.n * b.mean) * inverse, a.squares + b.squares + d * d * (a.n * b.n * inverse)};
  }
};

// The moments of one thread's values x, relative to the first of them: its distance to the mean is at most sqrt(n)
// deviations, which bounds the cancellation in squares - sum^2 / n by n roundings.
template <class A>
struct Shifted {
  A first, sum, squares;

  __device__ void Start(A x) {
    first = x;
    sum = squares = A(0);
  }
  __device__ void Add(A x) {
    const A d = x - first;
    sum += d;
    squares += d * d;
  }
  __device__ Moments<A> Finish(A n, A inverse, A pivot) const {
    const A offset = sum * inverse;
    const A rest = squares - sum * offset;
    return {n, n > A(0) ? (first - pivot) + offset : A(0), rest < A(0) ? A(0) : rest};
  }
};

// A group's statistics: x - mean is (x - mean) - rest, in which the first difference is exact for x near the mean.
template <class A>
struct Statistics {
  A mean, rest, rstd;

  Statistics() = default;
  __device__ Statistics(const Moments<A>& m, A pivot, A epsilon) {
    mean = pivot + m.mean;
    rest = (pivot - mean) + m.mean;
    // |m.mean| may exceed |pivot|: then the other order is the exact one.
    if (fabs(m.mean) > fabs(pivot)) rest = (m.mean - mean) + pivot;
    rstd = A(1) / sqrt(m.squares / m.n + epsilon);
  }
};

}  // namespace jaxdnn::group_norm
