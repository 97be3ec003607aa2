// Scale, softcap and dropout on scores of fp32 inputs, for forward and backward.
#pragma once

#include "kernels/common/score.h"

namespace flash_cute::sm80::fp32 {

using namespace cute;

// Products of queries and keys become scores: scaled, and capped where there is a softcap.
template <class Scores>
CUTE_DEVICE void scale_and_cap(Scores&& scores, const FwdProblem& p) {
  const float cap = p.rules.softcap;
  if (cap > 0.f) {
    const float inner = p.softmax_scale / cap;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = cap * tanhf(scores(i) * inner);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= p.softmax_scale;
  }
}

// Which of a thread's elements of 16 rows x 8 kTiles columns dropout keeps: element (r, c) at bit 2 c + r. Rows are
// queries and columns keys, or the other way round where kTransposed; (row, col) is the thread's first element.
template <bool kTransposed, int kTiles>
CUTE_DEVICE uint32_t kept_elements(const Dropout& dropout, int row, int col) {
  static_assert(kTiles % 2 == 0 && kTiles <= 8);
  constexpr int kTogether = kTransposed || kTiles == 2 ? 2 : 4;  // tiles that share random bits
  uint32_t kept = 0;
  CUTE_UNROLL
  for (int i = 0; i < kTiles / kTogether * 2; ++i) {
    const int tile = i / 2 * kTogether, parity = i % 2, at = col + 8 * tile + parity;
    const uint4 bits = kTransposed ? dropout.bits(at, row) : dropout.bits(row, at);
    const int octet = kTogether == 4 ? 0 : (kTransposed ? row : at) / 8 % 4;  // of the first key
    CUTE_UNROLL
    for (int e = 0; e < 2 * kTogether; ++e) {
      const int r = e % 2, t = e / 2;
      const bool keep = kTransposed ? dropout.keeps(bits, t, octet + r) : dropout.keeps(bits, r, octet + t);
      kept |= uint32_t(keep) << (2 * (2 * (tile + t) + parity) + r);
    }
  }
  return kept;
}

}  // namespace flash_cute::sm80::fp32
