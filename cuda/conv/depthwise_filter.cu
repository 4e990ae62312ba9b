// Filter gradient of depthwise convolution: kLines x kColumns taps at a time, whose sums a thread holds in registers
// while it goes down lines of its strip. Each line of x is loaded once and meets the last lines of y, which stay in
// registers. Threads of a block that have the same channels add up their sums, and blocks leave theirs behind for a
// second kernel, which adds them in order. Products of strips and of whole images have kernels of their own.
//
// A window of one line is folded: with results Q (strip + line) and taps Q r + s, strips of Q results that follow one
// another are lines too, and the taps a window of lines.
#include "cuda/common/column_sum.cuh"
#include "cuda/conv/depthwise.h"
#include "cuda/conv/depthwise_band_filter.cuh"
#include "cuda/conv/depthwise_filter_ring.cuh"
#include "cuda/conv/depthwise_image_filter.cuh"
#include "cuda/conv/depthwise_volume_filter.cuh"
#include "cuda/conv/depthwise_wide_filter.cuh"

namespace jaxdnn::conv {
namespace depthwise {
namespace {

template <class T, bool kPaired, bool kFolded, int kLines, int kColumns, int kStride, int kStrip, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    FilterKernel(const __grid_constant__ FilterParams p, const char* x, const char* y, float* partial, char* out) {
  constexpr int kHeld = (kLines + kStride - 1) / kStride;    // lines of y that a line of x meets
  constexpr int kWidth = (kStrip - 1) * kStride + kColumns;  // of the strip of x
  static_assert(!kFolded || (kStride == 1 && (kLines == 1 || kColumns == kStrip)));
  int slab, lane, rest = p.slabs.count.Div(static_cast<int>(blockIdx.x), &slab);
  const int task = rest % p.tasks;
  rest /= p.tasks;
  const int split = rest % p.splits, problem = rest / p.splits;
  const int unit = p.slabs.thread.Div(static_cast<int>(threadIdx.x), &lane), k = 2 * (slab * p.slabs.width + lane);
  const bool there = unit < p.slabs.units && k < p.channels, both = k + 1 < p.channels;
  const int x_channel = p.features.Div(k), x_second = both ? p.features.Div(k + 1) - x_channel : 0;
  // The taps: first + apart * (0, 1, ...) of each dimension.
  int line_residue, column_residue;
  const int column_group = p.column_residues.Div(task % p.column_tasks, &column_residue);
  const int line_group = p.line_residues.Div(task / p.column_tasks % p.line_tasks, &line_residue);
  const int plane_tap = task / p.column_tasks / p.line_tasks;
  const int lines_apart = p.line_residues.divisor, columns_apart = p.column_residues.divisor;
  const int first_line = line_residue + lines_apart * kLines * line_group;
  const int first_column = column_residue + columns_apart * kColumns * (kFolded ? kLines : 1) * column_group;
  const int line_pitch = p.at[1].pitch * lines_apart, column_pitch = p.at[2].pitch * columns_apart;
  const int x_step = column_pitch * p.x_pixel, y_step = p.at[2].period * p.y_pixel;

  float2 sums[kLines][kColumns] = {};
  for (int64_t id = int64_t{split} * p.slabs.units + unit; there && id < p.units;
       id += int64_t{p.splits} * p.slabs.units) {
    int strip, segment, row, plane, image, phase[kRank];
    int which = p.strips.Div(static_cast<int>(id), &strip);
    which = p.segments.Div(which, &segment);
    which = p.rows.Div(which, &row);
    which = p.planes.Div(which, &plane);
    which = p.images.Div(which, &image);
    which = p.phases[2].Div(which, &phase[2]);
    phase[0] = p.phases[1].Div(which, &phase[1]);
    const int columns = (p.at[2].out - phase[2] + p.at[2].period - 1) / p.at[2].period - strip * kStrip;
    const int lines =
        kFolded ? (columns + kStrip - 1) / kStrip : (p.at[1].out - phase[1] + p.at[1].period - 1) / p.at[1].period;
    const int y_plane = phase[0] + p.at[0].period * plane;
    const int x_plane = p.at[0].axis.Origin(y_plane) + p.at[0].axis.tap_step * plane_tap;
    if (y_plane >= p.at[0].out || x_plane < 0 || x_plane >= p.at[0].axis.extent || columns <= 0) continue;

    const int64_t whole_image = problem * int64_t{p.images.divisor} + image;
    const int x_column =
        p.at[2].axis.Origin(phase[2]) + p.at[2].pitch * (first_column + p.at[2].stride * strip * kStrip);
    const int y_column = phase[2] + p.at[2].period * strip * kStrip;
    const char* x_at =
        x + whole_image * p.x_image + x_plane * p.x_line[0] + int64_t{x_column} * p.x_pixel + x_channel * sizeof(T);
    const char* y_at =
        y + whole_image * p.y_image + y_plane * p.y_line[0] + int64_t{y_column} * p.y_pixel + k * sizeof(T);
    const int y_row = kFolded ? row : phase[1];
    const int x_row = p.at[1].axis.Origin(y_row) + p.at[1].pitch * first_line;
    const int fold = column_pitch * kStrip;
    Keep(x_at);
    Keep(y_at);
    bool there;  // the line of x that was loaded last
    const auto load_x = [&](int number, Pair<T>(&to)[kWidth]) {
      const int line = kFolded ? x_row : x_row + line_pitch * number, distance = kFolded ? fold * number : 0;
      there = static_cast<unsigned>(line) < static_cast<unsigned>(p.at[1].axis.extent);
      LoadStrip<T, kPaired>(x_at + line * p.x_line[1] + int64_t{distance} * p.x_pixel, x_step, x_column + distance,
                            column_pitch, there ? p.at[2].axis.extent : 0, x_second, to);
    };
    const auto load_y = [&](int number, Pair<T>(&to)[kStrip]) {
      const int line = kFolded ? y_row : y_row + p.at[1].period * number, distance = kFolded ? kStrip * number : 0;
      const bool valid = number >= 0 && number < lines;
      LoadStrip<T, kPaired>(y_at + line * p.y_line[1] + int64_t{distance} * y_step, y_step, distance, 1,
                            valid ? columns : 0, both, to);
    };

    const int begin = segment * p.segment, end = min(begin + p.segment, lines + kHeld - 1);
    float2 held[kHeld][kStrip];
    Pair<T> next_x[kWidth], next_y[kStrip], before[kHeld][kStrip];
    // All loads before the first use.
#pragma unroll
    for (int h = 0; h < kHeld - 1; ++h) load_y(begin - 1 - h, before[h]);
    load_y(begin, next_y);
    load_x(kStride * begin, next_x);
#pragma unroll
    for (int h = 0; h < kHeld - 1; ++h) WidenStrip<T>(before[h], p.is_half, held[h]);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
#pragma unroll
      for (int j = 0; j < kStrip; ++j)
#pragma unroll
        for (int h = kHeld - 1; h > 0; --h) held[h][j] = held[h - 1][j];
      WidenStrip<T>(next_y, p.is_half, held[0]);
      load_y(step + 1, next_y);
#pragma unroll
      for (int a = 0; a < kStride; ++a) {
        float2 wide[kWidth];
        WidenStrip<T>(next_x, p.is_half, wide);
#pragma unroll
        for (float2& each : wide) Keep(each);
        const bool any = there;
        load_x(kStride * step + a + 1, next_x);
        if (!any) continue;
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
          const int r = a + kStride * h;
          const int count = kFolded ? columns - kStrip * (step - h) : columns;  // of results in the line
          if (r >= kLines || step < h || step - h >= lines) continue;
          if (count >= kStrip) {
#pragma unroll
            for (int j = 0; j < kStrip; ++j)
#pragma unroll
              for (int s = 0; s < kColumns; ++s) MultiplyAdd(sums[r][s], wide[j * kStride + s], held[h][j]);
          } else {
#pragma unroll
            for (int j = 0; j < kStrip - 1; ++j) {
              if (j >= count) continue;
#pragma unroll
              for (int s = 0; s < kColumns; ++s) MultiplyAdd(sums[r][s], wide[j * kStride + s], held[h][j]);
            }
          }
        }
      }
    }
  }

