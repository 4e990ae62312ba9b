// Small groups that are computed as one (direct_plan.h): a filter that is zero off its diagonal, and what becomes of
// infinities, for which its zeros do not make up.
#pragma once

#include "cuda/conv/direct_data.cuh"

namespace jaxdnn::conv {

constexpr int kMerged = DirectGroups::kMergedChannels;

// A stage's taps, from `tap` on, by a warp: rows are the layer's channels, and what is beside in a row its features.
// So it is in memory, too, but that rows are of one group.
template <class In>
__device__ __forceinline__ void FillTaps(const DirectParams& q, const DirectPlace& place, int tap, uint32_t to) {
  constexpr int kChunk = 8, kChunks = kMerged / kChunk, kRows = 32 / kChunks;  // a warp's at a time
  const int pixel = static_cast<int>(q.pixel), in_group = (1 << q.group_log) - 1, whole = max(q.group_log, 3);
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x % 32 / kChunks, column = place.group * kMerged + 8 * chunk;
  const In* from =
      static_cast<const In*>(q.taps_from) + ((int64_t{place.problem} * q.taps + tap) << q.group_log) * pixel + column;
  const int taps = min(q.stage_taps, q.taps - tap);
#pragma unroll 2
  for (int t = 0; t < taps; ++t) {
    uint4 v[kMerged / kRows];
#pragma unroll
    for (int i = 0; i < kMerged / kRows; ++i) {
      const int r = row + i * kRows;
      v[i] = r >> whole == kChunk * chunk >> whole && column < pixel
                 ? __ldg(reinterpret_cast<const uint4*>(from + (r & in_group) * pixel))
                 : uint4();
    }
#pragma unroll
    for (int i = 0; i < kMerged / kRows; ++i) {
      const int r = row + i * kRows;
      const auto kept = [&](uint32_t word, int k) {
        return (kChunk * chunk + 2 * k) >> q.group_log == r >> q.group_log ? word : 0;
      };
      const uint32_t at = to + t * q.slab_bytes + r * q.filter_line + 16 * chunk;
      hopper::StoreWords(hopper::Swizzled(at, q.filter_line),
                         {kept(v[i].x, 0), kept(v[i].y, 1), kept(v[i].z, 2), kept(v[i].w, 3)});
    }
    from += int64_t{pixel} << q.group_log;
  }
}

// `so_far`, or NaN if one of the sums that are stored is not finite.
template <int kColumns>
__device__ __forceinline__ float ZeroOrNan(const DirectStores& stores, const DirectSums<kColumns>& sums, float so_far) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
    if (stores.pixels[i] >= 0)
#pragma unroll
      for (int j = 0; j < kColumns / 4; ++j) so_far = fmaf(sums[i / 2][4 * (j / 2) + i % 2 * 2 + j % 2], 0, so_far);
  return so_far;
}

// Computes those results of a warp again that met an infinity of another group, of their own group's terms alone.
// Rarely called, hence out of line, when nothing is in registers any more.
template <class In, bool kForward>
__device__ __noinline__ void RepairUnits(const DirectParams& q, int first_row, void* out) {
  const DirectShare share(q);
  const int lane = threadIdx.x % 32, warp_row = first_row + threadIdx.x % kWarpgroup / 32 * 16;
  const int pixel = static_cast<int>(q.pixel), in_group = (1 << q.group_log) - 1;
  __syncwarp();  // after every lane's stores
  int at_unit = 0;
  for (int i = blockIdx.x; i < q.units; i += gridDim.x, ++at_unit) {
    const DirectPlace place(q, share.first + at_unit);
    const int first = place.group * kMerged, channel = first + lane;
    const In* const filter =
        static_cast<const In*>(q.taps_from) + ((int64_t{place.problem} * q.taps) << q.group_log) * pixel + first;
    for (int row = 0; row < 16 * kBlocksOfWarpgroup; ++row) {
      const int result = place.Pixel(q, warp_row + row / 16 * 64 + row % 16);
      if (result < 0 || channel >= pixel) continue;
      const int out_height = q.image_pixels / q.out_planes / q.out_width;  // of all residues
      const int to_x = result % q.out_width, to_y = result / q.out_width % out_height;
      const int to_plane = result / q.out_width / out_height % q.out_planes;
      const int64_t image = result / q.image_pixels;
      float sum = 0, others = 0;
      for (int tap = 0; tap < q.taps; ++tap) {
        const int of_plane = q.window_height * q.window_width;
        const int plane = to_plane * q.plane_stride - q.plane_pad + tap / of_plane * q.plane_dilation;
        const int y = to_y * q.stride[0] - q.pad_lines + tap % of_plane / q.window_width * q.dilation[0];
        const int x = to_x * q.stride[1] - q.pad_columns + tap % q.window_width * q.dilation[1];
        if (plane < 0 || plane >= q.planes_from || y < 0 || y >= q.height_from || x < 0 || x >= q.width_from) continue;
        const int64_t line = (image * q.planes_from + plane) * q.height_from + y;
        const In* const from = reinterpret_cast<const In*>(q.from) + (line * q.width_from + x) * pixel + first;
        const In* const rows = filter + ((int64_t{kForward ? tap : q.taps - 1 - tap} << q.group_log) * pixel);
        for (int k = 0; k < min(kMerged, pixel - first); ++k) {
          const float value = static_cast<float>(from[k]);
          if (k >> q.group_log == lane >> q.group_log) {
            const int down = (kForward ? k : lane) & in_group, along = kForward ? lane : k;
            sum += value * static_cast<float>(rows[down * pixel + along]);
          } else {
            others += value * 0;
          }
        }
      }
      if (others == 0) continue;
      const int64_t bias = place.problem * q.bias_of_problem + channel, to = int64_t{result} * pixel + channel;
      float one[] = {sum};
      AddEither<In>(one, q.epilogue.bias, bias, q.wide);
      AddEither<In>(one, q.epilogue.residual, to, q.wide);
      ActivateEither<In, 1>(one, q.epilogue.activation, q.wide);
      if (q.wide)
        static_cast<float*>(out)[to] = one[0];
      else
        static_cast<In*>(out)[to] = static_cast<In>(one[0]);
    }
  }
}

}  // namespace jaxdnn::conv
