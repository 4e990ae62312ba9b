// Runs CUDA kernels on the CPU, one coroutine for each thread, so that what they compute can be tested without a GPU.
// Every source is compiled with this in front (see build.py). Shared memory, inline assembly and launches come here.
//
// Emulated: blocks and clusters, cooperative grids, shuffles and votes, cp.async (which lands when it is waited for),
// ldmatrix, mma of floating-point types. Not: TMA, wgmma, speed. Threads take turns in a random order, shared memory
// starts as NaN, and accesses that the hardware wants aligned are checked.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __restrict__
#define __CUDACC__ 1  // to the library's own headers; CUDA's are behind us
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

// Threads
// ---------------------------------------------------------------------------------------------------------------------

constexpr size_t kStackBytes = 256 << 10;
// A block's shared memory: what it asks for at launch, then what kernels declare. Blocks of a cluster lie in a row.
constexpr size_t kArenaBytes = 1 << 20, kDeclaredAt = 512 << 10, kMostShared = 227 << 10;

struct Copy {
  uint32_t to;
  int bytes;
  unsigned char data[16];
};
using Copies = std::vector<Copy>;

struct Block;
struct Thread {
  Block* block;
  uint3 index;
  int rank;  // in its block
  void* stack_pointer;
  bool done = false;
  Copies open;                    // cp.async since the last commit
  std::vector<Copies> committed;  // oldest first
};

// Where threads wait for each other. Lanes show each other their words in `slots`; two sets in turn, since a lane may
// be at the next meeting before another has looked.
struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
  uint32_t slots[2][32][8];
};

struct Block {
  uint3 index;
  int rank;  // in its cluster
  char* shared;
  char* stacks;
  size_t declared = 0;
  int live;
  std::map<const void*, size_t> places;  // of declared variables
  std::vector<Thread> threads;
  std::map<std::pair<int, uint32_t>, Meeting> warps;  // by warp and mask
  std::map<int, Meeting> barriers;                    // by number
};

inline Thread* self;
inline void* scheduler;
inline dim3 block_dim, grid_dim;
inline std::vector<Block>* running;
inline Meeting cluster_meeting;
inline const std::function<void()>* kernel_call;
inline uint64_t progress;  // counts whatever another thread may have waited for
inline std::mt19937 turns;

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "emulation: %s (block %u, thread %d)\n", what, self->block->index.x, self->rank);
  std::abort();
}

// Saves the stack pointer and what a function must keep, and goes on where `to` was saved (System V x86-64).
extern "C" void emulation_switch(void** save, void* to);
asm(R"(.text
.weak emulation_switch
emulation_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

inline void Yield() {
  Thread* const t = self;
  emulation_switch(&t->stack_pointer, scheduler);
}

[[noreturn]] inline void RunThread() {
  (*kernel_call)();
  for (const Copies& c : self->committed)
    if (!c.empty()) Fail("ends with copies that were not waited for");
  self->done = true;
  --self->block->live;
  ++progress;
  for (;;) Yield();
}

inline void Start(Thread& t) {
  auto* top = reinterpret_cast<void**>(t.block->stacks + kStackBytes * (t.rank + 1));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&RunThread);
  t.stack_pointer = top - 6;  // the registers' first values are of no matter
}

inline char* Map(size_t bytes, int flags) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

inline void RunBlocks(std::vector<Block>& blocks) {
  constexpr int kStuck = 1000;
  std::vector<Thread*> threads;
  for (Block& b : blocks)
    for (Thread& t : b.threads) threads.push_back(&t);
  running = &blocks;
  for (int idle = 0; !threads.empty();) {
    const uint64_t before = progress;
    std::shuffle(threads.begin(), threads.end(), turns);
    for (Thread* t : threads) {
      self = t;
      emulation_switch(&scheduler, t->stack_pointer);
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle == kStuck) Fail("all threads wait");
    threads.erase(std::remove_if(threads.begin(), threads.end(), [](Thread* t) { return t->done; }), threads.end());
  }
}

