// The tiles of queries that a tile of keys visits in backward, and its turn among the tiles that add to their dQ.
#pragma once

#include <concepts>

#include "core/layout/head_sets.h"
#include "core/layout/packed_tiles.h"
#include "core/layout/tiles.h"

namespace flash_cute {

// A tile of keys of one kv head: its place in the problem, and in the order of tiles.
struct KeyTile {
  int index, row, head, batch;
  bool late_first;  // among the tiles of its head

  FC_HOST_DEVICE KeyTile(int index, int row, int head, int batch)
      : index(index), row(row), head(head), batch(batch), late_first(false) {}

  // Of packed keys, of which each head has `tiles` tiles.
  FC_HOST_DEVICE KeyTile(const FwdProblem& p, int block_n, const HeadSets& sets, int tiles, const PackedOrder& order,
                         PackedTiles& packed, int number)
      : late_first(false) {
    const HeadSets::Set set = sets.of_tile(number, tiles, p.heads_k);
    const int place = number - set.first * tiles;
    const PackedTile tile = packed.find(PackedRows::of_keys(p, block_n), order, place / set.heads);
    head = set.first + place % set.heads;
    batch = tile.sequence;
    index = tile.before;
    row = index * block_n;
  }

  // Early keys first: under a causal mask the most queries see them. With `late` the late ones first, except in the
  // last set, whose longest tiles would finish last.
  FC_HOST_DEVICE KeyTile(const FwdProblem& p, int block_n, const HeadSets& sets, bool late, int number) {
    const int tiles = (p.seqlen_k + block_n - 1) / block_n;
    const HeadSets::Set set = sets.of_tile(number, tiles, p.heads_k * p.batch);
    late_first = late && set.first < sets.last;
    const int place = number - set.first * tiles;
    index = late_first ? tiles - 1 - place / set.heads : place / set.heads;
    row = index * block_n;
    const int any_head = set.first + place % set.heads;
    head = any_head % p.heads_k;
    batch = any_head / p.heads_k;
  }
};

// A range of tile numbers; for each tile its index in the sequence and its first query, whether every query sees all
// the keys, and the keys' turn at its dQ semaphore: which semaphore, by the first tile that shares it, and how many
// tiles of keys come before. A kind also makes the tiles of some keys, and says whether some keys certainly add to a
// query tile.
template <class Tiles>
concept QueryTiles =
    std::derived_from<Tiles, TileRange> && requires(const Tiles& tiles, int n, const FwdProblem& p, const SeqInfo& seq,
                                                    const KeyTile& keys, const QueryTile& queries) {
      { tiles.index(n) } -> std::same_as<int>;
      { tiles.first_query(n) } -> std::same_as<int>;
      { tiles.full(n) } -> std::same_as<bool>;
      { tiles.turn(n).semaphore } -> std::convertible_to<int>;
      { tiles.turn(n).rank(p, seq, keys) } -> std::same_as<int>;
      { Tiles::of(p, seq, keys) } -> std::same_as<Tiles>;
      { Tiles::any_adds(p, seq, queries) } -> std::same_as<bool>;
    };

// Consecutive tiles of kBlockM queries. kTogether of them share a semaphore.
template <int kBlockM, int kBlockN, int kTogether = 1>
struct QueryInterval : TileRange {
  // The tiles that see some of the keys.
  FC_HOST_DEVICE static QueryInterval of(const FwdProblem& p, const SeqInfo& seq, const KeyTile& keys) {
    return {query_tiles(seq, p.band, keys.row, kBlockN, kBlockM)};
  }

  FC_HOST_DEVICE int index(int n) const { return n; }
  FC_HOST_DEVICE int first_query(int n) const { return n * kBlockM; }

  struct Turn {
    int semaphore;

    FC_HOST_DEVICE int rank(const FwdProblem& p, const SeqInfo& seq, const KeyTile& keys) const {
      const TileRange adding = key_tiles(seq, p.band, semaphore * kBlockM, kTogether * kBlockM, kBlockN);
      return keys.late_first ? adding.end - 1 - keys.index : keys.index - adding.begin;
    }
  };
  FC_HOST_DEVICE Turn turn(int n) const { return {n / kTogether * kTogether}; }

  FC_HOST_DEVICE static bool any_adds(const FwdProblem& p, const SeqInfo& seq, const QueryTile& queries) {
    return !key_tiles(seq, p.band, queries.row, kBlockM, kBlockN).empty();
  }
};
static_assert(QueryTiles<QueryInterval<64, 128>>);

// A step of a walk: one query head of the group and one tile of queries.
struct QueryStep {
  int head, m;

  // The next step, with late tiles first. Under a band an early tile of keys then ends with the queries with which
  // later ones start, and semaphores rarely wait.
  FC_HOST_DEVICE QueryStep next(const TileRange& tiles) const {
    return m > tiles.begin ? QueryStep{head, m - 1} : QueryStep{head + 1, tiles.end - 1};
  }
};

}  // namespace flash_cute
