// What the Rich tier does to the scores and weights of a tile in forward.
#pragma once

#include "core/problem.h"
#include "kernels/common/dropout.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

// Softcap without its outer factor, which the softmax's scale includes; without a softcap, the sign of a negative
// scale. The shortcut is for small scores, the usual case.
template <bool kShortcuts, class Scores>
CUTE_DEVICE void apply_cap(Scores&& scores, float cap, float scale) {
  if (cap > 0.f) {
    const float inner = scale / cap;
    if (kShortcuts && SmallTanh::suits(scores, inner)) {
      const SmallTanh factor(inner);
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= factor(scores(i));
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = Softcap::value(scores(i) * inner);
  } else if (scale < 0.f) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = -scores(i);
  }
}

// Softcap, and ALiBi if `biased`: row r has slope(r), and its query is distance(r) keys after this thread's first
// column. The factor rule_scale_log2() is left to the softmax.
template <bool kShortcuts, class Scores, class Slope, class Distance>
CUTE_DEVICE void apply_rules(Scores&& scores, float cap, float scale, bool biased, Slope slope, Distance distance) {
  apply_cap<kShortcuts>(scores, cap, scale);
  if (!biased) return;
  const float inner = cap > 0.f ? cap : fabsf(scale);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const float from_first = distance(r);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = Alibi::value(scores(r, c) * inner, slope(r), fabsf(from_first - float(column_offset(c))));
    }
  }
}

CUTE_DEVICE float rule_scale_log2(float cap, float scale, bool biased) {
  if (biased) return kLog2e;
  return cap > 0.f ? cap * kLog2e : positive_scale_log2(scale);
}

// Softcap and ALiBi of one head. `at`: coordinates of scores (rows,columns) in a tile whose first query is at key
// position `row` and whose first key is `col`. Shortcuts take registers.
template <bool kShortcuts>
class ForwardRules {
 public:
  CUTE_DEVICE ForwardRules(const FwdProblem& p, int batch, int head)
      : cap_(p.rules.softcap),
        scale_(p.softmax_scale),
        biased_(p.rules.alibi != nullptr),
        is_causal_(p.band.right == 0),
        slope_(slope_of(p.rules, batch, head)) {}

  // Softcap and ALiBi of a tile, without the factor scale_log2().
  template <class Scores, class Coordinates>
  CUTE_DEVICE void apply(Scores&& scores, const Coordinates& at, int row, int col) const {
    if (adds_in_units()) add_bias(scores, at, row, col);
    apply_rules<kShortcuts>(
        scores, cap_, scale_, biased_ && !adds_in_units(), [&](int) { return slope_; },
        [&](int r) { return distance(at, r, row, col); });
  }

  // What scores are still multiplied by after apply().
  CUTE_DEVICE float scale_log2() const { return rule_scale_log2(cap_, scale_, biased_ && !adds_in_units()); }

 private:
  static constexpr float kLeastScale = 1e-20f;

  // Whether ALiBi is added to raw products, which is free. Not with a softcap, which comes first, nor with scale 0.
  CUTE_DEVICE bool adds_in_units() const { return kShortcuts && biased_ && cap_ == 0.f && fabsf(scale_) > kLeastScale; }

  // ALiBi in units of raw products, rounded once. Its size may be thousands, where tensor cores would lose low bits of
  // the product. Under a causal mask keys after the query are masked anyway.
  template <class Scores, class Coordinates>
  CUTE_DEVICE void add_bias(Scores&& scores, const Coordinates& at, int row, int col) const {
    constexpr int kRows = decltype(size<0>(scores))::value, kColumns = decltype(size<1>(scores))::value;
    const float slope = slope_ / scale_;
    auto add = [&](auto signless, float slope) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float from_first = distance(at, r, row, col);
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          scores(r, c) = Alibi::value(scores(r, c), slope, signless(from_first - float(column_offset(c))));
        }
      }
    };
    auto as_it_is = [](float x) { return x; };
    if (is_causal_ || distance(at, 0, row, col) >= float(column_offset(kColumns - 1))) {  // keys before the queries
      add(as_it_is, slope);
    } else if (distance(at, kRows - 1, row, col) <= 0.f) {  // keys after them
      add(as_it_is, -slope);
    } else {
      add([](float x) { return fabsf(x); }, slope);
    }
  }

  // Of row r from this thread's first key.
  template <class Coordinates>
  CUTE_DEVICE static float distance(const Coordinates& at, int r, int row, int col) {
    return float(row + get<0>(at(r, 0)) - col - get<1>(at(0, 0)));
  }

  float cap_, scale_;
  bool biased_, is_causal_;
  float slope_;
};

// Softcap fused into the softmax's scale: for scores that are small and have no other rule. Order is kept, so maxima
// are of raw scores. Computed on the host, as kernels have no registers for it.
struct SoftmaxCap {
  bool is_possible = false;
  float reach = 0.f;  // scores up to here are small
  SmallTanh factor{0.f};  // of a score
  SmallTanh weight{0.f};  // times the softmax's scale
  float most_weight = 0.f;  // the largest weight: at score 0

  // Not if the row max is an output: it must be exact.
  static SoftmaxCap of(const FwdProblem& p) {
    constexpr float kMost = kHuge / 2;  // times 1 / ln 2 still below kHuge
    const float cap = p.rules.softcap, inner = p.softmax_scale / cap;
    const bool is_alone = p.rules.alibi == nullptr && p.row_max.ptr == nullptr;
    if (!(0.f < cap && cap < kMost && p.softmax_scale > 0.f && is_alone && SmallTanh::usual(inner))) return {};
    const SmallTanh factor(inner), weight = factor.times(cap * kLog2e);
    return {true, SmallTanh::kSmall / inner, factor, weight, weight(0.f)};
  }

  // Whether scores of these OnlineSoftmax::magnitudes() are small, as far as this thread knows.
  template <class Tops>
  CUTE_DEVICE bool suits(const Tops& magnitudes) const {
    bool does = true;
    CUTE_UNROLL
    for (int r = 0; r < Tops::kElements; ++r) does &= magnitudes[r] <= reach;
    return does;
  }
};

// Sets dropped elements of kColumns weights (rows,columns) from column `first` on to 0.
template <int kColumns, class Weights, class Coordinates>
CUTE_DEVICE void drop(Weights&& weights, int first, const Coordinates& at, const Dropout& dropout, int row, int col) {
  each_kept<false, decltype(size<0>(weights))::value, kColumns>(
      dropout, [&](int r) { return row + get<0>(at(r, 0)); }, [&](int c) { return col + get<1>(at(0, first + c)); },
      [&](int r, int c, bool keep) {
        if (!keep) weights(r, first + c) = 0.f;
      });
}

}  // namespace flash_cute
