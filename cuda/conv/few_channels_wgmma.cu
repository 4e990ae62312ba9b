// Forward convolution of three or four channels with a stride of two, the first layers of networks, on Hopper's
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
// While one warpgroup stores its unit's results, transposed through shared memory, the other one multiplies.
#include "cuda/common/convert.cuh"
#include "cuda/conv/epilogue.cuh"
#include "cuda/conv/few_channels.h"
#include "cuda/conv/filled.cuh"

namespace jaxdnn::conv {
namespace {

template <class In_, bool kVolume>
struct ForwardTile : FilledTile<In_, kVolume> {
  using In = In_;
  using Base = FilledTile<In, kVolume>;
  static constexpr int kSteps = Base::kLines * Base::kLineSteps;  // of two chunks of the sum
  static constexpr int kResults = FilledPlan::kResults;
  using Rows = uint32_t[kSteps][4];
  // Results wait in slabs, a pixel's features in a line: of 16 bits with chunks exchanged, of floats with some room.
  static constexpr bool kFloats = sizeof(In) == 4;
  // Warpgroups that multiply and store, and that bring x, and their registers.
  static constexpr int kTakers = kFloats ? 2 : 3, kBringers = 1, kThreads = (kTakers + kBringers) * kWarpgroup;
  static constexpr int kTakersRegisters = kFloats ? 200 : 144, kBringersRegisters = kFloats ? 104 : 80;
  static constexpr int kPixelBytes = FilledPlan::kFeatures * sizeof(In) + (kFloats ? 16 : 0);
  static constexpr int kSlabBytes = kResults * kPixelBytes, kBeside = 2 * kTakers * kSlabBytes;
  static constexpr int kPixelChunks = FilledPlan::kFeatures * sizeof(In) / 16;
  static_assert(kFloats || FilledPlan::kFilterBytes <= kBeside);
};

struct ForwardParams {
  const void* bias;
  float least;  // of results
};

// Brings a plane of a filter of 16 bits to `shared`, by all who multiply. They call it together.
template <class T>
__device__ __forceinline__ void CopyFilter(const FilledParams& q, const typename T::In* filter, int first_feature,
                                           uint32_t shared) {
  constexpr int kChunks = FilledPlan::kFeatures / 8;
  for (int i = threadIdx.x; i < T::kLines * T::kLineTerms * kChunks; i += T::kTakers * kWarpgroup) {
    const int feature = first_feature + i % kChunks * 8, term = i / kChunks, row = q.FilterRow<T>(term);
    const bool valid = row >= 0 && feature < q.features;
    CopyAsync<16>(shared + term * FilledPlan::kFilterLine + i % kChunks * 16,
                  filter + (valid ? row * q.features + feature : 0), valid);
  }
  CommitCopies();
}

// The thread's rows of wgmma from there.
template <class T>
__device__ __forceinline__ void LoadRows(uint32_t shared, typename T::Rows& rows) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
  const uint32_t from = shared + (lane / 16 * 8 + lane % 8) * FilledPlan::kFilterLine + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
  for (int step = 0; step < T::kSteps; ++step)
    LoadMatrices<true>(rows[step], from + step * 16 * FilledPlan::kFilterLine);
}

// Its rows of a filter of one plane: all terms of its features, of 16 bits through `shared`, by all who multiply.
template <class T>
__device__ __forceinline__ void LoadFilter(const FilledParams& q, const typename T::In* filter, int first_feature,
                                           uint32_t shared, typename T::Rows& rows) {
  if constexpr (T::kFloats) {
    const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int feature = first_feature + 16 * warp + lane / 4 + i % 2 * 8;
        const int row = q.FilterRow<T>(8 * step + lane % 4 + i / 2 * 4);
        const bool valid = row >= 0 && feature < q.features;
        const float value = __ldg(filter + (valid ? row * q.features + feature : 0));
        rows[step][i] = valid ? __float_as_uint(value) : 0;
      }
      RoundToTf32(rows[step]);
    }
  } else {
    constexpr int kThreads = T::kTakers * kWarpgroup;
    CopyFilter<T>(q, filter, first_feature, shared);
    WaitForCopies<0>();
    hopper::SyncThreads(3, kThreads);
    LoadRows<T>(shared, rows);
    hopper::SyncThreads(3, kThreads);
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
  using Sums = float[T::kResults / 2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;

  // To the slab, a pixel after another.
  __device__ __forceinline__ void Stage(uint32_t slab, const Sums& sums) const {
    if constexpr (T::kFloats) {
      const uint32_t to = slab + lane % 4 * 2 * T::kPixelBytes + (16 * warp + lane / 4) * 4;
#pragma unroll
      for (int i = 0; i < T::kResults / 2; ++i)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (i / 4 * 8 + i % 2) * T::kPixelBytes + i % 4 / 2 * 32),
                     "f"(sums[i])
                     : "memory");
    } else {
      const uint32_t to = slab + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
      for (int i = 0; i < T::kResults / 16; ++i) {
        uint32_t matrices[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          matrices[k] = NarrowPair<typename T::In>(sums[8 * i + 2 * k], sums[8 * i + 2 * k + 1]);
        hopper::StoreTransposed(to + i * 16 * 128, matrices);
      }
    }
  }

  // Where the thread's sum i is there.
  __device__ __forceinline__ typename T::In* At(unsigned char* slab, int i) const {
    const int column = lane % 4 * 2 + i % 2, feature = 16 * warp + lane / 4 + i % 4 / 2 * 8;
    slab += (i / 4 * 8 + column) * T::kPixelBytes;
    if (T::kFloats) return reinterpret_cast<typename T::In*>(slab) + feature;
    return reinterpret_cast<typename T::In*>(slab + (feature / 8 ^ column) * 16) + feature % 8;
  }

  // From there to `out`, where the unit's first result is.
  __device__ __forceinline__ void Store(const FilledParams& q, uint32_t slab, int lines, int columns, int features,
                                        typename T::In* out) const {
    constexpr int kAtOnce = kWarpgroup / T::kPixelChunks;
    const int thread = threadIdx.x % kWarpgroup, chunk = thread % T::kPixelChunks, first = thread / T::kPixelChunks;
    const int column = first % 8, exchanged = T::kFloats ? chunk : chunk ^ column;
    const uint32_t from = slab + first * T::kPixelBytes + exchanged * 16;
    const bool exists = chunk * 16 < features * int(sizeof(typename T::In)) && column < columns;
    out += column * q.features + chunk * (16 / sizeof(typename T::In));
    uint32_t words[T::kResults / kAtOnce][4];
#pragma unroll
    for (int i = 0; i < T::kResults / kAtOnce; ++i) hopper::LoadWords(words[i], from + i * kAtOnce * T::kPixelBytes);
#pragma unroll
    for (int i = 0; i < T::kResults / kAtOnce; ++i) {
      const int line = (i * kAtOnce + first) / 8;
      // Written out, for the compiler makes four stores of a vector's.
      if (exists && line < lines)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(out + line * q.width * q.features),
                     "r"(words[i][0]), "r"(words[i][1]), "r"(words[i][2]), "r"(words[i][3])
                     : "memory");
    }
  }
};

