// FFI handler of dropout.
#include "cuda/dropout/dropout.h"

#include "bindings/ffi.h"
#include "bindings/handlers.h"

namespace jaxdnn {
namespace {

struct DropoutAttrs {
  int64_t threshold;
  double scale;
  int64_t pitch, start_multiple;
};

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::DropoutAttrs, xla::ffi::StructMember<int64_t>("threshold"),
                                      xla::ffi::StructMember<double>("scale"), xla::ffi::StructMember<int64_t>("pitch"),
                                      xla::ffi::StructMember<int64_t>("start_multiple"));

namespace jaxdnn {

// x and y are [..., rows, columns], with a seed for each problem: the key's words, and where the numbers begin if not
// at 0.
static ffi::Error DropoutImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer seeds,
                              ffi::Result<ffi::AnyBuffer> y, DropoutAttrs attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto dims = x.dimensions();
  if (!dtype || dims.size() < 2 || y->element_type() != x.element_type() || !SameShape(x, *y) ||
      seeds.element_type() != ffi::U32 || attrs.threshold < 0 || attrs.threshold > int64_t{0xFFFFFFFF})
    return Unsupported("no kernel", "dropout", x, seeds, *y);
  dropout::Shape shape = {1, dims[dims.size() - 2], dims[dims.size() - 1], attrs.pitch, attrs.start_multiple};
  for (size_t i = 0; i + 2 < dims.size(); ++i) shape.problems *= dims[i];
  const auto seed_dims = seeds.dimensions();
  const int64_t words = seed_dims.size() == 0 ? 0 : seed_dims[seed_dims.size() - 1];
  if (words < dropout::kLeastSeedWords || words > dropout::kSeedWords ||
      static_cast<int64_t>(seeds.element_count()) != shape.problems * words)
    return Unsupported("wrong number of seeds for", "dropout", x, seeds);
  const cudaError_t status =
      dropout::Run(*dtype, shape, x.untyped_data(), {seeds.typed_data<uint32_t>(), static_cast<int>(words)},
                   y->untyped_data(), static_cast<uint32_t>(attrs.threshold), attrs.scale, stream);
  return FromCuda(status, "dropout", x);
}

JAXDNN_HANDLER(Dropout, Bind<2, 1>().Attrs<DropoutAttrs>());

}  // namespace jaxdnn
