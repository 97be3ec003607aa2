// The Rich tier's rules for scores and weights of a tile in forward.
#pragma once

#include "core/problem.h"
#include "kernels/common/dropout.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

// The element-wise rule, and ALiBi if `biased`: row r has slope(r), and its query is distance(r) keys after this
// thread's first column. The factor rule_scale_log2() is left to the softmax.
template <bool kShortcuts, class Scores, class Slope, class Distance>
CUTE_DEVICE void apply_rules(Scores&& scores, const ScoreMod& mod, bool biased, Slope slope, Distance distance) {
  mod.apply<kShortcuts>(scores);
  if (!biased) return;
  const float rest = mod.rest();
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const float from_first = distance(r);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = Alibi::value(scores(r, c) * rest, slope(r), fabsf(from_first - float(column_offset(c))));
    }
  }
}

CUTE_DEVICE float rule_scale_log2(const ScoreMod& mod, bool biased) {
  return biased ? kLog2e : mod.rest_log2();
}

// The element-wise rule and ALiBi of one head. `at`: coordinates of scores (rows,columns) in a tile whose first query
// is at key position `row` and whose first key is `col`. Shortcuts take registers.
template <bool kShortcuts>
class ForwardRules {
 public:
  CUTE_DEVICE ForwardRules(const FwdProblem& p, int batch, int head)
      : mod_(p),
        scale_(p.softmax_scale),
        biased_(p.rules.alibi != nullptr),
        is_causal_(p.band.right == 0),
        slope_(slope_of(p.rules, batch, head)) {}

  // Applies both to a tile, without the factor scale_log2().
  template <class Scores, class Coordinates>
  CUTE_DEVICE void apply(Scores&& scores, const Coordinates& at, int row, int col) const {
    if (adds_in_units()) add_bias(scores, at, row, col);
    apply_rules<kShortcuts>(
        scores, mod_, biased_ && !adds_in_units(), [&](int) { return slope_; },
        [&](int r) { return distance(at, r, row, col); });
  }

  // The factor of scores that apply() leaves to the softmax.
  CUTE_DEVICE float scale_log2() const { return rule_scale_log2(mod_, biased_ && !adds_in_units()); }

 private:
  static constexpr float kLeastScale = 1e-20f;

  // Whether ALiBi is added to raw products, which is free. Not with a rule, which comes first, nor with scale 0.
  CUTE_DEVICE bool adds_in_units() const { return kShortcuts && biased_ && !mod_.on() && fabsf(scale_) > kLeastScale; }

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

  // The distance of row r's query from this thread's first key.
  template <class Coordinates>
  CUTE_DEVICE static float distance(const Coordinates& at, int r, int row, int col) {
    return float(row + get<0>(at(r, 0)) - col - get<1>(at(0, 0)));
  }

  ScoreMod mod_;
  float scale_;
  bool biased_, is_causal_;
  float slope_;
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
