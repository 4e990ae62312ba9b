// Padding with something else than zeros. Such a convolution is that with zeros, and a frame: the few results that meet
// an element beyond an edge.
//
// Any kernel computes the one with zeros. Forward and in the data gradient another kernel then stores the frame's
// results again, whole: it maps each position beyond an edge to the element that is read there, and the other way about
// adds up all positions that an element stands for. In the filter gradient it leaves the terms beyond the edges in the
// workspace, where the rest is added to them.
#pragma once

#include <functional>

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

// How far windows reach before the first element and beyond the last, in a dimension that has no zeros there.
struct Reach {
  int64_t low, high;
};
Reach ReachOf(const Problem& p, int d);

// The elements that stand for positions as far before the first, and beyond the last: none where last < first.
struct Range {
  int64_t first, last;
};
struct AliasedElements {
  Range low, high;
};
AliasedElements AliasedBy(const Problem& p, int d);

bool HasFrame(const Problem& p);

// Whether there are kernels for it that, wherever windows read, find one element of the operand, or zeros. In data
// gradients that is so of circular convolutions without strides alone.
bool FindsElements(const Problem& p);

// Neighbouring pixels beyond an edge that Hopper's kernels load at once (wgmma_patch.cuh).
constexpr int kRun = 8;

// The problem with zeros; its filter gradient as the sums are held.
Problem WithZeros(const Problem& p);

// Choose, for a problem without a frame: the best of what `complete` makes of each configuration.
using Completion = std::function<Config(const Config&)>;
std::optional<Config> ChooseCompleted(const Problem& p, bool hopper, std::string_view algorithm,
                                      int64_t workspace_limit, const Completion& complete);
// Choose, for a problem that has a frame: any kernel for the problem with zeros, where there is one for the frame too.
std::optional<Config> ChooseWithFrame(const Problem& p, bool hopper, std::string_view algorithm,
                                      int64_t workspace_limit);

// The frame's share of the results.
double FrameShare(const Problem& p);

// Whether the tensor cores compute the frame. Of small groups they would multiply little but zeros.
bool OnTensorCores(const Problem& p);

// Whether the kernel with wgmma takes it, on Hopper, from aligned memory and without an epilogue: one group whose
// channels are whole 16 bytes; floats in the data gradient alone, since forward their filter is MN-major; and not
// what is replicated far. And the columns of its tiles, fewer where large tiles would not fill the device.
constexpr int kFrameMostReadings = 32;  // positions that a result stands for
bool TakesFrameWgmma(const Problem& p);
int FrameColumns(const Problem& p);

// Slices of the frame's terms in the filter gradient; and what these, and the sums of the problem with zeros before
// them, take of the workspace. The rest is for that problem.
int64_t FrameSlices(const Problem& p);
int64_t FrameBytes(const Problem& p);

// Stores the results of the frame. As Launch, these return a cudaError_t.
int LaunchFrameMma(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                   CUstream_st* stream);
// cudaErrorInvalidValue where it does not take the problem.
int LaunchFrameWgmma(const Problem& p, const void* operand, const void* filter, void* out, CUstream_st* stream);
int LaunchFrameSimt(const Problem& p, const void* operand, const void* filter, void* out, const Epilogue& epilogue,
                    CUstream_st* stream);

// Leaves `slices` filters of sums of the frame's terms in `partial`.
int LaunchFrameFilterMma(const Problem& p, int64_t slices, const void* x, const void* y, void* partial,
                         CUstream_st* stream);
int LaunchFrameFilterSimt(const Problem& p, int64_t slices, const void* x, const void* y, void* partial,
                          CUstream_st* stream);

}  // namespace jaxdnn::conv
