// Online softmax over tiles of scores (arXiv 1805.02867).
#pragma once

#include <cfloat>

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

// A row max may rise by 2^kSlack before sums and output are rescaled; 2^8 is far below fp16's largest number.
constexpr float kSlack = 8.f;

// From this size on a row max (in bits) is subtracted from scores exactly, before the scale: rounding an offset of this
// size would be a factor that overflows.
constexpr float kHuge = 0x1p24f;

// The identity among factors of scores; other factors depend on the score and keep its order (SmallTanh).
struct UnitFactor {
  CUTE_DEVICE float operator()(float) const { return 1.f; }
};

struct Nothing {
  CUTE_DEVICE void operator()() const {}
};

// A row's sum of weights is value * 2^reference; unnormalized outputs are relative to 2^reference, too.
struct RowSum {
  float reference, value;
};

// A sink and a row of keys, both as base-2^unit logarithms. Relative to the larger, keys weigh damping^2 (two
// factors, as the square may underflow) and the sink `weight`.
struct SinkWeight {
  float top, damping, weight;

  CUTE_DEVICE SinkWeight(float keys /* finite */, float sink /* -inf: none */, float unit = 1.f)
      : top(fmaxf(keys, sink)),
        damping(exp2_approx((keys - top) * (0.5f * unit))),
        weight(exp2_approx((sink - top) * unit)) {}
};

// kChains independent chains for max and sum: within a chain each step waits for the one before.
template <int kRows, int kChains = 1>
struct OnlineSoftmax {
  using RowMaxima = cutlass::Array<float, kRows>;

