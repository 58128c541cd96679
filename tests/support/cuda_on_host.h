// Runs the CUDA source of one kernel on a processor: a block's threads are fibers that take turns at each
// barrier and at each exchange within a warp. Enough of CUDA for kernels whose threads all come to the same
// barriers and exchanges, in the same order; a thread that comes to another one is reported.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;
typedef unsigned char uchar;
typedef unsigned int uint;
struct alignas(16) int4 { int x, y, z, w; };
struct dim3 { unsigned x, y, z; };

#define __global__
#define __restrict__
#define __launch_bounds__(...)
#define __forceinline__ inline

static dim3 threadIdx, blockIdx;

namespace host {
static uchar memory[232448] __attribute__((aligned(1024)));
const size_t STACK = 1 << 16;
struct Fiber { ucontext_t context; std::vector<char> stack; bool over; int at; int64_t sent; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static void (*body)();

// Let every other thread come to the same place.
static void meet(int place) {
  fibers[current].at = place;
  swapcontext(&fibers[current].context, &scheduler);
}
static void enter() {
  body();
  fibers[current].over = true;
  swapcontext(&fibers[current].context, &scheduler);
}
static void run_block(unsigned threads, bool backwards) {
  fibers.resize(threads);
  std::memset(memory, 0xA5, sizeof memory);
  for (auto &fiber : fibers) {
    fiber.stack.resize(STACK);
    fiber.over = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool over = false; !over;) {
    for (unsigned i = 0; i < threads; ++i) {
      current = backwards ? threads - 1 - i : i;
      threadIdx = {current, 0, 0};
      swapcontext(&scheduler, &fibers[current].context);
    }
    over = fibers[0].over;
    for (auto &fiber : fibers)
      if (fiber.over != over || (!over && fiber.at != fibers[0].at)) {
        std::fprintf(stderr, "threads came to different barriers\n");
        std::abort();
      }
  }
}
static void run(void (*kernel)(), unsigned gx, unsigned gy, unsigned threads, bool backwards) {
  body = kernel;
  for (unsigned block = 0; block < gx * gy; ++block) {
    unsigned at = backwards ? gx * gy - 1 - block : block;
    blockIdx = {at % gx, at / gx, 0};
    run_block(threads, backwards);
  }
}
template <class V> V exchange(V value, unsigned from, int place) {
  fibers[current].sent = (int64_t)value;
  meet(place);
  V found = (V)fibers[from].sent;
  meet(place);
  return found;
}
}  // namespace host

#define __syncthreads() host::meet(__LINE__)
#define __shfl_xor_sync(mask, value, apart, width) host::exchange(value, host::current ^ (apart), __LINE__)
#define __shfl_up_sync(mask, value, apart, width) \
  host::exchange(value, host::current % 32 < (apart) ? host::current : host::current - (apart), __LINE__)
namespace tl {
inline int warp_reduce_sum(int value) {
  for (int apart = 16; apart; apart /= 2) value += host::exchange(value, host::current ^ apart, -apart);
  return value;
}
}  // namespace tl
template <class P, class V> void AtomicAdd(P *place, V value) { *place += value; }
