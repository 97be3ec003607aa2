// The tiles of keys that tiles of queries visit, by decreasing number: the last keys come first, so that the partial
// tile at the sequence's end is first. All roles of a forward kernel iterate over the same value.
#pragma once

#include <concepts>

#include "core/layout/tiles.h"
#include "core/workspace.h"

namespace flash_cute {

// A range of tile numbers; for each tile its first key, and whether every query sees all of it. Copies with a moving
// address start at past_keys(), and move by step(n) to tile n.
template <class Tiles>
concept KvTiles = std::derived_from<Tiles, TileRange> && requires(const Tiles& tiles, int n) {
  { tiles.first_key(n) } -> std::same_as<int>;
  { tiles.full(n) } -> std::same_as<bool>;
  { tiles.past_keys() } -> std::same_as<int>;
  { tiles.step(n) } -> std::same_as<int>;
};

// Tiles [0, count) that a CTA loads for several groups of queries, up to the end of `keys`. Each group visits those
// that it sees, of_group(), and may see only the first half of its last one.
template <class Tiles>
concept SharedKvTiles = requires(const Tiles& tiles, int n, int group) {
  { tiles.keys } -> std::convertible_to<RowSpan>;
  { tiles.count } -> std::convertible_to<int>;
  { tiles.first_key(n) } -> std::same_as<int>;
  { tiles.of_group(group) } -> KvTiles;
  { tiles.ends_in_half(group) } -> std::same_as<bool>;
};

// Consecutive tiles; tile 0 starts at key `origin`.
template <int kBlockN>
struct KvInterval : TileRange {
  int origin;

  // The tiles that some of `rows` queries see.
  FC_HOST_DEVICE static KvInterval of(const FwdProblem& p, const SeqInfo& seq, const QueryTile& tile, int rows) {
    return {key_tiles(seq, p.band, tile.row, rows, kBlockN), 0};
  }

  FC_HOST_DEVICE int first_key(int n) const { return origin + n * kBlockN; }
  FC_HOST_DEVICE int past_keys() const { return first_key(end); }
  FC_HOST_DEVICE int step(int) const { return -kBlockN; }
};
static_assert(KvTiles<KvInterval<64>>);

// The queries of a CTA of a cluster, in groups of 64 rows.
struct QueryGroups {
  QueryTile of_cluster;
  int rows;  // of the cluster
  QueryTile tile;  // of the CTA
  int rows_of_head;  // rows of the tile that each of its pack_gqa heads has
};

// A split of the key tiles that a tile of queries sees.
struct KeySplit {
  int index;
  int tiles = 0;  // of each split; 0: all have equally many

  // The split's of `all` tiles.
  FC_HOST_DEVICE RowSpan of(int all, int splits) const {
    if (tiles == 0) return {all * index / splits, all * (index + 1) / splits};
    return {detail::at_most(all, index * tiles), detail::at_most(all, (index + 1) * tiles)};
  }
};

// The keys of a split that some query of a cluster sees, and in how many tiles of kBlockN from the first on, which is
// rounded down to a multiple of kAlign.
template <int kBlockN, int kAlign = 1>
struct SplitKeys {
  RowSpan keys;
  int count;

  FC_HOST_DEVICE SplitKeys(const FwdParams& p, const SeqInfo& seq, const QueryGroups& queries, KeySplit split)
      : keys(visible_keys(seq, p.band, queries.of_cluster.row, queries.rows)) {
    keys.first -= keys.first % kAlign;
    const int tiles = detail::at_least(0, (keys.last - keys.first + kBlockN - 1) / kBlockN);
    const auto [begin, end] = split.of(tiles, p.num_splits);
    count = end - begin;
    keys = {keys.first + begin * kBlockN, detail::at_most(keys.last, keys.first + end * kBlockN)};
  }
};

// Consecutive tiles; tile 0 starts at the split's first key that some query of the cluster sees.
template <int kBlockN, int kGroups, int kAlign = 1>
struct SharedKvInterval : SplitKeys<kBlockN, kAlign> {
  using SplitKeys<kBlockN, kAlign>::keys, SplitKeys<kBlockN, kAlign>::count;
  TileRange ranges[kGroups];
  bool halves[kGroups];

  FC_HOST_DEVICE SharedKvInterval(const FwdParams& p, const SeqInfo& seq, const QueryGroups& queries, KeySplit split)
      : SplitKeys<kBlockN, kAlign>(p, seq, queries, split) {
    for (int i = 0; i < kGroups; ++i) {
      const int row = queries.tile.row + 64 * i % queries.rows_of_head;
      const bool exists = row < seq.q.length;
      ranges[i] = exists ? key_tiles(seq, p.band, row, 64, kBlockN, keys.first).before(count) : TileRange{};
      const int last = visible_keys(seq, p.band, row, 64).last - keys.first;
      halves[i] = last <= ranges[i].end * kBlockN - kBlockN / 2;
    }
  }

  FC_HOST_DEVICE int first_key(int n) const { return keys.first + n * kBlockN; }
  FC_HOST_DEVICE KvInterval<kBlockN> of_group(int group) const { return {ranges[group], keys.first}; }
  FC_HOST_DEVICE bool ends_in_half(int group) const { return halves[group]; }
};
static_assert(SharedKvTiles<SharedKvInterval<64, 2>>);

// The same for rows of tokens: all groups that have rows visit what some token of the tile sees.
template <int kBlockN>
struct SharedKvOfTokens : SplitKeys<kBlockN> {
  using SplitKeys<kBlockN>::keys, SplitKeys<kBlockN>::count;
  TileRange range;
  int rows;
  bool half;

  FC_HOST_DEVICE SharedKvOfTokens(const FwdParams& p, const SeqInfo& seq, const QueryGroups& queries, KeySplit split)
      : SplitKeys<kBlockN>(p, seq, queries, split),
        range(key_tiles(seq, p.band, queries.tile.row, queries.rows, kBlockN, keys.first).before(count)),
        rows(detail::at_most(queries.rows, seq.q.length - queries.tile.row) * p.pack_gqa) {
    const int last = visible_keys(seq, p.band, queries.tile.row, queries.rows).last - keys.first;
    half = last <= range.end * kBlockN - kBlockN / 2;
  }

  FC_HOST_DEVICE int first_key(int n) const { return keys.first + n * kBlockN; }
  FC_HOST_DEVICE KvInterval<kBlockN> of_group(int group) const {
    return {64 * group < rows ? range : TileRange{}, keys.first};
  }
  FC_HOST_DEVICE bool ends_in_half(int) const { return half; }
};
static_assert(SharedKvTiles<SharedKvOfTokens<64>>);

}  // namespace flash_cute
