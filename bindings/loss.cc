// FFI handlers of log-sum-exp and the scores that softmax losses are made of. Operands are [..., n, inner].
#include "bindings/ffi.h"
#include "bindings/handlers.h"
#include "bindings/softmax_problem.h"
#include "cuda/loss/log_partition.h"

namespace jaxdnn {
namespace {

struct LogPartitionAttrs {
  std::string_view targets, smooth;
};

bool HasElements(const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count) {
  return buffer.element_type() == type && static_cast<int64_t>(buffer.element_count()) == count;
}

ffi::DataType ToAccumulator(ffi::DataType type) { return type == ffi::F64 ? ffi::F64 : ffi::F32; }

// The operands after x, or after those that it comes with: what `targets` names, then weights of the classes.
std::optional<loss::Problem> ToProblem(const ffi::AnyBuffer& x, const ffi::RemainingArgs& rest,
                                       const LogPartitionAttrs& attrs) {
  const auto dtype = ToDType(x.element_type());
  const auto shape = ToSoftmaxShape(x);
  if (!dtype || !shape) return std::nullopt;
  loss::Problem p = {*dtype, *shape, {}};
  size_t next = 0;
  if (attrs.targets != "none") {
    const auto given = rest.get<ffi::AnyBuffer>(next++);
    if (!given.has_value()) return std::nullopt;
    if (attrs.targets == "mask") {
      const auto mask = ToMask(x, *given);
      if (!mask) return std::nullopt;
      p.targets.mask = *mask;
    } else if (attrs.targets == "labels" && HasElements(*given, ffi::S32, shape->outer * shape->inner)) {
      p.targets.labels = given->typed_data<int32_t>();
    } else if (attrs.targets == "soft" && given->element_type() == x.element_type() && SameShape(*given, x)) {
      p.targets.q = given->untyped_data();
    } else {
      return std::nullopt;
    }
  }
  p.targets.smooth = attrs.smooth != "none";
  if (attrs.smooth == "weighted") {
    const auto weights = rest.get<ffi::AnyBuffer>(next++);
    if (!weights.has_value() || !HasElements(*weights, ToAccumulator(x.element_type()), shape->n)) return std::nullopt;
    p.targets.weights = weights->untyped_data();
  }
  return next == rest.size() ? std::optional(p) : std::nullopt;
}

// Whether m and sums are those of the problem.
bool AreRows(const loss::Problem& p, const ffi::AnyBuffer& x, const ffi::AnyBuffer& m, const ffi::AnyBuffer& sums) {
  const ffi::DataType type = ToAccumulator(x.element_type());
  const int64_t rows = p.shape.outer * p.shape.inner;
  return HasElements(m, type, rows) && HasElements(sums, type, rows * p.targets.Sums());
}

}  // namespace
}  // namespace jaxdnn

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxdnn::LogPartitionAttrs, xla::ffi::StructMember<std::string_view>("targets"),
                                      xla::ffi::StructMember<std::string_view>("smooth"));

namespace jaxdnn {

// The results after m and sums are m + l, where there are no scores, and the workspace.
static ffi::Error LogPartitionImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                                   ffi::Result<ffi::AnyBuffer> m, ffi::Result<ffi::AnyBuffer> sums,
                                   ffi::RemainingRets others, LogPartitionAttrs attrs) {
  const auto problem = ToProblem(x, rest, attrs);
  if (!problem || !AreRows(*problem, x, *m, *sums)) return Unsupported("no kernel", "log_partition", x, *m, *sums);
  const bool alone = problem->targets.Sums() == 1;
  void* total = nullptr;
  if (alone) {
    auto given = others.get<ffi::AnyBuffer>(0);
    if (!given.has_value() || !HasElements(**given, x.element_type(), problem->shape.outer * problem->shape.inner))
      return Unsupported("no kernel", "log_partition", x, *m, *sums);
    total = (*given)->untyped_data();
  }
  auto workspace = others.get<ffi::AnyBuffer>(alone);
  if (!workspace.has_value() || others.size() != (alone ? 2 : 1) ||
      static_cast<int64_t>((*workspace)->size_bytes()) < loss::WorkspaceBytes(problem->dtype, problem->shape))
    return Unsupported("no kernel", "log_partition", x, *m, *sums);
  const cudaError_t status = loss::LogPartition(*problem, x.untyped_data(), m->untyped_data(), sums->untyped_data(),
                                                total, (*workspace)->untyped_data(), stream);
  return FromCuda(status, "log_partition", x);
}

JAXDNN_HANDLER(LogPartition, Bind<1, 2, true>().RemainingRets().Attrs<LogPartitionAttrs>());

static ffi::Error LogPartitionBwdImpl(cudaStream_t stream, ffi::AnyBuffer g, ffi::AnyBuffer x, ffi::AnyBuffer m,
                                      ffi::AnyBuffer sums, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> dx,
                                      LogPartitionAttrs attrs) {
  const auto problem = ToProblem(x, rest, attrs);
  const bool narrow = g.element_type() == x.element_type();
  if (!problem || !AreRows(*problem, x, m, sums) || !SameShape(g, sums) ||
      !(narrow || g.element_type() == sums.element_type()) || dx->element_type() != x.element_type() ||
      !SameShape(x, *dx))
    return Unsupported("no kernel", "log_partition_bwd", g, x, m, sums, *dx);
  const cudaError_t status = loss::LogPartitionBwd(*problem, g.untyped_data(), narrow, x.untyped_data(),
                                                   m.untyped_data(), sums.untyped_data(), dx->untyped_data(), stream);
  return FromCuda(status, "log_partition_bwd", x);
}

JAXDNN_HANDLER(LogPartitionBwd, Bind<4, 1, true>().Attrs<LogPartitionAttrs>());

}  // namespace jaxdnn
