// Stand-in for CUDA's header: the part that csrc/cuda uses (../README.md).
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(uint32_t{v.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {  // to the nearest, ties to even; every NaN to one
  const uint32_t bits = __float_as_uint(v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
inline float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }
