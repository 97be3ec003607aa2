// Scores in backward: S becomes P = exp(S - lse), dP becomes dS = P (dP - rowsum(dO O)), under the band and the Rich
// tier's score rules. Scores lie transposed, keys by queries.
#pragma once

#include "kernels/common/mask.h"
#include "kernels/common/dropout.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"
#include "core/layout/tiles.h"

namespace flash_cute {

// `Coords`: key and query of a thread's first element, offsets down(r) and across(c) of the others, and whether
// across(c) is column_offset(c).
template <KernelConfig C, class Coords>
class ScoreGradients {
 public:
  CUTE_DEVICE ScoreGradients(const FwdProblem& p, const SeqInfo& seq, int batch, int first_key, const Coords& coords)
      : p_(p), mask_(seq, p.band), shift_(seq.shift()), batch_(batch), coords_(coords), key_(first_key + coords.key) {}

  // In place, for the queries of a head from `first_query` on, with their LSE and row sums; s and dp (keys,queries).
  // `full`: nothing is masked. dP may be read after await_dp().
  template <class Scores, class Await>
  CUTE_DEVICE void operator()(Scores s, Scores dp, const float* lse_log2, const float* row_dot, int head,
                              int first_query, bool full, const Await& await_dp) const {
    if constexpr (C.rich()) {
      await_dp();
      ruled(s, dp, lse_log2, row_dot, head, first_query + coords_.query);
    } else {
      exponentiate(s, lse_log2, p_.softmax_scale * kLog2e);
      await_dp();
      subtract(dp, row_dot);
      CUTE_UNROLL
      for (int i = 0; i < size(s); ++i) dp(i) *= s(i);
    }
    if (!full) hide(first_query, s, dp);
  }

  // For the Plain tier in two steps: P replaces S, then dS replaces dP.
  template <class Scores>
  CUTE_DEVICE void probabilities(Scores s, const float* lse_log2, int first_query, bool full) const {
    exponentiate(s, lse_log2, p_.softmax_scale * kLog2e);
    if (!full) hide(first_query, s);
  }
  template <class Scores>
  CUTE_DEVICE void score_gradients(const Scores& weights, Scores dp, const float* row_dot, int first_query,
                                   bool full) const {
    subtract(dp, row_dot);
    CUTE_UNROLL
    for (int i = 0; i < size(dp); ++i) dp(i) *= weights(i);
    if (!full) hide(first_query, dp);
  }

