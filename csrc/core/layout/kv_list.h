// The tiles of keys in a sparse call's list, a kind of KvTiles.
#pragma once

#include "core/layout/kv_tiles.h"
#include "core/layout/tile_lists.h"

namespace flash_cute {

// The keys that the band shows to some, and to all, of the queries [row, row + rows).
struct ShownKeys {
  RowSpan some, all;

  FC_HOST_DEVICE ShownKeys(const SeqInfo& seq, Band band, int row, int rows)
      : some(visible_keys(seq, band, row, rows)) {
    const int last_row = detail::at_most(row + rows, seq.q.length) - 1, shift = seq.shift();
    all = {last_row + shift - band.left, detail::at_most(seq.k.length, row + shift + band.right + 1)};
  }
};

// The list of a tile of queries, without the tiles that have none of `keys`.
FC_HOST_DEVICE TileList key_list(const FwdProblem& p, const QueryTile& tile, RowSpan keys) {
  return {p.lists,
          tile.batch,
          tile.head,
          tile.row / kTileSide,
          keys.first / kTileSide,
          detail::ceil_div(detail::at_least(keys.first, keys.last), kTileSide),
          detail::ceil_div(p.seqlen_k, kTileSide)};
}

// Tiles of kBlockN keys, in the order of a list. Their full range is known of lists of whole tiles; in others, and
// outside of it, the list says which are full.
template <int kBlockN>
struct KvList : TileRange {
  static constexpr int kParts = kTileSide / kBlockN;
  static_assert(kTileSide % kBlockN == 0 && (kBlockN % 64 == 0 || 64 % kBlockN == 0), "parts of quadrants");
  TileList list;
  RowSpan shown;  // keys that the band shows to all queries
  int rows;       // quadrants of the queries

  FC_HOST_DEVICE KvList(const TileList& list, TileRange range, RowSpan shown, int row, int rows)
      : TileRange(range), list(list), shown(shown), rows(TileCode::quadrants_of_queries(row % kTileSide, rows)) {}

  FC_HOST_DEVICE static KvList of(const FwdProblem& p, const SeqInfo& seq, const QueryTile& tile, int rows) {
    const ShownKeys keys(seq, p.band, tile.row, rows);
    const TileList list = key_list(p, tile, keys.some);
    KvList tiles(list, {0, list.count * kParts, 0, 0}, keys.all, tile.row, rows);
    while (tiles.end > 0 && tiles.first_key(tiles.end - 1) >= keys.some.last) --tiles.end;
    return tiles;
  }

  FC_HOST_DEVICE TileCode code(int n) const { return list.code(n / kParts); }
  FC_HOST_DEVICE int first_key(int n) const { return list.tile(n / kParts) * kTileSide + n % kParts * kBlockN; }
  // Whether the band shows all of the tile to all queries.
  FC_HOST_DEVICE bool in_band(int n) const {
    const int key = first_key(n);
    return shown.first <= key && key + kBlockN <= shown.last;
  }
  FC_HOST_DEVICE bool in_full_range(int n) const { return TileRange::full(n); }
  FC_HOST_DEVICE bool full(int n) const {
    return in_full_range(n) ||
           (in_band(n) && code(n).shows(rows & TileCode::quadrants_of_keys(n % kParts * kBlockN, kBlockN)));
  }
  // Whether the list shows some of the tile to the queries' quadrants.
  FC_HOST_DEVICE bool listed(int n) const {
    return code(n).value & rows & TileCode::quadrants_of_keys(n % kParts * kBlockN, kBlockN);
  }
  // The last listed tile before n, of which there is one.
  FC_HOST_DEVICE int listed_before(int n) const {
    do --n;
    while (n > begin && !listed(n));
    return n;
  }
  FC_HOST_DEVICE int past_keys() const { return empty() ? 0 : first_key(end - 1) + kBlockN; }
  FC_HOST_DEVICE int step(int n) const { return first_key(n) - (n + 1 < end ? first_key(n + 1) : past_keys()); }
};
static_assert(KvTiles<KvList<64>>);

// Listed tiles for a CTA's groups of queries.
template <int kBlockN, int kGroups>
struct SharedKvList {
  static_assert(64 * kGroups == kTileSide, "a tile of queries is one of the lists'");
  TileList list;
  RowSpan keys;
  int count;
  TileRange ranges[kGroups];  // listed tiles
  RowSpan shown[kGroups];
  bool halves[kGroups];

  FC_HOST_DEVICE SharedKvList(const FwdParams& p, const SeqInfo& seq, const QueryGroups& queries, KeySplit)
      : list(key_list(p, queries.tile, visible_keys(seq, p.band, queries.tile.row, kTileSide))),
        keys(visible_keys(seq, p.band, queries.tile.row, kTileSide)),
        count(list.count * KvList<kBlockN>::kParts) {
    const QueryTile& tile = queries.tile;
    const bool whole = first_entry(p.lists, tile.batch, tile.head, tile.row / kTileSide)->code == TileCode::kWhole;
    for (int i = 0; i < kGroups; ++i) {
      const int row = queries.tile.row + 64 * i;
      const ShownKeys of_group(seq, p.band, row, 64);
      shown[i] = of_group.all;
      TileRange& range = ranges[i];
      range = {0, row < seq.q.length ? count : 0, 0, 0};
      const KvList<kBlockN> tiles = this->of_group(i);
      const auto hides = [&](int n) { return first_key(n) >= of_group.some.last || !tiles.listed(n); };
      while (range.end > 0 && hides(range.end - 1)) --range.end;
      while (range.begin < range.end && hides(range.begin)) ++range.begin;
      halves[i] = range.end > 0 && of_group.some.last <= first_key(range.end - 1) + kBlockN / 2;
      range.full_begin = range.begin;
      range.full_end = whole ? range.end : range.begin;
      while (range.full_begin < range.full_end && !tiles.in_band(range.full_end - 1)) --range.full_end;
      while (range.full_begin < range.full_end && !tiles.in_band(range.full_begin)) ++range.full_begin;
    }
  }

  FC_HOST_DEVICE KvList<kBlockN> of_group(int group) const {
    return {list, ranges[group], shown[group], 64 * group, 64};
  }
  FC_HOST_DEVICE int first_key(int n) const { return of_group(0).first_key(n); }
  FC_HOST_DEVICE bool ends_in_half(int group) const { return halves[group]; }
};
static_assert(SharedKvTiles<SharedKvList<64, 2>>);

}  // namespace flash_cute
