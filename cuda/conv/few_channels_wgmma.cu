// Forward convolution of three or four channels with a stride of two or four, the first layers of networks, on Hopper's
// tensor cores.
//
// filled_plan.h says how strips of x are wgmma's operand as they lie. It computes the transposed product: the filter's
// features are rows, which the warpgroups keep in registers, all of the window, and 8 lines of 8 results columns. The
// sum goes over a line of the window after another, pixels of 4 channels each, where the filter has zeros beside its
// own. They do not make up for an infinity there: sums that are NaN are added up again.
//
// Of a volume, of 16-bit floats, the strips of all of the window's planes come together, and the filter stays in shared
// memory, of which each unit loads a plane after another.
//
// While one warpgroup hands its unit's results, transposed in shared memory, to the TMA unit, others multiply.
#include "cuda/common/convert.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/few_channels.h"
#include "cuda/conv/filled.cuh"

namespace jaxdnn::conv {
namespace {

template <class In_, int kShape, bool kVolume>
struct ForwardTile : FilledTile<In_, kShape, kVolume> {
  using In = In_;
  using Base = FilledTile<In, kShape, kVolume>;
  static constexpr int kSteps = Base::kLines * Base::kLineSteps;  // of two chunks of the sum
  static constexpr int kResults = FilledPlan::kResults;
  using Rows = uint32_t[kSteps][4];
  static constexpr bool kFloats = sizeof(In) == 4, kMarksNotFinite = true;
  // Warpgroups that multiply and store, and that bring x, and their registers.
  static constexpr int kTakers = kFloats ? 2 : 3, kThreads = (kTakers + 1) * kWarpgroup;
  static constexpr int kTakersRegisters = kFloats ? 200 : 136, kBringersRegisters = 104;
  // Results wait in slabs, as boxes for the TMA unit: so many of a pixel's features in a line.
  static constexpr int kLine = 128;
  static constexpr int kBoxFeatures = kLine / sizeof(In), kBoxBytes = kResults * kLine;
  static constexpr int kSlabBytes = FilledPlan::kFeatures / kBoxFeatures * kBoxBytes;
  static constexpr int kBeside = 2 * kTakers * kSlabBytes;
  static constexpr int kFilterLine = FilledPlan::kFeatures * sizeof(In) + FilledPlan::kFilterPad;
  static_assert(kSteps * (kFloats ? 8 : 16) * kFilterLine <= kBeside);
};

struct ForwardParams {
  CUtensorMap y;
  const void* bias;
  float least;  // of results
  int beside;   // bytes of shared memory before the ring
};

// Brings a plane of a filter to `shared`, a term's features in a line, by all who multiply. They call it together.
template <class T>
__device__ __forceinline__ void CopyFilter(const FilledParams& q, const typename T::In* filter, int first_feature,
                                           uint32_t shared) {
  constexpr int kOfChunk = 16 / sizeof(typename T::In), kChunks = FilledPlan::kFeatures / kOfChunk;
  for (int i = threadIdx.x; i < T::kLines * T::kLineTerms * kChunks; i += T::kTakers * kWarpgroup) {
    const int feature = first_feature + i % kChunks * kOfChunk, term = i / kChunks, row = q.FilterRow<T>(term);
    const bool valid = row >= 0 && feature < q.features;
    CopyAsync<16>(shared + term * T::kFilterLine + i % kChunks * 16, filter + (valid ? row * q.features + feature : 0),
                  valid);
  }
  CommitCopies();
}

// The thread's rows of wgmma from there.
template <class T>
__device__ __forceinline__ void LoadRows(uint32_t shared, typename T::Rows& rows) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  if constexpr (T::kFloats) {
    shared += lane % 4 * T::kFilterLine + (16 * warp + lane / 4) * 4;
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[step][i] = LoadWord(shared + (8 * step + i / 2 * 4) * T::kFilterLine + i % 2 * 8 * 4);
      RoundToTf32(rows[step]);
    }
  } else {
    shared += (lane / 16 * 8 + lane % 8) * T::kFilterLine + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) LoadMatrices<true>(rows[step], shared + step * 16 * T::kFilterLine);
  }
}

