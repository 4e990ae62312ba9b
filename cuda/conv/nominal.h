// The device that kernels are chosen and work is shared out for, an H200: constants and no queries, since the choice,
// and the order of sums, must be the same on every machine.
#pragma once

namespace jaxdnn::conv {

constexpr int kMultiprocessors = 132;
constexpr double kBytesPerCycle = 18;   // of device memory, per multiprocessor
constexpr double kCachedBytes = 30e6;   // that are still in the L2 cache when they are read again
constexpr double kLaunchCycles = 4000;  // of one more kernel

}  // namespace jaxdnn::conv
