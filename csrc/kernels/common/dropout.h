// Dropout on probabilities: its random bits, and which elements they keep. flash_cute/philox.py has the definition.
#pragma once

#include <algorithm>

#include "core/problem.h"
#include "kernels/common/fragment.h"

namespace flash_cute {

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
