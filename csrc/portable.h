// What differs between processors, and how the kernels see a tensor.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__CUDACC__)
#define PPOKERN_HOST_DEVICE __host__ __device__
#else
#define PPOKERN_HOST_DEVICE
#endif

namespace ppokern {

// A tensor of sequences x steps, strides in elements. An absent one has no data.
template <class T>
struct View {
  T* data;
  int64_t sequence_stride;
  int64_t step_stride;

  PPOKERN_HOST_DEVICE T* at(int64_t sequence, int64_t step) const {
    return data + sequence * sequence_stride + step * step_stride;
  }
};

enum class Isa { kDefault, kAvx2, kAvx512 };

inline Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
  return Isa::kDefault;
}

// The instruction set of the kernels: the machine's best, or a lower one that the environment
// names when it is first asked for. Results are the same to the bit; tests compare them.
inline Isa isa() {
  static const Isa chosen = [] {
    const char* named = std::getenv("PPOKERN_CPU_CAPABILITY");
    const std::string name = named ? named : "avx512";
    if (name == "avx512") return best_isa();
    if (name == "avx2") return std::min(best_isa(), Isa::kAvx2);
    if (name == "default") return Isa::kDefault;
    throw std::invalid_argument("PPOKERN_CPU_CAPABILITY: expected default, avx2 or avx512, got " +
                                name);
  }();
  return chosen;
}

inline const char* cpu_capability() {
  return isa() == Isa::kAvx512 ? "avx512" : isa() == Isa::kAvx2 ? "avx2" : "default";
}

}  // namespace ppokern
