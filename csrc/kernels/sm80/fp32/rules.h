// Scale and softcap on scores of fp32 inputs, for forward and backward.
#pragma once

#include "kernels/common/score_mod.h"

namespace flash_cute::sm80::fp32 {

using namespace cute;

// Products of queries and keys become scores: scaled, and capped where there is a softcap.
template <class Scores>
CUTE_DEVICE void scale_and_cap(Scores&& scores, const FwdProblem& p) {
  const float cap = p.rules.softcap;
  if (cap > 0.f) {
    const float inner = p.softmax_scale / cap;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = cap * Softcap::value_fp32(scores(i) * inner);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= p.softmax_scale;
  }
}

}  // namespace flash_cute::sm80::fp32
