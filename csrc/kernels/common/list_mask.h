// Masks the pairs of a listed tile that are hidden: by quadrants, and by a token mask.
#pragma once

#include "core/layout/kv_list.h"
#include "kernels/common/fragment.h"

namespace flash_cute {

// Does nothing without lists.
template <class Tiles, class Scores, class Coordinates>
CUTE_DEVICE void hide_unlisted(const Tiles&, const TileLists&, int, int, Scores&&, const Coordinates&) {}

// Sets scores (rows,columns) of hidden pairs to -inf, in tile n; its queries start at row `row` of the listed tile.
template <int kBlockN, class Scores, class Coordinates>
CUTE_DEVICE void hide_unlisted(const KvList<kBlockN>& tiles, const TileLists& lists, int n, int row, Scores&& scores,
                               const Coordinates& at) {
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns % 8 == 0);  // of 32 keys, whose bits are a word
  const TileCode code = tiles.code(n);
  const int first = n % tiles.kParts * kBlockN;  // key of the tile of the list
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const int query = row + get<0>(at(r, 0));
    const uint32_t* const words = code.words(lists, query);
    CUTE_UNROLL
    for (int c = 0; c < kColumns; c += 8) {
      const int key = first + 4 * c;
      uint32_t visible = words == nullptr ? ~0u : words[key / 32] >> get<1>(at(0, 0));
      if (!code.quadrant(query, key)) visible = 0;
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (!(visible >> column_offset(i) & 1)) scores(r, c + i) = -INFINITY;
      }
    }
  }
}

// In backward: zeros the elements (keys,queries) that a list hides, of queries from `query` on and a thread's keys
// `key` and `key` + 8, which count from the listed tile's start. By selection, since hidden keys may hold anything.
template <class Coords, class First, class... Others>
CUTE_DEVICE void hide_unlisted_pairs(TileCode code, const TileLists& lists, int query, int key, First&& first,
                                     Others&&... others) {
  constexpr int kColumns = decltype(size<1>(first))::value, kAtOnce = 4;  // loads in flight take registers
  static_assert(kColumns <= 32 && decltype(size<0>(first))::value == 2);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    uint32_t shown = 0;  // a bit a column
    CUTE_NO_UNROLL
    for (int from = 0; from < kColumns; from += kAtOnce) {
      CUTE_UNROLL
      for (int c = from; c < from + kAtOnce; ++c) {
        const int row = query + Coords::across(c);
        const uint32_t* const words = code.words(lists, row);
        const uint32_t word = words == nullptr ? ~0u : words[key / 32] >> (key % 32 + Coords::down(r));
        shown |= (code.quadrant(row, key) ? word & 1 : 0) << c;
      }
    }
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      if (!(shown >> c & 1)) ((first(r, c) = 0.f), ..., (others(r, c) = 0.f));
    }
  }
}

}  // namespace flash_cute
