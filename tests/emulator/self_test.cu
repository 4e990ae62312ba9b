// What tests/test_emulator.py runs: kernels whose faults the interpreter must see, and some that have none. A line
// each.
#include <cstdio>
#include <vector>

#include "cuda/common/cluster.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/common/mma.cuh"

namespace {

enum Fault {
  kNone,
  kUnwaited,
  kRace,
  kBeyond,
  kUnaligned,
  kNull,
  kDeadlock,
  kElsewhere,
  kTrap,
  kEarly,
  kPartial,
  kTooMany,
  kForgotten
};

// The sum of 64 numbers, by asynchronous copies to shared memory, shuffles and barriers.
__global__ void Sum(const float* x, float* y, int fault) {
  __shared__ float values[64], sums[2];
  const int t = threadIdx.x;
  jaxdnn::CopyAsync<4>(jaxdnn::SharedAddress(values + t), x + t, true);
  jaxdnn::CommitCopies();
  if (fault != kUnwaited) jaxdnn::WaitForCopies<0>();
  __syncthreads();
  float v = values[63 - t];
  if (fault == kBeyond) v += jaxdnn::LoadWord(jaxdnn::SharedAddress(values + t) + 1024);
  if (fault == kUnaligned) v += jaxdnn::LoadWord(jaxdnn::SharedAddress(values) + t);
  if (fault == kNull) v += *static_cast<const volatile float*>(nullptr);
  if (fault == kTrap) __trap();
  if (fault == kElsewhere && t % 32 == 5) return;
  for (int lane = 1; lane < 32; lane *= 2) v += __shfl_xor_sync(~0u, v, lane);
  if (t % 32 == 0) sums[t / 32] = v;
  if (fault == kDeadlock && t < 32) jaxdnn::hopper::SyncThreads(1, 64);
  if (fault != kRace) __syncthreads();
  if (t == 0) *y = sums[0] + sums[1];
}

// The same by a bulk copy, and a transaction barrier that says when it is there.
__global__ void BulkSum(const float* x, float* y, int fault) {
  __shared__ alignas(16) float values[64];
  __shared__ uint64_t storage;
  const uint32_t barrier = jaxdnn::SharedAddress(&storage);
  if (jaxdnn::hopper::IsElected()) {
    jaxdnn::hopper::InitBarrier(barrier, 1);
    jaxdnn::hopper::ArriveExpecting(barrier, sizeof(values));
    if (fault == kTooMany) jaxdnn::hopper::Arrive(barrier);
    jaxdnn::hopper::CopyBulk(jaxdnn::SharedAddress(values), x, fault == kPartial ? 100 : sizeof(values), barrier);
  }
  __syncthreads();
  if (fault != kEarly && fault != kForgotten) jaxdnn::hopper::WaitBarrier(barrier, 0);
  float sum = 0;
  for (int i = 0; i < 64; ++i) sum += values[i];
  if (fault == kEarly) jaxdnn::hopper::WaitBarrier(barrier, 0);
  if (threadIdx.x == 0) *y = sum;
}

// Two blocks of a cluster write to each other. Without one, there is no other.
__global__ void Exchange(const float*, float* y, int) {
  __shared__ float from_other;
  const int rank = blockIdx.x;
  jaxdnn::StoreRemote(&from_other, 1 - rank, static_cast<float>(10 + rank));
  jaxdnn::ClusterArrive();
  jaxdnn::ClusterWait();
  if (threadIdx.x == 0) y[rank] = from_other;
}

// 16x8 by 8x8 of floats as TF32, and lanes that go different ways.
__global__ void Product(const float*, float* y, int) {
  const int lane = threadIdx.x;
  uint32_t a[4], b[2];
  for (int k = 0; k < 4; ++k) a[k] = __float_as_uint(lane / 4 + 8 * (k % 2) == lane % 4 + 4 * (k / 2) ? 1.0f : 0.0f);
  for (int k = 0; k < 2; ++k) b[k] = __float_as_uint(static_cast<float>(8 * (lane % 4 + 4 * k) + lane / 4));
  float d[4] = {};
  jaxdnn::Mma<float>(d, a, b[0], b[1]);
  float sum = 0;
  for (int k = 0; k < lane; ++k) sum += k % 3 == 0 ? d[k % 4] : -d[k % 4];
  y[lane] = d[0] + 0 * sum;
}

// A shuffle that every second lane comes to from further on.
__global__ void Apart(const float*, float* y, int) {
  const int lane = threadIdx.x;
  int v = lane;
  asm volatile(
      "{\n"
      ".reg .pred odd;\n"
      "setp.ne.s32 odd, %1, 0;\n"
      "@odd bra Further;\n"
      "Together: shfl.sync.bfly.b32 %0, %0, 1, 31, -1;\n"
      "bra.uni End;\n"
      "Further: add.s32 %0, %0, 100;\n"
      "bra Together;\n"
      "End:\n"
      "}"
      : "+r"(v)
      : "r"(lane % 2));
  y[lane] = static_cast<float>(v);
}

struct Case {
  const char* name;
  void (*kernel)(const float*, float*, int);
  int fault, blocks, threads;
  unsigned cluster;
  int results;
};
const Case kCases[] = {
    {"sum", Sum, kNone, 1, 64, 1, 1},
    {"unwaited", Sum, kUnwaited, 1, 64, 1, 1},
    {"race", Sum, kRace, 1, 64, 1, 1},
    {"beyond", Sum, kBeyond, 1, 64, 1, 1},
    {"unaligned", Sum, kUnaligned, 1, 64, 1, 1},
    {"null", Sum, kNull, 1, 64, 1, 1},
    {"deadlock", Sum, kDeadlock, 1, 64, 1, 1},
    {"elsewhere", Sum, kElsewhere, 1, 64, 1, 1},
    {"trap", Sum, kTrap, 1, 64, 1, 1},
    {"bulk sum", BulkSum, kNone, 1, 32, 1, 1},
    {"early", BulkSum, kEarly, 1, 32, 1, 1},
    {"partial", BulkSum, kPartial, 1, 32, 1, 1},
    {"too many", BulkSum, kTooMany, 1, 32, 1, 1},
    {"forgotten", BulkSum, kForgotten, 1, 32, 1, 1},
    {"exchange", Exchange, kNone, 2, 32, 2, 2},
    {"no cluster", Exchange, kNone, 2, 32, 1, 2},
    {"product", Product, kNone, 1, 32, 1, 32},
    {"apart", Apart, kNone, 1, 32, 1, 32},
};

}  // namespace

int main() {
  std::vector<float> x(64), y(32);
  for (int i = 0; i < 64; ++i) x[i] = static_cast<float>(i);
  for (const Case& c : kCases) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {c.cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(c.blocks);
    config.blockDim = dim3(c.threads);
    config.attrs = &attribute;
    config.numAttrs = 1;
    const cudaError_t e =
        cudaLaunchKernelEx(&config, c.kernel, static_cast<const float*>(x.data()), y.data(), static_cast<int>(c.fault));
    std::printf("%s:", c.name);
    if (e != cudaSuccess) std::printf(" %s", cudaGetErrorString(e));
    for (int i = 0; e == cudaSuccess && i < c.results; ++i) std::printf(" %g", y[i]);
    std::printf("\n\n");
  }
}
