// Convolution: what to compute (Problem), how (Config), and the launcher. Plain host declarations.
//
//   y[n, t, k] = sum over r, c of x[n, i, c] w[r, c, k]   where i * lhs_dilation = t * stride - pad + r * rhs_dilation
//
// Layouts: x [batch, images, D, H, W, groups * channels], w [batch, *window, channels, groups * features],
// y [batch, images, *out, groups * features]. Lower ranks have leading extents of 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "cuda/activation/kind.h"
#include "cuda/common/dtype.h"

struct CUstream_st;

namespace jaxdnn::conv {

constexpr int kRank = 3;

enum class Direction { kForward, kDataGradient, kFilterGradient };

// What is read beyond the input's first and last element of a dimension: zeros; the elements beside the edge, mirrored;
// the edge; or the other end.
enum class PadMode { kZeros, kReflect, kReplicate, kCircular };

struct Problem {
  Direction direction;
  DType in;        // of both operands, but that the two types of 8-bit floats may be mixed
  DType filter;    // of the filter
  DType out;       // of the result: `in`, or the type it is summed in; of 8-bit floats and scaled integers any float
  int products;    // of TF32 for one of floats: 1, 3 for nearly all of float32's bits, or 0 for float32 arithmetic
  int64_t batch;   // independent problems
  int64_t images;  // per problem
  int64_t groups;
  int64_t channels, features;  // input and output channels of one group
  int64_t x[kRank], window[kRank], y[kRank];
  int64_t stride[kRank], pad[kRank], lhs_dilation[kRank], rhs_dilation[kRank];
  bool exchanged;  // see Exchanged; the filter that is the result of a filter gradient stays as it is
  PadMode mode[kRank];