 private:
  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores& s, const float* lse_log2, float scale_log2) const {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(s); c += 2) {
      const float2 lse = pair(lse_log2, c);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(s); ++r) {
        s(r, c) = exp2_approx(s(r, c) * scale_log2 - lse.x);
        s(r, c + 1) = exp2_approx(s(r, c + 1) * scale_log2 - lse.y);
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE void subtract(Scores& dp, const float* row_dot) const {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(dp); c += 2) {
      const float2 dot = pair(row_dot, c);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(dp); ++r) {
        dp(r, c) -= dot.x;
        dp(r, c + 1) -= dot.y;
      }
    }
  }

  // A statistic of columns c and c + 1.
  CUTE_DEVICE float2 pair(const float* statistic, int c) const {
    return *reinterpret_cast<const float2*>(statistic + coords_.query + Coords::across(c));
  }

  // The Rich tier: each rule is a pass of its own, so that an absent one costs a branch. With dropout dS lacks the
  // factor gradient_scale().
  template <class Scores>
  CUTE_DEVICE void ruled(Scores& s, Scores& dp, const float* lse_log2, const float* row_dot, int head,
                         int query) const {
    const ScoreRules& rules = p_.rules;
    const ScoreMod mod(p_);
    const bool modified = mod.on(), drops = C.rich() && rules.rng != nullptr;
    float scale = p_.softmax_scale;  // of scores
    if (modified) {
      if (drops) each(s, head, query, [&](int r, int c, bool keep) { dp(r, c) = keep ? dp(r, c) : 0.f; });
      subtract(dp, row_dot);
      const float inner = mod.inner();
      scale = mod.outer();
      CUTE_UNROLL
      for (int i = 0; i < size(s); ++i) {
        s(i) = mod.value(s(i) * inner);
        dp(i) *= mod.derivative(s(i));
      }
    } else if (!drops) {
      subtract(dp, row_dot);
    }
    if (const float slope = slope_of(rules, batch_, head); slope != 0.f) {
      const float distance = float(query + shift_ - key_);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(s); ++r) {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(s); ++c) {
          const float steps = fabsf(distance + float(Coords::across(c) - Coords::down(r)));
          s(r, c) = Alibi::value(s(r, c) * scale, slope, steps);
        }
      }
      scale = 1.f;
    }
    exponentiate(s, lse_log2, scale * kLog2e);
    if (drops && !modified) {
      each(s, head, query, [&](int r, int c, bool keep) {
        const float lost = s(r, c) * row_dot[coords_.query + Coords::across(c)];
        s(r, c) = keep ? s(r, c) : 0.f;
        dp(r, c) = s(r, c) * dp(r, c) - lost;
      });
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < size(s); ++i) dp(i) *= s(i);
    if (drops) each(s, head, query, [&](int r, int c, bool keep) { s(r, c) = keep ? s(r, c) : 0.f; });
  }

  // Calls f(r, c, keep) for this thread's elements, with dropout's decision.
  template <class Scores, class F>
  CUTE_DEVICE void each(const Scores& s, int head, int query, F f) const {
    const Dropout dropout(p_.rules, int64_t(batch_) * p_.heads + head);
    each_kept<true, decltype(size<0>(s))::value, decltype(size<1>(s))::value>(
        dropout, [&](int r) { return key_ + Coords::down(r); }, [&](int c) { return query + Coords::across(c); }, f);
  }

  // Masked elements of all `scores` become 0 by selection: masked keys and values may hold anything.
  template <class... Scores>
  CUTE_DEVICE void hide(int first_query, Scores&... scores) const {
    const int query = first_query + coords_.query;
    if constexpr (Coords::kColumnsInOrder) {
      hide_columns(query, scores...);
    } else {
      hide_elements(query, scores...);
    }
  }

  template <class First, class... Others>
  CUTE_DEVICE void hide_elements(int query, First& first, Others&... others) const {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(first); ++r) {
      const auto [begin, end] = visible_columns(r, query);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(first); ++c) {
        if (Coords::across(c) < begin || Coords::across(c) >= end) ((first(r, c) = 0.f), ..., (others(r, c) = 0.f));
      }
    }
  }

  // The same for columns at column_offset(), from one bit a column.
  template <class First, class... Others>
  CUTE_DEVICE void hide_columns(int query, First& first, Others&... others) const {
    static_assert(decltype(size<1>(first))::value <= 32);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(first); ++r) {
      const auto [begin, end] = visible_columns(r, query);
      const uint32_t visible = low_bits(columns_before(end)) & ~low_bits(columns_before(begin));
      CUTE_UNROLL
      for (int c = 0; c < size<1>(first); ++c) {
        if (!(visible & (1u << c))) ((first(r, c) = 0.f), ..., (others(r, c) = 0.f));
      }
    }
  }

  // Row r sees the queries at offsets [first, last) from `query`.
  CUTE_DEVICE RowSpan visible_columns(int r, int query) const {
    const int key = key_ + Coords::down(r), first = key - mask_.highest - query;
    return {first, key < mask_.seqlen_k ? key - mask_.lowest + 1 - query : first};
  }

  const FwdProblem& p_;
  BandMask mask_;
  int shift_, batch_;
  Coords coords_;
  int key_;  // of this thread's first element, in the sequence
};

}  // namespace flash_cute
