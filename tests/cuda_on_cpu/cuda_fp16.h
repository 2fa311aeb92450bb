// float16, as cuda_runtime.h.

#pragma once

#include "cuda_runtime.h"
#include "portable.h"

struct __half {
  ppokern::Fp16 x;
};

struct alignas(4) __half2 {
  __half x, y;
};

inline __half __float2half_rn(float x) { return {ppokern::narrow<ppokern::Fp16>(x)}; }

inline float __half2float(__half x) { return ppokern::widen(x.x); }

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}

inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
