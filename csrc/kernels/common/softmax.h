// Softmax over score tiles that arrive one after the other (online softmax, arXiv 1805.02867).
#pragma once

#include "kernels/common/fragment.h"

namespace flash_cute {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 2^x to about 2 units in the last place of fp32; 2^-inf = 0.
CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// |scale| / ln 2, kept positive so that -inf stays -inf: with scale 0 every visible key then weighs the same.
CUTE_DEVICE float positive_scale_log2(float softmax_scale) {
  return fmaxf(fabsf(softmax_scale), 1e-30f) * kLog2e;
}

// Up to here a product of score and scale is rounded by at most 2^-14, a fraction of fp16's rounding unit.
constexpr float kFarFromZero = 1024.f;

template <int kRows>
struct OnlineSoftmax {
  float scale_log2;       // softmax_scale / ln 2, positive
  float row_max[kRows];   // of the scores before scaling
  float row_sum[kRows];   // this thread's columns only, until finish()

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Replaces scores by exp(scale * (score - row_max)) and rescales earlier sums and outputs to the new maximum.
  template <class Scores, class Output>
  CUTE_DEVICE void step(Scores&& scores /* (rows,columns) */, Output&& output /* (rows,dims) */) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float highest = row_max[r];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) highest = fmaxf(highest, scores(r, c));
      highest = quad_reduce(highest, [](float a, float b) { return fmaxf(a, b); });
      // A row that has seen no key yet: its scores are all -inf, and must become 0, not NaN.
      const float reference = highest == -INFINITY ? 0.f : highest;
      const float shrink = exp2_approx((row_max[r] - reference) * scale_log2);
      // One FMA a score, unless rounding the product of reference and scale would show in the result.
      float offset = reference * scale_log2;
      if (fabsf(offset) > kFarFromZero) {
        offset = 0.f;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(scores); ++c) scores(r, c) -= reference;
      }
      row_max[r] = highest;
      row_sum[r] *= shrink;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) *= shrink;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(scores(r, c) * scale_log2 - offset);
        row_sum[r] += scores(r, c);
      }
    }
  }

  // Divides outputs by the sums; afterwards row_sum holds whole rows. A row without keys stays 0.
  template <class Output>
  CUTE_DEVICE void finish(Output&& output /* (rows,dims) */) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] = quad_reduce(row_sum[r], [](float a, float b) { return a + b; });
      const float inverse = row_sum[r] == 0.f ? 0.f : 1.f / row_sum[r];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) *= inverse;
    }
  }

  // The row's maximum after scaling. The hardware's maximum passes over NaN, which the sum still shows.
  CUTE_DEVICE float natural_max(int r) const {
    return isnan(row_sum[r]) && row_max[r] < INFINITY ? row_sum[r] : row_max[r] * (scale_log2 * kLn2);
  }

  CUTE_DEVICE float lse(int r) const {
    return row_sum[r] == 0.f ? -INFINITY : (row_max[r] * scale_log2 + log2f(row_sum[r])) * kLn2;
  }
};

}  // namespace flash_cute
