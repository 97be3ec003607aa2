// Descales of e4m3, division by them, and the rounding of quotients. Results have the bits of IEEE division, then
// rounding to the nearest even number.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace flash_cute {

constexpr float kLargestE4M3 = 448.f;

// The descale of numbers of which the largest has this magnitude: a normal number, at most 2^120.
__device__ __forceinline__ float descale_of(float largest, bool power_of_two) {
  if (largest == 0.f) return 1.f;
  const float descale = fmaxf(__fdiv_rn(largest, kLargestE4M3), FLT_MIN);
  return power_of_two ? __uint_as_float((__float_as_uint(descale) + 0x7fffffu) & 0x7f800000u) : descale;
}

__device__ __forceinline__ bool is_finite(float x) {
  return fabsf(x) < INFINITY;
}

// Divides by a descale in five operations: a product with the rounded inverse is off by two units at most, and its
// remainder, which is exact, corrects it. Small descales are scaled, so that no remainder is subnormal.
struct E4M3Divisor {
  float scale, divisor, inverse;

  static __device__ __forceinline__ E4M3Divisor of(float descale) {
    const float scale = descale < 0x1p-60f ? 0x1p64f : 1.f, divisor = __fmul_rn(descale, scale);
    return {scale, divisor, __fdiv_rn(1.f, divisor)};
  }

  // What rounds to the e4m3 number of x / descale, cut off at 448; NaN if x is not finite. The remainder's sign is such
  // that -0 stays.
  __device__ __forceinline__ float quotient(float x) const {
    const float scaled = __fmul_rn(x, scale), product = __fmul_rn(scaled, inverse);
    const float excess = __fmaf_rn(divisor, product, -scaled);
    const float corrected = __fmaf_rn(-excess, inverse, product);
    if (fabsf(product) < 512.f) return corrected;
    return is_finite(x) ? copysignf(kLargestE4M3, x) : NAN;
  }
};

// Magnitudes below 512, or NaN.
__device__ __forceinline__ uint32_t round_to_e4m3(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude < 0x3c800000u) return sign | static_cast<uint32_t>(__float2int_rn(fabsf(x) * 512.f));  // below 2^-6
  const uint32_t rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
  return sign | min(rounded - (120u << 3), 0x7eu);
}

// Two of them, the first in the low byte.
__device__ __forceinline__ uint32_t round_to_e4m3(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
#else
  return round_to_e4m3(first) | round_to_e4m3(second) << 8;
#endif
}

}  // namespace flash_cute
