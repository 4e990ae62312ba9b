// FFI handlers of layer norm and RMS norm. Data is [problems, rows, n]; an operand without elements is absent.
#include "cuda/layer_norm/layer_norm.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct LayerNormAttrs {
  bool center;
  double epsilon;
  double offset;
};

layer_norm::Options ToOptions(const LayerNormAttrs& a) { return {a.center, a.epsilon, a.offset}; }

std::optional<layer_norm::Shape> ToShape(const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  if (dims.size() != 3) return std::nullopt;
  return layer_norm::Shape{dims[0], dims[1], dims[2]};
}

bool IsPresent(const ffi::AnyBuffer& buffer) { return buffer.element_count() != 0; }

void* Present(const ffi::AnyBuffer& buffer) { return IsPresent(buffer) ? buffer.untyped_data() : nullptr; }

// Whether each buffer is absent or of these dimensions.
template <class... Buffers>
bool FitOrAbsent(std::initializer_list<int64_t> dims, const Buffers&... buffers) {
  const auto fits = [&](const ffi::AnyBuffer& b) {
    const auto d = b.dimensions();
    return b.element_count() == 0 || std::equal(d.begin(), d.end(), dims.begin(), dims.end());
  };
  return (... && fits(buffers));
}

template <class... Buffers>
bool HaveType(ffi::DataType type, const Buffers&... buffers) {
  return (... && (buffers.element_type() == type));
}

ffi::DataType AccumulatorType(DType type) { return type == DType::kF64 ? ffi::F64 : ffi::F32; }

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::LayerNormAttrs, xla::ffi::StructMember<bool>("center"),
                                      xla::ffi::StructMember<double>("epsilon"),
                                      xla::ffi::StructMember<double>("offset"));

namespace jaxdnn {

static ffi::Error LayerNormImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer residual, ffi::AnyBuffer scale,
                                ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> sum,
                                ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                                ffi::Result<ffi::AnyBuffer> workspace, LayerNormAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToShape(x);
  if (!dtype || !shape || !SameShape(x, *y) || !HaveType(x.element_type(), residual, *y, *sum) ||
      !HaveType(AccumulatorType(*dtype), scale, bias, *mean, *rstd) ||
      !FitOrAbsent({shape->problems, shape->rows, shape->n}, residual, *sum) ||
      !FitOrAbsent({shape->problems, shape->n}, scale, bias) ||
      !FitOrAbsent({shape->problems, shape->rows, 2}, *mean) || !FitOrAbsent({shape->problems, shape->rows}, *rstd) ||
      static_cast<int64_t>(workspace->size_bytes()) < layer_norm::ForwardWorkspace(*shape))
    return Unsupported("no kernel", "layer_norm", x, residual, scale, bias);
  const layer_norm::Forward f = {x.untyped_data(),  Present(residual), Present(scale), Present(bias),
                                 y->untyped_data(), Present(*sum),     Present(*mean), Present(*rstd)};
  const cudaError_t status =
      layer_norm::RunForward(f, *dtype, *shape, ToOptions(attrs), workspace->untyped_data(), stream);
  return FromCuda(status, "layer_norm", x);
}

JAXDNN_HANDLER(LayerNorm, Bind<4, 5>().Attrs<LayerNormAttrs>());

static ffi::Error LayerNormBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer g_sum, ffi::AnyBuffer x,
                                   ffi::AnyBuffer scale, ffi::AnyBuffer mean, ffi::AnyBuffer rstd,
                                   ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dscale,
                                   ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> workspace,
                                   LayerNormAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToShape(x);
  if (!dtype || !shape || !SameShape(x, g) || !SameShape(x, *dx) || !HaveType(x.element_type(), g, g_sum, *dx) ||
      !HaveType(AccumulatorType(*dtype), scale, mean, rstd, *dscale, *dbias) ||
      !FitOrAbsent({shape->problems, shape->rows, shape->n}, g_sum) ||
      !FitOrAbsent({shape->problems, shape->n}, scale, *dscale, *dbias) ||
      !FitOrAbsent({shape->problems, shape->rows, 2}, mean) || !FitOrAbsent({shape->problems, shape->rows}, rstd) ||
      static_cast<int64_t>(workspace->size_bytes()) <
          layer_norm::BackwardWorkspace(*shape, *dtype, IsPresent(*dscale) + IsPresent(*dbias)))
    return Unsupported("no kernel", "layer_norm_bwd", g, g_sum, x, scale);
  const layer_norm::Backward b = {g.untyped_data(),   Present(g_sum),   x.untyped_data(),
                                  Present(scale),     Present(mean),    rstd.untyped_data(),
                                  dx->untyped_data(), Present(*dscale), Present(*dbias)};
  const cudaError_t status =
      layer_norm::RunBackward(b, *dtype, *shape, ToOptions(attrs), workspace->untyped_data(), stream);
  return FromCuda(status, "layer_norm_bwd", g);
}

JAXDNN_HANDLER(LayerNormBwd, Bind<6, 4>().Attrs<LayerNormAttrs>());

}  // namespace jaxdnn