template <class T>
__device__ void ConsumeFilled(const FilledParams& q, const ForwardParams& r, FilledRing& ring, int worker,
                              int first_feature, int warpgroup, unsigned char* beside, const typename T::In* x,
                              const typename T::In* filter, typename T::In* out) {
  using In = typename T::In;
  typename T::Rows rows;
  const uint32_t planes = SharedAddress(beside) + T::kBeside;
  if constexpr (T::kVolume) {
    for (int plane = 0; plane < q.planes; ++plane)
      CopyFilter<T>(q, filter + plane * q.PlaneRows() * q.features, first_feature,
                    planes + plane * FilledPlan::kFilterBytes);
    WaitForCopies<0>();
    hopper::SyncThreads(3, T::kTakers * kWarpgroup);
  } else {
    LoadFilter<T>(q, filter, first_feature, SharedAddress(beside), rows);
  }
  const Results<T> results;
  const int feature = first_feature + 16 * results.warp + results.lane / 4;
  float bias[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (r.bias != nullptr && feature + 8 * i < q.features)
      bias[i] = static_cast<float>(static_cast<const In*>(r.bias)[feature + 8 * i]);

  unsigned char* const slabs = beside + warpgroup * 2 * T::kSlabBytes;
  int turn = 0;  // of the slabs
  const int part = q.pitch / T::kApart;
  int next = warpgroup;  // of a piece's units, which warpgroups take in turn
  const FilledShare share(q, worker);
#pragma unroll 1
  for (int piece = share.first; piece < share.end; ++piece, ring.Next()) {
    const FilledPlace place(q, piece);
    hopper::WaitBarrier(ring.Full(), ring.parity);
    if (next >= place.units && results.lane == 0) hopper::Arrive(ring.Empty());
#pragma unroll 1
    for (int unit = next; unit < place.units; unit += T::kTakers) {
      uint64_t terms = T::Windows(q, ring.Data() + q.strip, unit, false);
      typename Results<T>::Sums sums;
      const auto multiply = [&](bool more) {
        hopper::BeginProducts();
#pragma unroll
        for (int line = 0; line < T::kLines; ++line) {
#pragma unroll
          for (int i = 0; i < T::kLineSteps; ++i) {
            const int step = line * T::kLineSteps + i;
            const uint64_t chunks = terms + (2 * i % T::kApart * part >> 4) + 2 * i / T::kApart;
            if constexpr (T::kFloats) {
              hopper::MultiplyHeld<T::kResults>(sums, rows[step], chunks, step > 0);
            } else {
              hopper::MultiplyHeldShort<In, T::kResults, false>(sums, rows[step], chunks, more || step > 0);
            }
          }
          terms += q.pitch >> 4;
          asm volatile("" : "+l"(terms));  // else all of them would be kept in registers
        }
        hopper::CommitProducts();
        hopper::WaitForSums(sums);
      };
      if constexpr (T::kVolume) {
#pragma unroll 1
        for (int plane = 0; plane < q.planes; ++plane) {
          LoadRows<T>(planes + plane * FilledPlan::kFilterBytes, rows);
          multiply(plane > 0);
          terms += (q.lines - T::kLines) * (q.pitch >> 4);
        }
      } else {
        multiply(false);
      }
      if (unit + T::kTakers >= place.units && results.lane == 0) hopper::Arrive(ring.Empty());

      float zeros[4] = {};
#pragma unroll
      for (int i = 0; i < T::kResults / 2; ++i) zeros[i % 4] = fmaf(sums[i], 0.f, zeros[i % 4]);
      const int first_column = place.column + unit * FilledPlan::kColumns;
#pragma unroll
      for (int i = 0; i < T::kResults / 2; ++i)
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(sums[i]) : "f"(sums[i] + bias[i % 4 / 2]), "f"(r.least));
      unsigned char* const slab = slabs + turn * T::kSlabBytes;
      turn ^= 1;
      results.Stage(SharedAddress(slab), sums);
      __syncwarp();
      if (zeros[0] + zeros[1] + zeros[2] + zeros[3] != 0) {
#pragma unroll 1
        for (int i = 0; i < T::kResults / 2; ++i) {
          In* const result = results.At(slab, i);
          if (!isnan(static_cast<float>(*result))) continue;
          const float sum = SumAgain<T>(q, x, filter, place, place.line + i / 4,
                                        first_column + results.lane % 4 * 2 + i % 2, feature + i % 4 / 2 * 8);
          *result = In(activation::MaxOrNan(sum + (i % 4 < 2 ? bias[0] : bias[1]), r.least));
        }
      }
      hopper::SyncWarpgroup(1 + warpgroup);  // and everyone has read the other slab
      const int pixel = (place.image * q.height + place.line) * q.width + first_column;
      results.Store(q, SharedAddress(slab), q.height - place.line, q.width - first_column, q.features - first_feature,
                    out + pixel * q.features + first_feature);
    }
    next = (next + T::kTakers - place.units % T::kTakers) % T::kTakers;
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    FewChannelsKernel(const __grid_constant__ FilledParams q, const __grid_constant__ ForwardParams r,
                      const typename T::In* x, const typename T::In* filter, typename T::In* out) {
  if constexpr (hopper::kAvailable) {
    extern __shared__ __align__(1024) unsigned char shared[];
    FilledRing ring(q, shared);
    ring.Init(kWarpgroup, T::kTakers);
    int column_tile;
    const int worker = q.column_div.Div(blockIdx.x, &column_tile);
    RunFilled<T>(
        q, ring, worker, 0, x, [](const FilledPlace&) {},
        [&](int warpgroup) {
          ConsumeFilled<T>(q, r, ring, worker, column_tile * FilledPlan::kFeatures, warpgroup, shared + q.SharedBytes(),
                           x, filter, out);
        });
  }
}

template <class T>
cudaError_t LaunchTile(const Problem& p, const FilledPlan& plan, const void* x, const void* filter, void* out,
                       const Epilogue& epilogue, cudaStream_t stream) {
  using In = typename T::In;
  const bool relu = epilogue.activation.kind == activation::Kind::kRelu;
  const ForwardParams r = {epilogue.bias, relu ? 0 : -INFINITY};
  const int beside = T::kBeside + (T::kVolume ? plan.planes * FilledPlan::kFilterBytes : 0);
  FilledParams q(p, plan, 0, 128, beside);
  q.workers = int(std::min<int64_t>(plan.pieces, FilledPlan::Workers(plan.column_tiles)));
  const Grid grid = {int64_t{q.workers} * q.column_tiles, T::kThreads, size_t(q.SharedBytes() + beside)};
  return LaunchKernel(FewChannelsKernel<T>, grid, stream, q, r, static_cast<const In*>(x),
                      static_cast<const In*>(filter), static_cast<In*>(out));
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
    if constexpr (sizeof(In) == 2)
      if (plan.volume) return LaunchTile<ForwardTile<In, true>>(p, plan, x, filter, out, epilogue, stream);
    return LaunchTile<ForwardTile<In, false>>(p, plan, x, filter, out, epilogue, stream);
  });
}

}  // namespace jaxdnn::conv
