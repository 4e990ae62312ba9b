// What the kernels of few features (few_features.h) take, and how long they do. Plain host declarations.
#pragma once

#include "cuda/conv/conv.h"

namespace jaxdnn::conv {

constexpr int kFewMostFeatures = 8;  // the columns of a product
constexpr int kFewMostWindow = 7;
constexpr int kFewMostFilterBytes = 51 << 10;  // that shared memory has for the filter

// Steps of the product's depth that a pixel's channels are, of 32 bytes, and the filter's bytes as the kernels have it.
// Of a problem as AsForward has it.
inline int64_t FewFeaturesSteps(const Problem& p) { return (p.channels * SizeOf(p.in) + 31) / 32; }
inline int64_t FewFeaturesFilterBytes(const Problem& p) { return p.Taps() * FewFeaturesSteps(p) * 256; }

bool TakesFewFeatures(const Problem& p);
double FewFeaturesCycles(const Problem& p);

}  // namespace jaxdnn::conv
