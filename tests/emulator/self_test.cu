// What tests/test_emulator.py runs: kernels whose faults the interpreter must see, and some that have none.
#include <cstdio>
#include <vector>

#include "cuda/common/mma.cuh"

namespace {

enum Fault { kNone, kNoWait, kBeyond, kUnaligned, kDeadlock };

// The sum of 64 numbers, by asynchronous copies to shared memory, shuffles and a barrier.
__global__ void Sum(const float* x, float* y, Fault fault) {
  __shared__ float values[64], sums[2];
  const int t = threadIdx.x;
  jaxdnn::CopyAsync<4>(jaxdnn::SharedAddress(values + t), x + t, true);
  jaxdnn::CommitCopies();
  if (fault != kNoWait) jaxdnn::WaitForCopies<0>();
  __syncthreads();
  float v = values[t];
  if (fault == kBeyond) v += jaxdnn::LoadWord(jaxdnn::SharedAddress(values + t) + 1024);
  if (fault == kUnaligned) v += jaxdnn::LoadWord(jaxdnn::SharedAddress(values) + t);
  for (int lane = 1; lane < 32; lane *= 2) v += __shfl_xor_sync(~0u, v, lane);
  if (t % 32 == 0) sums[t / 32] = v;
  if (fault == kDeadlock) {
    if (t < 32) asm volatile("barrier.sync 1, 64;" ::: "memory");
  }
  __syncthreads();
  if (t == 0) *y = sums[0] + sums[1];
}

// 16x8 by 8x8 of floats as TF32, and lanes that go different ways.
__global__ void Product(float* y) {
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

}  // namespace

int main() {
  std::vector<float> x(64), y(32);
  for (int i = 0; i < 64; ++i) x[i] = static_cast<float>(i);
  for (int fault = kNone; fault <= kDeadlock; ++fault) {
    y[0] = -1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(64);
    const cudaError_t e =
        cudaLaunchKernelEx(&config, Sum, static_cast<const float*>(x.data()), y.data(), static_cast<Fault>(fault));
    std::printf("%d: %s %g\n", fault, e == cudaSuccess ? "done" : cudaGetErrorString(e), y[0]);
  }
  Product<<<1, 32>>>(y.data());
  for (float v : y) std::printf("%g ", v);
}