  float scale_log2;  // of scores, positive: a weight is 2^(scale_log2 * score - offset)
  float
      row_max[kRows];  // of scores, or 0 (see update_max()); this thread's columns only, until rescale() or finalize()
  float row_sum[kRows][kChains];  // of weights; this thread's columns only, until finalize()
  // scale_log2 * row_max at the last rescale(), rounded: weights and LSE use the same number, so its rounding cancels.
  // Less than any score before the first rescale().
  float offset[kRows];
  // Largest scale_log2 * score that needs no rescale. -inf for rows whose max is huge: their offset is 0, and rescale()
  // makes each tile's scores relative to row_max.
  float limit[kRows];

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      offset[r] = limit[r] = -FLT_MAX;
      CUTE_UNROLL
      for (int i = 0; i < kChains; ++i) row_sum[r][i] = 0.f;
    }
  }

  // Online-softmax step for a tile of scores (rows,columns). If no row max of the warp grew by more than 2^kSlack the
  // old reference stays and the result is false; else sums and output (rows,dims) are rescaled. factor_of(score) is
  // applied later. `then` is called inside both branches so that ptxas cannot sink it below the next wait.
  template <class Scores, class Output, class Factor = UnitFactor, class Then = Nothing>
  CUTE_DEVICE bool update_max(Scores&& scores, Output&& output, const Factor& factor_of = {}, const Then& then = {}) {
    RowMaxima top;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) top[r] = max_of_row(scores, r);
    if (keeps_offset(top, factor_of)) {
      then();
      return false;
    }
    rescale(top, scores, output);
    then();
    return true;
  }

  // Whether scores of these magnitudes(), times at most `most`, need no rescale, as far as this thread knows. Then row
  // maxima need not be computed, unless they are a result of the call.
  CUTE_DEVICE bool fits_limit(const RowMaxima& magnitudes, float most) const {
    bool does = true;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) does &= magnitudes[r] * most <= limit[r];
    return does;
  }

  // The largest |score| of each row, of this thread's columns. Non-negative floats compare like integers, and Hopper
  // has a three-operand integer max.
  template <class Scores>
  CUTE_DEVICE static RowMaxima magnitudes(const Scores& scores) {
    static_assert(decltype(size<1>(scores))::value % 4 == 0);
    RowMaxima top;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      auto larger = [&](int c) { return __float_as_int(fmaxf(fabsf(scores(r, c)), fabsf(scores(r, c + 1)))); };
      int chain[kChains] = {};
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); c += 4) {
        int& most = chain[c / 4 % kChains];
        most = __vimax3_s32(most, larger(c), larger(c + 2));
      }
      CUTE_UNROLL
      for (int i = 1; i < kChains; ++i) chain[0] = max(chain[0], chain[i]);
      top[r] = __int_as_float(chain[0]);
    }
    return top;
  }

  // Columns [first, last) become weights and join the sums. Masked scores, -inf, weigh 0.
  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores&& scores, int first, int last) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = first; c < last; ++c) {
        scores(r, c) = exp2_approx(scores(r, c) * scale_log2 - offset[r]);
        row_sum[r][c % kChains] += scores(r, c);
      }
    }
  }

  // Weights of a whole tile in two steps: first exponents of all columns and weights of the first ones, with
  // factor(score) applied; then the rest.
  template <class Scores, class Factor>
  CUTE_DEVICE void begin_exponentials(Scores&& scores, int columns, const Factor& factor) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = scores(r, c) * factor(scores(r, c)) - offset[r];
      CUTE_UNROLL
      for (int c = 0; c < columns; ++c) scores(r, c) = exp2_approx(scores(r, c));
    }
  }
  template <class Scores>
  CUTE_DEVICE void begin_exponentials(Scores&& scores, int columns) {
    begin_exponentials(scores, columns, [&](float) { return scale_log2; });
  }
  template <class Scores>
  CUTE_DEVICE void end_exponentials(Scores&& scores, int columns) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        if (c >= columns) scores(r, c) = exp2_approx(scores(r, c));
        row_sum[r][c % kChains] += scores(r, c);
      }
    }
  }

  // Row r's sum over all columns, for unnormalized outputs.
  CUTE_DEVICE RowSum sum(int r) {
    row_max[r] = quad_max(row_max[r]);
    CUTE_UNROLL
    for (int i = 1; i < kChains; ++i) row_sum[r][0] += row_sum[r][i];
    row_sum[r][0] = quad_sum(row_sum[r][0]);
    if (limit[r] == -INFINITY) offset[r] = at_least_finite(row_max[r] * scale_log2);
    return {offset[r], row_sum[r][0]};
  }

  // The final statistics of a row.
  struct Total {
    float lse;  // natural log
    float damping, inverse;  // outputs are to be multiplied by both
  };

  // Finalizes row r with its sink; outputs get `factor` on top. Branchless, it can run under the last P V product.
  template <bool kBranchless = false>
  CUTE_DEVICE Total finalize(int r, float sink /* -inf: none */, float factor) {
    const RowSum own = sum(r);
    const SinkWeight beside(own.reference, sink * kLog2e);
    const float total = own.value * beside.damping * beside.damping + beside.weight, weight = factor * beside.damping;
    const float inverse = kBranchless ? __fdividef(weight, total) : weight / total;
    const float lse = total == 0.f ? -INFINITY : (beside.top + log2f(total)) * kLn2;
    return {lse, beside.damping, total == 0.f ? 0.f : inverse};
  }

  // Normalizes row r of outputs (rows,dims). A row without keys stays 0.
  template <class Output>
  CUTE_DEVICE static void normalize(Output&& output, int r, const Total& total) {
    CUTE_UNROLL
    for (int c = 0; total.damping < 1.f && c < size<1>(output); ++c) output(r, c) *= total.damping;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); ++c) output(r, c) *= total.inverse;
  }

  // Finalizes and normalizes all rows; returns their LSE.
  template <class Output>
  CUTE_DEVICE auto finish(Output&& output, float sink, float factor) {
    cutlass::Array<float, kRows> lse;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Total total = finalize(r, sink, factor);
      lse[r] = total.lse;
      normalize(output, r, total);
    }
    return lse;
  }

  // The scaled row max. The hardware max ignores NaN, which the sum still shows.
  CUTE_DEVICE float natural_max(int r) const {
    return isnan(row_sum[r][0]) && row_max[r] < INFINITY ? row_sum[r][0] : row_max[r] * (scale_log2 * kLn2);
  }

 private:
  // The largest of row r's scores, of this thread's columns.
  template <class Scores>
  CUTE_DEVICE static float max_of_row(const Scores& scores, int r) {
    float chain[kChains];
    CUTE_UNROLL
    for (int i = 0; i < kChains; ++i) chain[i] = scores(r, i);
    CUTE_UNROLL
    for (int c = kChains; c < size<1>(scores); ++c) chain[c % kChains] = fmaxf(chain[c % kChains], scores(r, c));
    CUTE_UNROLL
    for (int i = 1; i < kChains; ++i) chain[0] = fmaxf(chain[0], chain[i]);
    return chain[0];
  }

  // Applies factor_of to the new maxima. If every offset of the warp can stay, they join row_max.
  template <class Factor>
  CUTE_DEVICE bool keeps_offset(RowMaxima& top, const Factor& factor_of) {
    bool may = true;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      top[r] *= factor_of(top[r]);
      may &= top[r] * scale_log2 <= limit[r];
    }
    if (!__all_sync(0xffffffff, may)) return false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) row_max[r] = fmaxf(row_max[r], top[r]);
    return true;
  }

  CUTE_DEVICE static float at_least_finite(float x) { return fmaxf(x, -FLT_MAX); }

  // `top`: maxima of the new scores, of this thread's columns.
  template <class Scores, class Output>
  CUTE_DEVICE void rescale(const RowMaxima& top, Scores&& scores, Output&& output) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const bool was_huge = limit[r] == -INFINITY;
      const float before = at_least_finite(row_max[r]);
      row_max[r] = quad_max(fmaxf(row_max[r], top[r]));
      const float after = at_least_finite(row_max[r]), raised = at_least_finite(row_max[r] * scale_log2);
      const float factor = exp2_approx(was_huge ? (before - after) * scale_log2 : offset[r] - raised);
      CUTE_UNROLL
      for (int i = 0; i < kChains; ++i) row_sum[r][i] *= factor;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) *= factor;
      const bool huge = was_huge || (kHuge < fabsf(raised) && fabsf(raised) < FLT_MAX);
      offset[r] = huge ? 0.f : raised;
      limit[r] = huge ? -INFINITY : raised + kSlack;
      CUTE_UNROLL
      for (int c = 0; huge && c < size<1>(scores); ++c) scores(r, c) -= after;
    }
  }
};

}  // namespace flash_cute
