// Online softmax whose weights are to be rounded to e4m3, and the rows of a warp.
#pragma once

#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"
#include "kernels/sm90/fp8/traits.h"

namespace flash_cute::sm90::fp8 {

constexpr float kWeightBits = 8.f;  // weights, at most 1, are multiplied by 2^8: e4m3 reaches 448
// From this size on (in bits) a row's maximum is subtracted from scores before the scale. The rounding of a larger
// offset would take weights beyond e4m3.
constexpr float kLargeOffset = 0x1p16f;

// Rounds four weights to e4m3, the first one in the low byte. Four columns of an accumulator, of two n-tiles, are a
// word of the operand A in the order of keys of TransposedValues.
CUTE_DEVICE uint32_t rounded(float a, float b, float c, float d) {
  uint32_t result;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(result)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}

// Two rows of scores in this thread's columns. The weight of a score is 2^(scale_log2 * (score - row_max) +
// kWeightBits).
struct RoundedSoftmax {
  float scale_log2[2];  // positive
  float row_max[2];  // of all columns; -inf before the first key
  float row_sum[2];  // of weights before they are rounded; this thread's columns only

  // Scores of a tile (rows,columns) become weights. `factors`: of sums and outputs so far.
  template <class Scores>
  CUTE_DEVICE void step(Scores&& scores, float (&factors)[2]) {
    constexpr int kColumns = decltype(size<1>(scores))::value, kTogether = 4;
    const float before[2] = {row_max[0], row_max[1]};
    take_nonnegative_max(scores);
    float offset[2];
    bool is_rare = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      offset[r] = row_max[r] * scale_log2[r];
      factors[r] = exp2_approx(before[r] * scale_log2[r] - offset[r]);
      is_rare |= __float_as_int(row_max[r]) < 0 || kLargeOffset <= offset[r];
    }
    if (__any_sync(~0u, is_rare)) {
      row_max[0] = before[0];
      row_max[1] = before[1];
      take_max(scores);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float base = row_max[r] == -INFINITY ? 0.f : row_max[r];
        factors[r] = exp2_approx((before[r] - base) * scale_log2[r]);
        offset[r] = 0.f;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) scores(r, c) -= base;
      }
    }
    float sum[2][2] = {{row_sum[0] * factors[0], 0.f}, {row_sum[1] * factors[1], 0.f}};
    // Sums follow a group of columns later: they hide the latency of exponentials.
    CUTE_UNROLL
    for (int c = 0; c <= kColumns; c += kTogether) {
      CUTE_UNROLL
      for (int i = 0; i < 2 * kTogether && c < kColumns; ++i) {
        float& score = scores(i % 2, c + i / 2);
        score = exp2_approx(score * scale_log2[i % 2] - (offset[i % 2] - kWeightBits));
      }
      CUTE_UNROLL
      for (int i = 0; i < 2 * kTogether && c > 0; ++i) sum[i % 2][i / 2 % 2] += scores(i % 2, c - kTogether + i / 2);
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) row_sum[r] = sum[r][0] + sum[r][1];
  }

  // A row's LSE, and what its outputs are to be multiplied by, twice and once; `rounded_sum` is that of its weights.
  struct Total {
    float lse, damping, inverse;
  };
  CUTE_DEVICE Total finish(int r, float rounded_sum, float sink /* -inf: none */) {
    const float base = row_max[r] == -INFINITY ? 0.f : row_max[r], most = exp2f(kWeightBits);
    const SinkWeight beside(base * scale_log2[r], sink * kLog2e);
    const float damping = beside.damping, sum = quad_sum(row_sum[r]) / most;
    const float total = sum * damping * damping + beside.weight;
    const float weights = rounded_sum * damping * damping + beside.weight * most;
    return {total == 0.f ? -INFINITY : (beside.top + log2f(total)) * kLn2, damping,
            weights == 0.f ? 0.f : damping / weights};
  }

 private:
  // The largest scores so far, of all columns; both rows side by side.
  template <class Scores>
  CUTE_DEVICE void take_max(const Scores& scores) {
    constexpr int kColumns = decltype(size<1>(scores))::value;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kColumns; ++c) row_max[r] = fmaxf(row_max[r], scores(r, c));
      row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(~0u, row_max[r], 1));
      row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(~0u, row_max[r], 2));
    }
  }

  // The same if there is one of at least 0, else some negative number or NaN: numbers compare as integers, of which the
  // hardware takes three at a time.
  template <class Scores>
  CUTE_DEVICE void take_nonnegative_max(const Scores& scores) {
    constexpr int kColumns = decltype(size<1>(scores))::value, kChains = 4;
    int top[2][kChains];
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 2) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        int& chain = top[r][c / 2 % kChains];
        chain = __vimax3_s32(__float_as_int(scores(r, c)), __float_as_int(scores(r, c + 1)),
                             c < 2 * kChains ? __float_as_int(row_max[r]) : chain);
      }
    }
    int most[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) most[r] = max(__vimax3_s32(top[r][0], top[r][1], top[r][2]), top[r][3]);
    CUTE_UNROLL
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      int other[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) other[r] = __shfl_xor_sync(~0u, most[r], lanes);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) most[r] = max(most[r], other[r]);
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) row_max[r] = __int_as_float(most[r]);
  }
};

}  // namespace flash_cute::sm90::fp8
