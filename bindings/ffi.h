// What every handler needs between XLA and a launcher: element types, shapes in messages, CUDA status to FFI error.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <string_view>

#include "cuda/common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdnn {

namespace ffi = xla::ffi;

inline std::optional<DType> ToDType(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return DType::kF32;
    case ffi::F64:
      return DType::kF64;
    case ffi::F16:
      return DType::kF16;
    case ffi::BF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

// The signature of most handlers: the stream, kArgs operands, any number more where kMoreArgs, and kRets results.
template <int kArgs, int kRets, bool kMoreArgs = false>
auto Bind() {
  if constexpr (kRets > 0) {
    return Bind<kArgs, kRets - 1, kMoreArgs>().template Ret<ffi::AnyBuffer>();
  } else if constexpr (kMoreArgs) {
    return Bind<kArgs, 0>().RemainingArgs();
  } else if constexpr (kArgs > 0) {
    return Bind<kArgs - 1, 0>().template Arg<ffi::AnyBuffer>();
  } else {
    return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>();
  }
}

// Defines the handler NAME of the function NAMEImpl. All of ours can be recorded into a CUDA graph.
#define JAXDNN_HANDLER(NAME, ...) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, NAME##Impl, (__VA_ARGS__), {ffi::Traits::kCmdBufferCompatible})

// "bf16[8,28,28,64]"; element types without a kernel print as their number.
inline std::string Describe(const ffi::AnyBuffer& buffer) {
  std::string text;
  switch (buffer.element_type()) {
    case ffi::F32:
      text = "f32";
      break;
    case ffi::F64:
      text = "f64";
      break;
    case ffi::F16:
      text = "f16";
      break;
    case ffi::BF16:
      text = "bf16";
      break;
    default:
      text = "type" + std::to_string(static_cast<int>(buffer.element_type()));
  }
  text += "[";
  for (int64_t d : buffer.dimensions()) text += (text.back() == '[' ? "" : ",") + std::to_string(d);
  return text + "]";
}

inline std::string DescribeAll(std::string_view op) { return std::string(op) + ":"; }

template <class... Rest>
std::string DescribeAll(std::string_view op, const ffi::AnyBuffer& first, const Rest&... rest) {
  std::string head = std::string(op) + " " + Describe(first);
  return DescribeAll(head, rest...);
}

// A failed launch, named by operator and operand shapes.
template <class... Buffers>
ffi::Error FromCuda(cudaError_t status, std::string_view op, const Buffers&... buffers) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(DescribeAll(op, buffers...) + " " + cudaGetErrorString(status));
}

template <class... Buffers>
ffi::Error Unsupported(std::string_view why, std::string_view op, const Buffers&... buffers) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, DescribeAll(op, buffers...) + " " + std::string(why));
}

inline bool SameShape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const auto da = a.dimensions(), db = b.dimensions();
  return std::equal(da.begin(), da.end(), db.begin(), db.end());
}

}  // namespace jaxdnn
