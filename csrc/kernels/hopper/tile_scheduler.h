// The order in which persistent CTAs take tiles of queries, or splits of their keys.
#pragma once

#include <algorithm>

#include "core/layout/packed_tiles.h"
#include "core/workspace.h"
#include "kernels/common/query_tile.h"

namespace flash_cute::hopper {

// Hands out tile numbers to persistent CTAs (or clusters). The first tile of a CTA is its index in the grid. With
// semaphores between tiles the first one comes from the counter, too: then every lower number is with a running CTA.
struct TileCounter {
  unsigned* counter;  // 0 before and after the kernel
  int tiles;
  int first_tiles;  // tiles that CTAs get by grid index: one per CTA, or none
  unsigned last;  // the counter's last value, after which an increment wraps it to 0 for the next launch

  static TileCounter of(int64_t tiles, int64_t workers, bool in_order) {
    const int64_t first_tiles = in_order ? 0 : workers;
    // Each CTA fetches one number past the end.
    return {nullptr, static_cast<int>(tiles), static_cast<int>(first_tiles),
            static_cast<unsigned>(tiles - first_tiles + workers - 1)};
  }

  // The same for fewer tiles, of which the host knew a bound; `workers`: CTAs or clusters of the grid.
  CUTE_DEVICE TileCounter with_tiles(int tiles, int workers) const {
    if (first_tiles == 0) return {counter, tiles, 0, static_cast<unsigned>(tiles + workers - 1)};
    return {counter, tiles, min(tiles, workers), static_cast<unsigned>(tiles - 1)};
  }

  // If each tile has a CTA there is nothing to count.
  CUTE_DEVICE int fetch() const {
    return first_tiles == tiles ? tiles : first_tiles + static_cast<int>(atomicInc(counter, last));
  }
};

// Heads run in sets whose K and V fit into L2 together. In a set late rows come first (longest processing time first):
// under a causal mask they are the longest tiles. With pack_gqa a tile's head is the first of its heads.
struct TileScheduler {
  int row_tiles, pack_gqa;
  int heads, batch, splits;  // heads / pack_gqa
  bool by_split;  // the first splits of all tiles, then the second ones: of lengths on the device, many have few
  HeadSets sets;

  // `packed`: of packed queries the host knows a bound alone; with_tiles() has the tiles that exist, of all sequences.
  static TileScheduler of(const FwdParams& p, int block_m, bool packed) {
    const int heads = p.heads / p.pack_gqa;
    const bool by_split = !p.knows_keys();
    if (packed) {
      const int64_t most = p.total_q / block_m + p.batch;
      return {static_cast<int>(most), p.pack_gqa, heads, 1, p.num_splits, by_split, p.sets};
    }
    const int longest = p.dense() ? p.seqlen_q : static_cast<int>(std::min<int64_t>(p.seqlen_q, p.total_q));
    return {(longest + block_m - 1) / block_m, p.pack_gqa, heads, p.batch, p.num_splits, by_split, p.sets};
  }

  CUTE_DEVICE TileScheduler with_tiles(int tiles_of_head) const {
    TileScheduler known = *this;
    known.row_tiles = tiles_of_head;
    return known;
  }

  CUTE_HOST_DEVICE int64_t tiles() const { return int64_t(row_tiles) * heads * batch * splits; }

  // A tile, and a split of its keys.
  struct Part {
    int tile, split;
  };
  CUTE_DEVICE Part part_of(int index) const {
    const int tiles_of_split = row_tiles * heads * batch;
    return by_split ? Part{index % tiles_of_split, index / tiles_of_split} : Part{index / splits, index % splits};
  }

  // A tile's head, of all sequences, and its number among those of the head, the longest first.
  struct Place {
    int number, head;
  };
  CUTE_DEVICE Place place_of(int tile) const {
    const HeadSets::Set set = sets.of_tile(tile, row_tiles, heads * batch);
    const int place = tile - set.first * row_tiles;
    return {place / set.heads, set.first + place % set.heads};
  }

  CUTE_DEVICE QueryTile at(int tile, int block_m) const {
    const auto [number, head] = place_of(tile);
    return {(row_tiles - 1 - number) * block_m, head % heads * pack_gqa, head / heads};
  }
  // Of packed queries.
  CUTE_DEVICE QueryTile at(int tile, const PackedRows& rows, const PackedOrder& order, PackedTiles& packed) const {
    const auto [number, head] = place_of(tile);
    const PackedTile found = packed.find(rows, order, number);
    return {(found.tiles - 1 - found.before) * rows.tile_rows, head * pack_gqa, found.sequence};
  }
};

// Sorts packed sequences, by a warp, and returns how many tiles all have. cost_of(sequence): of each tile, if they are alike.
template <class CostOf>
CUTE_DEVICE int sort_sequences(PackedOrder& order, const PackedRows& rows, bool by_level, const CostOf& cost_of) {
  const int lane = threadIdx.x % 32;
  int tiles = 0;
  for (int sequence = lane; sequence < rows.batch; sequence += 32) tiles += rows.tiles(sequence);
  const bool sorts = rows.batch <= PackedOrder::kMost;
  if (sorts) {
    const bool exists = lane < rows.batch;
    const int cost = !exists ? 0 : by_level ? rows.length(lane) : cost_of(lane);
    const int place =
        PackedOrder::place_of(lane, rows.batch, [&](int sequence) { return __shfl_sync(~0u, cost, sequence); });
    if (exists) {
      order.sequence[place] = lane;
      order.tiles[place] = tiles;
    }
  }
  if (lane == 0) {
    order.count = sorts ? rows.batch : 0;
    order.by_level = sorts && by_level;
  }
  // After this barrier the warp has written the order.
  __syncwarp();
  CUTE_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) tiles += __shfl_xor_sync(~0u, tiles, lanes);
  return tiles;
}

}  // namespace flash_cute::hopper
