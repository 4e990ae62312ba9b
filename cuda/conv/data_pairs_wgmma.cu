// Hopper's forward convolution and data gradient over two pixels at a step, whose operand or result has 32 channels of
// 16-bit floats, half a line: pairs of pixels are taken for one of 64 (pairs.h), so that lines are whole ones, each of
// which is loaded, or stored, once.
//
// The taps of both of a pair are loaded side by side, as terms of a step or as columns of the result. Where one of them
// has no tap, products leave its half out: zeros in place of a tap would make NaNs of infinities that no window meets.
#include "cuda/conv/pairs.h"
#include "cuda/conv/wgmma.h"
#include "cuda/conv/wgmma_finish.cuh"

namespace jaxdnn::conv {
namespace {

constexpr int kPairBytes = kLineBytes / 2;

struct PairParams {
  PairTaps taps;
  FastDiv views;  // the view's taps in the last dimension
  int all_views;  // and in all

  // The filter's tap in the last dimension, for the first of a pair or the second; and whether it exists.
  __device__ int Tap(int of_view, int which) const { return taps.first + 2 * of_view + which * taps.second; }
  __device__ bool Has(int of_view, int which) const {
    const int tap = Tap(of_view, which);
    return tap >= 0 && tap < taps.taps;
  }
  // The same in all dimensions; if it does not exist, past the last, where there are zeros.
  __device__ int Plane(int of_view, int which, int past) const {
    int last;
    const int others = views.Div(of_view, &last);
    return Has(last, which) ? others * taps.taps + Tap(last, which) : past;
  }
};

// Loads a step's filter. Boxes are of one tap: of what is gathered, half of a step's terms; of the result, 32 columns.
// Those that are lines of 32 features are half as wide.
template <class T, bool kForward>
__device__ void LoadFilter(const WgmmaParams& p, const PairParams& r, const Ring<T>& ring, const WgmmaPlace& place,
                           int line, int of_view) {
  const uint32_t to = ring.Data() + T::kBytesA;
  if (r.taps.of_result) {
#pragma unroll
    for (int k = 0; k < T::kColumns / kPairChannels; ++k) {
      const int number = p.in_row.taps ? (place.column + k * kPairChannels) / T::kLine : of_view;
      const int plane = p.in_row.taps || k < 2 ? r.Plane(number, k % 2, p.planes) : p.planes;
      const uint32_t box = to + k * kPairChannels * kLineBytes;
      if constexpr (kForward)
        hopper::LoadBox(box, &p.filter, ring.Full(), 0, line * T::kLine, plane);
      else
        hopper::LoadBox(box, &p.filter, ring.Full(), line * T::kLine, 0, plane);
    }
    return;
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int plane = r.Plane(of_view, which, p.planes);
    if constexpr (kForward) {
#pragma unroll
      for (int slab = 0; slab * T::kLine < T::kColumns; ++slab)
        hopper::LoadBox(to + slab * T::kSlab + which * (T::kSlab / 2), &p.filter, ring.Full(),
                        place.column + slab * T::kLine, 0, plane);
    } else {
      hopper::LoadBox(to + which * T::kColumns * kPairBytes, &p.filter, ring.Full(), 0, place.column, plane);
    }
  }
}

template <class T, bool kForward>
__device__ void ProduceFilter(const WgmmaParams& p, const PairParams& r, Ring<T> ring) {
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    const WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    const int first_tap = f.steps == 0 ? r.all_views : place.tap;
    const auto load = [&](int line, int tap, const int (&)[kRank]) {
      BeginStage(ring, T::kBytesB);
      LoadFilter<T, kForward>(p, r, ring, place, line, first_tap + tap);
      ring.Next();
    };
    ForEachStep(p, f, 0, max(1, f.steps), load);
    PassResidual(p, ring);
  }
}

// How a stage has the filter: in lines of columns forward, and of terms otherwise; of 32 of them where those of both of
// a pair are loaded side by side, and of 64 where they follow each other.
template <class T, bool kForward, bool kOfResult>
struct FilterLayout {
  static constexpr bool kHalves = kForward == kOfResult;
  static constexpr int kLine = kHalves ? kPairBytes : kLineBytes;

