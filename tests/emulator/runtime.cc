// The part of CUDA's runtime that the kernels' host code calls, for a device that is the interpreter: memory is the
// host's, and a launch returns when the grid has ended.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "emulator.h"

namespace {

constexpr int kSharedOfBlock = 232448, kSharedOfMultiprocessor = 233472;

std::mutex one_at_a_time;
std::string last_error;

// What nvcc leaves of a compilation unit: a container of machine code and PTX, of which it is the PTX, uncompressed.
struct Wrapper {
  int magic, version;
  const uint8_t* data;
  void* unused;
};
struct Header {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct Part {
  uint16_t kind, attributes;
  uint32_t header_bytes;
  uint64_t bytes;
};
constexpr int kPtx = 1;

std::string PtxOf(const void* wrapper) {
  const uint8_t* at = static_cast<const Wrapper*>(wrapper)->data;
  const auto* header = reinterpret_cast<const Header*>(at);
  const uint8_t* end = at + header->header_bytes + header->bytes;
  for (at += header->header_bytes; at < end;) {
    const auto* part = reinterpret_cast<const Part*>(at);
    const auto* payload = reinterpret_cast<const char*>(at + part->header_bytes);
    if (part->kind == kPtx) {
      if (std::memchr(payload, '.', std::min<size_t>(part->bytes, 4096)) == nullptr)
        throw emulator::Error("compressed PTX");
      return std::string(payload, strnlen(payload, part->bytes));
    }
    at += part->header_bytes + part->bytes;
  }
  throw emulator::Error("no PTX");
}

// A compilation unit.
struct Unit {
  const void* wrapper;
  std::unique_ptr<emulator::Module> module;  // once it is wanted
};
struct Entry {
  Unit* unit;
  std::string name;
};
std::map<const void*, Entry>& Entries() {  // by the host's function; units register before main
  static std::map<const void*, Entry> entries;
  return entries;
}

const emulator::Kernel& KernelOf(const void* function) {
  const auto& [unit, name] = Entries().at(function);
  if (!unit->module) unit->module = std::make_unique<emulator::Module>(PtxOf(unit->wrapper));
  return unit->module->Find(name);
}

cudaError_t Launch(const void* function, dim3 grid, dim3 block, int cluster, size_t dynamic_shared, void** arguments) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  try {
    const emulator::Kernel& kernel = KernelOf(function);
    if (std::getenv("EMULATOR_TRACE")) std::fprintf(stderr, "%s <%u, %u>\n", kernel.name.c_str(), grid.x, block.x);
    emulator::Launch(kernel, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, cluster,
                     static_cast<int64_t>(dynamic_shared), arguments);
    return cudaSuccess;
  } catch (const std::exception& e) {
    last_error = e.what();
    return cudaErrorLaunchFailure;
  }
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) { return reinterpret_cast<void**>(new Unit{wrapper, nullptr}); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** unit, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Entries()[host] = {reinterpret_cast<Unit*>(unit), name};
}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// <<<>>> leaves its numbers for the function that it calls then.
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return Launch(kernel, grid, block, 1, shared, arguments);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t) {
  return Launch(function, grid, block, 1, shared, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  int cluster = 1;
  for (unsigned k = 0; k < config->numAttrs; ++k)
    if (config->attrs[k].id == cudaLaunchAttributeClusterDimension)
      cluster = static_cast<int>(config->attrs[k].val.clusterDim.x);
  return Launch(function, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, arguments);
}

// The device is an H200's in what the planners ask.
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> kAttributes = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, emulator::kMultiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedOfBlock},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedOfMultiprocessor}};
  const auto found = kAttributes.find(attribute);
  if (found == kAttributes.end()) return cudaErrorInvalidValue;
  *value = found->second;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  *attributes = {};
  attributes->maxThreadsPerBlock = KernelOf(function).max_threads;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > kSharedOfBlock ? cudaErrorInvalidValue
                                                                                            : cudaSuccess;
}
// Registers, which the interpreter does not know, are left out.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t shared) {
  *blocks = std::min<int>({32, 2048 / threads, static_cast<int>(kSharedOfMultiprocessor / (shared + 1024))});
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const cudaLaunchConfig_t* config) {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, static_cast<int>(config->blockDim.x),
                                                config->dynamicSmemBytes);
  *clusters = emulator::kMultiprocessors / static_cast<int>(config->attrs[0].val.clusterDim.x) * blocks;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorLaunchFailure ? last_error.c_str() : "an error of the interpreter's runtime";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** address, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *address = !std::strcmp(name, "cuTensorMapEncodeTiled")    ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled)
             : !std::strcmp(name, "cuTensorMapEncodeIm2col") ? reinterpret_cast<void*>(&cuTensorMapEncodeIm2col)
                                                             : nullptr;
  *found = *address ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
