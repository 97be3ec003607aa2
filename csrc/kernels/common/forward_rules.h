// What the Rich tier does to the scores and weights of a tile in forward.
#pragma once

#include "kernels/common/score.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

// Softcap and ALiBi, for scores (rows,columns) where row r has slope(r), and its query stands distance(r) keys behind
// that of this thread's first column. A factor is left out: rule_scale_log2().
template <class Scores, class Slope, class Distance>
CUTE_DEVICE void apply_rules(Scores&& scores, const FwdProblem& p, Slope slope, Distance distance) {
  const float cap = p.rules.softcap;
  if (cap > 0.f) {
    const float inner = p.softmax_scale / cap;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of(scores(i) * inner);
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

// The same for the queries of one head that stand at keys from `row` on, and the keys from `col` on.
template <class Scores, class Coordinates>
CUTE_DEVICE void apply_rules(Scores&& scores, const Coordinates& at, const FwdProblem& p, float slope, int row,
                             int col) {
  apply_rules(
      scores, p, [&](int) { return slope; }, [&](int r) { return row + get<0>(at(r, 0)) - col - get<1>(at(0, 0)); });
}

// What scores are still multiplied by after the rules: no pass of its own, as the softmax multiplies anyway.
CUTE_DEVICE float rule_scale_log2(const FwdProblem& p) {
  if (p.rules.alibi != nullptr) return kLog2e;
  return p.rules.softcap > 0.f ? p.rules.softcap * kLog2e : positive_scale_log2(p.softmax_scale);
}

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