  bool Tripled() const { return in == DType::kF32 && products == 3; }
  int64_t XPixels() const { return x[0] * x[1] * x[2]; }
  int64_t YPixels() const { return y[0] * y[1] * y[2]; }
  // Of a group, in the operand whose pixels the windows gather.
  int64_t DepthChannels() const { return direction == Direction::kDataGradient ? features : channels; }
  int64_t Taps() const { return window[0] * window[1] * window[2]; }
  int64_t FilterSize() const { return batch * Taps() * channels * groups * features; }
};

// Where windows lie side by side, as wide as their stride and without padding, the same arrays seen as other extents,
// of a problem that has less stride, or none. Other problems as they are.
Problem Folded(const Problem& p);

// The problem that pairs the same elements of x and y, which have changed places, with strides and dilations of x, at
// mirrored taps; the filter's channels are exchanged.
Problem Exchanged(const Problem& p);

// A data gradient as the forward convolution of y that it is, with x and y exchanged; other problems as they are.
Problem AsForward(const Problem& p);

// Block tiles (rows x columns of the implicit matrix product) that kernels are compiled for: on the CUDA cores, or with
// mma.sync or Hopper's wgmma on the tensor cores. Depthwise convolution is no product of matrices and has no tiles;
// those of few channels or features, of small groups, of unaligned channels, of planes and direct ones depend on the
// problem.
enum class Unit { kSimt, kMma, kWgmma, kDepthwise, kFewChannels, kGrouped, kFewFeatures, kUnaligned, kPlanes, kDirect };
constexpr const char* kAlgorithms[] = {
    "implicit_gemm", "implicit_gemm_mma", "implicit_gemm_wgmma", "depthwise", "few_channels",
    "grouped",       "few_features",      "unaligned",           "planes",    "direct"};  // by Unit
enum class Tile {
  kSimt128x64,
  kSimt64x64,
  kSimt128x32,
  kSimt64x32,
  kSimt128x8,
  kSimt256x8,
  kSimt256x4,
  kSimtRuns,
  kSimtPatch,
  kMma128x128,
  kMma128x64,
  kMma64x64,
  kMma128x32,
  kWgmma128x128,
  kWgmma256x64,
  kWgmma128x64,
  kWgmma64x128,
  kWgmma64x64,
  kWgmma128x160,
  kWgmma128x128Copied,
  kWgmma96Across,
  kWgmma160Across,
  kWgmma192Across,
  kWgmma208Across,
  kWgmma128x256,
  kWgmma256x128,
  kWgmma192x128,
  kWgmma192x160,
  kWgmma256x160,
  kWgmma128x128Pairs,
  kWgmma256x64Pairs,
  kDepthwise,
  kFewChannels,
  kFewChannelsWgmma,
  kGrouped,
  kFewFeatures,
  kFewFeaturesWgmma,
  kUnaligned,
  kPlanes,
  kDirect,
};
struct TileShape {
  Tile tile;
  const char* name;
  Unit unit;
  int rows, columns, threads;
};
constexpr TileShape kTiles[] = {
    {Tile::kSimt128x64, "simt 128x64", Unit::kSimt, 128, 64, 256},
    {Tile::kSimt64x64, "simt 64x64", Unit::kSimt, 64, 64, 128},
    {Tile::kSimt128x32, "simt 128x32", Unit::kSimt, 128, 32, 128},
    {Tile::kSimt64x32, "simt 64x32", Unit::kSimt, 64, 32, 128},
    {Tile::kSimt128x8, "simt 128x8", Unit::kSimt, 128, 8, 128},
    {Tile::kSimt256x8, "simt 256x8", Unit::kSimt, 256, 8, 128},
    {Tile::kSimt256x4, "simt 256x4", Unit::kSimt, 256, 4, 128},
    {Tile::kSimtRuns, "simt runs", Unit::kSimt, 1, 4, 128},
    {Tile::kSimtPatch, "simt patch", Unit::kSimt, 1, 8, 128},
    {Tile::kMma128x128, "mma 128x128", Unit::kMma, 128, 128, 128},
    {Tile::kMma128x64, "mma 128x64", Unit::kMma, 128, 64, 128},
    {Tile::kMma64x64, "mma 64x64", Unit::kMma, 64, 64, 128},
    {Tile::kMma128x32, "mma 128x32", Unit::kMma, 128, 32, 128},
    {Tile::kWgmma128x128, "wgmma 128x128", Unit::kWgmma, 128, 128, 384},
    {Tile::kWgmma256x64, "wgmma 256x64", Unit::kWgmma, 256, 64, 384},
    {Tile::kWgmma128x64, "wgmma 128x64", Unit::kWgmma, 128, 64, 384},
    {Tile::kWgmma64x128, "wgmma 64x128", Unit::kWgmma, 64, 128, 384},
    {Tile::kWgmma64x64, "wgmma 64x64", Unit::kWgmma, 64, 64, 384},
    {Tile::kWgmma128x160, "wgmma 128x160", Unit::kWgmma, 128, 160, 384},
    {Tile::kWgmma128x128Copied, "wgmma 128x128 copied", Unit::kWgmma, 128, 128, 384},
    {Tile::kWgmma96Across, "wgmma 96x128 across", Unit::kWgmma, 96, 128, 384},
    {Tile::kWgmma160Across, "wgmma 160x128 across", Unit::kWgmma, 160, 128, 384},
    {Tile::kWgmma192Across, "wgmma 192x128 across", Unit::kWgmma, 192, 128, 384},
    {Tile::kWgmma208Across, "wgmma 208x128 across", Unit::kWgmma, 208, 128, 384},
    {Tile::kWgmma128x256, "wgmma 128x256", Unit::kWgmma, 128, 256, 384},
    {Tile::kWgmma256x128, "wgmma 256x128", Unit::kWgmma, 256, 128, 384},
    {Tile::kWgmma192x128, "wgmma 192x128", Unit::kWgmma, 192, 128, 384},
    {Tile::kWgmma192x160, "wgmma 192x160", Unit::kWgmma, 192, 160, 384},
    {Tile::kWgmma256x160, "wgmma 256x160", Unit::kWgmma, 256, 160, 384},
    {Tile::kWgmma128x128Pairs, "wgmma 128x128 pairs", Unit::kWgmma, 128, 128, 384},
    {Tile::kWgmma256x64Pairs, "wgmma 256x64 pairs", Unit::kWgmma, 256, 64, 384},
    {Tile::kDepthwise, "depthwise", Unit::kDepthwise, 1, 1, 128},
    {Tile::kFewChannels, "few_channels", Unit::kFewChannels, 1, 1, 128},
    {Tile::kFewChannelsWgmma, "few_channels wgmma", Unit::kFewChannels, 1, 1, 384},
    {Tile::kGrouped, "grouped", Unit::kGrouped, 1, 1, 128},
    {Tile::kFewFeatures, "few_features", Unit::kFewFeatures, 1, 1, 128},
    {Tile::kFewFeaturesWgmma, "few_features wgmma", Unit::kFewFeatures, 1, 1, 288},
    {Tile::kUnaligned, "unaligned", Unit::kUnaligned, 1, 1, 512},
    {Tile::kPlanes, "planes", Unit::kPlanes, 1, 1, 384},
    {Tile::kDirect, "direct", Unit::kDirect, 1, 1, 288},
};

// Whether rows are wgmma's columns (wgmma_across.cuh).
constexpr bool IsAcross(Tile t) { return t >= Tile::kWgmma96Across && t <= Tile::kWgmma208Across; }

// Whether two pixels are taken for one (pairs.h).
constexpr bool IsOfPairs(Tile t) { return t == Tile::kWgmma128x128Pairs || t == Tile::kWgmma256x64Pairs; }

// Depth of a tile step: how many terms of the reduction are in shared memory at once.
constexpr int MmaDepth(Direction direction, int size) {
  return (direction == Direction::kFilterGradient ? 128 : 64) / size;
}
constexpr int WgmmaDepth(DType in) { return 128 / int(SizeOf(in)); }
constexpr int SimtDepth(DType in) { return in == DType::kF64 ? 8 : 16; }

// The most taps along a dimension that the tensor-core kernels take.
constexpr int64_t kMmaMaxWindow = 511;

// Positions in an image, and terms of a filter, are fewer.
constexpr int64_t kIndexLimit = int64_t{1} << 30;

// How blocks of float32 on the CUDA cores share out a product (gemm_plan.h).
struct FloatBlocks {
  int parts = 1;             // of a block, which share its steps
  bool by_position = false;  // whether a tile's rows are the same positions of many images
  int64_t rest = 0;          // of the columns, the last ones, which a second launch computes
  Tile rest_tile = Tile::kSimt256x4;
};

struct Config {
  Tile tile;
  int64_t splits;           // parts of the reduction, at most, that are summed in order at the end when more than 1
  int64_t cluster;          // neighbouring blocks that share the reduction of a tile
  int64_t blocks;           // of Hopper's filter gradient, which share its tiles (wgmma_plan.h)
  int64_t workspace_bytes;  // for the slices' partial sums, or a transposed operand
  double cycles;            // modelled time, for comparing configurations
  bool exchanged;           // whether the kernel computes a filter gradient with x and y exchanged
  int64_t frame_slices;     // further ones, of what reads beyond the edges (frame.h)
  bool patched;             // whether the kernel does that itself (wgmma_patch.cuh, depthwise_ring.cuh, unaligned.cuh)
  int edges;                // dimensions, by bits, whose edges are computed apart, without taps that meet padding alone
  bool copies;              // whether Hopper's filter gradient of floats has y transposed by a kernel before it
  bool unaligned;           // whether depthwise convolution copies lines as they lie in memory, on Hopper
  FloatBlocks floats;       // of float32 on the CUDA cores
};

// The matrix product that a problem is: per problem of the batch and group, rows x columns sums of `depth` terms.
struct Gemm {
  int64_t problems, rows, columns, depth;
};
Gemm GemmOf(const Problem& p);

// In the data gradient of a strided convolution, and forward over a dilated input, most taps meet nothing at a given
// output position. Positions that agree modulo `period` meet the same ones: one in every `tap_period`, or none.
struct Phases {
  int64_t period[kRank], tap_period[kRank];
};
Phases PhasesOf(const Problem& p);

// What the mma.sync kernels make of few channels, so that they fill a tile. `groups` neighbouring groups are computed
// as one, whose filter is zero off its diagonal. And where a strided data gradient, or a forward convolution over a
// dilated input, has few columns, those of all phases lie side by side: the result is `fold` times smaller in a
// dimension, and a window of `taps` meets every position of it. Position o reads at tap v the operand's index o +
// tap_step * v + offset, which for phase a is the tap v * fold + first_tap - tap_step * a of the filter, if there is
// one.
struct Dense {
  int64_t groups = 1;
  int64_t fold[kRank] = {1, 1, 1}, taps[kRank] = {}, offset[kRank] = {}, first_tap[kRank] = {};

