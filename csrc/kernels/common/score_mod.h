// The rules' arithmetic on scores and their gradients, in one place for the GPU. flash_cute/reference/ has the
// definitions.
#pragma once

#include "core/problem.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

// tanh(x * inner) / x as a polynomial, accurate to 2^-24 for |x * inner| <= kSmall; keeps the MUFU unit free for
// exponentials.
struct SmallTanh {
  static constexpr float kSmall = 0.25f;

  float c0, c1, c2;

  CUTE_HOST_DEVICE explicit SmallTanh(float inner) {
    const float square = inner * inner;
    c0 = 0.99999823f * inner;
    c1 = -0.33313174f * inner * square;
    c2 = 0.12730211f * inner * square * square;
  }

  CUTE_HOST_DEVICE float operator()(float x) const {
    const float x2 = x * x;
    return (c2 * x2 + c1) * x2 + c0;
  }
  CUTE_HOST_DEVICE SmallTanh times(float factor) const { return {c0 * factor, c1 * factor, c2 * factor}; }

  // Whether all of a warp's scores are small enough.
  template <class Scores>
  CUTE_DEVICE static bool suits(const Scores& scores, float inner) {
    float largest[kChains] = {};
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores(i)));
    const float top = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    return __all_sync(0xffffffff, usual(inner) && top * fabsf(inner) <= kSmall);
  }

  // Whether fifth powers are still normal numbers.
  CUTE_HOST_DEVICE static bool usual(float inner) { return 1e-7f <= fabsf(inner) && fabsf(inner) <= 1e7f; }

 private:
  static constexpr int kChains = 4;

  CUTE_HOST_DEVICE SmallTanh(float c0, float c1, float c2) : c0(c0), c1(c1), c2(c2) {}
};

// A capped score is softcap * value(x), with x = score * softmax_scale / softcap.
struct Softcap {
  // tanh(x) to about 2^-19 of itself: a softcap multiplies errors. The hardware's own is off by 2^-11.
  CUTE_DEVICE static float value(float x) {
    const float large = 1.f - __fdividef(2.f, 1.f + exp2_approx(2.f * kLog2e * x));
    return fabsf(x) <= SmallTanh::kSmall ? SmallTanh(1.f)(x) * x : large;
  }
  // tanh(x) to the last bits of fp32.
  CUTE_DEVICE static float value_fp32(float x) { return tanhf(x); }
  // The derivative of value(x).
  CUTE_DEVICE static float derivative(float value) { return 1.f - value * value; }
};

// The element-wise rule of a call, for kernels: a product x of query and key becomes the score outer() * value(x *
// inner()), without a rule x * softmax_scale. outer() is above 0; value is odd, and derivative(value(0)) is 1. Softcap
// and SmallTanh are softcap's: another rule needs its own (docs/architecture.md).
class ScoreMod {
 public:
  CUTE_HOST_DEVICE explicit ScoreMod(const FwdProblem& p) : rule_(p.rules.element), scale_(p.softmax_scale) {}

  CUTE_DEVICE bool on() const { return rule_.on(); }
  CUTE_DEVICE float inner() const { return scale_ / rule_.softcap; }
  CUTE_DEVICE float outer() const { return rule_.softcap; }
  CUTE_DEVICE float value(float x) const { return Softcap::value(x); }
  CUTE_DEVICE float value_fp32(float x) const { return Softcap::value_fp32(x); }
  CUTE_DEVICE float derivative(float value) const { return Softcap::derivative(value); }

  // Products become scores without the factor rest(); without a rule they change sign if the scale is negative. The
  // shortcut is for small scores, the usual case, and takes registers.
  template <bool kShortcuts, class Scores>
  CUTE_DEVICE void apply(Scores&& scores) const {
    if (on()) {
      if (kShortcuts && SmallTanh::suits(scores, inner())) {
        const SmallTanh factor(inner());
        CUTE_UNROLL
        for (int i = 0; i < size(scores); ++i) scores(i) *= factor(scores(i));
        return;
      }
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = value(scores(i) * inner());
    } else if (scale_ < 0.f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = -scores(i);
    }
  }
  CUTE_DEVICE float rest() const { return on() ? outer() : fabsf(scale_); }
  CUTE_DEVICE float rest_log2() const { return on() ? outer() * kLog2e : positive_scale_log2(scale_); }

  // Products become scores, to the last bits of fp32.
  template <class Scores>
  CUTE_DEVICE void apply_fp32(Scores&& scores) const {
    if (on()) {
      const float inside = inner();
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = outer() * value_fp32(scores(i) * inside);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= scale_;
    }
  }
  // 1 / outer(), or 0 without a rule: the derivative of a value of 0 is 1.
  CUTE_DEVICE float inverse_outer() const { return on() ? 1.f / outer() : 0.f; }

 private:
  ElementRule rule_;
  float scale_;
};

// A rule that is fused into the softmax's scale: softcap, for scores that are small and have no other rule. Order is
// kept, so maxima are of raw scores. Computed on the host, as kernels have no registers for it.
struct SoftmaxCap {
  bool is_possible = false;
  float reach = 0.f;  // scores up to here are small
  SmallTanh factor{0.f};  // of a score
  SmallTanh weight{0.f};  // times the softmax's scale
  float most_weight = 0.f;  // the largest weight: at score 0

  // It is off if the row max is an output, which must be exact.
  static SoftmaxCap of(const FwdProblem& p) {
    constexpr float kMost = kHuge / 2;  // times 1 / ln 2 still below kHuge
    const ElementRule& rule = p.rules.element;
    const float cap = rule.softcap, inner = p.softmax_scale / cap;
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

// A scaled score with a bias; `distance`, not negative, is from the query's position to the key. The derivative is 1.
struct Alibi {
  CUTE_DEVICE static float value(float score, float slope, float distance) { return score - slope * distance; }
};

// ALiBi's slope of a head, 0 without ALiBi.
CUTE_DEVICE float slope_of(const ScoreRules& rules, int batch, int head) {
  return rules.alibi == nullptr ? 0.f : rules.alibi[batch * rules.alibi_batch + head];
}

// The sink's logit of a head; -inf has no weight.
CUTE_DEVICE float sink_of(const Sink& sink, int head) {
  switch (sink.element) {
    case Sink::Element::FP32:
      return static_cast<const float*>(sink.ptr)[head];
    case Sink::Element::FP16:
      return float(static_cast<const cutlass::half_t*>(sink.ptr)[head]);
    case Sink::Element::BF16:
      return float(static_cast<const cutlass::bfloat16_t*>(sink.ptr)[head]);
    default:
      return -INFINITY;
  }
}

}  // namespace flash_cute