// Runs `call` in every thread: clusters one after the other, or all blocks at once where they wait for each other.
inline void Launch(int64_t blocks, int threads, int cluster, bool cooperative, const std::function<void()>& call) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  static char* arenas;
  static int64_t have = 0;
  const int64_t together = cooperative ? blocks : cluster;
  if (have < together) {  // never given back; shared addresses have 32 bits
    arenas = Map(kArenaBytes * together, MAP_32BIT);
    have = together;
  }
  grid_dim = dim3(static_cast<unsigned>(blocks));
  block_dim = dim3(threads);
  kernel_call = &call;
  for (int64_t first = 0; first < blocks; first += together) {
    std::vector<Block> set(together);
    cluster_meeting = Meeting();
    for (int64_t i = 0; i < together; ++i) {
      Block& b = set[i];
      b.index = {static_cast<unsigned>(first + i), 0, 0};
      b.rank = static_cast<int>(i % cluster);
      b.shared = arenas + i * kArenaBytes;
      b.stacks = Map(kStackBytes * threads, 0);
      b.live = threads;
      std::memset(b.shared, 0xff, kMostShared);
      for (int t = 0; t < threads; ++t) b.threads.push_back({&b, {static_cast<unsigned>(t), 0, 0}, t});
      for (Thread& t : b.threads) Start(t);
    }
    RunBlocks(set);
    for (Block& b : set) munmap(b.stacks, kStackBytes * threads);
  }
}

template <class... Args>
void NotEmulated(Args&&...) {
  std::fprintf(stderr, "emulation: this launch is not emulated\n");
  std::abort();
}

// Shared memory
// ---------------------------------------------------------------------------------------------------------------------

inline void* AtLaunch() { return self->block->shared; }

// The block's variable of a declaration that `key` stands for.
template <class T>
T& Declared(const void* key) {
  Block& b = *self->block;
  auto found = b.places.find(key);
  if (found == b.places.end()) {
    const size_t at = (b.declared + 127) / 128 * 128;
    if (at + sizeof(T) > kMostShared) Fail("too much shared memory");
    std::memset(b.shared + kDeclaredAt + at, 0xff, sizeof(T));
    b.declared = at + sizeof(T);
    found = b.places.emplace(key, at).first;
  }
  return *reinterpret_cast<T*>(b.shared + kDeclaredAt + found->second);
}

inline char* Shared(uint64_t address) { return reinterpret_cast<char*>(uintptr_t{static_cast<uint32_t>(address)}); }

// The same place in the block of this rank in the cluster.
inline char* Remote(uint64_t address, uint64_t rank) {
  return Shared(address) + (static_cast<int64_t>(rank) - self->block->rank) * static_cast<int64_t>(kArenaBytes);
}

// Meetings
// ---------------------------------------------------------------------------------------------------------------------

// `expected` may shrink meanwhile, as threads end.
template <class Expected>
void Meet(Meeting& m, Expected expected) {
  const uint64_t generation = m.generation;
  ++m.arrived;
  ++progress;
  while (m.generation == generation) {
    if (m.arrived >= expected()) {
      m.arrived = 0;
      ++m.generation;
      ++progress;
    } else {
      Yield();
    }
  }
}

inline void MeetBlock(int barrier = 0, int threads = 0) {
  Block& b = *self->block;
  Meet(b.barriers[barrier], [&b, threads] { return threads ? threads : b.live; });
}

inline void MeetCluster() {
  Meet(cluster_meeting, [] {
    int live = 0;
    for (const Block& b : *running) live += b.live;
    return live;
  });
}

inline void MeetWarp(Meeting& m, uint32_t mask) {
  Block& b = *self->block;
  const int first = self->rank / 32 * 32;
  if (!(mask >> (self->rank % 32) & 1)) Fail("is not in its own mask");
  Meet(m, [&b, first, mask] {
    int live = 0;
    for (int i = 0; i < 32 && first + i < static_cast<int>(b.threads.size()); ++i)
      live += (mask >> i & 1) && !b.threads[first + i].done;
    return live;
  });
}

