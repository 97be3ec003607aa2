// Masks the keys of a tile that queries do not see.
#pragma once

#include "kernels/common/fragment.h"
#include "core/layout/seq.h"

namespace flash_cute {

// How many columns of a thread have a column_offset() less than `offset`.
CUTE_DEVICE int columns_before(int offset) {
  return offset <= 0 ? 0 : offset / 8 * 2 + min(offset % 8, 2);
}

CUTE_DEVICE uint32_t low_bits(int count) {
  return count <= 0 ? 0 : count >= 32 ? 0xffffffff : (1u << count) - 1;
}

struct BandMask {
  int lowest, highest;  // of key position minus query position
  int seqlen_k;

  FC_HOST_DEVICE BandMask(const SeqInfo& seq, Band band)
      : lowest(seq.shift() - band.left), highest(seq.shift() + band.right), seqlen_k(seq.k.length) {}

  FC_HOST_DEVICE bool visible(int query, int key) const {
    return key < seqlen_k && key - query >= lowest && key - query <= highest;
  }

  // Scores (rows,columns) of the queries from `row` and the keys from `col` on that the band hides become -inf.
  // Selected, not added: hidden keys may hold anything.
  template <class Scores, class Coordinates>
  CUTE_DEVICE void hide(Scores&& scores, const Coordinates& at, int row, int col) const {
    hide_from(scores, [&](int r) { return row + get<0>(at(r, 0)); }, col + get<1>(at(0, 0)));
  }

  // The same for rows with queries query_of(r), and this thread's columns from key `first` on.
  template <class Scores, class Query>
  CUTE_DEVICE void hide_from(Scores&& scores, Query query_of, int first) const {
    constexpr int kColumns = decltype(size<1>(scores))::value, kBits = 32;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int query = query_of(r);
      const int begin = columns_before(query + lowest - first);
      const int end = columns_before(min(seqlen_k, query + highest + 1) - first);
      CUTE_UNROLL
      for (int c = 0; c < kColumns; c += kBits) {
        const uint32_t visible = low_bits(end - c) & ~low_bits(begin - c);  // a bit a column
        CUTE_UNROLL
        for (int i = 0; i < kBits && c + i < kColumns; ++i) {
          if (!(visible & (1u << i))) scores(r, c + i) = -INFINITY;
        }
      }
    }
  }
};

}  // namespace flash_cute
