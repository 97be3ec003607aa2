// Which keys a query sees inside a tile.
#pragma once

#include "kernels/common/fragment.h"
#include "kernels/common/seq.h"

namespace flash_cute {

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
    const int first = get<1>(at(0, 0));  // this thread's first column
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const int query = row + get<0>(at(r, 0));
      const int begin = query + lowest - col - first;
      const int end = min(seqlen_k, query + highest + 1) - col - first;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        if (column_offset(c) < begin || column_offset(c) >= end) scores(r, c) = -INFINITY;
      }
    }
  }
};

}  // namespace flash_cute
