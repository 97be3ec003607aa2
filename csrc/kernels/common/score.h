// The rules of the Rich tier: softcap and ALiBi on scores, dropout on probabilities. flash_cute/reference.py has their
// definitions, flash_cute/philox.py that of the random numbers.
#pragma once

#include <algorithm>

#include "core/problem.h"
#include "kernels/common/fragment.h"
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

// tanh to about 2^-19 of itself: a softcap multiplies errors. The hardware's own is off by 2^-11.
CUTE_DEVICE float tanh_of(float x) {
  const float large = 1.f - __fdividef(2.f, 1.f + exp2_approx(2.f * kLog2e * x));
  return fabsf(x) <= SmallTanh::kSmall ? SmallTanh(1.f)(x) * x : large;
}

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

// A scaled score under softcap and ALiBi; `distance` is from the query's position to the key.
CUTE_DEVICE float ruled(float score, const ScoreRules& rules, float softmax_scale, float slope, int distance) {
  score *= softmax_scale;
  if (rules.softcap > 0.f) score = rules.softcap * tanhf(score / rules.softcap);
  return score - slope * float(abs(distance));
}

// Dropout's random bits. One Philox4x32-7 call serves the 16 elements of a 32 x 32 block whose rows and columns agree
// modulo 8; each has 16 of its 128 bits: word y for query octet y, from byte x downwards (cyclic) for key octet x.
class Dropout {
 public:
  CUTE_DEVICE Dropout(const ScoreRules& rules, int64_t head_of_all)
      : last_dropped_((uint32_t(rules.drop_below) << 16) - 1) {
    if (rules.rng == nullptr) return;
    const uint64_t seed = rules.rng[0], offset = rules.rng[1];
    key_ = make_uint2(uint32_t(seed), uint32_t(seed >> 32) ^ uint32_t(offset >> 32));
    counter_ = make_uint2(uint32_t(head_of_all), uint32_t(offset));
  }

  // Bits for the elements that share them with this query and key.
  CUTE_DEVICE uint4 bits(int query, int key) const {
    uint4 c = make_uint4(key / 32 * 8 + key % 8, query / 32 * 8 + query % 8, counter_.x, counter_.y);
    uint2 k = key_;
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      const uint64_t a = uint64_t(0xD2511F53u) * c.x, b = uint64_t(0xCD9E8D57u) * c.z;
      c = make_uint4(uint32_t(b >> 32) ^ c.y ^ k.x, uint32_t(b), uint32_t(a >> 32) ^ c.w ^ k.y, uint32_t(a));
      k.x += 0x9E3779B9u;
      k.y += 0xBB67AE85u;
    }
    return c;
  }

  // Whether the element in query octet y and key octet x is kept.
  CUTE_DEVICE bool keeps(const uint4& bits, int y, int x) const {
    const uint32_t word = y == 0 ? bits.x : y == 1 ? bits.y : y == 2 ? bits.z : bits.w;
    return __funnelshift_l(word, word, 24 - 8 * x) > last_dropped_;
  }

 private:
  uint32_t last_dropped_;  // of 32-bit numbers whose upper half is the element's
  uint2 key_{}, counter_{};
};

// Calls f(r, c, keep) for a thread's kRows x kColumns accumulator elements; row(r) and col(c) are queries and keys
// (keys and queries if kTransposed). Rows lie 8 apart, two from a multiple of 16 on or four from a multiple of 32 on;
// so do column pairs.
template <bool kTransposed, int kRows, int kColumns, class Row, class Column, class F>
CUTE_DEVICE void each_kept(const Dropout& dropout, Row row, Column col, F f) {
  constexpr int kDown = std::min(kRows, 4), kAcross = std::min(kColumns / 2, 4);  // octets that share bits
  static_assert(kRows % kDown == 0 && kColumns % (2 * kAcross) == 0);
  CUTE_UNROLL
  for (int r = 0; r < kRows; r += kDown) {
    const int first_row = row(r), y = kDown == 4 ? 0 : first_row / 8 % 4;
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 2 * kAcross) {
      CUTE_UNROLL
      for (int parity = 0; parity < 2; ++parity) {
        const int first_col = col(c + parity), x = kAcross == 4 ? 0 : first_col / 8 % 4;
        const uint4 bits = kTransposed ? dropout.bits(first_col, first_row) : dropout.bits(first_row, first_col);
        CUTE_UNROLL
        for (int i = 0; i < kDown * kAcross; ++i) {
          const int down = i % kDown, across = i / kDown;
          const bool keep =
              kTransposed ? dropout.keeps(bits, x + across, y + down) : dropout.keeps(bits, y + down, x + across);
          f(r + down, c + 2 * across + parity, keep);
        }
      }
    }
  }
}

}  // namespace flash_cute
