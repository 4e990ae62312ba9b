// What kernels can do on the current device. Its architecture alone does not say: code for an older one runs there too,
// as machine code or as PTX that the driver compiles, without what it was not compiled with.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxdnn {

// The most blocks of a cluster (cluster.cuh), 1 where there are no clusters.
cudaError_t QueryMaxCluster(int* blocks);

// Whether kernels have the instructions of sm_90a (hopper.cuh), which is on compute capability 9.0 alone.
bool HasHopperCode();

}  // namespace jaxdnn