// One sum, of its own terms alone.
template <class T, class In = typename T::In>
__device__ __forceinline__ float SumAgain(const FilledParams& q, const In* x, const In* filter,
                                          const FilledPlace& place, int line, int column, int feature) {
  float sum = 0;
  if (line >= q.height || column >= q.width || feature >= q.features) return sum;
  int volume = place.image, first_plane = 0;
  if constexpr (T::kVolume) first_plane = place.FirstPlane(q, &volume);
#pragma unroll 1
  for (int tap = 0; tap < q.planes * q.window_height * q.window_width; ++tap) {
    const int plane = first_plane + tap / (q.window_height * q.window_width);
    const int down = line * q.stride - q.pad_h + tap / q.window_width % q.window_height;
    const int across = column * T::kStride - q.pad_w + tap % q.window_width;
    const bool inside = static_cast<unsigned>(plane) < static_cast<unsigned>(q.x_depth) &&
                        static_cast<unsigned>(down) < static_cast<unsigned>(q.x_height) &&
                        static_cast<unsigned>(across) < static_cast<unsigned>(q.x_width);
    const int image = volume * q.x_depth + plane;
    const int at = inside ? ((image * q.x_height + down) * q.x_width + across) * q.channels : 0;
    const In* const taps = filter + tap * q.channels * q.features + feature;
#pragma unroll 1
    for (int c = 0; c < q.channels; ++c)
      sum += (inside ? static_cast<float>(x[at + c]) : 0) * static_cast<float>(taps[c * q.features]);
  }
  return sum;
}

// What a thread does with sums: those of two features, 8 apart, at two pixels of each line.
template <class T>
struct Results {
  using In = typename T::In;
  using Sums = float[T::kResults / 2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;

  // To the slab, a pixel after another. 16-bit numbers are at least `least`.
  __device__ __forceinline__ void Stage(uint32_t slab, const Sums& sums, uint32_t least) const {
    if constexpr (T::kFloats) {
      const uint32_t to = slab + warp / 2 * T::kBoxBytes + lane % 4 * 2 * T::kLine + lane / 4 % 4 * 4;
      const int chunk = (warp % 2 * 4 + lane / 16) ^ lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < T::kResults / 2; ++i)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (chunk ^ i % 4) * 16 + (i / 4 * 8 + i % 2) * T::kLine),
                     "f"(sums[i])
                     : "memory");
    } else {
      const uint32_t to = slab + (lane / 16 * 8 + lane % 8) * T::kLine + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
      for (int i = 0; i < T::kResults / 16; ++i) {
        uint32_t matrices[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          matrices[k] = BitCast<uint32_t>(
              __hmax2_nan(BitCast<TwoOf<In>>(NarrowPair<In>(sums[8 * i + 2 * k], sums[8 * i + 2 * k + 1])),
                          BitCast<TwoOf<In>>(least)));
        hopper::StoreTransposed(to + i * 16 * T::kLine, matrices);
      }
    }
  }

  // Where the thread's sum i is there.
  __device__ __forceinline__ In* At(unsigned char* slab, int i) const {
    const int column = lane % 4 * 2 + i % 2, feature = 16 * warp + lane / 4 + i % 4 / 2 * 8;
    const int chunk = feature % T::kBoxFeatures * int(sizeof(In)) / 16;
    slab += feature / T::kBoxFeatures * T::kBoxBytes + (i / 4 * 8 + column) * T::kLine + (chunk ^ column) * 16;
    return reinterpret_cast<In*>(slab) + feature % (16 / int(sizeof(In)));
  }
};

// sums = or += a unit's products with the lines of a window of one plane, whose first strip is `at` so many 16 bytes.
template <class T>
__device__ __forceinline__ void MultiplyWindows(const FilledParams& q, uint64_t windows, int at, bool more,
                                                const typename T::Rows& rows, typename Results<T>::Sums& sums) {
  using In = typename T::In;
  const int part = q.pitch / T::kApart >> 4;
  hopper::BeginProducts();
#pragma unroll
  for (int line = 0; line < T::kLines; ++line) {
#pragma unroll
    for (int i = 0; i < T::kLineSteps; ++i) {
      const int step = line * T::kLineSteps + i;
      const uint64_t chunks = hopper::Later(windows, at + 2 * i % T::kApart * part + 2 * i / T::kApart);
      if constexpr (T::kFloats) {
        hopper::MultiplyHeld<T::kResults>(sums, rows[step], chunks, step > 0);
      } else {
        hopper::MultiplyHeldShort<In, T::kResults, false>(sums, rows[step], chunks, more || step > 0);
      }
    }
    at += q.pitch >> 4;
    asm volatile("" : "+r"(at));  // else all of them would be kept in registers
  }
  hopper::CommitProducts();
  hopper::WaitForSums(sums);
}