  const auto tap = [&](int r, int s) {
    const int line = first_line + (kFolded ? 0 : lines_apart * r);
    const int column = first_column + columns_apart * (s + (kFolded ? kColumns * r : 0));
    if (line >= p.at[1].window || column >= p.at[2].window) return int64_t{-1};
    return ((int64_t{problem} * p.at[0].window + plane_tap) * p.at[1].window + line) * p.at[2].window + column;
  };
  WriteSums<T>(p, sums, slab, split, tap, partial, out);
}

// What a kernel is compiled for.
template <int kLines_, int kColumns_, int kStride_, int kStrip_, int kBlocks_, bool kPaired_ = true,
          bool kFolded_ = false>
struct Taps {
  static constexpr bool kPaired = kPaired_, kFolded = kFolded_;
  static constexpr int kLines = kLines_, kColumns = kColumns_, kStride = kStride_, kStrip = kStrip_, kBlocks = kBlocks_;

  static bool Takes(const FilterParams& q) {
    return q.at[1].window == kLines && q.at[2].window == kColumns && q.at[1].stride == kStride &&
           q.at[2].stride == kStride;
  }

  // Sets how the work is shared out.
  static void Share(FilterParams& q, const Problem& p) {
    const auto tasks = [](const PhasedAxis& at, int taps, FastDiv* residues) {
      *residues = FastDiv(at.stride / kStride);
      return int(residues->divisor * CeilDiv(CeilDiv(at.window, residues->divisor), taps));
    };
    q.line_tasks = kFolded ? 1 : tasks(q.at[1], kLines, &q.line_residues);
    if (kFolded) q.line_residues = FastDiv(1);
    q.column_tasks = tasks(q.at[2], kFolded ? kLines * kColumns : kColumns, &q.column_residues);
    q.tasks = q.at[0].window * q.line_tasks * q.column_tasks;
    const int64_t strips = CeilDiv(q.at[2].MaxCount(), kStrip);
    q.rows = FastDiv(kFolded ? q.at[1].out : 1);
    q.planes = FastDiv(q.at[0].MaxCount());
    q.strips = FastDiv(kFolded ? 1 : strips);
    const int steps = std::max(1, int(kFolded ? strips : q.at[1].MaxCount()) + (kLines + kStride - 1) / kStride - 1);
    const int64_t columns = p.images * q.at[0].phases * q.at[1].phases * q.at[2].phases * int64_t{q.planes.divisor} *
                            q.rows.divisor * q.strips.divisor;
    // The work of each block in eight pieces or more.
    const int64_t pieces = 8 * int64_t{q.splits} * q.slabs.units;
    q.segment = int(std::clamp<int64_t>(steps * columns / pieces, std::min(8, steps), steps));
    q.segments = FastDiv(CeilDiv(steps, q.segment));
    q.units = int(columns * q.segments.divisor);
  }
};

template <class F>
auto VisitTaps(FilterParams& q, const Problem& p, bool paired, F&& f) {
  const auto run = [&](auto tag) {
    decltype(tag)::Share(q, p);
    return f(tag);
  };
#define TAKE(...) \
  if (paired && Taps<__VA_ARGS__>::Takes(q)) return run(Taps<__VA_ARGS__>{});
  TAKE(3, 3, 1, 4, 4)
  TAKE(3, 3, 2, 4, 4)
  TAKE(5, 5, 1, 4, 2)
  TAKE(5, 5, 2, 4, 2)
  TAKE(7, 7, 1, 4, 2)
#undef TAKE
  const bool one_line = q.at[1].window == 1 && q.at[1].stride == 1;
  if (one_line && q.at[2].window <= 4 * q.at[2].stride)
    return paired ? run(Taps<1, 4, 1, 8, 4, true, true>{}) : run(Taps<1, 4, 1, 8, 4, false, true>{});
  if (paired) return one_line ? run(Taps<4, 8, 1, 8, 2, true, true>{}) : run(Taps<4, 8, 1, 8, 2>{});
  return one_line ? run(Taps<3, 8, 1, 8, 2, false, true>{}) : run(Taps<3, 8, 1, 8, 2, false>{});
}

}  // namespace
}  // namespace depthwise

