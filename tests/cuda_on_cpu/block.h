// Runs the threads of a block as fibers: the scheduler behind cuda_runtime.h.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace cuda_on_cpu {

[[noreturn]] inline void fail(const std::string& what);

// Fibers ------------------------------------------------------------------------------------------

// Where a fiber, or what runs them, goes on.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer;
#else
  ucontext_t registers;
#endif
  const void* stack = nullptr;  // its lowest address
  size_t size = 0;
};

#if defined(__x86_64__)
// Saves what a called function must leave as it was, and takes up another stack.
__attribute__((naked, noinline)) inline void exchange(void** /*from*/, void* /*to*/) {
  asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}
#endif

inline void switch_to(Context& from, Context& to, bool for_good = false) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack, to.stack, to.size);
#else
  (void)for_good;
#endif
#if defined(__x86_64__)
  exchange(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.registers, &to.registers);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

constexpr size_t kStack = 1 << 17, kGuard = 1 << 12, kMaxThreads = 1024;

// A stack of its own for each thread of a block, with a page below that is not to be touched.
inline char* stack_of(size_t thread) {
  static char* const all = [] {
    void* memory = mmap(nullptr, kMaxThreads * (kStack + kGuard), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    for (size_t i = 0; i < kMaxThreads; ++i) {
      mprotect(static_cast<char*>(memory) + i * (kStack + kGuard), kGuard, PROT_NONE);
    }
    return static_cast<char*>(memory);
  }();
  return all + thread * (kStack + kGuard) + kGuard;
}

inline void start(Context& context, size_t thread, void (*entry)()) {
  char* const stack = stack_of(thread);
  context.stack = stack;
  context.size = kStack;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;  // where the entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
#else
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = kStack;
  makecontext(&context.registers, entry, 0);
#endif
}

// A block -----------------------------------------------------------------------------------------

enum class State { kReady, kAtBarrier, kAtWarp, kDone };

struct Thread {
  Context context;
  uint3 index;
  State state;
  const char* at;  // the operation that it waits in
  unsigned mask;   // of a warp operation
  int source;      // the lane whose value it gets, or -1: it votes
  uint64_t value, result;
};

struct Block {
  std::vector<Thread> threads;
  Context scheduler;
  Thread* running = nullptr;
  std::string kernel;
  void (*call)(const void*) = nullptr;
  const void* arguments = nullptr;
  std::exception_ptr fault;
  bool cut_short = false;  // by an error
  unsigned char* shared = nullptr;
};
inline Block block;

inline std::string name_of(const uint3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

inline std::string state_of(const Thread& thread) {
  if (thread.state == State::kDone) return "has ended";
  std::string waits = "waits in " + std::string(thread.at);
  if (thread.state == State::kAtWarp) {
    char mask[16];
    std::snprintf(mask, sizeof mask, "(0x%08x)", thread.mask);
    waits += mask;
  }
  return waits;
}

inline void fail(const std::string& what) {
  throw std::runtime_error(block.kernel + ", block " + name_of(blockIdx) + ": " + what);
}

// What a thread does. Its frame is never left, hence not instrumented.
__attribute__((no_sanitize("address"))) inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler.stack, &block.scheduler.size);
#endif
  try {
    block.call(block.arguments);
  } catch (...) {
    block.fault = std::current_exception();
  }
  block.running->state = State::kDone;
  switch_to(block.running->context, block.scheduler, true);
}

// Called by a thread: lets others go on until it may.
inline uint64_t wait(State state, const char* at, unsigned mask, int source, uint64_t value) {
  Thread& me = *block.running;
  me.state = state, me.at = at, me.mask = mask, me.source = source, me.value = value;
  switch_to(me.context, block.scheduler);
  return me.result;
}

// The numbers below `count` in the order of this run.
inline std::vector<int> order(int count) {
  static std::minstd_rand random;
  const char* named = std::getenv("PPOKERN_CUDA_ON_CPU_ORDER");
  const std::string name = named ? named : "ascending";
  std::vector<int> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (name == "descending") {
    std::reverse(numbers.begin(), numbers.end());
  } else if (name == "random") {
    std::shuffle(numbers.begin(), numbers.end(), random);
  } else if (name != "ascending") {
    throw std::invalid_argument(
        "PPOKERN_CUDA_ON_CPU_ORDER: expected ascending, descending or random, got " + name);
  }
  return numbers;
}

// The first lane in the mask of a thread that has not arrived where that waits, or -1.
inline int awaited(const Thread& one, const Thread* warp, int count) {
  for (int lane = 0; lane < 32; ++lane) {
    if (~one.mask >> lane & 1) continue;
    const Thread* other = lane < count ? &warp[lane] : nullptr;
    if (!other || other->state != State::kAtWarp || other->at != one.at ||
        other->mask != one.mask) {
      return lane;
    }
  }
  return -1;
}

// Releases the threads of a warp whose partners have all arrived. Returns whether there were any.
inline bool release(Thread* warp, int count) {
  unsigned released = 0;
  for (int lane = 0; lane < count; ++lane) {
    Thread& one = warp[lane];
    if (one.state != State::kAtWarp) continue;
    if (~released >> lane & 1 && awaited(one, warp, count) >= 0) continue;
    released |= one.mask;
    one.result = one.source >= 0 ? warp[one.source].value : 0;
    for (int i = 0; i < count && one.source < 0; ++i) {
      if (one.mask >> i & 1) one.result |= uint64_t{warp[i].value != 0} << i;
    }
  }
  for (int lane = 0; lane < count; ++lane) {
    if (released >> lane & 1) warp[lane].state = State::kReady;
  }
  return released != 0;
}