  // Bytes until the column, a multiple of 32, and until the term, one of 16.
  static __device__ constexpr int Column(int column) {
    if (!kForward) return column * kLine;
    return kHalves ? column / kPairChannels * T::kLine * kLine : column / T::kLine * T::kSlab + column % T::kLine * 2;
  }
  static __device__ constexpr int Term(int term) {
    if (kForward) return term * kLine;
    return kHalves ? term / kPairChannels * T::kColumns * kLine + term % kPairChannels * 2 : term * 2;
  }
  static __device__ uint64_t Descriptor(uint32_t filter) {
    return hopper::LineDescriptor(filter, kLine, 8 * kLine, T::kSlab);
  }
};

// sums += the products of a stage with the first of a pair, or the second: with its terms, or its columns, every other
// 32. Products always have the same registers: otherwise the compiler lets none begin before the last is done.
template <class T, bool kForward, bool kOfResult, int kWhich>
__device__ __forceinline__ void MultiplyOne(const Ring<T>& ring, typename T::Sums& sums) {
  using Layout = FilterLayout<T, kForward, kOfResult>;
  constexpr int kFirst = kWhich * kPairChannels, kColumns = kOfResult ? kPairChannels : T::kColumns;
  constexpr int kTerm = kOfResult ? 0 : kFirst, kTerms = kOfResult ? T::kLine : kPairChannels;
  const uint64_t a = hopper::Descriptor(ring.Data(), T::kSlab), b = Layout::Descriptor(ring.Data() + T::kBytesA);
  hopper::BeginProducts();
#pragma unroll
  for (int term = kTerm; term < kTerm + kTerms; term += 16)
#pragma unroll
    for (int m = 0; m < T::kBlocks; ++m)
#pragma unroll
      for (int column = kOfResult ? kFirst : 0; column < T::kColumns; column += 2 * kColumns)
        hopper::Multiply<typename T::In, kColumns, false, kForward>(
            reinterpret_cast<float (&)[kColumns / 2]>(sums[m][column / 2]), a + ((m * T::kSlab + term * 2) >> 4),
            b + ((Layout::Column(column) + Layout::Term(term)) >> 4), true);
}

// The sums over the ring's next steps, by the warpgroup whose turn it is at the block's tile of this number.
template <class T, bool kForward, bool kOfResult>
__device__ void MultiplyPairs(const WgmmaParams& p, const PairParams& r, const WgmmaPhase& f, Ring<T>& ring, int number,
                              typename T::Sums& sums) {
  BeginTurn(ring, number);
#pragma unroll
  for (auto& block : sums)
#pragma unroll
    for (float& sum : block) sum = 0;
  const int steps = f.steps, lines = p.run.divisor;
  int last = 0, line = 0, view = 0;
#pragma unroll 1
  for (int step = 0; step < max(1, steps); ++step) {
    hopper::WaitBarrier(ring.Full(), ring.parity);
    const bool first = steps > 0 && r.Has(view, 0), second = steps > 0 && r.Has(view, 1);
    if (first) MultiplyOne<T, kForward, kOfResult, 0>(ring, sums);
    if (second) MultiplyOne<T, kForward, kOfResult, 1>(ring, sums);
    hopper::CommitProducts();
    // One stage's products run on while the next one's are issued; those before are done.
    hopper::WaitForProducts<1>();
    if (step > 0) Release(ring, last);
    last = ring.stage;
    ring.Next();
    if (++line == lines) line = 0, view = view + 1 == f.taps[kRank - 1] ? 0 : view + 1;
  }
  EndTurn(ring, number, last, sums);
}

template <class T, bool kForward, bool kOfResult>
__device__ void Consume(const WgmmaParams& p, const PairParams& r, Ring<T> ring, int warpgroup, typename T::In* out,
                        int* pixels) {
  int turn = 0;
  if (kForward) ring.more = p.residual_lines;
  for (int number = 0, tile; (tile = TileOf(p, number)) < p.tiles; ++number) {
    __syncwarp();  // lanes whose columns do not exist have stored the last tile sooner
    const WgmmaPlace place(p, tile, T());
    const WgmmaPhase& f = p.phase[place.phase];
    if (number % 2 != warpgroup) {
      ring.Skip(max(1, f.steps) + ring.more);
      continue;
    }
    typename T::Sums sums;
    MultiplyPairs<T, kForward, kOfResult>(p, r, f, ring, number, sums);
    const Rows rows = {0, T::kRows};
    if (p.by_pixels) FindPixels<T>(p, f, place, rows, warpgroup, pixels);
    if (kForward && !p.plain) FinishSums<T>(p, ring, warpgroup, 0, place, pixels, false, sums);
    StoreBoxes<T>(p, f, ring.Slabs(), warpgroup, place, sums, rows, out, pixels, turn);
  }
}

template <class T, bool kForward, bool kOfResult>
__global__ void __launch_bounds__(T::kThreads, 1)
    DataPairsKernel(const __grid_constant__ WgmmaParams p, const __grid_constant__ PairParams r, typename T::In* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring<T> ring(shared);
    ring.Init();
    PrefetchMaps(p);
    RunRoles(
        [&](int which) {
          if (which == 1) return ProduceFilter<T, kForward>(p, r, ring);
          hopper::VisitDimensions(p.phase[0].dimensions,
                                  [&](auto d) { ProducePixels<T, decltype(d)::value>(p, ring); });
        },
        [&](int warpgroup) {
          Consume<T, kForward, kOfResult>(p, r, ring, warpgroup, out, Ring<T>::Pixels(shared, warpgroup));
        });
  }
}

template <class T, bool kForward>
cudaError_t LaunchTile(const Problem& p, const Pairs& pairs, const Config& config, const void* operand,
                       const void* filter, void* out, const Epilogue& epilogue, cudaStream_t stream) {
  const Problem& view = pairs.view;
  const PairTaps& taps = pairs.taps;
  WgmmaParams q;
  const bool may = taps.of_result && view.window[kRank - 1] == 1;
  cudaError_t e = SetParams<T>(view, config, epilogue, may, false, operand, out, &q);
  if (e != cudaSuccess) return e;
  const PairParams r = {taps, FastDiv(view.window[kRank - 1]), int(view.Taps())};
  q.planes = int(p.Taps());
  if (taps.of_result && !q.in_row.taps) q.biases = kPairChannels;
  constexpr int kLine = T::kLine;
  const int features = kForward == taps.of_result ? kPairChannels : kLine;
  const int channels =
      kForward ? (taps.of_result ? kLine : kPairChannels) : (taps.of_result ? kPairChannels : T::kColumns);
  e = EncodeBoxes(&q.filter, p.in, filter, {p.features, p.channels, p.Taps()}, {features, channels, 1});
  if (e != cudaSuccess) return e;
  return LaunchPersistent<T>(taps.of_result ? DataPairsKernel<T, kForward, true> : DataPairsKernel<T, kForward, false>,
                             q.tiles, 1, stream, q, r, static_cast<typename T::In*>(out));
}

}  // namespace

cudaError_t LaunchDataPairsWgmma(const Problem& p, const Config& config, const void* operand, const void* filter,
                                 void* out, const Epilogue& epilogue, cudaStream_t stream) {
  const std::optional<Pairs> pairs = PairsOf(p);
  if (!pairs) return cudaErrorInvalidValue;
  const auto launch = [&](auto tile) {
    using T = typename decltype(tile)::type;
    return (p.direction == Direction::kForward ? LaunchTile<T, true> : LaunchTile<T, false>)(p, *pairs, config, operand,
                                                                                             filter, out, epilogue,
                                                                                             stream);
  };
  const auto with_type = [&](auto in) {
    using In = typename decltype(in)::type;
    return config.tile == Tile::kWgmma128x128Pairs ? launch(TypeTag<WgmmaTile<In, 128, 128>>())
                                                   : launch(TypeTag<WgmmaTile<In, 256, 64>>());
  };
  return p.in == DType::kBF16 ? with_type(TypeTag<__nv_bfloat16>()) : with_type(TypeTag<__half>());
}

}  // namespace jaxdnn::conv
