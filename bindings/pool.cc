// FFI handlers of pooling.
#include "cuda/pool/pool.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

using Span = ffi::Span<const int64_t>;

// The same for every handler; a field that an operator has no use for is neutral.
struct PoolAttrs {
  Span window, stride, low, dilation, counted_low, counted_high;
  double divisor, power;
  bool minimum, indexed;
};

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::PoolAttrs,
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("window"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("stride"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("low"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("dilation"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("counted_low"),
                                      xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("counted_high"),
                                      xla::ffi::StructMember<double>("divisor"),
                                      xla::ffi::StructMember<double>("power"), xla::ffi::StructMember<bool>("minimum"),
                                      xla::ffi::StructMember<bool>("indexed"));

namespace jaxdnn {
namespace {

// The geometry of `in` [leading..., spatial..., channels] and `out`, of as many spatial dimensions as attributes have.
std::optional<pool::Geometry> ToGeometry(const PoolAttrs& attrs, const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  const size_t rank = attrs.window.size(), dims = in.dimensions().size();
  const bool ranks = rank >= 1 && rank <= 3 && attrs.stride.size() == rank && attrs.low.size() == rank &&
                     attrs.dilation.size() == rank && dims > rank && out.dimensions().size() == dims;
  if (!ranks || in.element_type() != out.element_type()) return std::nullopt;
  const auto within = [](int64_t v, int64_t least) { return v >= least && v < int64_t{1} << 30; };
  pool::Geometry g;
  const size_t lead = dims - rank - 1;
  for (size_t i = 0; i < lead; ++i) {
    if (in.dimensions()[i] != out.dimensions()[i]) return std::nullopt;
    g.batch *= in.dimensions()[i];
  }
  for (size_t i = 0; i < rank; ++i) {
    const size_t d = 3 - rank + i;
    const int64_t in_extent = in.dimensions()[lead + i], out_extent = out.dimensions()[lead + i];
    if (!within(in_extent, 0) || !within(out_extent, 0) || !within(attrs.window[i], 1) || !within(attrs.stride[i], 0) ||
        !within(attrs.dilation[i], 1) || !within(attrs.low[i], -in_extent))
      return std::nullopt;
    g.in[d] = static_cast<int>(in_extent);
    g.out[d] = static_cast<int>(out_extent);
    g.window[d] = static_cast<int>(attrs.window[i]);
    g.stride[d] = static_cast<int>(attrs.stride[i]);
    g.low[d] = static_cast<int>(attrs.low[i]);
    g.dilation[d] = static_cast<int>(attrs.dilation[i]);
  }
  const int64_t channels = in.dimensions()[dims - 1];
  if (!within(channels, 0) || out.dimensions()[dims - 1] != channels) return std::nullopt;
  g.channels = static_cast<int>(channels);
  return g;
}

std::optional<pool::Division> ToDivision(const PoolAttrs& attrs) {
  const size_t rank = attrs.window.size();
  if (attrs.counted_low.size() != rank || attrs.counted_high.size() != rank) return std::nullopt;
  pool::Division division;
  division.divisor = attrs.divisor;
  for (size_t i = 0; i < rank; ++i) {
    division.low[3 - rank + i] = static_cast<int>(attrs.counted_low[i]);
    division.high[3 - rank + i] = static_cast<int>(attrs.counted_high[i]);
  }
  return division;
}

std::optional<pool::IndexType> ToIndexType(const ffi::AnyBuffer& index, const ffi::AnyBuffer& y) {
  if (!SameShape(index, y)) return std::nullopt;
  if (index.element_type() == ffi::U8) return pool::IndexType::kUint8;
  if (index.element_type() == ffi::S32) return pool::IndexType::kInt32;
  return std::nullopt;
}

pool::Workspace ToWorkspace(const ffi::AnyBuffer& buffer) { return {buffer.untyped_data(), buffer.size_bytes()}; }

}  // namespace

static ffi::Error MaxPoolImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                              ffi::RemainingRets rest, PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, x, *y);
  const auto dtype = ToDType(x.element_type());
  void* index = nullptr;
  std::optional<pool::IndexType> index_type = pool::IndexType::kUint8;
  if (rest.size() != 1u + attrs.indexed) return Unsupported("wrong number of results", "max_pool", x, *y);
  if (attrs.indexed) {
    auto buffer = rest.get<ffi::AnyBuffer>(0);
    if (!buffer.has_value()) return buffer.error();
    index = (*buffer)->untyped_data();
    index_type = ToIndexType(**buffer, *y);
  }
  auto scratch = rest.get<ffi::AnyBuffer>(attrs.indexed);
  if (!scratch.has_value()) return scratch.error();
  if (!geometry || !dtype || !index_type) return Unsupported("no kernel", "max_pool", x, *y);
  const cudaError_t status = pool::MaxPool(*geometry, *dtype, *index_type, attrs.minimum, x.untyped_data(),
                                           y->untyped_data(), index, ToWorkspace(**scratch), stream);
  return FromCuda(status, "max_pool", x, *y);
}

JAXDNN_HANDLER(MaxPool, Bind<1, 1>().RemainingRets().Attrs<PoolAttrs>());

static ffi::Error PoolGatherImpl(cudaStream_t stream, ffi::AnyBuffer t, ffi::AnyBuffer index,
                                 ffi::Result<ffi::AnyBuffer> y, PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, t, *y);
  const auto dtype = ToDType(t.element_type());
  const auto index_type = ToIndexType(index, *y);
  if (!geometry || !dtype || !index_type) return Unsupported("no kernel", "pool_gather", t, index, *y);
  const cudaError_t status =
      pool::Gather(*geometry, *dtype, *index_type, t.untyped_data(), index.untyped_data(), y->untyped_data(), stream);
  return FromCuda(status, "pool_gather", t, *y);
}

JAXDNN_HANDLER(PoolGather, Bind<2, 1>().Attrs<PoolAttrs>());

static ffi::Error PoolScatterImpl(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer index,
                                  ffi::Result<ffi::AnyBuffer> dx, PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, *dx, dy);
  const auto dtype = ToDType(dy.element_type());
  const auto index_type = ToIndexType(index, dy);
  if (!geometry || !dtype || !index_type) return Unsupported("no kernel", "pool_scatter", dy, index, *dx);
  const cudaError_t status = pool::Scatter(*geometry, *dtype, *index_type, dy.untyped_data(), index.untyped_data(),
                                           dx->untyped_data(), stream);
  return FromCuda(status, "pool_scatter", dy, *dx);
}