  bool Folds() const { return fold[0] * fold[1] * fold[2] > 1; }
};
Dense DenseOf(const Problem& p);

// The kernel for a problem: a closed-form function of the problem and of whether the device has Hopper's instructions
// (compute capability 9.0), so that equal shapes give equal bits on all devices of a kind. Empty where no kernel takes
// the problem, or the algorithm or tile that is named does not, within `workspace_limit` bytes.
// A tile of Hopper's may be named with kEdgesSuffix: then an image's edges are computed apart (Config::edges).
constexpr int64_t kWorkspaceLimit = int64_t{256} << 20;
constexpr std::string_view kEdgesSuffix = " edges";
std::optional<Config> Choose(const Problem& p, bool hopper, std::string_view algorithm = "",
                             int64_t workspace_limit = kWorkspaceLimit);

// Whether a filter gradient's sums, as floats or doubles, go to the workspace, and from there to the result.
inline bool UsesWorkspace(const Problem& p, int64_t splits) { return splits > 1 || p.exchanged; }

// What becomes of a forward convolution's sums before they are rounded: activation(scale sum + bias + residual).
struct Epilogue {
  const void* bias = nullptr;      // [batch, groups * features], of the result's type, or null
  const void* residual = nullptr;  // like the result, or null
  activation::Activation activation = {activation::Kind::kIdentity};
  const float* scale = nullptr;  // [batch, groups * features], or null; of 8-bit operands' sums alone
};

// `lhs`, `rhs` and `out` are x, w, y (forward); y, w, x (data gradient); x, y, w (filter gradient). Returns a
// cudaError_t.
int Launch(const Problem& p, const Config& config, const void* lhs, const void* rhs, void* out, void* workspace,
           const Epilogue& epilogue, CUstream_st* stream);

}  // namespace jaxdnn::conv
