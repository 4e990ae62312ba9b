// FFI handlers of the tensor transforms, and of patches: x [leading..., spatial..., channels] and cols [leading...,
// out..., cells, channels].
#include "cuda/transform/transform.h"

#include <algorithm>

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

using Span = ffi::Span<const int64_t>;

struct TransformAttrs {
  Span permutation, low;
  double pad_value, alpha, beta;
};
struct PatchesAttrs {
  Span window, stride, low, dilation;
};

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::TransformAttrs,
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("permutation"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("low"),
                                      xla::ffi::StructMember<double>("pad_value"),
                                      xla::ffi::StructMember<double>("alpha"), xla::ffi::StructMember<double>("beta"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::PatchesAttrs,
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("window"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("stride"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("low"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("dilation"));

namespace jaxdnn {
namespace {

std::optional<transform::ElementType> ToElementType(ffi::DataType type) {
  using transform::ElementType;
  switch (type) {
    case ffi::F32:
      return ElementType::kF32;
    case ffi::F64:
      return ElementType::kF64;
    case ffi::F16:
      return ElementType::kF16;
    case ffi::BF16:
      return ElementType::kBF16;
    case ffi::S8:
      return ElementType::kS8;
    case ffi::U8:
      return ElementType::kU8;
    case ffi::S32:
      return ElementType::kS32;
    default:
      return std::nullopt;
  }
}

std::optional<transform::Problem> ToProblem(const TransformAttrs& attrs, const ffi::AnyBuffer& x,
                                            const ffi::AnyBuffer& out) {
  const auto in_dims = x.dimensions(), out_dims = out.dimensions();
  const auto in = ToElementType(x.element_type()), to = ToElementType(out.element_type());
  const size_t rank = in_dims.size();
  if (!in || !to || rank > transform::kMaxRank || out_dims.size() != rank || attrs.permutation.size() != rank ||
      attrs.low.size() != rank)
    return std::nullopt;
  transform::Problem p;
  p.rank = static_cast<int>(rank);
  p.in = *in;
  p.out = *to;
  p.pad = attrs.pad_value;
  p.alpha = attrs.alpha;
  p.beta = attrs.beta;
  p.offset = 0;
  p.x_elements = x.element_count();
  int64_t strides[transform::kMaxRank], stride = 1;
  for (size_t d = rank; d-- > 0; stride *= in_dims[d]) strides[d] = stride;
  for (size_t d = 0; d < rank; ++d) {
    const int64_t from = attrs.permutation[d], low = attrs.low[d], extent = out_dims[d];
    if (from < 0 || from >= p.rank) return std::nullopt;
    const int64_t begin = std::clamp<int64_t>(low, 0, extent);
    p.dims[d] = {extent, begin, std::clamp<int64_t>(low + in_dims[from], begin, extent), strides[from]};
    p.offset -= low * strides[from];
  }
  return p;
}

// The patches of `x` in `cols`, of as many spatial dimensions as the attributes have.
std::optional<transform::Patches> ToPatches(const PatchesAttrs& attrs, const ffi::AnyBuffer& x,
                                            const ffi::AnyBuffer& cols) {
  const size_t rank = attrs.window.size(), dims = x.dimensions().size();
  const bool ranks = rank >= 1 && rank <= 3 && attrs.stride.size() == rank && attrs.low.size() == rank &&
                     attrs.dilation.size() == rank && dims > rank && cols.dimensions().size() == dims + 1;
  if (!ranks || x.element_type() != cols.element_type()) return std::nullopt;
  const auto within = [](int64_t v, int64_t least) { return v >= least && v < int64_t{1} << 30; };
  transform::Patches p;
  const size_t lead = dims - rank - 1;
  for (size_t i = 0; i < lead; ++i) {
    if (x.dimensions()[i] != cols.dimensions()[i]) return std::nullopt;
    p.batch *= x.dimensions()[i];
  }
  int64_t cells = 1;
  for (size_t i = 0; i < rank; ++i) {
    const size_t d = 3 - rank + i;
    p.in[d] = x.dimensions()[lead + i];
    p.out[d] = cols.dimensions()[lead + i];
    p.window[d] = attrs.window[i];
    p.stride[d] = attrs.stride[i];
    p.low[d] = attrs.low[i];
    p.dilation[d] = attrs.dilation[i];
    if (!within(p.in[d], 0) || !within(p.out[d], 0) || !within(p.window[d], 1) || !within(p.stride[d], 1) ||
        !within(p.dilation[d], 1) || !within(p.low[d], -p.in[d]))
      return std::nullopt;
    cells *= p.window[d];
  }
  p.channels = x.dimensions()[dims - 1];
  if (cols.dimensions()[dims] != p.channels || cols.dimensions()[dims - 1] != cells) return std::nullopt;
  return p;
}

}  // namespace

static ffi::Error TransformImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                                ffi::Result<ffi::AnyBuffer> out, TransformAttrs attrs) {
  const auto problem = ToProblem(attrs, x, *out);
  const void* y = nullptr;
  if (rest.size() == 1) {
    auto buffer = rest.get<ffi::AnyBuffer>(0);
    if (!buffer.has_value()) return buffer.error();
    if (!SameShape(*buffer, *out) || buffer->element_type() != out->element_type())
      return Unsupported("no kernel", "transform", x, *buffer, *out);
    y = buffer->untyped_data();
  }
  if (!problem || rest.size() > 1) return Unsupported("no kernel", "transform", x, *out);
  const cudaError_t status = transform::Transform(*problem, x.untyped_data(), y, out->untyped_data(), stream);
  return FromCuda(status, "transform", x, *out);
}

JAXDNN_HANDLER(Transform, Bind<1, 1, true>().Attrs<TransformAttrs>());

static ffi::Error Im2colImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> cols,
                             PatchesAttrs attrs) {
  const auto patches = ToPatches(attrs, x, *cols);
  const auto type = ToElementType(x.element_type());
  if (!patches || !type) return Unsupported("no kernel", "im2col", x, *cols);
  const cudaError_t status =
      transform::Im2col(*patches, transform::SizeOf(*type), x.untyped_data(), cols->untyped_data(), stream);
  return FromCuda(status, "im2col", x, *cols);
}

JAXDNN_HANDLER(Im2col, Bind<1, 1>().Attrs<PatchesAttrs>());

static ffi::Error Col2imImpl(cudaStream_t stream, ffi::AnyBuffer cols, ffi::Result<ffi::AnyBuffer> x,
                             PatchesAttrs attrs) {
  const auto patches = ToPatches(attrs, *x, cols);
  const auto dtype = ToDType(cols.element_type());
  if (!patches || !dtype) return Unsupported("no kernel", "col2im", cols, *x);
  const cudaError_t status = transform::Col2im(*patches, *dtype, cols.untyped_data(), x->untyped_data(), stream);
  return FromCuda(status, "col2im", cols, *x);
}

JAXDNN_HANDLER(Col2im, Bind<1, 1>().Attrs<PatchesAttrs>());

}  // namespace jaxdnn
