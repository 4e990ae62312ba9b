// From FFI buffers to the problem that the softmax kernels and those of its losses work on.
#pragma once

#include "bindings/ffi.h"
#include "cuda/softmax/softmax.h"

namespace jaxdnn {

// [..., n, inner] as [outer, n, inner].
inline std::optional<softmax::Shape> ToSoftmaxShape(const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  if (dims.size() < 2) return std::nullopt;
  softmax::Shape shape = {1, dims[dims.size() - 2], dims[dims.size() - 1]};
  for (size_t i = 0; i + 2 < dims.size(); ++i) shape.outer *= dims[i];
  return shape;
}

// A mask whose every dimension is 1 or that of x. Neighbouring dimensions that it has, or lacks, become one.
inline std::optional<softmax::Mask> ToMask(const ffi::AnyBuffer& x, const ffi::AnyBuffer& mask) {
  const auto dims = x.dimensions(), own = mask.dimensions();
  const size_t rank = dims.size();
  if (mask.element_type() != ffi::PRED || own.size() != rank || rank < 2) return std::nullopt;
  for (size_t d = 0; d < rank; ++d)
    if (own[d] != 1 && own[d] != dims[d]) return std::nullopt;
  softmax::Mask m;
  m.data = mask.typed_data<bool>();
  m.along_inner = own[rank - 1] > 1;
  m.along_n = own[rank - 2] > 1 ? own[rank - 1] : 0;
  const auto lacks = [&](size_t d) { return own[d] == 1; };
  for (size_t d = 0; d + 2 < rank; ++d) {
    if (dims[d] == 1) continue;
    if (m.groups > 0 && lacks(d) == (m.stride[m.groups - 1] == 0)) {
      m.size[m.groups - 1] *= dims[d];
      continue;
    }
    if (m.groups == softmax::Mask::kMaxGroups) return std::nullopt;
    m.size[m.groups] = dims[d];
    m.stride[m.groups++] = !lacks(d);
  }
  // Strides of the groups that the mask has, the last of them over whole slices [n, inner].
  int64_t stride = own[rank - 2] * own[rank - 1];
  for (int g = m.groups - 1; g >= 0; --g) {
    if (m.stride[g] == 0) continue;
    m.stride[g] = stride;
    stride *= m.size[g];
  }
  return m;
}

// Operands, mask (perhaps) and workspace of a call on arrays like x.
inline std::optional<softmax::Problem> ToSoftmaxProblem(const ffi::AnyBuffer& x, const ffi::AnyBuffer* mask,
                                                        const ffi::AnyBuffer& workspace) {
  const auto shape = ToSoftmaxShape(x);
  const auto dtype = ToDType(x.element_type());
  const auto folded = mask == nullptr ? std::optional<softmax::Mask>(std::in_place) : ToMask(x, *mask);
  if (!shape || !dtype || !folded) return std::nullopt;
  if (static_cast<int64_t>(workspace.size_bytes()) < softmax::WorkspaceBytes(*dtype, *shape)) return std::nullopt;
  return softmax::Problem{*shape, *folded, workspace.untyped_data()};
}

}  // namespace jaxdnn
