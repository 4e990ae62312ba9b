// FFI handlers of local response and divisive normalization. Operands are [..., spatial..., inner].
#include "cuda/lrn/lrn.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct LrnAttrs {
  ffi::Span<const int64_t> before, after;
  double scale, beta, k;
};

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::LrnAttrs, xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("before"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("after"),
                                      xla::ffi::StructMember<double>("scale"), xla::ffi::StructMember<double>("beta"),
                                      xla::ffi::StructMember<double>("k"));

namespace jaxdnn {
namespace {

std::optional<lrn::Problem> ToProblem(const LrnAttrs& attrs, const ffi::AnyBuffer& x) {
  const auto dims = x.dimensions();
  const size_t rank = attrs.before.size();
  if (rank < 1 || rank > 3 || attrs.after.size() != rank || dims.size() <= rank) return std::nullopt;
  const auto within = [](int64_t v) { return v >= 0 && v < int64_t{1} << 30; };
  const size_t lead = dims.size() - rank - 1;
  lrn::Problem p;
  for (size_t i = 0; i < lead; ++i) p.outer *= dims[i];
  for (size_t i = 0; i < rank; ++i) {
    const size_t d = 3 - rank + i;
    if (!within(dims[lead + i]) || !within(attrs.before[i]) || !within(attrs.after[i])) return std::nullopt;
    p.extent[d] = static_cast<int>(dims[lead + i]);
    p.before[d] = static_cast<int>(attrs.before[i]);
    p.after[d] = static_cast<int>(attrs.after[i]);
  }
  p.inner = dims[dims.size() - 1];
  p.scale = attrs.scale, p.beta = attrs.beta, p.k = attrs.k;
  return p;
}

bool Alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return a.element_type() == b.element_type() && SameShape(a, b);
}

}  // namespace

static ffi::Error LrnImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, LrnAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto problem = ToProblem(attrs, x);
  if (!dtype || !problem || !Alike(x, *y)) return Unsupported("no kernel", "lrn", x, *y);
  return FromCuda(lrn::Forward(*problem, *dtype, x.untyped_data(), y->untyped_data(), stream), "lrn", x);
}

JAXDNN_HANDLER(Lrn, Bind<1, 1>().Attrs<LrnAttrs>());

static ffi::Error LrnJvpImpl(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                             LrnAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto problem = ToProblem(attrs, x);
  if (!dtype || !problem || !Alike(x, t) || !Alike(x, *out)) return Unsupported("no kernel", "lrn_jvp", t, x, *out);
  const cudaError_t status =
      lrn::Tangent(*problem, *dtype, t.untyped_data(), x.untyped_data(), out->untyped_data(), stream);
  return FromCuda(status, "lrn_jvp", x);
}

JAXDNN_HANDLER(LrnJvp, Bind<2, 1>().Attrs<LrnAttrs>());

static ffi::Error LrnVjpImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> dx,
                             ffi::Result<ffi::AnyBuffer> scratch, LrnAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto problem = ToProblem(attrs, x);
  if (!dtype || !problem || !Alike(x, g) || !Alike(x, *dx)) return Unsupported("no kernel", "lrn_vjp", g, x, *dx);
  const cudaError_t status = lrn::Cotangent(*problem, *dtype, g.untyped_data(), x.untyped_data(), dx->untyped_data(),
                                            {scratch->untyped_data(), scratch->size_bytes()}, stream);
  return FromCuda(status, "lrn_vjp", x);
}

JAXDNN_HANDLER(LrnVjp, Bind<2, 2>().Attrs<LrnAttrs>());

static ffi::Error DivisiveImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer m, ffi::Result<ffi::AnyBuffer> y,
                               LrnAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto problem = ToProblem(attrs, x);
  if (!dtype || !problem || !Alike(x, m) || !Alike(x, *y)) return Unsupported("no kernel", "divisive", x, m, *y);
  const cudaError_t status =
      lrn::DivisiveForward(*problem, *dtype, x.untyped_data(), m.untyped_data(), y->untyped_data(), stream);
  return FromCuda(status, "divisive", x);
}

JAXDNN_HANDLER(Divisive, Bind<2, 1>().Attrs<LrnAttrs>());

static ffi::Error DivisiveJvpImpl(cudaStream_t stream, ffi::AnyBuffer tx, ffi::AnyBuffer tm, ffi::AnyBuffer x,
                                  ffi::AnyBuffer m, ffi::Result<ffi::AnyBuffer> out, LrnAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto problem = ToProblem(attrs, x);
  if (!dtype || !problem || !Alike(x, tx) || !Alike(x, tm) || !Alike(x, m) || !Alike(x, *out))
    return Unsupported("no kernel", "divisive_jvp", tx, tm, x, m, *out);
  const cudaError_t status = lrn::DivisiveTangent(*problem, *dtype, tx.untyped_data(), tm.untyped_data(),
                                                  x.untyped_data(), m.untyped_data(), out->untyped_data(), stream);
  return FromCuda(status, "divisive_jvp", x);
}

JAXDNN_HANDLER(DivisiveJvp, Bind<4, 1>().Attrs<LrnAttrs>());

static ffi::Error DivisiveVjpImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x, ffi::AnyBuffer m,
                                  ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dm,
                                  ffi::Result<ffi::AnyBuffer> scratch, LrnAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto problem = ToProblem(attrs, x);
  if (!dtype || !problem || !Alike(x, g) || !Alike(x, m) || !Alike(x, *dx) || !Alike(x, *dm))
    return Unsupported("no kernel", "divisive_vjp", g, x, m, *dx, *dm);
  const cudaError_t status =
      lrn::DivisiveCotangent(*problem, *dtype, g.untyped_data(), x.untyped_data(), m.untyped_data(), dx->untyped_data(),
                             dm->untyped_data(), {scratch->untyped_data(), scratch->size_bytes()}, stream);
  return FromCuda(status, "divisive_vjp", x);
}

JAXDNN_HANDLER(DivisiveVjp, Bind<3, 3>().Attrs<LrnAttrs>());

}  // namespace jaxdnn
