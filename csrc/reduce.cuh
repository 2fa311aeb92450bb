// What CUDA kernels share: rows that are read 16 bytes at a time wherever they lie, sums of
// exponentials relative to a maximum that rises, and reductions over a warp, always in one order.

#pragma once

#include <cmath>
#include <limits>

#include "launch.cuh"
#include "portable.h"

#define PPOKERN_ISA cuda

namespace ppokern::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kWarp = 32;

// The larger one of x and a number, the number if x is NaN.
__device__ inline float at_least(float x, float low) { return fmaxf(x, low); }

// NaN stays one.
__device__ inline float clamp(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

}  // namespace
}  // namespace ppokern::cuda

#include "token_math.h"

namespace ppokern::cuda {
namespace {

__device__ inline int lane_of_thread() { return threadIdx.x % kWarp; }

// 2^x to a relative error of 2^-22; 0 below -126.
__device__ inline float exp2_near(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}

// Warps ------------------------------------------------------------------------------------------

__device__ inline float warp_max(float x) {
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  }
  return x;
}

__device__ inline float warp_min(float x) { return -warp_max(-x); }

template <class Number>
__device__ inline Number warp_sum(Number x) {
  for (int apart = kWarp / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

// In every thread of a block.
template <class Number>
__device__ inline Number block_sum(Number x) {
  __shared__ Number of_warps[kWarp];
  const int warps = blockDim.x / kWarp;
  x = warp_sum(x);
  __syncthreads();  // what was there before has been read
  if (lane_of_thread() == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < warps; ++i) x += of_warps[i];
  return x;
}

// Sums of exponentials ---------------------------------------------------------------------------

// What can be subtracted from -inf.
__device__ inline float finite_top(float top) { return top == -kInfinity ? 0 : top; }

// Part of a row: its maximum, the sum of 2^d over distances d from there in bits, and that sum's
// entropy in bits. Distances are (logit - top) * in_bits.
template <bool kEntropy>
struct Exps {
  float top = -kInfinity, sum = 0, terms = 0;

  // Measures from a maximum that is not lower.
  __device__ void raise(float to, float in_bits) {
    const float fall = tempered_logit(top, finite_top(to), in_bits), ratio = exp2_near(fall);
    if (kEntropy) terms = entropy_term(ratio, fall, 0.0f) * sum + ratio * terms;
    sum *= ratio;
    top = to;
  }

  __device__ void add(Exps other, float in_bits) {
    const float to = fmaxf(top, other.top);
    raise(to, in_bits);
    other.raise(to, in_bits);
    sum += other.sum;
    terms += other.terms;
  }

  template <int kCount>
  __device__ void add(const float (&logits)[kCount], float in_bits) {
    Exps other;
#pragma unroll
    for (float logit : logits) other.top = fmaxf(other.top, logit);
    other.top = fmaxf(top, other.top);
    const float base = finite_top(other.top);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float bits = tempered_logit(logits[i], base, in_bits), power = exp2_near(bits);
      other.sum += power;
      if (kEntropy) other.terms = entropy_term(power, bits, other.terms);
    }
    raise(other.top, in_bits);
    sum += other.sum;
    terms += other.terms;
  }

  // Of all lanes, in every lane.
  __device__ Exps of_warp(float in_bits) const {
    Exps all = *this;
    all.raise(warp_max(top), in_bits);
    all.sum = warp_sum(all.sum);
    if (kEntropy) all.terms = warp_sum(all.terms);
    return all;
  }
};

// Rows -------------------------------------------------------------------------------------------

template <class T>
constexpr int kVector = 16 / sizeof(T);  // logits that are read at once
template <class T>
constexpr int kLaneLogits = 4 * kVector<T>;  // that a lane has in flight
template <class T>
constexpr int kStep = kWarp * kLaneLogits<T>;

template <class T>
PPOKERN_HOST_DEVICE inline int misalignment(const T* at) {
  return reinterpret_cast<uintptr_t>(at) % 16;
}

// 16 bytes from somewhere in a pair of vectors on.
__device__ inline uint4 cut(uint4 low, uint4 high, int bytes) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t pair = uint64_t{words[i + 1]} << 32 | words[i];
    words[i] = static_cast<uint32_t>(pair >> (8 * (bytes & 2)));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The column of a lane's logit of a step that begins at `first`: every lane has kVector at a time.
template <class T>
__device__ inline int column_in_step(int i, int first) {
  return first + (i / kVector<T> * kWarp + lane_of_thread()) * kVector<T> + i % kVector<T>;
}

// Which of the lane's logits of a step is in a column; -1: none.
template <class T>
__device__ inline int place_in_step(int column, int first) {
  const int from = column - first;
  if (from < 0 || from >= kStep<T> || from / kVector<T> % kWarp != lane_of_thread()) return -1;
  return from / (kWarp * kVector<T>)*kVector<T> + from % kVector<T>;
}

// Reads what a warp does in a step of a row, logits from `first` on. What lies outside of the row
// is -inf, and is not read. Which lane has which logit depends on `first` alone, not on where the
// row lies: vectors that lie across two are cut out of both. With kAgain they are to stay in the
// cache, for they will be read once more.
template <bool kAgain = false, class T>
__device__ inline void read_step(const T* row, int size, int first, float (&to)[kLaneLogits<T>]) {
  constexpr int kVectors = kLaneLogits<T> / kVector<T>;
  const int off = misalignment(row + first), around = off ? kVector<T> : 0;
  if (first >= around && first + kStep<T> + around <= size) {
    const char* from = reinterpret_cast<const char*>(row + column_in_step<T>(0, first)) - off;
    uint4 raw[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4* const at = reinterpret_cast<const uint4*>(from) + i * kWarp;
      raw[i] = kAgain ? *at : __ldcs(at);
    }
    if (off) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        raw[i] = cut(raw[i], *(reinterpret_cast<const uint4*>(from) + i * kWarp + 1), off);
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      T logits[kVector<T>];
      memcpy(logits, &raw[i], sizeof logits);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) to[i * kVector<T> + j] = widen(logits[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneLogits<T>; ++i) {
      const int at = column_in_step<T>(i, first);
      to[i] = 0 <= at && at < size ? widen(row[at]) : -kInfinity;
    }
  }
}

}  // namespace
}  // namespace ppokern::cuda