inline Meeting& WarpMeeting(uint32_t mask) { return self->block->warps[{self->rank / 32, mask}]; }

// Shows `value` to the warp; returns all lanes'.
template <class V>
auto& Show(uint32_t mask, const V& value) {
  static_assert(sizeof(V) <= 32);
  Meeting& m = WarpMeeting(mask);
  auto& slots = m.slots[m.generation % 2];
  std::memcpy(slots[self->rank % 32], &value, sizeof(V));
  MeetWarp(m, mask);
  return slots;
}

template <class V>
V Shuffle(uint32_t mask, V value, int from) {
  std::memcpy(&value, Show(mask, value)[from], sizeof(V));
  return value;
}

// Instructions
// ---------------------------------------------------------------------------------------------------------------------

// An operand of inline assembly: its bits and, of an output, where they go.
struct Operand {
  void* out;
  uint64_t bits;
  size_t bytes;

  float Float() const {
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    return f;
  }
  uint32_t Word() const { return static_cast<uint32_t>(bits); }
  template <class T>
  void Set(T value) const {
    std::memcpy(out, &value, std::min(bytes, sizeof(value)));
  }
};
using Operands = std::vector<Operand>;

template <class T>
Operand Out(T& value) {
  Operand o = {&value, 0, sizeof(T)};
  std::memcpy(&o.bits, &value, sizeof(T));
  return o;
}
template <class T>
Operand In(const T& value) {
  Operand o = {nullptr, 0, sizeof(T)};
  std::memcpy(&o.bits, &value, sizeof(T));
  return o;
}

inline void CheckAligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) Fail("an access is not aligned");
}

// cp.async of `valid` bytes, and zeros up to `bytes`.
inline void CopyAsync(const Operand& to, const Operand& from, int bytes, int valid) {
  const auto* source = reinterpret_cast<const void*>(from.bits);
  CheckAligned(Shared(to.bits), bytes);
  if (valid) CheckAligned(source, bytes);
  Copy copy = {to.Word(), bytes, {}};
  std::memcpy(copy.data, source, valid);
  self->open.push_back(copy);
}

inline void CommitCopies() { self->committed.push_back(std::exchange(self->open, {})); }

inline void WaitForCopies(size_t pending) {
  auto& committed = self->committed;
  while (committed.size() > pending) {
    for (const Copy& c : committed.front()) std::memcpy(Shared(c.to), c.data, c.bytes);
    committed.erase(committed.begin());
  }
}

inline void LoadMatrices(const Operands& o, int count, bool transposed) {
  auto& rows = Show(~0u, o[count].Word());
  const int lane = self->rank % 32;
  for (int m = 0; m < count; ++m) {
    uint32_t word = 0;
    for (int half = 0; half < 2; ++half) {
      int row = lane / 4, column = 2 * (lane % 4) + half;
      if (transposed) std::swap(row, column);
      const char* line = Shared(rows[8 * m + row][0]);
      CheckAligned(line, 16);
      uint16_t element;
      std::memcpy(&element, line + 2 * column, 2);
      word |= uint32_t{element} << 16 * half;
    }
    o[m].Set(word);
  }
}

template <class T>
double Element(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> 16 * half);
  T t;
  std::memcpy(&t, &bits, sizeof(t));
  return static_cast<float>(t);
}
template <>
inline double Element<float>(uint32_t word, int) {  // TF32
  word &= 0xffffe000u;
  float f;
  std::memcpy(&f, &word, sizeof(f));
  return f;
}