cudaError_t LaunchDepthwiseFilter(const Problem& p, const Config& config, const void* x, const void* y, void* out,
                                  void* workspace, cudaStream_t stream) {
  using namespace depthwise;
  if (p.FilterSize() == 0) return cudaSuccess;
  FilterParams q = MakeParams(p);
  q.splits = int(config.splits);
  return VisitSingleDType(p.in, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool paired = Paired(p, {x, y});
    const bool aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y)) % 16 == 0;
    const auto launch_grid = [&](auto* kernel, const Grid& grid, const auto&... tile) {
      float* partial = q.splits > 1 ? static_cast<float*>(workspace) : nullptr;
      return LaunchKernel(kernel, grid, stream, q, tile..., static_cast<const char*>(x), static_cast<const char*>(y),
                          partial, static_cast<char*>(out));
    };
    const auto launch = [&](auto* kernel, size_t shared_bytes) {
      return launch_grid(kernel,
                         Grid{p.batch * q.splits * q.tasks * q.slabs.count.divisor, kDepthwiseThreads, shared_bytes});
    };
    cudaError_t status = cudaErrorInvalidValue;
    const bool plain = !HasFrame(p);
    if constexpr (sizeof(T) == 4) {
      const VolumeTile tile(q.channels, q.at[2].out);
      if (plain && AreQuads(p, {x, y}) && VolumeTaps<T>::Takes(q, tile)) {
        const int64_t blocks = VolumeTaps<T>::Share(q, p, tile);
        status = launch_grid(VolumeFilterKernel<T>, Grid{blocks, tile.threads, VolumeTaps<T>::SharedBytes(tile)}, tile);
      }
    } else {
      const auto launch_band = [&](auto band) {
        using B = decltype(band);
        FilterParams r = q;
        const BandTile<B> t(p, q.channels, q.at);
        const Grid grid = BandFilterGrid<B>(r, p, t);
        if (!CanShare(grid.shared_bytes)) return cudaErrorInvalidValue;
        q = r;
        return launch_grid(BandFilterKernel<B, T>, grid, t);
      };
      if (plain && aligned && TakesBands(p)) status = VisitBand(p, launch_band);
      if (plain && AreQuads(p, {x, y}) && TakesVolumeBands(p))
        status = launch_band(Band<kVolumeTaps, 1, kVolumeTaps>());
      if (plain && status == cudaErrorInvalidValue && aligned && TakesWide(p)) {
        const auto take = [&](auto tag) {
          using W = decltype(tag);
          FilterParams r = q;
          const WideTile t = W::Tile(q);
          const Grid grid = W::Share(r, p, t);
          if (!CanShare(grid.shared_bytes)) return;
          q = r;
          status = launch_grid(WideFilterKernel<W, T>, grid, t);
        };
        if (p.window[2] <= WideTaps<2>::kColumns)
          take(WideTaps<2>{});
        else
          take(WideTaps<3>{});
      }
      if (plain && status == cudaErrorInvalidValue && aligned && TakesImages(p)) {
        FilterParams r = q;
        ImageTaps t(q, p);
        const Grid grid = t.Share(r, p);
        if (CanShare(grid.shared_bytes)) {
          q = r;
          status = launch_grid(ImageFilterKernel<T>, grid, t);
        }
      }
    }
    const auto launch_ring = [&](auto pairing) {
      constexpr Pairing kPairing = decltype(pairing)::value;
      return VisitRingTaps<T, kPairing>(q, [&](auto tag) {
        using R = typename decltype(tag)::type;
        using L = Lanes<T, kPairing>;
        R::Share(q, p);
        constexpr int kRing = kDepthwiseWarps * R::template kStages<L> * R::template kStage<L>;
        if (plain) return launch(FilterRingKernel<R, T, L, false>, kRing);
        if constexpr (R::kLines == kEdgesTaps && R::kStride == 1 && kPairing == Pairing::kPlain)
          return launch(FilterRingKernel<R, T, L, true>, kRing);
        return cudaErrorInvalidValue;
      });
    };
    if (status == cudaErrorInvalidValue && aligned && paired)
      status = launch_ring(PairingTag<Pairing::kPlain>{});
    else if (status == cudaErrorInvalidValue && aligned && TakesMultiplied(p))
      status = launch_ring(PairingTag<Pairing::kShared>{});
    if (plain && status == cudaErrorInvalidValue) {
      status = VisitTaps(q, p, paired, [&](auto tag) {
        using S = decltype(tag);
        return launch(FilterKernel<EitherOf<T>, S::kPaired, S::kFolded, S::kLines, S::kColumns, S::kStride, S::kStrip,
                                   S::kBlocks>,
                      0);
      });
    }
    if (status != cudaSuccess || q.splits == 1) return status;
    const auto* partial = static_cast<const float*>(workspace);
    if (p.out == p.in) return SumRows(partial, 1, q.splits, q.size, static_cast<T*>(out), stream);
    return SumRows(partial, 1, q.splits, q.size, static_cast<float*>(out), stream);
  });
}

}  // namespace jaxdnn::conv
