// Forward and data gradient of depthwise convolution in large windows on small images, of 16-bit floats, as products of
// matrices (depthwise_image.cuh says of which). A warp goes through all pixels of the operand that kTiles eights of the
// result see, 16 at a time: rows come by ldmatrix, and the other matrix is put together of pairs of taps. The filter
// lies in a table with zeros around it, once in pairs that begin with an even tap and once with an odd one, so that a
// thread has one place there, whence all it reads are whole lines and eights away.
//
// Results that are not finite are computed again, as zeros do not make up for an infinity or NaN.
#pragma once

#include "cuda/conv/depthwise_data.cuh"
#include "cuda/conv/depthwise_image.cuh"

namespace jaxdnn::conv::depthwise {

struct ImageTile {
  static constexpr int kTiles = 4, kResults = kTiles * kImageEight;
  static constexpr int kStaged = kResults + 8;  // floats of an image; fragments' rows are in different banks

  ImageLines in, out;
  int fragments;                          // of rows
  int rows, all_rows;                     // images of a block and of a problem, each plane one
  int tiles;                              // eights of a block's results
  int table_lines, odd_words;             // of a channel; where words of pairs are that begin with an odd tap
  FastDiv table_words;                    // of pairs that begin with an even one
  FastDiv chunks, parts, groups, planes;  // eights of channels; blocks of the same images; of images

  ImageTile(const DataParams& q, const Problem& p, int fragments)
      : in(q.at[1].axis.extent, q.at[2].axis.extent), out(q.at[1].out, q.at[2].out), fragments(fragments) {
    planes = FastDiv(q.at[0].out);
    all_rows = int(p.images * q.at[0].out);
    groups = FastDiv(CeilDiv(all_rows, kImageRows * fragments));
    rows = int(CeilDiv(all_rows, groups.divisor));
    chunks = FastDiv(q.channels / kImageChannels);
    const int64_t sets = CeilDiv(out.Eights(), kTiles);
    tiles = int(CeilDiv(sets, std::clamp<int64_t>(2 * kMultiprocessors / Blocks(p), 1, sets))) * kTiles;
    parts = FastDiv(CeilDiv(out.Eights(), tiles));
    // One line more than pixels can be apart, of what is behind an image with an odd number of eights.
    table_lines = in.lines + out.lines;
    table_words = FastDiv((in.Across() + out.Across()) * kImageEight / 2);
    // Odd rows read other banks than even ones.
    odd_words = static_cast<int>(table_words.divisor);
    if (odd_words % 32 < 8 || odd_words % 32 > 24) odd_words = int(CeilDiv(odd_words, 16)) * 16 + 8;
  }
  int64_t Blocks(const Problem& p) const { return p.batch * groups.divisor * chunks.divisor; }
  __host__ __device__ int LineBytes() const { return (odd_words + static_cast<int>(table_words.divisor)) * 4; }
  __host__ __device__ int TableBytes() const { return table_lines * LineBytes(); }
  __host__ __device__ int StagedFloats() const { return fragments * kImageRows * kStaged; }  // of a channel

  Grid GridOf(const Problem& p) const {
    const size_t channel = size_t(rows) * in.pitch + TableBytes() + StagedFloats() * sizeof(float);
    return {Blocks(p) * parts.divisor, kImageThreads, kImageChannels * channel};
  }
  // More rows, which share what is put together of taps, where there is work for all, and memory for two blocks.
  static ImageTile Of(const DataParams& q, const Problem& p) {
    const ImageTile two(q, p, 2);
    const bool fits = two.Blocks(p) >= 2 * kMultiprocessors && two.GridOf(p).shared_bytes <= kImageHalf;
    return fits ? two : ImageTile(q, p, 1);
  }
};

// Lays out the taps of eight channels, each where results are that many lines and columns before what they read.
template <class T>
__device__ void LoadTable(const DataParams& p, const ImageTile& t, const char* filter, char* table) {
  const int line0 = t.out.lines - 1 + p.whole[1].origin, column0 = t.out.Across() * kImageEight + p.whole[2].origin;
#pragma unroll 2
  for (int i = threadIdx.x; i < t.table_lines * static_cast<int>(t.table_words.divisor); i += kImageThreads) {
    int word;
    const int line = t.table_words.Div(i, &word), r = line - line0;
    uint4 taps[3];
#pragma unroll
    for (int e = 0; e < 3; ++e) {
      const int s = 2 * word + e - column0;
      taps[e] = {0, 0, 0, 0};
      if (static_cast<unsigned>(r) < static_cast<unsigned>(p.whole[1].taps) &&
          static_cast<unsigned>(s) < static_cast<unsigned>(p.whole[2].taps))
        taps[e] = __ldg(reinterpret_cast<const uint4*>(filter + r * p.whole[1].tap_step * p.filter_tap[1] +
                                                       s * p.whole[2].tap_step * p.filter_tap[2]));
    }
    char* const to = table + line * t.LineBytes() + word * 4;
    StorePixels(to, t.TableBytes(), taps[0], taps[1]);
    StorePixels(to + t.odd_words * 4, t.TableBytes(), taps[1], taps[2]);
  }
}

// Which pairs of eights of the operand some eights of the result see.
struct ImageSteps {
  int begin, end;

