// What softcap and ALiBi make of a score, and what of its gradient: their only arithmetic on a GPU. The loops over
// tiles are in forward_rules.h, backward_scores.h and sm80/fp32/rules.h. flash_cute/reference.py has the definitions.
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
  // The same to the last bits of fp32.
  CUTE_DEVICE static float value_fp32(float x) { return tanhf(x); }
  // Of value(x) by x.
  CUTE_DEVICE static float derivative(float value) { return 1.f - value * value; }
};

// A scaled score with a bias; `distance`, not negative, is from the query's position to the key. The derivative is 1.
struct Alibi {
  CUTE_DEVICE static float value(float score, float slope, float distance) { return score - slope * distance; }
};

// ALiBi's slope of a head, 0 where there is none.
CUTE_DEVICE float slope_of(const ScoreRules& rules, int batch, int head) {
  return rules.alibi == nullptr ? 0.f : rules.alibi[batch * rules.alibi_batch + head];
}

// One logit a head beside those of the keys; -inf weighs nothing.
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
