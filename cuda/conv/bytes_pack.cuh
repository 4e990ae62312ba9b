// Bytes as Hopper's kernel wants them: channels in whole chunks of 16, next to each other in the filter too.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// The filter [taps, channels, features] as [taps, features, channels], with zeros behind the last channel. A thread has
// a chunk of channels, and its neighbours the same ones of the next features.
static __global__ void PackFilterKernel(const uint8_t* in, uint4* out, int64_t total, int channels, FastDiv chunks,
                                        FastDiv features) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= total) return;
  int feature, chunk;
  const int tap = chunks.Div(features.Div(static_cast<int>(i), &feature), &chunk);
  const int64_t first = (int64_t{tap} * channels + chunk * 16) * features.divisor + feature;
  uint32_t words[4] = {};
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    const bool exists = chunk * 16 + c < channels;
    const uint32_t byte = in[exists ? first + c * int64_t{features.divisor} : 0];
    words[c / 4] |= (exists ? byte : 0) << c % 4 * 8;
  }
  out[(int64_t{tap} * features.divisor + feature) * chunks.divisor + chunk] = {words[0], words[1], words[2], words[3]};
}

// Pixels of channels that are no whole chunks, with zeros behind the last one.
static __global__ void PadPixelsKernel(const uint8_t* in, uint4* out, int64_t total, int channels, int chunks) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= total) return;
  const int64_t pixel = i / chunks, first = static_cast<int>(i - pixel * chunks) * 16;
  uint32_t words[4] = {};
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    const bool exists = first + c < channels;
    const uint32_t byte = in[exists ? pixel * channels + first + c : 0];
    words[c / 4] |= (exists ? byte : 0) << c % 4 * 8;
  }
  out[i] = {words[0], words[1], words[2], words[3]};
}

// Packs the filter into the workspace, and behind it the operand where it needs to be, and points there.
inline cudaError_t Pack(const Problem& p, const void** x, const void** w, void* workspace, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int64_t chunks = CeilDiv(p.channels, 16), filter = p.Taps() * p.features * chunks;
  uint4* const out = static_cast<uint4*>(workspace);
  cudaError_t e =
      LaunchKernel(PackFilterKernel, CeilDiv(filter, kThreads), kThreads, stream, static_cast<const uint8_t*>(*w), out,
                   filter, int(p.channels), FastDiv(chunks), FastDiv(p.features));
  *w = out;
  if (e != cudaSuccess || p.channels % 16 == 0) return e;
  const int64_t pixels = p.images * p.XPixels() * chunks;
  e = LaunchKernel(PadPixelsKernel, CeilDiv(pixels, kThreads), kThreads, stream, static_cast<const uint8_t*>(*x),
                   out + filter, pixels, int(p.channels), int(chunks));
  *x = out + filter;
  return e;
}

}  // namespace jaxdnn::conv