JAXDNN_HANDLER(PoolScatter, Bind<2, 1>().Attrs<PoolAttrs>());

static ffi::Error SumPoolImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                              ffi::Result<ffi::AnyBuffer> scratch, PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, x, *y);
  const auto division = ToDivision(attrs);
  const auto dtype = ToDType(x.element_type());
  if (!geometry || !division || !dtype) return Unsupported("no kernel", "sum_pool", x, *y);
  const cudaError_t status =
      pool::SumPool(*geometry, *dtype, *division, x.untyped_data(), y->untyped_data(), ToWorkspace(*scratch), stream);
  return FromCuda(status, "sum_pool", x, *y);
}

JAXDNN_HANDLER(SumPool, Bind<1, 2>().Attrs<PoolAttrs>());

static ffi::Error SumPoolBwdImpl(cudaStream_t stream, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                                 PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, *dx, dy);
  const auto division = ToDivision(attrs);
  const auto dtype = ToDType(dy.element_type());
  if (!geometry || !division || !dtype) return Unsupported("no kernel", "sum_pool_bwd", dy, *dx);
  const cudaError_t status =
      pool::SumPoolBwd(*geometry, *dtype, *division, dy.untyped_data(), dx->untyped_data(), stream);
  return FromCuda(status, "sum_pool_bwd", dy, *dx);
}

JAXDNN_HANDLER(SumPoolBwd, Bind<1, 1>().Attrs<PoolAttrs>());

static ffi::Error LpPoolImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                             ffi::Result<ffi::AnyBuffer> scratch, PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, x, *y);
  const auto dtype = ToDType(x.element_type());
  if (!geometry || !dtype || !(attrs.power > 0)) return Unsupported("no kernel", "lp_pool", x, *y);
  const cudaError_t status =
      pool::LpPool(*geometry, *dtype, attrs.power, x.untyped_data(), y->untyped_data(), ToWorkspace(*scratch), stream);
  return FromCuda(status, "lp_pool", x, *y);
}

JAXDNN_HANDLER(LpPool, Bind<1, 2>().Attrs<PoolAttrs>());

static ffi::Error LpPoolBwdImpl(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::AnyBuffer y,
                                ffi::Result<ffi::AnyBuffer> dx, PoolAttrs attrs) {
  const auto geometry = ToGeometry(attrs, x, y);
  const auto dtype = ToDType(dy.element_type());
  const bool alike = SameShape(dy, y) && SameShape(*dx, x) && dy.element_type() == x.element_type() &&
                     dx->element_type() == x.element_type();
  if (!geometry || !dtype || !alike || !(attrs.power > 0)) return Unsupported("no kernel", "lp_pool_bwd", dy, x, *dx);
  const cudaError_t status = pool::LpPoolBwd(*geometry, *dtype, attrs.power, dy.untyped_data(), x.untyped_data(),
                                             y.untyped_data(), dx->untyped_data(), stream);
  return FromCuda(status, "lp_pool_bwd", dy, x, *dx);
}

JAXDNN_HANDLER(LpPoolBwd, Bind<3, 1>().Attrs<PoolAttrs>());

}  // namespace jaxdnn
