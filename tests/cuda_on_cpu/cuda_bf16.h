// bfloat16, as cuda_runtime.h.

#pragma once

#include "cuda_runtime.h"
#include "portable.h"

struct __nv_bfloat16 {
  ppokern::Bf16 x;
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {ppokern::narrow<ppokern::Bf16>(x)}; }

inline float __bfloat162float(__nv_bfloat16 x) { return ppokern::widen(x.x); }

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

inline float2 __bfloat1622float2(__nv_bfloat162 x) {
  return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
