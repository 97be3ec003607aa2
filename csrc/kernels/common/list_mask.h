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

// Whether all rows of a warp see all of tile n; they start at row `row` of the listed tile.
template <class Tiles>
CUTE_DEVICE bool rows_see_all(const Tiles& tiles, const TileLists&, int n, int) {
  return tiles.full(n);
}

template <int kBlockN>
CUTE_DEVICE bool rows_see_all(const KvList<kBlockN>& tiles, const TileLists& lists, int n, int row) {
  if (tiles.full(n)) return true;
  if (!tiles.in_band(n)) return false;
  constexpr int kWords = kBlockN / 64;  // of half a row, which a thread reads
  const int lane = threadIdx.x % 32, query = row + lane / 2;
  const int key = n % tiles.kParts * kBlockN + lane % 2 * (kBlockN / 2);  // of the tile of the list
  const TileCode code = tiles.code(n);
  const uint32_t* const words = code.words(lists, query);
  bool all = code.quadrant(query, key);
  CUTE_UNROLL
  for (int i = 0; i < kWords; ++i) all &= words == nullptr || words[key / 32 + i] == ~0u;
  return __all_sync(~0u, all);
}

// Of a warp's 16 keys, which see which of a step's kQueries queries in a listed tile.
template <int kQueries>
struct WarpPairs {
  static constexpr int kWords = kQueries / 32;
  static constexpr uint32_t kAllKeys = 0xffff;
  uint32_t keys[kWords];  // of query 32 w + lane: a bit a key

  WarpPairs() = default;
  // `key`: the warp's first in the tile of the list. query_of(i): row in its tile of the list, and code of this, of query i
  // of the step.
  template <class QueryOf>
  CUTE_DEVICE WarpPairs(const TileLists& lists, int key, const QueryOf& query_of) {
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const auto [row, code] = query_of(32 * w + int(threadIdx.x % 32));
      const uint32_t* const words = code.words(lists, row);
      const uint32_t word = words == nullptr ? kAllKeys : words[key / 32] >> key % 32;
      keys[w] = code.quadrant(row, key) ? word & kAllKeys : 0;
    }
  }

  // Elements (keys,queries) of hidden pairs become 0, by selection: hidden keys may hold anything.
  template <class Coords, class... Elements>
  CUTE_DEVICE void hide(Elements&&... elements) const {
    constexpr int kColumns = 32 / 4;  // of a thread, in 32 queries
    const int lane = threadIdx.x % 32;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      uint32_t shown[2];  // to the thread's two keys: a bit a query
      if (__all_sync(~0u, keys[w] == 0 || keys[w] == kAllKeys)) {
        shown[0] = shown[1] = __ballot_sync(~0u, keys[w] != 0);
        if (shown[0] == ~0u) continue;
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 16; ++i) {
          const uint32_t queries = __ballot_sync(~0u, keys[w] >> i & 1);
          if (i % 8 == lane / 4) shown[i / 8] = queries;
        }
      }
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const uint32_t queries = shown[r] >> Coords(lane).query;
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          if (!(queries >> Coords::across(c) & 1)) ((elements(r, kColumns * w + c) = 0.f), ...);
        }
      }
    }
  }
};

}  // namespace flash_cute