// d += A B of 16 rows, 8 columns and 4 or 8 words of terms: four operands of d, then A's words, then B's.
template <class T>
void Mma(const Operands& o) {
  constexpr int kTerms = sizeof(T) == 4 ? 1 : 2;  // in a word
  const int b_words = static_cast<int>(o.size() - 4) / 3, a_words = 2 * b_words;
  uint32_t mine[6];
  for (int i = 0; i < a_words + b_words; ++i) mine[i] = o[4 + i].Word();
  auto& words = Show(~0u, mine);
  const int lane = self->rank % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double sum = o[i].Float();
    for (int part = 0; part < b_words; ++part)
      for (int k = 0; k < 4 * kTerms; ++k)
        sum += Element<T>(words[row % 8 * 4 + k / kTerms][2 * part + row / 8], k % kTerms) *
               Element<T>(words[column * 4 + k / kTerms][a_words + part], k % kTerms);
    o[i].Set(static_cast<float>(sum));
  }
}

// A vector of words between memory and operands: the address is the last operand of a load, the first of a store.
inline void Access(const Operands& o, bool load, bool shared, int bytes) {
  const int words = static_cast<int>(o.size()) - 1;
  const uint64_t address = o[load ? words : 0].bits;
  char* p = shared ? Shared(address) : reinterpret_cast<char*>(address);
  CheckAligned(p, bytes * words);
  for (int i = 0; i < words; ++i) {
    if (load) {
      std::memcpy(o[i].out, p + bytes * i, bytes);
    } else {
      std::memcpy(p + bytes * i, &o[1 + i].bits, bytes);
    }
  }
}

inline void ToTf32(const Operands& o, bool ties_away) {
  uint32_t word = o[1].Word();
  const bool finite = (word & 0x7f800000u) != 0x7f800000u;
  if (finite) word += ties_away ? 0x1000 : 0xfff + (word >> 13 & 1);
  o[0].Set(word & 0xffffe000u);
}

template <class Op>
void OrNan(const Operands& o, Op op) {
  const float a = o[1].Float(), b = o[2].Float();
  o[0].Set(std::isnan(a) || std::isnan(b) ? NAN : op(a, b));
}