// Runs a warp until each of its threads has ended or waits for the block.
inline void run_warp(Thread* warp, int count, const std::vector<int>& lanes) {
  do {
    for (const int lane : lanes) {
      if (lane >= count || warp[lane].state != State::kReady) continue;
      block.running = &warp[lane];
      threadIdx = warp[lane].index;
      switch_to(block.scheduler, warp[lane].context);
      if (block.fault) std::rethrow_exception(block.fault);
    }
  } while (release(warp, count));
  for (int i = 0; i < count; ++i) {
    if (warp[i].state != State::kAtWarp) continue;
    const int lane = awaited(warp[i], warp, count);
    fail("thread " + name_of(warp[i].index) + " " + state_of(warp[i]) + " for lane " +
         std::to_string(lane) + ", which " +
         (lane < count ? state_of(warp[lane]) : "the block lacks"));
  }
}

// Runs the threads from barrier to barrier.
inline void run_block() {
  std::vector<Thread>& threads = block.threads;
  const int count = static_cast<int>(threads.size()), warps = (count + 31) / 32;
  for (;;) {
    const std::vector<int> lanes = order(32);
    for (const int warp : order(warps)) {
      run_warp(&threads[warp * 32], std::min(32, count - warp * 32), lanes);
    }
    uint64_t yes = 0;
    const Thread* waits = nullptr;
    const Thread* other = nullptr;
    for (const Thread& one : threads) {
      if (one.state == State::kAtBarrier && !waits) waits = &one;
      yes += one.value != 0;
    }
    if (!waits) return;
    for (const Thread& one : threads) {
      if (one.state != State::kAtBarrier || one.at != waits->at) other = &one;
    }
    if (other) {
      fail("thread " + name_of(waits->index) + " " + state_of(*waits) + ", but thread " +
           name_of(other->index) + " " + state_of(*other));
    }
    for (Thread& one : threads) one.result = yes, one.state = State::kReady;
  }
}

// Shared memory and launches ----------------------------------------------------------------------

constexpr size_t kZone = 64;  // not to be touched, on both sides of dynamic shared memory

inline void* dynamic_shared() { return block.shared + kZone; }

extern "C" {
extern char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));
}

__attribute__((no_sanitize("address"))) inline void fill_static_shared() {
  for (volatile char* at = __start_cuda_shared; at < __stop_cuda_shared; ++at) *at = -1;
}

struct Shared {
  std::vector<unsigned char> bytes;
  size_t zone = 0;  // where the second one begins

  explicit Shared(size_t size) : bytes(size + 2 * kZone + 16), zone(size + kZone) {
    unsigned char* const aligned = bytes.data() + (-reinterpret_cast<uintptr_t>(bytes.data()) & 15);
    block.shared = aligned;
    guard(true);
  }
  Shared(const Shared&) = delete;
  ~Shared() { guard(false); }

  void guard(bool on) const {
#if defined(__SANITIZE_ADDRESS__)
    const auto mark = on ? &__asan_poison_memory_region : &__asan_unpoison_memory_region;
    mark(block.shared, kZone);
    mark(block.shared + zone, kZone);
#else
    if (on) std::fill_n(block.shared, kZone, 0xcd), std::fill_n(block.shared + zone, kZone, 0xcd);
#endif
  }

  void fill() const {
    fill_static_shared();
    std::memset(block.shared + kZone, 0xff, zone - kZone);
  }

  void check() const {
#if !defined(__SANITIZE_ADDRESS__)
    for (const unsigned char* side : {block.shared, block.shared + zone}) {
      if (std::any_of(side, side + kZone, [](unsigned char byte) { return byte != 0xcd; })) {
        fail("a write beyond the " + std::to_string(zone - kZone) + " bytes of shared memory");
      }
    }
#endif
  }
};

// Runs all blocks.
template <class... Params, class... Args>
void run(void (*kernel)(Params...), const std::string& name, dim3 grid, dim3 size,
         size_t shared_bytes, const Args&... args) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> arguments;
  } const call{kernel, {args...}};
  block.call = [](const void* of) {
    std::apply(static_cast<const Call*>(of)->kernel, static_cast<const Call*>(of)->arguments);
  };
  block.arguments = &call;
  block.kernel = name;
  const Shared shared(shared_bytes);
#if defined(__SANITIZE_ADDRESS__)
  if (block.cut_short) {  // frames were left behind
    __asan_unpoison_memory_region(stack_of(0), kMaxThreads * (kStack + kGuard) - kGuard);
  }
#endif
  block.fault = nullptr;
  block.cut_short = true;
  block.threads.resize(size_t{size.x} * size.y * size.z);
  gridDim = grid, blockDim = size;
  for (const int number : order(grid.x * grid.y * grid.z)) {
    const unsigned b = number;
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    for (unsigned i = 0; i < block.threads.size(); ++i) {
      Thread& thread = block.threads[i];
      thread.state = State::kReady;
      thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      start(thread.context, i, &entry);
    }
    shared.fill();
    run_block();
    shared.check();
  }
  block.cut_short = false;
}

}  // namespace cuda_on_cpu
