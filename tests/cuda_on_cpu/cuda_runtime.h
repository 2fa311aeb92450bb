// Compiles CUDA C++ with g++ and runs it on the CPU, for tests of kernels where there is no GPU.
//
// Each thread of a block is a fiber that runs until it has to wait for others. Warps run one after
// the other, each until all of its threads wait at a barrier of the block, so that what a barrier
// is missing for has not happened yet in some order: PPOKERN_CUDA_ON_CPU_ORDER is that of threads,
// warps and blocks, ascending, descending or random. Reported as an exception that names kernel,
// block and thread: a barrier that some threads of the block never reach, a warp operation that a
// thread named in its mask never reaches, a lane read outside the mask, a write beyond dynamic
// shared memory, a launch that no device takes. Shared memory is NaN at first. g++'s sanitizers
// find the rest: misaligned vectors, and what lies out of bounds in global and shared memory
// (-fsanitize-sections=cuda_shared). What it cannot show: races within a step of a warp,
// asynchronous copies, tensor cores, memory that other blocks see late, time.

#pragma once

#include <math.h>  // the C++ one, whose functions take floats in the global namespace too

#include "block.h"

// Words of the language ---------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// blocks run one after the other, so that one copy will do
#define __shared__ static __attribute__((section("cuda_shared")))

#define PPOKERN_VECTORS(T, name)                             \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };         \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };   \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
PPOKERN_VECTORS(float, float)
PPOKERN_VECTORS(int, int)
PPOKERN_VECTORS(unsigned, uint)
#undef PPOKERN_VECTORS

// Barriers and warps ------------------------------------------------------------------------------

inline void __syncthreads() {
  cuda_on_cpu::wait(cuda_on_cpu::State::kAtBarrier, "__syncthreads", 0, 0, 0);
}

inline int __syncthreads_count(int yes) {
  const auto at = cuda_on_cpu::State::kAtBarrier;
  return static_cast<int>(cuda_on_cpu::wait(at, "__syncthreads_count", 0, 0, yes != 0));
}

inline int __syncthreads_or(int yes) {
  const auto at = cuda_on_cpu::State::kAtBarrier;
  return cuda_on_cpu::wait(at, "__syncthreads_or", 0, 0, yes != 0) != 0;
}

inline int __syncthreads_and(int yes) {
  const auto at = cuda_on_cpu::State::kAtBarrier;
  return cuda_on_cpu::wait(at, "__syncthreads_and", 0, 0, yes == 0) == 0;
}

namespace cuda_on_cpu {

inline int lane() { return (block.running - block.threads.data()) % 32; }

inline unsigned vote(const char* at, unsigned mask, int yes) {
  if (~mask >> lane() & 1) fail(std::string(at) + " by a lane that its mask does not name");
  return static_cast<unsigned>(wait(State::kAtWarp, at, mask, -1, yes != 0));
}

template <class T>
T shuffle(const char* at, unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (~mask >> lane() & 1) fail(std::string(at) + " by a lane that its mask does not name");
  if (~mask >> source & 1) {
    fail(std::string(at) + " from lane " + std::to_string(source) + ", not named in its mask");
  }
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = wait(State::kAtWarp, at, mask, source, bits);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace cuda_on_cpu

inline void __syncwarp(unsigned mask = 0xffffffff) { cuda_on_cpu::vote("__syncwarp", mask, 0); }

inline unsigned __ballot_sync(unsigned mask, int yes) {
  return cuda_on_cpu::vote("__ballot_sync", mask, yes);
}

inline int __any_sync(unsigned mask, int yes) {
  return cuda_on_cpu::vote("__any_sync", mask, yes) != 0;
}

inline int __all_sync(unsigned mask, int yes) {
  return cuda_on_cpu::vote("__all_sync", mask, !yes) == 0;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = cuda_on_cpu::lane() & -width;
  return cuda_on_cpu::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)));
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::lane(), source = lane - static_cast<int>(delta);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, value,
                              source < (lane & -width) ? lane : source);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::lane(), source = lane + static_cast<int>(delta);
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, value,
                              source > (lane | (width - 1)) ? lane : source);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = cuda_on_cpu::lane(), source = lane ^ bits;
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value,
                              source > (lane | (width - 1)) ? lane : source);
}

// Memory: threads take turns, so that nothing is torn ---------------------------------------------

inline void __threadfence() {}

namespace cuda_on_cpu {

template <class T>
T* aligned(T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) {
    fail("thread " + name_of(threadIdx) + ": " + std::to_string(sizeof(T)) +
         " bytes at an address that is no multiple of that");
  }
  return at;
}

}  // namespace cuda_on_cpu

// clang-format off
template <class T> T __ldg(const T* at) { return *cuda_on_cpu::aligned(at); }
template <class T> T __ldcg(const T* at) { return *cuda_on_cpu::aligned(at); }
template <class T> T __ldcs(const T* at) { return *cuda_on_cpu::aligned(at); }
template <class T> void __stcg(T* at, T x) { *cuda_on_cpu::aligned(at) = x; }
template <class T> void __stcs(T* at, T x) { *cuda_on_cpu::aligned(at) = x; }
// clang-format on

// of integers only: sums of floats would have no fixed order
inline unsigned atomicAdd(unsigned* at, unsigned x) { return std::exchange(*at, *at + x); }

inline unsigned atomicCAS(unsigned* at, unsigned old, unsigned x) {
  return std::exchange(*at, *at == old ? x : *at);
}

inline unsigned atomicInc(unsigned* at, unsigned last) {
  return std::exchange(*at, *at >= last ? 0 : *at + 1);
}

using std::max;
using std::min;

// The runtime -------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;

namespace cuda_on_cpu {

// few, so that a kernel that fills the device has several items for each block
constexpr int kMultiprocessors = 3;
constexpr size_t kSharedMemory = 48 << 10;
inline cudaError_t last_error = cudaSuccess;

// `within` is the __PRETTY_FUNCTION__ of a template whose parameter kKernel is the kernel.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const std::string& within, dim3 grid, dim3 size,
            size_t shared_bytes, cudaStream_t, const Args&... args) {
  const auto fits = [](const dim3& x, unsigned x_most, unsigned y_most, unsigned z_most) {
    return x.x && x.y && x.z && x.x <= x_most && x.y <= y_most && x.z <= z_most;
  };
  if (!fits(grid, 0x7fffffff, 0xffff, 0xffff) || !fits(size, kMaxThreads, kMaxThreads, 64) ||
      size_t{size.x} * size.y * size.z > kMaxThreads) {
    last_error = cudaErrorInvalidConfiguration;
  } else if (shared_bytes > kSharedMemory) {
    last_error = cudaErrorInvalidValue;
  } else {
    const size_t name = within.find("kKernel = ") + 10;
    run(kernel, within.substr(name, within.find("; ", name) - name), grid, size, shared_bytes,
        args...);
  }
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() {
  return std::exchange(cuda_on_cpu::last_error, cudaSuccess);
}

inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  return error == cudaErrorInvalidValue ? "invalid argument" : "invalid configuration argument";
}

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = cuda_on_cpu::kMultiprocessors, cudaSuccess;
}