// What inline assembly does, by how its text begins once braces, declarations and spaces are skipped.
struct Instruction {
  const char* begins;
  void (*run)(const Operands& o);
};
inline const Instruction kInstructions[] = {
    {"ex2.approx", [](const Operands& o) { o[0].Set(exp2f(o[1].Float())); }},
    {"lg2.approx", [](const Operands& o) { o[0].Set(log2f(o[1].Float())); }},
    {"rcp.approx", [](const Operands& o) { o[0].Set(1 / o[1].Float()); }},
    {"sqrt.approx", [](const Operands& o) { o[0].Set(sqrtf(o[1].Float())); }},
    {"rsqrt.approx", [](const Operands& o) { o[0].Set(1 / sqrtf(o[1].Float())); }},
    {"tanh.approx", [](const Operands& o) { o[0].Set(tanhf(o[1].Float())); }},
    {"max.NaN.f32", [](const Operands& o) { OrNan(o, fmaxf); }},
    {"min.NaN.f32", [](const Operands& o) { OrNan(o, fminf); }},
    {"cvt.rn.tf32", [](const Operands& o) { ToTf32(o, false); }},
    {"cvt.rna.tf32", [](const Operands& o) { ToTf32(o, true); }},
    {"mov.u32 %0, %%ctaid.x", [](const Operands& o) { o[0].Set(self->block->index.x); }},
    {"prmt.b32 %0, %1, 0, 0xBB99",
     [](const Operands& o) {
       o[0].Set((o[1].Word() >> 15 & 1 ? 0xffffu : 0u) | (o[1].Word() >> 31 ? 0xffff0000u : 0u));
     }},
    {"lop3.or.b32 t|p, %1, %2, %3, %4, 0; @!p add.f32 %0, %0, %5",
     [](const Operands& o) {
       uint32_t any = 0;
       for (int i = 0; i < 8; ++i)
         if (o[4].bits >> i & 1)
           any |= (i & 4 ? o[1].Word() : ~o[1].Word()) & (i & 2 ? o[2].Word() : ~o[2].Word()) &
                  (i & 1 ? o[3].Word() : ~o[3].Word());
       if (any == 0) o[0].Set(o[0].Float() + o[5].Float());
     }},
    {"cp.async.commit_group", [](const Operands&) { CommitCopies(); }},
    {"cp.async.wait_group", [](const Operands& o) { WaitForCopies(o[0].bits); }},
    {"cp.async.cg.shared.global [%0], [%1], 16, %2", [](const Operands& o) { CopyAsync(o[0], o[1], 16, o[2].Word()); }},
    {"cp.async.cg.shared.global", [](const Operands& o) { CopyAsync(o[0], o[1], 16, 16); }},
    {"cp.async.ca.shared.global",
     [](const Operands& o) { CopyAsync(o[0], o[1], o[2].Word(), o.size() == 4 ? o[3].Word() : o[2].Word()); }},
    {"ldmatrix.sync.aligned.m8n8.x4.trans", [](const Operands& o) { LoadMatrices(o, 4, true); }},
    {"ldmatrix.sync.aligned.m8n8.x4", [](const Operands& o) { LoadMatrices(o, 4, false); }},
    {"ldmatrix.sync.aligned.m8n8.x2.trans", [](const Operands& o) { LoadMatrices(o, 2, true); }},
    {"ldmatrix.sync.aligned.m8n8.x2", [](const Operands& o) { LoadMatrices(o, 2, false); }},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16", Mma<__nv_bfloat16>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16", Mma<__half>},
    {"mma.sync.aligned.m16n8k8.row.col.f32.bf16", Mma<__nv_bfloat16>},
    {"mma.sync.aligned.m16n8k8.row.col.f32.f16", Mma<__half>},
    {"mma.sync.aligned.m16n8k8.row.col.f32.tf32", Mma<float>},
    {"ld.shared.b32", [](const Operands& o) { Access(o, true, true, 4); }},
    {"ld.shared.v4", [](const Operands& o) { Access(o, true, true, 4); }},
    {"st.shared.v4", [](const Operands& o) { Access(o, false, true, 4); }},
    {"st.shared.v2", [](const Operands& o) { Access(o, false, true, 4); }},
    {"st.shared.b16", [](const Operands& o) { Access(o, false, true, 2); }},
    {"st.global.v2.b32", [](const Operands& o) { Access(o, false, false, 4); }},
    {"ld.acquire.gpu.global.u32",
     [](const Operands& o) {
       Access(o, true, false, 4);
       Yield();
     }},
    {"red.release.gpu.global.add.u32 [%0], 1",
     [](const Operands& o) {
       ++*reinterpret_cast<uint32_t*>(o[0].bits);
       ++progress;
     }},
    {"barrier.cluster.arrive", [](const Operands&) {}},  // the wait that follows meets them all
    {"barrier.cluster.wait", [](const Operands&) { MeetCluster(); }},
    {"mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster",
     [](const Operands& o) { std::memcpy(Remote(o[0].bits, o[1].bits), &o[2].bits, o[2].bytes); }},
    // common/cluster.cuh's Mailbox; its counter holds the bytes that are still to come.
    {"mbarrier.init.shared.b64 [%0], 1; fence",
     [](const Operands& o) { *reinterpret_cast<int64_t*>(Shared(o[0].bits)) = o[1].Word(); }},
    {"mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 counter, %1, %2; st.async",
     [](const Operands& o) {
       std::memcpy(Remote(o[0].bits, o[2].bits), &o[3].bits, 4);
       *reinterpret_cast<int64_t*>(Remote(o[1].bits, o[2].bits)) -= 4;
       ++progress;
     }},
    {"again: mbarrier.try_wait.parity.acquire.cluster",
     [](const Operands& o) {
       while (*reinterpret_cast<volatile int64_t*>(Shared(o[0].bits)) > 0) Yield();
     }},
};

