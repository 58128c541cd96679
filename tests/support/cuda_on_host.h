// Runs the CUDA source of one kernel on a processor: a block's threads are fibers that take turns at each
// barrier and at each exchange within a warp. Enough of CUDA for kernels without tensor cores; threads that
// wait for ever, because others came to another barrier or ended, are reported.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <setjmp.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

using std::max;
using std::min;
typedef unsigned char uchar;
typedef unsigned int uint;
struct alignas(16) int4 { int x, y, z, w; };
// Not aligned as on a GPU: here a register array begins anywhere.
struct uint1 { uint x; };
struct uint2 { uint x, y; };
struct uint4 { uint x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };

// Nearest, ties to even; a NaN stays one.
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = std::isnan(value) ? 0x7FFF : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
static __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {bfloat16_t(pair.x), bfloat16_t(pair.y)}; }
static float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float __uint_as_float(uint word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
static float rsqrtf(float value) { return 1 / std::sqrt(value); }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __restrict__
#define __launch_bounds__(...)
#define __forceinline__ inline

static dim3 threadIdx, blockIdx;

namespace host {
static uchar memory[232448] __attribute__((aligned(1024)));
const size_t STACK = 1 << 16;
struct Fiber { ucontext_t begin; jmp_buf here; std::vector<char> stack; bool begun, over; uint32_t sent[6]; };
struct Barrier { unsigned arrived = 0, generation = 0; };
typedef std::pair<int, unsigned> Place;  // where in the source, or which named barrier, and whose: a warp's
static std::vector<Fiber> fibers;
static std::map<Place, Barrier> barriers;
static jmp_buf scheduler;
static unsigned current, moved;
static void (*body)();

// Let the next thread run. A context begins a thread; jumps go on with it, without a system call each.
static void yield() {
  if (!_setjmp(fibers[current].here)) _longjmp(scheduler, 1);
}
static void resume(Fiber &fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}
// Wait until `count` threads have come to a place.
static void meet(Place place, unsigned count) {
  Barrier &barrier = barriers[place];
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++moved;
    return;
  }
  for (unsigned before = barrier.generation; barrier.generation == before;) yield();
}
static void enter() {
  body();
  fibers[current].over = true;
  ++moved;
  yield();
}
// Return how many threads wait for ever.
static unsigned run_block(unsigned threads, bool backwards) {
  fibers.resize(threads);
  barriers.clear();
  std::memset(memory, 0xA5, sizeof memory);
  for (auto &fiber : fibers) {
    fiber.stack.resize(STACK);
    fiber.begun = fiber.over = false;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack.data();
    fiber.begin.uc_stack.ss_size = STACK;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, enter, 0);
  }
  for (unsigned left = threads; left;) {
    moved = left = 0;
    for (unsigned i = 0; i < threads; ++i) {
      current = backwards ? threads - 1 - i : i;
      if (fibers[current].over) continue;
      threadIdx = {current, 0, 0};
      resume(fibers[current]);
      left += !fibers[current].over;
    }
    if (left && !moved) return left;
  }
  return 0;
}
static unsigned run(void (*kernel)(), unsigned gx, unsigned gy, unsigned gz, unsigned threads, bool backwards) {
  body = kernel;
  for (unsigned block = 0; block < gx * gy * gz; ++block) {
    unsigned at = backwards ? gx * gy * gz - 1 - block : block;
    blockIdx = {at % gx, at / gx % gy, at / gx / gy};
    if (unsigned left = run_block(threads, backwards)) return left;
  }
  return 0;
}
// Read what thread `from` of this warp sends at the same place; all of its 32 threads come there.
template <class V> V exchange(V value, unsigned from, int line) {
  Place place(line, 1 + current / 32);
  V found;
  static_assert(sizeof value <= sizeof Fiber().sent, "too much to send");
  std::memcpy(fibers[current].sent, &value, sizeof value);
  meet(place, 32);
  std::memcpy(&found, fibers[from].sent, sizeof found);
  meet(place, 32);
  return found;
}
}  // namespace host

#define __syncthreads() host::meet({__LINE__, 0}, (unsigned)host::fibers.size())
#define __shfl_sync(mask, value, lane, width) \
  host::exchange(value, host::current / 32 * 32 + (lane), __LINE__)
#define __shfl_xor_sync(mask, value, apart, width) host::exchange(value, host::current ^ (apart), __LINE__)
#define __shfl_up_sync(mask, value, apart, width) \
  host::exchange(value, host::current % 32 < (apart) ? host::current : host::current - (apart), __LINE__)
// One launch after another: whoever is ahead has ended.
#define cudaGridDependencySynchronize()
#define cudaTriggerProgrammaticLaunchCompletion()
static uint4 __ldcs(const uint4 *place) { return *place; }
static void __stcs(uint4 *place, uint4 value) { *place = value; }

