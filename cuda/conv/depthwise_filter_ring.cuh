// Filter gradient of depthwise convolution for windows that are compiled for, as FilterKernel computes it, but lines of
// both operands pass through a ring in shared memory (depthwise_line.cuh). For channels that are whole chunks of 16
// bytes. Of a dilated window, the lines and pixels of a warp's piece of work are those of one phase.
// Where channels have several features, pairs are of y's channels (Pairing).
#pragma once

#include "cuda/conv/depthwise_filter.cuh"
#include "cuda/conv/depthwise_line.cuh"

namespace jaxdnn::conv::depthwise {

// A window of kLines x kColumns taps, results kStride lines and columns apart, kStrip of them in a strip.
template <int kLines_, int kColumns_, int kStride_, int kStrip_, int kBlocks_>
struct RingTaps {
  static constexpr int kLines = kLines_, kColumns = kColumns_, kStride = kStride_, kStrip = kStrip_, kBlocks = kBlocks_;
  static constexpr int kHeld = (kLines + kStride - 1) / kStride;    // lines of y that a line of x meets
  static constexpr int kWidth = (kStrip - 1) * kStride + kColumns;  // of the strip of x

  // y's channels are one to one with the results.
  template <class L>
  using OfY = Lanes<typename L::Type>;
  template <class L, bool kEdges>
  using CopyX = LineCopy<L, kWidth, kEdges>;
  template <class L>
  using CopyY = LineCopy<OfY<L>, kStrip>;
  template <class L>
  static constexpr int kStage = kStride * CopyX<L, false>::kBytes + CopyY<L>::kBytes;
  template <class L>
  static constexpr int kStages = RingStages(kStage<L>);

  static bool Takes(const FilterParams& q) {
    return q.at[1].window == kLines && q.at[2].window == kColumns && q.at[1].stride == kStride &&
           q.at[2].stride == kStride && q.x_pixel % 16 == 0;
  }

