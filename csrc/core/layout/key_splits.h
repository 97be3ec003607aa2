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

  // The splits of a sequence, each of `tiles_of_split`.
  FC_HOST_DEVICE static int64_t splits(const SeqInfo& seq, int queries, int block_n, int tiles_of_split) {
    const int64_t rows = detail::ceil_div(seq.q.length, queries);
    return rows * detail::at_least(1, detail::ceil_div(detail::ceil_div(seq.k.length, block_n), tiles_of_split));
  }

  // Tiles of a split, as few as leave the splits of all sequences one wave of CTAs, or two if one is half full without
  // splits. splits_of(tiles of a split): of all sequences.
  template <class SplitsOf>
  FC_HOST_DEVICE int of_split(int heads, int ctas, int most_splits, const SplitsOf& splits_of) const {
    const int64_t units = query_tiles * heads, wave = 2 * units <= ctas ? ctas : 2 * int64_t(ctas);
    int most = detail::at_least(1, longest);
    int least = detail::at_most(most, detail::at_least(1, detail::ceil_div(longest, most_splits)));
    const int64_t share = tiles * heads / wave;
    if (share > least) least = share < most ? static_cast<int>(share) : most;
    while (least < most) {
      const int middle = (least + most) / 2;
      if (splits_of(middle) * heads <= wave) {
        most = middle;
      } else {
        least = middle + 1;
      }
    }
    return least;
  }
};

}  // namespace flash_cute