inline const Instruction* Find(const char* text) {
  std::string plain;
  for (const char* c = text; *c; ++c) {
    if (!std::strncmp(c, ".reg ", 5))
      c = std::strchr(c, ';');
    else if (std::strchr(" \n", *c)) {
      if (!plain.empty() && plain.back() != ' ') plain += ' ';
    } else if (*c != '{' || !plain.empty())
      plain += *c;
  }
  for (const Instruction& i : kInstructions)
    if (plain.rfind(i.begins, 0) == 0) return &i;
  std::fprintf(stderr, "emulation: no such instruction: %s\n", plain.c_str());
  std::abort();
}

inline void Asm(const char* text, const Operands& operands) {
  if (*text == 0) return;  // keeps the compiler from something
  static std::map<const char*, const Instruction*> known;
  const Instruction*& instruction = known[text];
  if (!instruction) instruction = Find(text);
  instruction->run(operands);
}

}  // namespace emulation

// What kernels call
// ---------------------------------------------------------------------------------------------------------------------

#define threadIdx (emulation::self->index)
#define blockIdx (emulation::self->block->index)
#define blockDim (emulation::block_dim)
#define gridDim (emulation::grid_dim)

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

inline int emulation_lane() { return emulation::self->rank % 32; }

inline void __syncthreads() { emulation::MeetBlock(); }
inline void __syncwarp(unsigned mask = ~0u) { emulation::MeetWarp(emulation::WarpMeeting(mask), mask); }
inline int __syncthreads_or(int value) {
  static char key;
  int& any = emulation::Declared<int>(&key);
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= value != 0;
  __syncthreads();
  return any;
}
inline int __syncthreads_and(int value) { return !__syncthreads_or(!value); }
template <class V>
V __shfl_sync(unsigned mask, V value, int from, int width = 32) {
  return emulation::Shuffle(mask, value, emulation_lane() / width * width + from % width);
}
template <class V>
V __shfl_xor_sync(unsigned mask, V value, int lanes) {
  return emulation::Shuffle(mask, value, emulation_lane() ^ lanes);
}
template <class V>
V __shfl_down_sync(unsigned mask, V value, int by, int width = 32) {
  const int lane = emulation_lane();
  return emulation::Shuffle(mask, value, lane % width + by < width ? lane + by : lane);
}
template <class V>
V __shfl_up_sync(unsigned mask, V value, int by, int width = 32) {
  const int lane = emulation_lane();
  return emulation::Shuffle(mask, value, lane % width >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  auto& votes = emulation::Show(mask, vote != 0);
  unsigned all = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) all |= (votes[i][0] & 1) << i;
  return all;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
inline void __threadfence() {}
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }

template <class V>
V __ldg(const V* p) {
  emulation::CheckAligned(p, sizeof(V));
  return *p;
}
template <class V>
V __ldcs(const V* p) {
  return __ldg(p);
}
template <class V>
V __ldcg(const V* p) {
  return __ldg(p);
}
template <class V>
void __stcs(V* p, V value) {
  emulation::CheckAligned(p, sizeof(V));
  *p = value;
}
template <class V>
void __stcg(V* p, V value) {
  __stcs(p, value);
}
template <class A, class B>
A atomicAdd(A* p, B value) {
  ++emulation::progress;
  return std::exchange(*p, *p + value);
}

template <class To, class From>
To emulation_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline unsigned __float_as_uint(float f) { return emulation_cast<unsigned>(f); }
inline int __float_as_int(float f) { return emulation_cast<int>(f); }
inline float __uint_as_float(unsigned u) { return emulation_cast<float>(u); }
inline float __int_as_float(int i) { return emulation_cast<float>(i); }
inline double __hiloint2double(int high, int low) {
  return emulation_cast<double>(uint64_t{static_cast<uint32_t>(high)} << 32 | static_cast<uint32_t>(low));
}
inline int __float2int_rn(float x) { return static_cast<int>(lrintf(x)); }
inline int __double2int_rn(double x) { return static_cast<int>(lrint(x)); }

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }
inline float normcdff(float x) { return static_cast<float>(normcdf(static_cast<double>(x))); }
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i, byte = both >> 8 * (s & 7) & 0xff;
    result |= (s & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (by & 31) >> 32);
}
