// The depth of the product that a forward convolution or data gradient is: taps, places among them, and what a column
// of the filter meets of them.
#pragma once

#include "cuda/conv/data.cuh"

namespace jaxdnn::conv {

// For which taps an index stays inside: an interval in each dimension. Three fields of 9 bits, each below a guard bit
// that takes the borrow of a subtraction, compare all dimensions at once.
struct TapRange {
  static constexpr uint32_t kGuards = 1u << 9 | 1u << 19 | 1u << 29;
  static constexpr int kNever = 511;
  uint32_t low, high;

  static __device__ uint32_t Pack(const int (&tap)[kRank]) { return tap[0] | tap[1] << 10 | tap[2] << 20; }

  TapRange() = default;
  __device__ TapRange(const Row& row, const DataParams& p, const PhaseAxis (&phase)[kRank]) {
    int first[kRank], last[kRank];
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      const int distance = abs(p.tap_distance[d]), end = p.axis[d].extent - 1;
      // How far the index at tap 0 is before the first valid one, and before the last, in the direction of the taps.
      const bool up = p.tap_distance[d] > 0;
      const int before = up ? -row.origin[d] : row.origin[d] - end, to_end = up ? end - row.origin[d] : row.origin[d];
      first[d] = before > 0 ? min(p.distance_div[d].Div(before + distance - 1), kNever) : 0;
      last[d] = to_end < 0 ? -1 : min(p.distance_div[d].Div(to_end), phase[d].taps - 1);
      if (first[d] > last[d] || row.result < 0) first[d] = kNever, last[d] = 0;
    }
    low = Pack(first);
    high = Pack(last) | kGuards;
  }

  __device__ bool Contains(uint32_t tap) const { return (((tap | kGuards) - low) & (high - tap) & kGuards) == kGuards; }
};

// A place along the depth: a channel of a tap.
struct Walk {
  int channel, tap[kRank];
  uint32_t packed;
  int64_t operand, filter;  // offsets of the tap, from its first

  Walk() = default;
  __device__ Walk(const DataParams& p, const Box& taps, int k) {
    taps.Split(p.channel_div.Div(k, &channel), tap);
    SetTap(p);
  }

  // On by kDepth terms.
  template <int kDepth>
  __device__ void Advance(const DataParams& p, const PhaseAxis (&phase)[kRank]) {
    channel += kDepth;
    if (channel < p.channels) return;
    do {
      channel -= p.channels;
      if (++tap[2] == phase[2].taps) {
        tap[2] = 0;
        if (++tap[1] == phase[1].taps) tap[1] = 0, ++tap[0];
      }
    } while (channel >= p.channels);
    SetTap(p);
  }

  __device__ void SetTap(const DataParams& p) {
    // Past the last tap, where tap[0] is its count, no row has one.
    packed = TapRange::Pack(tap);
    const int pixel = (tap[0] * p.tap_distance[0] * p.axis[1].extent + tap[1] * p.tap_distance[1]) * p.axis[2].extent +
                      tap[2] * p.tap_distance[2];
    operand = pixel * p.pixel_size;
    filter = tap[0] * p.filter_tap[0] + tap[1] * p.filter_tap[1] + tap[2] * p.filter_tap[2];
  }
};

// A column of the product where it is not simply an output channel of a dense filter: one of a phase or of a group that
// is computed together with others (Dense).
struct Column {
  int64_t filter, result;  // from the block's first tap, and from the pixel of a row, in elements
  TapRange taps;           // that it has
  int first_channel;       // of those that it meets
  int channel;             // of the result's group
  int end[kRank];          // of the origins of rows at which its phase has a position

  Column() = default;
  __device__ Column(const DataParams& p, bool forward, int column) {
    const bool folds = p.fold[0] * p.fold[1] * p.fold[2] > 1;
    int within, rest = p.phase_columns.Div(column, &within);
    channel = folds ? within : column;
    first_channel = folds ? 0 : rest * p.phase_channels;
    filter = forward ? channel - first_channel * p.filter_channel : within * p.filter_column;
    int64_t pixel = 0, pixels = 1;
    taps.low = taps.high = 0;
#pragma unroll 1
    for (int d = kRank - 1; d >= 0; --d) {
      const int fold = p.fold[d], of = folds ? rest / fold : 0, phase = folds ? rest - of * fold : 0;
      rest = of;
      pixel += phase * pixels;
      pixels *= p.extent[d];
      // Tap v is `tap` + v * fold of the filter.
      const int tap = fold > 1 ? p.first_tap[d] - p.axis[d].tap_step * phase : 0, last = p.filter_taps[d] - 1 - tap;
      int from = tap < 0 ? (fold - 1 - tap) / fold : 0, to = folds ? last / fold : last;
      if (!p.all_taps) from = 0, to = TapRange::kNever;
      if (last < 0 || column >= p.columns) from = TapRange::kNever, to = 0;
      taps.low = taps.low << 10 | from, taps.high = taps.high << 10 | to;
      filter += tap * p.first_filter_tap[d];
      // A phase may end before the first one.
      const bool lacks = (p.out[d] - 1) * fold + phase >= p.extent[d];
      end[2] = end[1], end[1] = end[0];
      end[0] = phase > 0 ? p.axis[d].offset + p.out[d] - lacks : INT32_MAX;
    }
    taps.high |= TapRange::kGuards;
    result = pixel * p.result_pixel + channel;
  }

  __device__ bool Meets(const DataParams& p, const Walk& at) const {
    return static_cast<unsigned>(at.channel - first_channel) < static_cast<unsigned>(p.phase_channels) &&
           taps.Contains(at.packed);
  }

  __device__ bool Exists(const Row& row) const {
    return row.origin[0] < end[0] && row.origin[1] < end[1] && row.origin[2] < end[2];
  }
};

}  // namespace jaxdnn::conv