namespace tl {
enum class DataType { kBFloat16, kFloat32 };
// Operands of a warpgroup's product as Hopper describes them: bits 0 to 13 the address in 16 bytes, bits 32 to
// 45 the bytes from 8 rows to the next 8, in 16 too, bits 62 and 63 the swizzle.
struct GmmaDescriptor {
  uint64_t bits;
  operator uint64_t() const { return bits; }
  GmmaDescriptor operator+(int offset) const { return {bits + offset}; }
};
template <int swizzle, int leading, int stride, class P> void initialize_wgmma_descriptor(GmmaDescriptor &of, P *at) {
  of.bits = (uint64_t)((uchar *)at - host::memory) >> 4 | (uint64_t)stride << 32 | (uint64_t)swizzle << 62;
}
template <class V> void increase_descriptor_offset(GmmaDescriptor &of, V bytes) { of.bits += bytes >> 4; }
// Element k of row r of an operand whose rows run along k: rows of 128, 64 or 32 bytes, in units of 16 that are
// exchanged by the row.
static float operand(uint64_t descriptor, int row, int k) {
  unsigned swizzle = descriptor >> 62, line = 256 >> swizzle, mixed = (8 >> (swizzle - 1)) - 1;
  unsigned at = (descriptor & 0x3FFF) * 16 + row / 8 * ((descriptor >> 32 & 0x3FFF) * 16) + row % 8 * line + k * 2;
  return *(const bfloat16_t *)(host::memory + (at ^ (at >> 7 & mixed) << 4));
}
// A thread has its own part of the 64 x N sums, and computes that: no barrier is made up for a missing one.
template <DataType A, DataType B, DataType C, int M, int N, int K, bool tA, bool tB, int sA, int sB>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t *sums, int add) {
  static_assert(A == DataType::kBFloat16 && M == 64 && K == 16 && !tA && !tB && sA == 1 && sB == 1, "not known");
  unsigned lane = host::current % 32, first = host::current / 32 % 4 * 16 + lane / 4;
  float rows[2][K];
  for (int i = 0; i < 2 * K; ++i) rows[i / K][i % K] = operand(a, first + i / K * 8, i % K);
  for (int i = 0; i < N / 4; ++i) {
    float column[K];
    for (int k = 0; k < K; ++k) column[k] = operand(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
    for (int half = 0; half < 2; ++half) {
      float &sum = ((float *)sums)[i / 2 * 4 + half * 2 + i % 2];
      if (!add) sum = 0;
      for (int k = 0; k < K; ++k) sum += rows[half][k] * column[k];
    }
  }
}
// Matrices of 8 rows of 16 bytes: lane 8 m + r names row r of matrix m, and each lane takes 4 bytes of each.
template <int matrices> void load_matrices(const void *row, void *taken) {
  unsigned lane = host::current % 32, warp = host::current / 32 * 32;
  for (unsigned m = 0; m < matrices; ++m) {
    const uchar *found = host::exchange((const uchar *)row, warp + 8 * m + lane / 4, -100);
    std::memcpy((uint32_t *)taken + m, found + lane % 4 * 4, 4);
  }
}
static void ptx_ldmatrix_x2(const void *row, void *taken) { load_matrices<2>(row, taken); }
static void ptx_ldmatrix_x4(const void *row, void *taken) { load_matrices<4>(row, taken); }
// A warp's product of 16 x 16 and 16 x 8, added to its sums.
template <DataType A, DataType B, DataType C, int M, int N, int K, bool tA, bool tB>
void mma_sync(float *sums, const unsigned *a, const unsigned *b) {
  static_assert(A == DataType::kBFloat16 && M == 16 && N == 8 && K == 16 && !tA && tB, "not known");
  unsigned lane = host::current % 32, warp = host::current / 32 * 32;
  host::Place place(-200, 1 + host::current / 32);
  std::copy(a, a + 4, host::fibers[host::current].sent);
  std::copy(b, b + 2, host::fibers[host::current].sent + 4);
  host::meet(place, 32);
  // Element k of a row or column is one of the two of a register of a neighbour.
  auto part = [&](unsigned line, unsigned first, unsigned step, int k) -> float {
    const uint32_t *held = host::fibers[warp + line * 4 + k % 8 / 2].sent + first + k / 8 * step;
    return ((const bfloat16_t *)held)[k % 2];
  };
  for (unsigned i = 0; i < 4; ++i)
    for (int k = 0; k < K; ++k) sums[i] += part(lane / 4, i / 2, 2, k) * part(lane % 4 * 2 + i % 2, 4, 1, k);
  host::meet(place, 32);
}
static void fence_proxy_async() {}
static void warpgroup_arrive() {}
static void warpgroup_commit_batch() {}
template <int pending> void warpgroup_wait() {}
template <class P> void warpgroup_fence_operand(P *, int) {}
template <class V> V warp_reduce_sum(V value) {
  for (int apart = 16; apart; apart /= 2) value += host::exchange(value, host::current ^ apart, -apart);
  return value;
}
// The sum over neighbouring threads from `first` on, whole warps that meet at a barrier of their own.
struct SumOp {};
template <int threads> struct NamedBarrier {
  static void sync() { host::meet({-2000, 0}, threads); }
};
template <class Op, int threads, int apart, int first, class Barrier> struct AllReduce {
  static_assert(std::is_same<Op, SumOp>::value && apart == 1, "not known");
  static float run(float value, float *shared) {
    Barrier::sync();
    shared[threadIdx.x - first] = value;
    Barrier::sync();
    return std::accumulate(shared, shared + threads, 0.0f);
  }
};
// What is copied asynchronously arrives as late as it may: at the wait for its group.
struct Copy { void *to; const void *from; };
static std::map<unsigned, std::vector<std::vector<Copy>>> copies;
static std::vector<std::vector<Copy>> &groups() {
  auto &mine = copies[host::current];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
template <int bytes> void cp_async_gs(void *to, const void *from) {
  static_assert(bytes == 16, "not known");
  groups().back().push_back({to, from});
}
static void cp_async_commit() { groups().emplace_back(); }
template <int pending> void cp_async_wait() {
  auto &mine = groups();
  for (; mine.size() > pending + 1; mine.erase(mine.begin()))
    for (auto &copy : mine.front()) std::memcpy(copy.to, copy.from, 16);
}
static float fast_rcp(float value) { return 1 / value; }
static void __sync_thread_partial(int barrier, int count) { host::meet({-1000 - barrier, 0}, count); }
}  // namespace tl
template <class P, class V> void AtomicAdd(P *place, V value) { *place += value; }
