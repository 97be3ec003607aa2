// What happens to scores in backward: S becomes P = exp(S - lse), and dP becomes dS = P (dP - rowsum(dO O)), under the
// band and the rules of the Rich tier. Scores lie transposed, keys by queries.
#pragma once

#include "kernels/common/mask.h"
#include "kernels/common/score.h"
#include "kernels/common/softmax.h"

namespace flash_cute::sm80 {

// Where this thread's elements are in a tile of scores, of which every kDown x kAcross warps have one 16 x 16 piece
// each.
template <int kDown, int kAcross>
struct ScorePlace {
  int key, query;  // of the first element

  CUTE_DEVICE explicit ScorePlace(uint32_t warp)
      : key(16 * (warp % kDown) + threadIdx.x % 32 / 4), query(16 * (warp / kDown) + threadIdx.x % 4 * 2) {}

  // Row r and column c of rows_and_columns(), counted from the first.
  CUTE_HOST_DEVICE static constexpr int down(int r) { return 16 * kDown * (r / 2) + 8 * (r % 2); }
  CUTE_HOST_DEVICE static constexpr int across(int c) { return 16 * kAcross * (c / 4) + 8 * (c / 2 % 2) + c % 2; }
};

template <KernelConfig C, class Place>
class ScoreGradients {
 public:
  CUTE_DEVICE ScoreGradients(const FwdProblem& p, const SeqInfo& seq, int batch, int first_key, uint32_t warp)
      : p_(p), mask_(seq, p.band), shift_(seq.shift()), batch_(batch), place_(warp), key_(first_key + place_.key) {}

  // In place, for queries from `first_query` on of a head, whose statistics are given. `full`: the band hides nothing.
  template <class Accumulator>
  CUTE_DEVICE void operator()(Accumulator& tSrS, Accumulator& tSrdP, const float* lse_log2, const float* row_dot,
                              int head, int first_query, bool full) const {
    Tensor s = rows_and_columns(tSrS), dp = rows_and_columns(tSrdP);  // (keys,queries)
    if constexpr (C.rich()) {
      ruled(s, dp, lse_log2, row_dot, head, first_query + place_.query);
    } else {
      plain(s, dp, lse_log2, row_dot);
    }
    if (!full) hide(s, dp, first_query + place_.query);
  }

 private:
  template <class Scores>
  CUTE_DEVICE void plain(Scores& s, Scores& dp, const float* lse_log2, const float* row_dot) const {
    const float scale_log2 = p_.softmax_scale * kLog2e;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(s); c += 2) {
      const float2 lse = pair(lse_log2, c), dot = pair(row_dot, c);
      CUTE_UNROLL
      for (int r = 0; r < size<0>(s); ++r) {
        s(r, c) = exp2_approx(s(r, c) * scale_log2 - lse.x);
        s(r, c + 1) = exp2_approx(s(r, c + 1) * scale_log2 - lse.y);
        dp(r, c) = s(r, c) * (dp(r, c) - dot.x);
        dp(r, c + 1) = s(r, c + 1) * (dp(r, c + 1) - dot.y);
      }
    }
  }

  // A statistic of columns c and c + 1.
  CUTE_DEVICE float2 pair(const float* statistic, int c) const {
    return *reinterpret_cast<const float2*>(statistic + place_.query + Place::across(c));
  }

  template <class Scores>
  CUTE_DEVICE void ruled(Scores& s, Scores& dp, const float* lse_log2, const float* row_dot, int head,
                         int query) const {
    const float cap = p_.rules.softcap, keep_scale = p_.rules.keep_scale;
    const float inner = cap > 0.f ? p_.softmax_scale / cap : p_.softmax_scale;
    const float slope = slope_of(p_.rules, batch_, head);
    const uint32_t kept = p_.rules.rng == nullptr ? ~0u : kept_bits(s, head, query);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(s); ++c) {
      const float lse = lse_log2[place_.query + Place::across(c)], dot = row_dot[place_.query + Place::across(c)];
      CUTE_UNROLL
      for (int r = 0; r < size<0>(s); ++r) {
        float score = s(r, c) * inner, steepness = 1.f;  // of the softcap at this score
        if (cap > 0.f) {
          const float t = tanh_of(score);
          score = cap * t;
          steepness = 1.f - t * t;
        }
        score -= slope * float(abs(query + Place::across(c) + shift_ - key_ - Place::down(r)));
        const bool keep = kept >> bit(s, r, c) & 1;
        const float weight = exp2_approx(score * kLog2e - lse);
        dp(r, c) = weight * steepness * ((keep ? dp(r, c) * keep_scale : 0.f) - dot);
        s(r, c) = keep ? weight : 0.f;
      }
    }
  }

  // Whether dropout keeps each of this thread's elements.
  template <class Scores>
  CUTE_DEVICE uint32_t kept_bits(const Scores& s, int head, int query) const {
    static_assert(decltype(size(s))::value <= 32);
    const Dropout dropout(p_.rules, int64_t(batch_) * p_.heads + head);
    uint32_t kept = 0;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(s); r += 2) {
      CUTE_UNROLL
      for (int group = 0; group < size<1>(s); group += 4) {
        CUTE_UNROLL
        for (int parity = 0; parity < 2; ++parity) {
          const int key = key_ + Place::down(r), c = group + parity;
          const uint4 bits = dropout.bits(query + Place::across(c), key);
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {  // keys `key` and `key` + 8 of two queries
            kept |= uint32_t(dropout.keeps(bits, i / 2, key / 8 % 4 + i % 2)) << bit(s, r + i % 2, c + i / 2 * 2);
          }
        }
      }
    }
    return kept;
  }

  template <class Scores>
  CUTE_DEVICE static constexpr int bit(const Scores& s, int r, int c) {
    return c * decltype(size<0>(s))::value + r;
  }

  // Hidden elements are selected away: hidden keys and values may hold anything.
  template <class Scores>
  CUTE_DEVICE void hide(Scores& weights, Scores& ds, int query) const {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(weights); ++r) {
      const int key = key_ + Place::down(r);
      const int begin = key - mask_.highest - query;
      const int end = key < mask_.seqlen_k ? key - mask_.lowest + 1 - query : begin;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(weights); ++c) {
        if (Place::across(c) < begin || Place::across(c) >= end) weights(r, c) = ds(r, c) = 0.f;
      }
    }
  }

  const FwdProblem& p_;
  BandMask mask_;
  int shift_, batch_;
  Place place_;
  int key_;  // of this thread's first element, in the sequence
};

}  // namespace flash_cute::sm80
