// Stand-in for CUDA's header: the part that csrc/cuda uses (../README.md).
#pragma once

#include <cuda_runtime.h>

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, exponent = (v.bits >> 10) & 31u, mantissa = v.bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float small = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -small : small;
  }
  return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