template <class T>
__device__ void ConsumeFilled(const FilledParams& q, const ForwardParams& r, FilledRing& ring, int worker,
                              int first_feature, int warpgroup, unsigned char* beside, const typename T::In* x,
                              const typename T::In* filter) {
  using In = typename T::In;
  const Results<T> results;
  const int tiles = q.Tiles<T>(first_feature);
  const uint32_t planes = SharedAddress(beside) + T::kBeside;
  typename T::Rows rows[T::kTiles];
  if constexpr (T::kVolume) {
    for (int plane = 0; plane < q.planes; ++plane)
      CopyFilter<T>(q, filter + plane * q.PlaneRows() * q.features, first_feature,
                    planes + plane * FilledPlan::kFilterBytes);
    WaitForCopies<0>();
    hopper::SyncThreads(3, T::kTakers * kWarpgroup);
  } else {
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      CopyFilter<T>(q, filter, first_feature + tile * FilledPlan::kFeatures, SharedAddress(beside));
      WaitForCopies<0>();
      hopper::SyncThreads(3, T::kTakers * kWarpgroup);
      LoadRows<T>(SharedAddress(beside), rows[tile]);
      hopper::SyncThreads(3, T::kTakers * kWarpgroup);
    }
  }
  const auto feature_of = [&](int tile, int i) {
    return first_feature + tile * FilledPlan::kFeatures + 16 * results.warp + results.lane / 4 + 8 * i;
  };
  float bias[T::kTiles][2] = {};
#pragma unroll
  for (int i = 0; i < 2 * T::kTiles; ++i)
    if (r.bias != nullptr && feature_of(i / 2, i % 2) < q.features)
      bias[i / 2][i % 2] = static_cast<float>(static_cast<const In*>(r.bias)[feature_of(i / 2, i % 2)]);

  unsigned char* const slabs = beside + warpgroup * 2 * T::kSlabBytes;
  uint32_t least = 0;
  if constexpr (!T::kFloats) least = NarrowPair<In>(r.least, r.least);
  const bool stores = threadIdx.x % kWarpgroup == 0;
  int turn = 0;          // of the slabs
  int next = warpgroup;  // of a piece's units, which warpgroups take in turn
  const FilledShare share(q, worker);
