// What the Rich tier does to the scores and weights of a tile in forward.
#pragma once

#include "kernels/common/score.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

// Softcap and ALiBi, for scores (rows,columns) where row r has slope(r), and its query stands distance(r) keys behind
// that of this thread's first column. A factor is left out: rule_scale_log2(). Shortcuts take registers.
template <bool kShortcuts = false, class Scores, class Slope, class Distance>
CUTE_DEVICE void apply_rules(Scores&& scores, const FwdProblem& p, Slope slope, Distance distance) {
  const float cap = p.rules.softcap;
  if (cap > 0.f) {
    tanh_of_all<kShortcuts>(scores, p.softmax_scale / cap);
  } else if (p.softmax_scale < 0.f) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = -scores(i);
  }
  if (p.rules.alibi == nullptr) return;
  const float scale = cap > 0.f ? cap : fabsf(p.softmax_scale);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const float from_first = float(distance(r));
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = scores(r, c) * scale - slope(r) * fabsf(from_first - float(column_offset(c)));
    }
  }
}

// What scores are still multiplied by after the rules: no pass of its own, as the softmax multiplies anyway.
CUTE_DEVICE float rule_scale_log2(const FwdProblem& p) {
  if (p.rules.alibi != nullptr) return kLog2e;
  return p.rules.softcap > 0.f ? p.rules.softcap * kLog2e : positive_scale_log2(p.softmax_scale);
}

// The same for the queries of one head. Coordinates `at` of scores (rows,columns) are those in a tile whose first query
// stands at key `row` and whose first key is `col`.
template <bool kShortcuts>
class ForwardRules {
 public:
  CUTE_DEVICE ForwardRules(const FwdProblem& p, int batch, int head) : p_(p), slope_(slope_of(p.rules, batch, head)) {}

  // Whether products of scores are to begin with what begin() gives, for 0: ALiBi in their units, as it then takes one
  // instruction a score, not three. A softcap comes before it, and scale 0 leaves no units.
  CUTE_DEVICE bool begins() const {
    constexpr float kLeastScale = 1e-20f;
    return kShortcuts && p_.rules.alibi != nullptr && p_.rules.softcap == 0.f && fabsf(p_.softmax_scale) > kLeastScale;
  }

  template <class Scores, class Coordinates>
  CUTE_DEVICE void begin(Scores&& scores, const Coordinates& at, int row, int col) const {
    constexpr int kRows = decltype(size<0>(scores))::value, kColumns = decltype(size<1>(scores))::value;
    const float slope = slope_ / p_.softmax_scale;
    const int nearest = distance(at, 0, row, col) - column_offset(kColumns - 1);
    const int farthest = distance(at, kRows - 1, row, col);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float from_first = float(distance(at, r, row, col));
      if (nearest >= 0 || farthest <= 0) {  // all of this thread's keys are on one side
        const float away = nearest >= 0 ? slope : -slope, first = -away * from_first;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) scores(r, c) = away * float(column_offset(c)) + first;
      } else {
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) scores(r, c) = -slope * fabsf(from_first - float(column_offset(c)));
      }
    }
  }

  // What is left to do after the products.
  template <class Scores, class Coordinates>
  CUTE_DEVICE void apply(Scores&& scores, const Coordinates& at, int row, int col) const {
    if (!begins()) {
      apply_rules<kShortcuts>(
          scores, p_, [&](int) { return slope_; }, [&](int r) { return distance(at, r, row, col); });
    } else if (p_.softmax_scale < 0.f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = -scores(i);
    }
  }

  // What scores are multiplied by after apply().
  CUTE_DEVICE float scale_log2() const {
    return begins() ? positive_scale_log2(p_.softmax_scale) : rule_scale_log2(p_);
  }

 private:
  // From this thread's first key to the query of row r.
  template <class Coordinates>
  CUTE_DEVICE static int distance(const Coordinates& at, int r, int row, int col) {
    return row + get<0>(at(r, 0)) - col - get<1>(at(0, 0));
  }

  const FwdProblem& p_;
  float slope_;
};

// Those of kColumns weights (rows,columns) from column `first` on that dropout does not keep become 0.
template <int kColumns, class Weights, class Coordinates>
CUTE_DEVICE void drop(Weights&& weights, int first, const Coordinates& at, const Dropout& dropout, int row, int col) {
  each_kept<false, decltype(size<0>(weights))::value, kColumns>(
      dropout, [&](int r) { return row + get<0>(at(r, 0)); }, [&](int c) { return col + get<1>(at(0, first + c)); },
      [&](int r, int c, bool keep) {
        if (!keep) weights(r, first + c) = 0.f;
      });
}

}  // namespace flash_cute
