// Filter gradient of depthwise convolution in large windows on small images, of 16-bit floats, as products of matrices
// (depthwise_image.cuh): eight pixels of x times eight of y, summed over images. All that are as far apart go to the
// same sums, of which each diagonal is a tap. A fragment has two lines of the window, and a warp kPairs of them at
// once.
//
// A zero that stands for no image or pixel does not make up for an infinity or NaN: sums that are not finite are
// computed again, of existing terms alone.
#pragma once

#include "cuda/conv/depthwise_filter.cuh"
#include "cuda/conv/depthwise_image.cuh"

namespace jaxdnn::conv::depthwise {

struct ImageTaps {
  static constexpr int kPairs = 4, kDepths = 2;                                          // fragments of images
  static constexpr int kSumPitch = kImageEight + 1, kSum = 2 * kImageEight * kSumPitch;  // floats of a fragment's sums

  ImageLines x, y;
  int rows, all_rows;           // images at once and of a problem, each plane of y one
  int pairs;                    // of lines of the window, of a block at most: pair `part` and every parts-th from there
  int first_apart, last_apart;  // eights of x and y of which a tap is
  FastDiv chunks, parts, planes;  // eights of channels; blocks of the same images; of images

  explicit ImageTaps(const FilterParams& q, const Problem& p)
      : x(q.at[1].axis.extent, q.at[2].axis.extent), y(q.at[1].out, q.at[2].out) {
    planes = FastDiv(q.at[0].out);
    all_rows = int(p.images * q.at[0].out);
    const auto fit = [&](int most) { rows = int(CeilDiv(all_rows, CeilDiv(all_rows, most))); };
    fit(kDepths * kImageRows);
    if (kImageChannels * size_t(PlaneBytes()) > kImageHalf * 3 / 4) fit(kImageRows);
    chunks = FastDiv(q.channels / kImageChannels);
    const int offset = q.at[2].axis.offset;
    first_apart = std::max(int(-FloorDiv(kImageEight - 1 - offset, kImageEight)), 1 - y.Across());
    last_apart = std::min(int(FloorDiv(offset + q.at[2].window + kImageEight - 2, kImageEight)), x.Across() - 1);
  }

  // Sets how the work is shared out.
  Grid Share(FilterParams& q, const Problem& p) {
    const int64_t slabs = p.batch * chunks.divisor, places = std::max<int64_t>(2 * kMultiprocessors / slabs, 1);
    const int64_t all_pairs = CeilDiv(q.at[1].window, 2);
    q.units = int(CeilDiv(all_rows, rows));
    q.splits = int(std::min<int64_t>({q.units, places, q.splits}));
    parts = FastDiv(std::clamp<int64_t>(places / q.splits, 1, all_pairs));
    pairs = int(CeilDiv(all_pairs, parts.divisor));
    const size_t floats = kPairs * kSum + size_t(pairs) * 2 * q.at[2].window;
    return {slabs * q.splits * parts.divisor, kImageThreads,
            kImageChannels * (PlaneBytes() + floats * sizeof(float)) + ZeroBytes()};
  }
  __host__ __device__ int PlaneBytes() const { return rows * (x.pitch + y.pitch); }
  __host__ __device__ int ZeroBytes() const { return x.pitch > y.pitch ? x.pitch : y.pitch; }
};

// Adds a fragment's diagonals, of eights `apart` in the pair of lines of the window whose taps these are.
template <class Tap>
__device__ void AddDiagonals(const float* sums, int apart, int offset, int columns, const Tap& tap) {
  constexpr int kDiagonals = 2 * kImageEight - 1;
  const int lane = threadIdx.x % 32, half = lane / kDiagonals, diagonal = lane % kDiagonals - (kImageEight - 1);
  const int s = kImageEight * apart + diagonal - offset;
  if (half > 1 || s < 0 || s >= columns) return;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kImageEight; ++n) {
    const int k = diagonal + n;
    if (k >= 0 && k < kImageEight) sum += sums[(half * kImageEight + k) * ImageTaps::kSumPitch + n];
  }
  *tap(half, s) += sum;
}