  __device__ ImageSteps(const DataParams& p, const ImageTile& t, int first, int last) {
    int left, right;
    const int above = t.out.across.Div(first, &left) + p.whole[1].origin,
              below = t.out.across.Div(last, &right) + p.whole[1].origin + p.whole[1].taps - 1;
    int eight = max(above, 0) * t.in.Across(), eights = (min(below, t.in.lines - 1) + 1) * t.in.Across();
    if (t.in.lines * t.out.lines == 1) {
      eight = max(left * kImageEight + p.whole[2].origin, 0) / kImageEight;
      eights =
          min((right + 1) * kImageEight + p.whole[2].origin + p.whole[2].taps - 2 + kImageEight, eights * kImageEight) /
          kImageEight;
    }
    begin = eight / 2;
    end = (eights + 1) / 2;
  }
};

template <int kFragments, class T>
__global__ void __launch_bounds__(kImageThreads, 2)
    ImageKernel(const __grid_constant__ DataParams p, const __grid_constant__ ImageTile t, const char* in,
                const char* filter, char* out) {
  constexpr int kTiles = ImageTile::kTiles, kResults = ImageTile::kResults, kStaged = ImageTile::kStaged;
  extern __shared__ __align__(16) char shared[];
  int chunk, part, group;
  const int problem = t.groups.Div(t.parts.Div(t.chunks.Div(static_cast<int>(blockIdx.x), &chunk), &part), &group);
  const int thread = threadIdx.x, channel = thread / 32, lane = thread % 32, row = lane / 4, pair = lane % 4;
  const int channel0 = chunk * kImageChannels, row0 = group * t.rows, rows = min(t.rows, t.all_rows - row0);
  const int image0 = problem * static_cast<int>(p.images.divisor), plane_bytes = t.rows * t.in.pitch;
  char* const table = shared + kImageChannels * plane_bytes;
  float* const staged = reinterpret_cast<float*>(table + kImageChannels * t.TableBytes());

  const auto image_at = [&](int i) -> const char* {
    int plane;
    const int image = image0 + t.planes.Div(row0 + i, &plane), in_plane = p.whole[0].origin + plane;
    if (static_cast<unsigned>(in_plane) >= static_cast<unsigned>(p.at[0].axis.extent)) return nullptr;
    return in + image * p.in_image + in_plane * p.in_line[0] + channel0 * sizeof(T);
  };
  LoadImages(shared, plane_bytes, t.in, rows, image_at, p.in_line[1], p.in_pixel);
  LoadTable<T>(p, t, FirstTap<T>(p, p.whole, filter, problem, channel0), table);
  __syncthreads();

  // Rows that no image has are those of the last.
  uint32_t rows_at[kFragments];
#pragma unroll
  for (int f = 0; f < kFragments; ++f)
    rows_at[f] = SharedAddress(shared) + channel * plane_bytes +
                 min(kImageRows * f + lane % kImageRows, rows - 1) * t.in.pitch + lane / kImageRows * 16;
  // Taps of the thread's column, of the first line and eight of the operand and the last line and first eight of the
  // result.
  const int odd = row & 1, line_bytes = t.LineBytes();
  const char* const own = table + channel * t.TableBytes() +
                          (odd * t.odd_words + t.out.Across() * kImageEight / 2 + pair - (row + odd) / 2) * 4;
  const int first_tile = part * t.tiles, last_tile = min(first_tile + t.tiles, t.out.Eights());
#pragma unroll 1
  for (int tile0 = first_tile; tile0 < last_tile; tile0 += kTiles) {
    const char* taps_at[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      int eight;
      const int line = t.out.across.Div(min(tile0 + i, last_tile - 1), &eight);
      taps_at[i] = own + (t.out.lines - 1 - line) * line_bytes - eight * 16;
    }
    const ImageSteps steps(p, t, tile0, min(tile0 + kTiles, last_tile) - 1);
    int eight, offset = t.in.across.Div(2 * steps.begin, &eight) * line_bytes;
    offset += eight * 16;
    const auto next = [&] {
      const bool last = ++eight == t.in.Across();
      offset += last ? line_bytes - (eight - 1) * 16 : 16;
      if (last) eight = 0;
    };
    float sums[kTiles][kFragments][4] = {};
#pragma unroll 2
    for (int k = steps.begin; k < steps.end; ++k) {
      uint32_t x[kFragments][4], taps[kTiles][2];
#pragma unroll
      for (int f = 0; f < kFragments; ++f) LoadMatrices<false>(x[f], rows_at[f] + 32 * k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) taps[i][half] = *reinterpret_cast<const uint32_t*>(taps_at[i] + offset);
        next();
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int f = 0; f < kFragments; ++f) Mma<T>(sums[i][f], x[f], taps[i][0], taps[i][1]);
    }

    // Channels come together.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(staged + channel * t.StagedFloats() + (kImageRows * f + 8 * half + row) * kStaged +
                                     i * kImageEight + 2 * pair) = {sums[i][f][2 * half], sums[i][f][2 * half + 1]};
    __syncthreads();
#pragma unroll 1
    for (int pixel = thread; pixel < rows * kResults; pixel += kImageThreads) {
      int first, plane;
      const int of = pixel / kResults, result = pixel % kResults, tile = tile0 + result / kImageEight;
      const int line = t.out.across.Div(tile, &first), column = first * kImageEight + result % kImageEight;
      if (tile >= last_tile || column >= t.out.columns) continue;
      const int image = image0 + t.planes.Div(row0 + of, &plane);
      float v[kImageChannels];
#pragma unroll
      for (int c = 0; c < kImageChannels; ++c) v[c] = staged[c * t.StagedFloats() + of * kStaged + result];
      StoreEight<T>(p, in, filter, out, problem, image, plane, line, column, channel0, v);
    }
  }
}

}  // namespace jaxdnn::conv::depthwise
