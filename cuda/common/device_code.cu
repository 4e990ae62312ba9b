// Empty kernels say which of their versions the device runs by how many threads they let a block have.
#include "cuda/common/cluster.cuh"
#include "cuda/common/device_code.h"
#include "cuda/common/hopper.cuh"

namespace jaxdnn {
namespace {

constexpr int kWith = 64, kWithout = 32;

__global__ void __launch_bounds__(kHasClusters ? kWith : kWithout) ClusterProbe() {}
__global__ void __launch_bounds__(hopper::kAvailable ? kWith : kWithout) HopperProbe() {}

cudaError_t Query(int* major, int* threads, void (*probe)()) {
  int device = 0;
  cudaFuncAttributes attributes;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, probe);
  if (e == cudaSuccess) *threads = attributes.maxThreadsPerBlock;
  return e;
}

}  // namespace

cudaError_t QueryMaxCluster(int* blocks) {
  int major = 0, threads = 0;
  const cudaError_t e = Query(&major, &threads, ClusterProbe);
  // Consumers' devices have clusters of 8 blocks.
  *blocks = major < 9 || threads == kWithout ? 1 : major <= 10 ? 16 : 8;
  return e;
}

bool HasHopperCode() {
  int major = 0, threads = 0;
  return Query(&major, &threads, HopperProbe) == cudaSuccess && major == 9 && threads != kWithout;
}

}  // namespace jaxdnn
