// The visible tiles of a band, and those of them that need a mask.
#pragma once

#include "core/layout/seq.h"

namespace flash_cute {

// A tile of query rows of one head: its place in the problem.
struct QueryTile {
  int row, head, batch;
};

// Tiles [begin, end) are visible in part; tiles [full_begin, full_end) wholly, and need no mask.
struct TileRange {
  int begin, end;
  int full_begin, full_end;

  FC_HOST_DEVICE bool empty() const { return begin >= end; }
  FC_HOST_DEVICE TileRange before(int tile) const {
    TileRange range = *this;
    if (tile < range.end) range.end = tile;
    return range;
  }
  FC_HOST_DEVICE bool full(int tile) const { return full_begin <= tile && tile < full_end; }
};

// One of `shares` even shares of the tiles.
FC_HOST_DEVICE TileRange even_share(TileRange range, int share, int shares) {
  const int first = range.begin, tiles = range.end - first;
  range.begin = first + tiles * share / shares;
  range.end = first + tiles * (share + 1) / shares;
  return range;
}

namespace detail {
FC_HOST_DEVICE int at_least(int a, int b) {
  return a > b ? a : b;
}
FC_HOST_DEVICE int at_most(int a, int b) {
  return a < b ? a : b;
}
FC_HOST_DEVICE int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}
FC_HOST_DEVICE int ceil_div(int a, int b) {
  return -floor_div(-a, b);
}

// Positions [first, last] are seen by something on the other side, [full_first, full_last] by everything there.
// `length` positions exist; tiles that reach past `full_length` need a mask.
FC_HOST_DEVICE TileRange tile_range(int first, int last, int full_first, int full_last, int length, int full_length,
                                    int block) {
  TileRange range;
  range.begin = at_least(0, floor_div(first, block));
  range.end = at_least(range.begin, ceil_div(at_most(length, last + 1), block));
  range.full_begin = at_most(range.end, at_least(range.begin, ceil_div(full_first, block)));
  range.full_end = floor_div(at_most(full_length, full_last + 1), block);
  range.full_end = at_least(range.full_begin, at_most(range.end, range.full_end));
  return range;
}
}  // namespace detail

// Key tiles, counted from key `origin` on, that queries [row, row + rows) see; rows past the sequence's end do not
// count.
FC_HOST_DEVICE TileRange key_tiles(const SeqInfo& seq, Band band, int row, int rows, int block_n, int origin = 0) {
  const int last_row = detail::at_most(row + rows, seq.q.length) - 1;
  const int shift = seq.shift() - origin, length = seq.k.length - origin;
  return detail::tile_range(row + shift - band.left, last_row + shift + band.right, last_row + shift - band.left,
                            row + shift + band.right, length, length, block_n);
}

// Positions [first, last) of a sequence. Rows that a tile does not see are loaded as zeros: whatever they hold meets no
// product.
struct RowSpan {
  int first, last;
};

// Keys that some of the queries [row, row + rows) see.
FC_HOST_DEVICE RowSpan visible_keys(const SeqInfo& seq, Band band, int row, int rows) {
  const int last_row = detail::at_most(row + rows, seq.q.length) - 1;
  return {detail::at_least(0, row + seq.shift() - band.left),
          detail::at_most(seq.k.length, last_row + seq.shift() + band.right + 1)};
}

// Queries that see some of the keys [col, col + cols).
FC_HOST_DEVICE RowSpan seeing_queries(const SeqInfo& seq, Band band, int col, int cols) {
  const int last_col = detail::at_most(col + cols, seq.k.length) - 1;
  return {detail::at_least(0, col - seq.shift() - band.right),
          detail::at_most(seq.q.length, last_col - seq.shift() + band.left + 1)};
}

// Query tiles that see keys [col, col + cols). Query rows past the end need no mask: backward gives them no weight.
FC_HOST_DEVICE TileRange query_tiles(const SeqInfo& seq, Band band, int col, int cols, int block_m) {
  const int last_col = detail::at_most(col + cols, seq.k.length) - 1;
  const int shift = seq.shift();
  const bool ragged = col + cols > seq.k.length;
  const int full_length = ragged ? 0 : detail::ceil_div(seq.q.length, block_m) * block_m;
  return detail::tile_range(col - shift - band.right, last_col - shift + band.left, last_col - shift - band.right,
                            col - shift + band.left, seq.q.length, full_length, block_m);
}

}  // namespace flash_cute
