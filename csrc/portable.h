// What differs between processors, and how the kernels see a tensor.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__CUDACC__)
#define PPOKERN_HOST_DEVICE __host__ __device__
#else
#define PPOKERN_HOST_DEVICE
#endif

#define PPOKERN_INLINE inline __attribute__((always_inline))

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

// The rows of a tensor (..., V) whose last stride is 1: at a fixed stride in elements, or where its
// leading strides allow none, each at an offset of its own.
struct Rows {
  void* data;
  const int64_t* offsets;  // absent: stride
  int64_t stride;

  template <class T>
  PPOKERN_HOST_DEVICE T* at(int64_t row) const {
    return static_cast<T*>(data) + (offsets ? offsets[row] : row * stride);
  }
};

// A contiguous tensor. An absent one has no data.
template <class T>
struct Dense {
  T* data;

  PPOKERN_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// Declares a struct of arguments from a list of FIELD(type, name), with their types and names in
// order: Python passes them by name, see bindings.h. The second form begins with those of another
// struct, its member `within`.
template <class... Types>
struct FieldTypes {};

#define PPOKERN_MEMBER(type, name) type name;
#define PPOKERN_NAME(type, name) #name,
#define PPOKERN_TYPE(type, name) , type
#define PPOKERN_ARGS(Struct, FIELDS)                                \
  struct Struct {                                                   \
    FIELDS(PPOKERN_MEMBER)                                          \
    using Types = FieldTypes<void FIELDS(PPOKERN_TYPE)>;            \
    static constexpr const char* kNames[] = {FIELDS(PPOKERN_NAME)}; \
  };
#define PPOKERN_ARGS_WITHIN(Struct, Within, within, WITHIN, FIELDS)                      \
  struct Struct {                                                                        \
    Within within;                                                                       \
    FIELDS(PPOKERN_MEMBER)                                                               \
    using Types = FieldTypes<void WITHIN(PPOKERN_TYPE) FIELDS(PPOKERN_TYPE)>;            \
    static constexpr const char* kNames[] = {WITHIN(PPOKERN_NAME) FIELDS(PPOKERN_NAME)}; \
  };

// Of packed sequences; out of bounds there would be memory of others.
inline void check_boundaries(const int64_t* begin, int64_t sequences, int64_t steps) {
  const int64_t* end = begin + sequences + 1;
  if (*begin != 0 || end[-1] != steps || !std::is_sorted(begin, end)) {
    throw std::invalid_argument("cu_seqlens: expected non-decreasing values from 0 to " +
                                std::to_string(steps));
  }
}

// The upper half of a float.
struct Bf16 {
  uint16_t bits;
};

// IEEE binary16.
struct Fp16 {
  uint16_t bits;
};

template <class To, class From>
PPOKERN_HOST_DEVICE inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

PPOKERN_HOST_DEVICE inline float widen(float x) { return x; }

PPOKERN_HOST_DEVICE inline float widen(Bf16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }

PPOKERN_HOST_DEVICE inline float widen(Fp16 x) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31, rest = x.bits & 0x7fff;
  if (rest < 0x0400) {  // subnormal: a multiple of 2^-24
    return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(rest) * 0x1p-24f));
  }
  return bit_cast<float>(sign | ((rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23)));
#endif
}

// To nearest, ties to even; a NaN stays one.
template <class T>
PPOKERN_HOST_DEVICE inline T narrow(float x);

template <>
PPOKERN_HOST_DEVICE inline float narrow<float>(float x) {
  return x;
}

template <>
PPOKERN_HOST_DEVICE inline Bf16 narrow<Bf16>(float x) {
#if defined(__CUDA_ARCH__)
  Bf16 near;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(near.bits) : "f"(x));
  return near;
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

template <>
PPOKERN_HOST_DEVICE inline Fp16 narrow<Fp16>(float x) {
#if defined(__CUDA_ARCH__)
  Fp16 near;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(near.bits) : "f"(x));
  return near;
#else
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00;
  } else if (rest < 0x38800000) {  // subnormal: adding .5 rounds to multiples of 2^-24
    half = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000;
  } else {
    half = std::min((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13, 0x7c00u);
  }
  return {static_cast<uint16_t>(sign | half)};
#endif
}

enum class Isa { kDefault, kAvx2, kAvx512, kAvx512Bf16 };

inline Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kDefault;
}

// The instruction set of the kernels: the machine's best, or a lower one that the environment
// names when it is first asked for. Advantages are the same to the bit on all of them; log-probs
// and losses differ by rounding, since they use fused multiply-adds where there are some.
inline Isa isa() {
  static const Isa chosen = [] {
    const char* named = std::getenv("PPOKERN_CPU_CAPABILITY");
    const std::string name = named ? named : "avx512_bf16";
    if (name == "avx512_bf16") return best_isa();
    if (name == "avx512") return std::min(best_isa(), Isa::kAvx512);
    if (name == "avx2") return std::min(best_isa(), Isa::kAvx2);
    if (name == "default") return Isa::kDefault;
    throw std::invalid_argument(
        "PPOKERN_CPU_CAPABILITY: expected default, avx2, avx512 or avx512_bf16, got " + name);
  }();
  return chosen;
}

inline const char* cpu_capability() {
  constexpr const char* kNames[] = {"default", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa())];
}

// Whether this process is a fork: the threads that OpenMP would wait for stayed in its parent.
inline bool forked = false;
#if defined(__unix__) || defined(__APPLE__)
inline const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// How many threads work on so many elements: one, where waking others costs more than it saves.
inline int threads_for(int64_t elements, int threads) {
  return forked || elements < 1 << 16 ? 1 : threads;
}

}  // namespace ppokern
