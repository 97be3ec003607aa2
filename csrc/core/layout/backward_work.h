// The work of a CTA of Hopper's backward for one tile of keys, and the order of its steps.
#pragma once

#include "core/layout/query_tiles.h"
#include "core/workspace.h"

namespace flash_cute {

// All query heads of a query tile, then the next query tile, upwards or downwards. The order keeps tiles that run at
// once at the same queries, so that L2 serves them, and lets semaphores of dQ rarely wait.
// docs/kernels/backward_order.md has the reasons and a picture.
template <QueryTiles Tiles>
class BackwardWork {
 public:
  int split_tile;  // index of the tile among the tiles that are split, or negative
  int split;
  KeyTile tile;
  SeqInfo seq;
  Tiles queries;  // the split's query tiles that see some of the keys
  int heads, first_head;  // query heads: how many, and the first
  uint32_t steps_until_end = 0;  // of the CTA, from its start to this tile's end (2-CTA backward)
  bool has_unfinished = false;  // the previous tile's dV, dK and last dQ are still to be stored

  // `splits`: how many splits a tile that is split has.
  FC_HOST_DEVICE BackwardWork(const BwdParams& p, const FastDivmod& splits, int block_n, int number)
      : BackwardWork(p, splits, number, number - p.splits.whole_tiles,
                     [&](int tile) { return KeyTile(p.fwd, block_n, p.order.sets, p.order.late_first, tile); }) {}
  // Of packed keys, of which each head has `tiles` tiles.
  FC_HOST_DEVICE BackwardWork(const BwdParams& p, const FastDivmod& splits, int block_n, int number, int tiles,
                              const PackedOrder& order, PackedTiles& packed)
      : BackwardWork(p, splits, number, number - p.splits.whole_tiles,
                     [&](int tile) { return KeyTile(p.fwd, block_n, p.order.sets, tiles, order, packed, tile); }) {}

  FC_HOST_DEVICE uint32_t steps() const { return heads * (queries.end - queries.begin); }
  FC_HOST_DEVICE QueryStep first_step() const { return {queries.empty() ? heads : 0, first()}; }
  // After the last step the head is out of range.
  FC_HOST_DEVICE QueryStep after(QueryStep step) const {
    const int next_head = step.head + 1;
    if (next_head < heads_inside_) return {next_head, step.m};
    if (step.m != (early_first_ ? queries.end - 1 : queries.begin))
      return {next_head - heads_inside_, early_first_ ? step.m + 1 : step.m - 1};
    return {next_head, first()};
  }

 private:
  // `index_from_first_split`: counts works from the first tile that is split. tile_of(number): of keys.
  template <class TileOf>
  FC_HOST_DEVICE BackwardWork(const BwdParams& p, const FastDivmod& splits, int number, int index_from_first_split,
                              const TileOf& tile_of)
      : split_tile(index_from_first_split < 0 || !p.sums_of_splits ? -1 : splits.div(index_from_first_split)),
        split(split_tile < 0 ? 0 : index_from_first_split - split_tile * splits.value),
        tile(tile_of(split_tile < 0 ? number : p.splits.whole_tiles + split_tile)),
        seq(p.fwd, tile.batch) {
    queries = Tiles::of(p.fwd, seq, tile);
    heads = p.fwd.heads / p.fwd.heads_k;
    first_head = tile.head * heads;
    if (split_tile >= 0) {
      static_cast<TileRange&>(queries) = even_share(queries, split % p.splits.queries, p.splits.queries);
      heads /= p.splits.heads;
      first_head += split / p.splits.queries * heads;
    }
    const KeyOrder& order = p.order;
    heads_inside_ = order.heads_inside ? heads : 1;
    const bool in_odd_set = number / order.tiles_of_set % 2 == 1;
    early_first_ = heads == 1 ? !uses_semaphore(p.dq_accumulate) || tile.late_first : order.down_and_up && in_odd_set;
  }

  FC_HOST_DEVICE int first() const { return early_first_ ? queries.begin : queries.end - 1; }

  int heads_inside_;  // consecutive heads of a query tile: all, or one
  bool early_first_;
};

}  // namespace flash_cute