  // Sets how the work is shared out between warps.
  static void Share(FilterParams& q, const Problem& p) {
    const int pairs = PairsOfWarp(q.channels, CeilDiv(q.at[2].MaxCount(), kStrip)), strips = 32 / pairs;
    q.slabs.width = pairs;
    q.slabs.units = kDepthwiseThreads / pairs;
    q.slabs.count = FastDiv(CeilDiv(q.channels, 2 * pairs));
    q.slabs.thread = FastDiv(pairs);
    q.tasks = q.at[0].window;
    q.planes = FastDiv(q.at[0].out);
    q.strips = FastDiv(CeilDiv(q.at[2].MaxCount(), kStrip * strips));
    const int steps = std::max(q.at[1].MaxCount() + kHeld - 1, 1);
    const int64_t columns =
        p.images * int64_t{q.planes.divisor} * q.strips.divisor * q.phases[1].divisor * q.phases[2].divisor;
    const int64_t places =
        std::max<int64_t>(1, kMultiprocessors * kBlocks / (p.batch * q.tasks * q.slabs.count.divisor));
    const int64_t warps = places * kDepthwiseWarps;
    if (kLines <= 3) {
      // Memory bounds these: work in eight pieces or more for a warp, while they are long enough.
      q.segment = int(std::clamp<int64_t>(steps * columns / (8 * warps), std::min(12, steps), steps));
    } else {
      // Short segments are even work, but each begins with lines that are not multiplied, and with an empty ring.
      constexpr int kStart = 4 + kHeld / 2;
      int64_t least = INT64_MAX;
      for (int count = 1; count == 1 || count * kLines <= steps; ++count) {
        const int segment = int(CeilDiv(steps, count));
        const int64_t cost = CeilDiv(columns * CeilDiv(steps, segment), warps) * (segment + kStart);
        if (cost < least) q.segment = segment, least = cost;
      }
    }
    q.segments = FastDiv(CeilDiv(steps, q.segment));
    q.units = int(columns * q.segments.divisor);
    q.splits = int(std::clamp<int64_t>(CeilDiv(q.units, kDepthwiseWarps), 1, std::min<int64_t>(places, q.splits)));
  }
};

// kEdges: with what is beyond edges, where that is not zeros.
template <class R, class T, class L, bool kEdges>
__global__ void __launch_bounds__(kDepthwiseThreads, R::kBlocks)
    FilterRingKernel(const __grid_constant__ FilterParams p, const char* x, const char* y, float* partial, char* out) {
  using CopyX = typename R::template CopyX<L, kEdges>;
  using CopyY = typename R::template CopyY<L>;
  using Y = typename R::template OfY<L>;
  constexpr int kLines = R::kLines, kColumns = R::kColumns, kStride = R::kStride, kStrip = R::kStrip, kHeld = R::kHeld,
                kStages = R::template kStages<L>, kStage = R::template kStage<L>,
                kY = kStride * CopyX::kBytes;  // where a stage has its line of y
  extern __shared__ __align__(16) char shared[];
  int slab, rest = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
  const int plane_tap = rest % p.tasks;
  rest /= p.tasks;
  const int split = rest % p.splits, problem = rest / p.splits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = p.slabs.width;
  char* const ring = shared + warp * kStages * kStage;
  const uint32_t to_ring = SharedAddress(ring);
  const char* const own_x = ring + L::Within(slab, width, lane, p.features);
  const char* const own_y = ring + kY + Y::Within(slab, width, lane, p.features);

  float2 sums[kLines][kColumns] = {};
#pragma unroll 1
  for (int id = split * kDepthwiseWarps + warp; id < p.units; id += p.splits * kDepthwiseWarps) {
    const auto [strips, segment, plane, place] = Locate(p, id);
    int image, column_phase;
    const int phase = p.phases[2].Div(p.images.Div(place, &image), &column_phase);
    const auto lattice = [&](int d, int phase) {
      return kEdges ? p.at[d].Undilated(p.at[d].axis.offset) : p.at[d].LatticeAt(phase, p.at[d].axis.offset);
    };
    const Lattice down = lattice(1, phase), across = lattice(2, column_phase);
    const int lines = down.count;
    const int column0 = (width == 16 ? 2 : 1) * strips * kStrip,
              columns = across.count - column0 - (lane < width ? 0 : kStrip);
    const int x_plane = p.at[0].axis.Origin(plane) + p.at[0].axis.tap_step * plane_tap;
    const int x_line = down.start, x_lines = down.extent, x_column = across.start + kStride * column0;
    // Steps whose lines of x are zeros add nothing.
    const bool all = kEdges && p.edges[1].mapped;
    const int begin = max(segment * p.segment, all ? 0 : max(-x_line / kStride, 0));
    const int end = min(min((segment + 1) * p.segment, lines + kHeld - 1),
                        all ? INT32_MAX : (x_lines - x_line + kStride - 1) / kStride);
    if (begin >= end || plane >= p.at[0].out || x_plane < 0 || x_plane >= p.at[0].axis.extent) continue;

    const int x_chunk = L::FirstChunk(slab, width, p.features), y_chunk = Y::FirstChunk(slab, width, p.features);
    const CopyX copy_x(x_column, width, kStride * kStrip, kEdges ? p.edges[2] : Edges{across.extent}, x_chunk,
                       p.x_pixel, p.x_step[2]);
    const CopyY copy_y(column0, width, kStrip, Edges{across.count}, y_chunk, p.y_pixel, p.y_step[2]);
    const int64_t whole_image = problem * int64_t{p.images.divisor} + image;
    int ahead = begin - (kHeld - 1);  // the step to copy for next; the first fill `held`
    const char* const x_plane_at = x + whole_image * p.x_image + x_plane * p.x_line[0] + down.element * p.x_line[1] +
                                   int64_t{across.element} * p.x_pixel + x_chunk + copy_x.Offset();
    const char* x_at = x_plane_at + (x_line + kStride * int64_t{ahead}) * p.x_step[1];
    const char* y_at = y + whole_image * p.y_image + plane * p.y_line[0] + down.first * p.y_line[1] +
                       int64_t{across.first} * p.y_pixel + ahead * p.y_step[1] + y_chunk + copy_y.Offset();
    const auto copy_step = [&](int stage) {
#pragma unroll
      for (int a = 0; a < kStride; ++a) {
        int line = x_line + kStride * ahead + a;
        const bool needed = ahead >= begin && ahead < end;
        if constexpr (kEdges) {
          const bool inside = p.edges[1].FindAny(&line) && needed;
          copy_x.Start(to_ring + stage + a * CopyX::kBytes, x_plane_at + line * p.x_step[1], inside);
        } else {
          copy_x.Start(to_ring + stage + a * CopyX::kBytes, x_at, needed && line >= 0 && line < x_lines);
          x_at += p.x_step[1];
        }
      }
      copy_y.Start(to_ring + stage + kY, y_at, ahead >= 0 && ahead < min(end, lines));
      y_at += p.y_step[1];
      ++ahead;
      CommitCopies();
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy_step(i * kStage);

    float2 held[kHeld][kStrip] = {};
    int stage = 0, before = (kStages - 1) * kStage;
#pragma unroll 1
    for (int step = begin - (kHeld - 1); step < end; ++step) {
      WaitForCopies<kStages - 2>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kStrip; ++j) {
#pragma unroll
        for (int h = kHeld - 1; h > 0; --h) held[h][j] = held[h - 1][j];
        held[0][j] = Y::Read(own_y + stage + j * Y::kPixelBytes);
      }
      copy_step(before);
      before = stage;
      if (step >= begin) {
#pragma unroll
        for (int a = 0; a < kStride; ++a) {
          float2 wide[R::kWidth];
#pragma unroll
          for (int i = 0; i < R::kWidth; ++i) wide[i] = L::Read(own_x + stage + a * CopyX::kBytes + i * L::kPixelBytes);
#pragma unroll
          for (int h = 0; h < kHeld; ++h) {
            const int r = a + kStride * h;
            if (r >= kLines || step < h || step - h >= lines) continue;
            if (columns >= kStrip) {
#pragma unroll
              for (int j = 0; j < kStrip; ++j)
#pragma unroll
                for (int s = 0; s < kColumns; ++s) MultiplyAdd(sums[r][s], wide[j * kStride + s], held[h][j]);
            } else {
#pragma unroll
              for (int j = 0; j < kStrip - 1; ++j) {
                if (j >= columns) continue;
#pragma unroll
                for (int s = 0; s < kColumns; ++s) MultiplyAdd(sums[r][s], wide[j * kStride + s], held[h][j]);
              }
            }
          }
        }
      }
      stage = stage == (kStages - 1) * kStage ? 0 : stage + kStage;
    }
    // The ring is filled anew.
    WaitForCopies<0>();
    __syncwarp();
  }
  const auto tap = [&](int r, int s) {
    return ((int64_t{problem} * p.at[0].window + plane_tap) * kLines + r) * kColumns + s;
  };
  WriteSums<T>(p, sums, slab, split, tap, partial, out);
}

// Calls f with the TypeTag of the taps that take the problem, or fails as an invalid value.
template <class T, Pairing kPairing, class F>
cudaError_t VisitRingTaps(const FilterParams& q, F&& f) {
  cudaError_t status = cudaErrorInvalidValue;
  const auto visit = [&](auto... taps) { (void)((decltype(taps)::type::Takes(q) && (status = f(taps), true)) || ...); };
  visit(TypeTag<RingTaps<3, 3, 1, 7, 4>>{}, TypeTag<RingTaps<3, 3, 2, 7, 3>>{});
  if constexpr (kPairing == Pairing::kPlain) {
    visit(TypeTag<RingTaps<5, 5, 2, 5, 3>>{});
    // Of 16-bit floats without dilation depthwise_band_filter.cuh has these.
    if (sizeof(T) == 4 || q.at[1].pitch > 1 || q.at[2].pitch > 1)
      visit(TypeTag<RingTaps<5, 5, 1, 7, 2>>{}, TypeTag<RingTaps<7, 7, 1, 7, 2>>{});
  }
  return status;
}

}  // namespace jaxdnn::conv::depthwise
