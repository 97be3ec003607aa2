// The tiles of queries in a sparse call's list, a kind of QueryTiles.
#pragma once

#include "core/layout/query_tiles.h"
#include "core/layout/tile_lists.h"

namespace flash_cute {

// Tiles of kBlockM queries, in the order of the list of a tile of keys.
template <int kBlockM, int kBlockN>
struct QueryList : TileRange {
  static constexpr int kParts = kTileSide / kBlockM;
  static_assert(kParts <= 2 && kBlockN == kTileSide && kTileSide % kBlockM == 0 && kBlockM % 64 == 0,
                "parts of quadrants");
  TileList list;
  RowSpan seeing_all;  // queries to which the band shows all the keys
  int last_first_query;  // of the sequence's last tile
  const int* ranks;  // of the entries: TileLists::ranks
  int start = 0;  // the entry at which a walk starts; after the last entry it goes on with the first

  FC_HOST_DEVICE static QueryList of(const FwdProblem& p, const SeqInfo& seq, const KeyTile& keys) {
    const RowSpan queries = seeing_queries(seq, p.band, keys.row, kBlockN);
    const int past = detail::at_least(queries.first, queries.last);
    const TileList list(p.lists, keys.batch, keys.head * (p.heads / p.heads_k), keys.index, queries.first / kTileSide,
                        detail::ceil_div(past, kTileSide), detail::ceil_div(p.seqlen_q, kTileSide));
    const int last_key = keys.row + kBlockN - 1;
    const RowSpan all{last_key - seq.shift() - p.band.right, keys.row - seq.shift() + p.band.left + 1};
    const bool ragged = last_key >= seq.k.length;
    QueryList tiles{{0, list.count * kParts, 0, 0},
                    list,
                    ragged ? RowSpan{} : all,
                    detail::at_least(0, past - 1) / kBlockM * kBlockM,
                    p.lists.ranks == nullptr ? nullptr : p.lists.ranks + (list.entries - p.lists.ptr)};
    if (tiles.end > 0 && tiles.part(tiles.end - 1) > tiles.last_first_query) --tiles.end;
    return tiles;
  }

  FC_HOST_DEVICE int entries() const { return detail::ceil_div(end, kParts); }
  // The number that is `n`th of a walk from `start` on.
  FC_HOST_DEVICE int walked(int n) const {
    const int turned = n + start * kParts;
    return turned < end ? turned : turned - end;
  }

  FC_HOST_DEVICE TileCode code(int n) const { return list.code(n / kParts); }
  FC_HOST_DEVICE int first_query(int n) const { return detail::at_most(part(n), last_first_query); }
  FC_HOST_DEVICE int part(int n) const { return list.tile(n / kParts) * kTileSide + n % kParts * kBlockM; }
  FC_HOST_DEVICE bool full(int n) const {
    const int query = first_query(n);
    return seeing_all.first <= query && query + kBlockM <= seeing_all.last &&
           code(n).shows(TileCode::quadrants_of_queries(n % kParts * kBlockM, kBlockM));
  }
  FC_HOST_DEVICE int index(int n) const { return first_query(n) / kBlockM; }
  // Whether the band shows all keys to some query.
  FC_HOST_DEVICE bool shows_all_keys() const { return seeing_all.first < seeing_all.last; }

  struct Turn {
    int semaphore, tiles_before;

    FC_HOST_DEVICE int rank(const FwdProblem&, const SeqInfo&, const KeyTile&) const { return tiles_before; }
  };
  FC_HOST_DEVICE Turn turn(int n) const { return {index(n), ranks[n / kParts]}; }

  // Unknown without reading the lists, so sums of dQ start from zeros.
  FC_HOST_DEVICE static bool any_adds(const FwdProblem&, const SeqInfo&, const QueryTile&) { return false; }
};
static_assert(QueryTiles<QueryList<64, 128>>);

}  // namespace flash_cute
