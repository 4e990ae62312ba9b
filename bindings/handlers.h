// Every FFI handler, declared for module.cc.
#pragma once

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdnn {

XLA_FFI_DECLARE_HANDLER_SYMBOL(Activation);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ActivationBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MaxPool);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PoolGather);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PoolScatter);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AvgPool);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AvgPoolBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ConvFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ConvDgrad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ConvWgrad);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Softmax);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SoftmaxBwd);

}  // namespace jaxdnn
