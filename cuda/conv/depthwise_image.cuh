// What the kernels of depthwise convolution in large windows on small images share. Of one channel, such a convolution
// is a product of matrices: rows are images, the sum runs over all pixels of the operand, columns are all pixels of the
// result, and in the matrix between them each pair of pixels has the tap that lies between them, or zero.
//
// Lines are filled up to eights of pixels, as rows and columns of a fragment have them. What eight pixels of the
// operand have to do with eight of the result depends on how many lines and eights they are apart, and on nothing else.
//
// A block has eight channels of some images, which lie in shared memory in planes of one channel, and a warp one
// channel.
#pragma once

#include "cuda/conv/depthwise_volume_tile.cuh"
#include "cuda/conv/depthwise_wide.cuh"

namespace jaxdnn::conv::depthwise {

constexpr int kImageChannels = 8, kImageThreads = 32 * kImageChannels;
constexpr int kImageRows = 16;                       // of a fragment
constexpr size_t kImageHalf = (227 / 2 - 1) * 1024;  // bytes of shared memory of which a multiprocessor has two

// How an image lies in shared memory: lines of `across` eights of pixels, and zeros to an even number of eights.
struct ImageLines {
  int lines, columns, pitch;  // bytes from one image to the next
  FastDiv across, pairs, words;

  ImageLines(int lines, int columns) : lines(lines), columns(columns) {
    across = FastDiv(CeilDiv(columns, kImageEight));
    pairs = FastDiv(across.divisor * kImageEight / 2);
    // An odd number of 16 bytes: rows of ldmatrix are in different banks.
    pitch = int(CeilDiv(Eights(), 2) * 2 + 1) * 16;
    words = FastDiv(pitch / 4);
  }
  __host__ __device__ int Across() const { return static_cast<int>(across.divisor); }
  __host__ __device__ int Eights() const { return lines * Across(); }
};

// Brings images, of which from(row) is the first pixel or null, into planes of shared memory `plane_bytes` apart.
template <class From>
__device__ void LoadImages(char* to, int plane_bytes, const ImageLines& t, int rows, const From& from,
                           int64_t line_bytes, int pixel_bytes) {
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * static_cast<int>(t.words.divisor); i += kImageThreads) {
    int word, at;
    const char* const image = from(t.words.Div(i, &word));
    const int line = t.pairs.Div(word, &at);
    uint4 two[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      two[e] = {0, 0, 0, 0};
      if (image != nullptr && line < t.lines && 2 * at + e < t.columns)
        two[e] = __ldg(reinterpret_cast<const uint4*>(image + line * line_bytes + int64_t{2 * at + e} * pixel_bytes));
    }
    StorePixels(to + i * 4, plane_bytes, two[0], two[1]);
  }
}

}  // namespace jaxdnn::conv::depthwise