#pragma unroll 1
  for (int piece = share.first; piece < share.end; ++piece, ring.Next()) {
    const FilledPlace place(q, piece);
    hopper::WaitBarrier(ring.Full(), ring.parity);
    const bool finite = *ring.NotFinite() != piece;
    if (next >= place.units && results.lane == 0) hopper::Arrive(ring.Empty());
#pragma unroll 1
    for (int unit = next; unit < place.units; unit += T::kTakers) {
      const uint64_t windows = T::Windows(q, ring.Data() + q.strip, unit, false);
      const int first_column = place.column + unit * FilledPlan::kColumns;
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile) {
        if (tile == tiles) break;
        typename Results<T>::Sums sums;
        if constexpr (T::kVolume) {
#pragma unroll 1
          for (int plane = 0; plane < q.planes; ++plane) {
            LoadRows<T>(planes + plane * FilledPlan::kFilterBytes, rows[tile]);
            MultiplyWindows<T>(q, windows, plane * q.lines * (q.pitch >> 4), plane > 0, rows[tile], sums);
          }
        } else {
          MultiplyWindows<T>(q, windows, 0, false, rows[tile], sums);
        }
        if (unit + T::kTakers >= place.units && tile == tiles - 1 && results.lane == 0) hopper::Arrive(ring.Empty());

        if (r.bias != nullptr) {
#pragma unroll
          for (int i = 0; i < T::kResults / 2; ++i) sums[i] += bias[tile][i % 4 / 2];
        }
        if constexpr (T::kFloats) {
#pragma unroll
          for (float& sum : sums) sum = activation::MaxOrNan(sum, r.least);
        }
        unsigned char* const slab = slabs + turn * T::kSlabBytes;
        turn ^= 1;
        results.Stage(SharedAddress(slab), sums, least);
        if (!finite) {
          __syncwarp();
#pragma unroll 1
          for (int i = 0; i < T::kResults / 2; ++i) {
            In* const result = results.At(slab, i);
            if (!isnan(static_cast<float>(*result))) continue;
            const float sum = SumAgain<T>(q, x, filter, place, place.line + i / 4,
                                          first_column + results.lane % 4 * 2 + i % 2, feature_of(tile, i % 4 / 2));
            *result = In(activation::MaxOrNan(sum + (i % 4 < 2 ? bias[tile][0] : bias[tile][1]), r.least));
          }
        }
        hopper::ShowSharedToTma();
        if (stores) hopper::WaitForStoreReads<0>();  // of the other slab, which all may write after the barrier
        hopper::SyncWarpgroup(1 + warpgroup);
        if (stores) {
#pragma unroll
          for (int box = 0; box < T::kSlabBytes / T::kBoxBytes; ++box)
            hopper::StoreBox(&r.y, SharedAddress(slab) + box * T::kBoxBytes,
                             {first_feature + tile * FilledPlan::kFeatures + box * T::kBoxFeatures, first_column,
                              place.line, place.image, 0});
          hopper::CommitStores();
        }
      }
    }
    next = (next + T::kTakers - place.units % T::kTakers) % T::kTakers;
  }
  if (stores) hopper::WaitForStoreReads<0>();
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    FewChannelsKernel(const __grid_constant__ FilledParams q, const __grid_constant__ ForwardParams r,
                      const typename T::In* x, const typename T::In* filter) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    FilledRing ring(q, shared + r.beside);
    ring.Init(kWarpgroup, T::kTakers);
    int column_tile;
    const int worker = q.column_div.Div(blockIdx.x, &column_tile);
    RunFilled<T>(
        q, ring, worker, 0, x, [](const FilledPlace&) {},
        [&](int warpgroup) {
          ConsumeFilled<T>(q, r, ring, worker, column_tile * T::kTiles * FilledPlan::kFeatures, warpgroup, shared, x,
                           filter);
        });
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const FilledPlan& plan, const void* x, const void* filter, void* out,
                       const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  const bool relu = epilogue.activation.kind == activation::Kind::kRelu;
  const int beside = T::kBeside + (T::kVolume ? plan.planes * FilledPlan::kFilterBytes : 0);
  ForwardParams r = {{}, epilogue.bias, relu ? 0 : -INFINITY, beside};
  const cudaError_t e = EncodeBoxes(&r.y, p.out, out, {p.features, p.y[2], p.y[1], p.images * p.y[0], 1},
                                    {T::kBoxFeatures, FilledPlan::kColumns, FilledPlan::kHeight, 1, 1}, false);
  if (e != cudaSuccess) return e;
  FilledParams q(p, plan, 0, 128, beside);
  q.workers = int(std::min<int64_t>(plan.pieces, FilledPlan::Workers(plan.column_tiles)));
  const Grid grid = {int64_t{q.workers} * q.column_tiles, T::kThreads, size_t(q.SharedBytes() + beside)};
  return LaunchKernel(FewChannelsKernel<T>, grid, stream, q, r, static_cast<const In*>(x),
                      static_cast<const In*>(filter));
}

}  // namespace

cudaError_t LaunchFewChannelsWgmma(const Problem& p, const void* x, const void* filter, void* out,
                                   const Epilogue& epilogue, cudaStream_t stream) {
  FilledPlan plan;
  const auto kind = epilogue.activation.kind;
  if (p.out != p.in || epilogue.residual != nullptr ||
      (kind != activation::Kind::kIdentity && kind != activation::Kind::kRelu) || !IsVectorAligned(x, filter, out) ||
      !plan.Fit(p))
    return LaunchFewChannelsData(p, x, filter, out, epilogue, stream);
  return VisitSingleDType(p.in, [&](auto in) {
    using In = typename decltype(in)::type;
    if constexpr (sizeof(In) == 2) {
      if (plan.shape == 1) return LaunchTile<ForwardTile<In, 1, false>>(p, plan, x, filter, out, epilogue, stream);
      if (plan.volume) return LaunchTile<ForwardTile<In, 0, true>>(p, plan, x, filter, out, epilogue, stream);
    }
    return LaunchTile<ForwardTile<In, 0, false>>(p, plan, x, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
