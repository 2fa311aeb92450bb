// How kernels are launched, by nvcc and, in tests, by g++, which runs them on the CPU.

#pragma once

#include <cuda_runtime.h>  // for g++ the one in tests/cuda_on_cpu

#include <cstddef>
#include <stdexcept>
#include <string>

namespace ppokern {

inline void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error("CUDA error " + std::to_string(error) + ": " +
                           cudaGetErrorString(error));
}

// Starts kKernel on a stream of the current device.
template <auto kKernel, class... Args>
void launch(dim3 grid, dim3 block, size_t shared_bytes, void* stream, const Args&... args) {
  const auto on = static_cast<cudaStream_t>(stream);
#if defined(__CUDACC__)
  kKernel<<<grid, block, shared_bytes, on>>>(args...);
#else
  cuda_on_cpu::launch(kKernel, __PRETTY_FUNCTION__, grid, block, shared_bytes, on, args...);
#endif
  check_cuda(cudaGetLastError());
}

// The shared memory whose size the launch names, aligned to 16 bytes.
template <class T>
__device__ inline T* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char ppokern_shared[];
  return reinterpret_cast<T*>(ppokern_shared);
#else
  return static_cast<T*>(cuda_on_cpu::dynamic_shared());
#endif
}

}  // namespace ppokern
