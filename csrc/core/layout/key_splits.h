// Splits of keys that suit lengths which only the device knows.
#pragma once

#include "core/layout/tiles.h"

namespace flash_cute {

// What the sequences have together, per head.
struct KeyCount {
  int64_t query_tiles = 0;
  int64_t tiles = 0;  // of keys, over all tiles of queries
  int longest = 0;  // tiles of keys of a sequence

  FC_HOST_DEVICE void add(const SeqInfo& seq, Band band, int queries, int block_n) {
    const int64_t rows = detail::ceil_div(seq.q.length, queries), keys = detail::ceil_div(seq.k.length, block_n);
    const int64_t hidden = band.right < seq.k.length ? rows * (rows - 1) / 2 * queries / block_n : 0;
    query_tiles += rows;
    tiles += rows * keys > rows + hidden ? rows * keys - hidden : rows;
    longest = detail::at_least(longest, static_cast<int>(keys));
  }

  // Tiles of a split, so that the splits of all sequences are about as many as CTAs, and equally long. The last of each
  // tile of queries is shorter: with one more for each, the CTAs have one wave, or two.
  FC_HOST_DEVICE int of_split(int heads, int ctas, int most_splits) const {
    const int64_t all = tiles * heads, units = query_tiles * heads, wave = 2 * units <= ctas ? ctas : 2 * ctas;
    const int64_t whole = wave > units ? wave - units : 1, of_equal = (all + whole - 1) / whole;
    const int least = detail::at_least(1, detail::ceil_div(longest, most_splits));
    return of_equal < longest ? detail::at_least(least, static_cast<int>(of_equal)) : detail::at_least(least, longest);
  }
};

}  // namespace flash_cute