template <class T>
__global__ void __launch_bounds__(kImageThreads, 2)
    ImageFilterKernel(const __grid_constant__ FilterParams p, const __grid_constant__ ImageTaps t, const char* x,
                      const char* y, float* partial, char* out) {
  constexpr int kPairs = ImageTaps::kPairs, kDepths = ImageTaps::kDepths, kSum = ImageTaps::kSum,
                kSumPitch = ImageTaps::kSumPitch;
  extern __shared__ __align__(16) char shared[];
  int chunk, part;
  const int rest = t.parts.Div(t.chunks.Div(static_cast<int>(blockIdx.x), &chunk), &part), split = rest % p.splits,
            problem = rest / p.splits, parts = static_cast<int>(t.parts.divisor);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  const int channel0 = chunk * kImageChannels, window = p.at[1].window, columns = p.at[2].window;
  const int image0 = problem * static_cast<int>(p.images.divisor);
  const int x_bytes = t.rows * t.x.pitch, y_bytes = t.rows * t.y.pitch;
  char *const shared_y = shared + kImageChannels * x_bytes, *const zeros = shared_y + kImageChannels * y_bytes;
  float* const own = reinterpret_cast<float*>(zeros + t.ZeroBytes()) + warp * kPairs * kSum;
  float* const taps = reinterpret_cast<float*>(zeros + t.ZeroBytes()) + kImageChannels * kPairs * kSum;
  const int own_pairs = ((window + 1) / 2 - part + parts - 1) / parts, tap_count = own_pairs * 2 * columns;
  for (int i = thread; i < kImageChannels * tap_count; i += kImageThreads) taps[i] = 0;
  for (int i = thread; i < t.ZeroBytes() / 4; i += kImageThreads) reinterpret_cast<uint32_t*>(zeros)[i] = 0;

  // Of a row, its image and plane of y, and the plane of x.
  const auto locate = [&](int i, int* plane, int* x_plane) {
    const int image = image0 + t.planes.Div(i, plane);
    *x_plane = p.at[0].axis.Origin(*plane);
    return image;
  };
  const int half = lane / 8 % 2;  // of a fragment's pixels
#pragma unroll 1
  for (int id = split; id < p.units; id += p.splits) {
    const int row0 = id * t.rows, rows = min(t.rows, t.all_rows - row0);
    __syncthreads();
    const auto x_at = [&](int i) -> const char* {
      int plane, x_plane;
      const int image = locate(row0 + i, &plane, &x_plane);
      if (static_cast<unsigned>(x_plane) >= static_cast<unsigned>(p.at[0].axis.extent)) return nullptr;
      return x + image * p.x_image + x_plane * p.x_line[0] + channel0 * sizeof(T);
    };
    const auto y_at = [&](int i) -> const char* {
      int plane, x_plane;
      const int image = locate(row0 + i, &plane, &x_plane);
      return y + image * p.y_image + plane * p.y_line[0] + channel0 * sizeof(T);
    };
    LoadImages(shared, x_bytes, t.x, rows, x_at, p.x_line[1], p.x_pixel);
    LoadImages(shared_y, y_bytes, t.y, rows, y_at, p.y_line[1], p.y_pixel);
    __syncthreads();
    // Where the lane's rows of matrices begin: eight images, and the next.
    const uint32_t zeros_at = SharedAddress(zeros);
    uint32_t rows_x[kDepths], rows_y[kDepths];
#pragma unroll
    for (int d = 0; d < kDepths; ++d) {
      const int x_row = kImageRows * d + lane / 16 * 8 + lane % 8, y_row = kImageRows * d + half * 8 + lane % 8;
      rows_x[d] = x_row < rows ? SharedAddress(shared) + warp * x_bytes + x_row * t.x.pitch : zeros_at;
      rows_y[d] = y_row < rows ? SharedAddress(shared_y) + warp * y_bytes + y_row * t.y.pitch : zeros_at;
    }
#pragma unroll 1
    for (int first = 0; first < own_pairs; first += kPairs) {
      // Lines of x that a fragment's first half of pair i meets lie so many below those of y.
      const int below0 = p.at[1].axis.offset + 2 * (part + first * parts);
      const int last = below0 + 2 * (min(kPairs, own_pairs - first) - 1) * parts + 1;
      const int begin = max(0, -last), end = min(t.y.lines, t.x.lines - below0);
#pragma unroll 1
      for (int apart = t.first_apart; apart <= t.last_apart && begin < end; ++apart) {
        float sums[kPairs][4] = {};
#pragma unroll 1
        for (int line = begin; line < end; ++line) {
#pragma unroll 1
          for (int eight = max(0, -apart); eight < min(t.y.Across(), t.x.Across() - apart); ++eight) {
            const int y_offset = (line * t.y.Across() + eight) * 16;
#pragma unroll
            for (int d = 0; d < kDepths; ++d) {
              if (kImageRows * d >= rows) continue;
              uint32_t of_y[4];
              LoadMatrices<true>(of_y, rows_y[d] + y_offset);
#pragma unroll
              for (int i = 0; i < kPairs; ++i) {
                const int x_line = line + below0 + 2 * i * parts;
                if (x_line < -1 || x_line >= t.x.lines || first + i >= own_pairs) continue;
                const bool there = static_cast<unsigned>(x_line + half) < static_cast<unsigned>(t.x.lines);
                const int x_offset = ((x_line + half) * t.x.Across() + eight + apart) * 16;
                uint32_t of_x[4];
                LoadMatrices<true>(of_x, there ? rows_x[d] + x_offset : zeros_at);
                Mma<T>(sums[i], of_x, of_y[0], of_y[1]);
              }
            }
          }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) own[i * kSum + (row + j / 2 * 8) * kSumPitch + 2 * pair + j % 2] = sums[i][j];
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < min(kPairs, own_pairs - first); ++i)
          AddDiagonals(own + i * kSum, apart, p.at[2].axis.offset, columns, [&](int of, int s) {
            return taps + (((first + i) * 2 + of) * columns + s) * kImageChannels + warp;
          });
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < tap_count * kImageChannels / 2; i += kImageThreads) {
    const int tap = i / (kImageChannels / 2), channel = channel0 + i % (kImageChannels / 2) * 2;
    const int line = tap / columns, s = tap % columns, r = 2 * (part + line / 2 * parts) + line % 2;
    if (r >= window) continue;
    const auto add_all = [&](int of, float& sum) {
#pragma unroll 1
      for (int id = split; id < p.units; id += p.splits)
#pragma unroll 1
        for (int i = id * t.rows; i < min((id + 1) * t.rows, t.all_rows); ++i) {
          int plane, x_plane;
          const int image = locate(i, &plane, &x_plane);
          AddTerms<T>(p, x, y, image, plane, 0, p.at[1].out, 0, p.at[2].out, 0, r, s, of, sum);
        }
    };
    StoreFinite<T>(p, reinterpret_cast<const float2*>(taps)[i], add_all, split,
                   (int64_t{problem} * window + r) * columns + s, channel, partial, out);
  }
}

}  // namespace jaxdnn::conv::depthwise
