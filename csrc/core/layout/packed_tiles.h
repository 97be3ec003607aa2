// The tiles of packed sequences that exist, the longest first: none between a short sequence's end and the longest one's.
#pragma once

#include <cstdint>

#include "core/layout/tiles.h"

namespace flash_cute {

// The rows of packed sequences, of queries or of keys, in tiles of `tile_rows`.
struct PackedRows {
  const int *cu, *used;
  int longest, batch;
  int64_t total;
  int tile_rows;

  FC_HOST_DEVICE static PackedRows of_queries(const FwdProblem& p, int tile_rows) {
    return {p.varlen.cu_q, p.varlen.used_q, p.seqlen_q, p.batch, p.total_q, tile_rows};
  }
  FC_HOST_DEVICE static PackedRows of_keys(const FwdProblem& p, int tile_rows) {
    return {p.varlen.cu_k, p.varlen.used_k, p.seqlen_k, p.batch, p.total_k, tile_rows};
  }

  FC_HOST_DEVICE int length(int sequence) const { return seq_span(cu, used, sequence, longest, total).length; }
  FC_HOST_DEVICE int tiles(int sequence) const { return detail::ceil_div(length(sequence), tile_rows); }
};

// Sequences, those with the longest tiles first. In shared memory; more than kMost sequences are not sorted.
struct PackedOrder {
  static constexpr int kMost = 32;
  int count = 0;  // of sorted sequences
  bool by_level = false;  // a tile takes as long as its sequence has tiles after it; else all of a sequence are alike
  int tiles[kMost];
  uint8_t sequence[kMost];  // shared memory is scarce

  // The place of a sequence, if those with higher costs come first; cost_of(sequence).
  template <class CostOf>
  FC_HOST_DEVICE static int place_of(int sequence, int batch, const CostOf& cost_of) {
    const int cost = cost_of(sequence);
    int place = 0;
    for (int other = 0; other < batch; ++other) {
      const int of_other = cost_of(other);
      place += of_other > cost || (of_other == cost && other < sequence);
    }
    return place;
  }
};

// A tile, the sequence's number `before` of `tiles`.
struct PackedTile {
  int sequence, tiles, before;
};

// Finds tiles by number, for numbers that mostly grow: it holds no table, and goes on from the last one. Numbers count
// the tiles of the first sequence, then of the next; or (by_level) all tiles with the most tiles after them, and so on.
class PackedTiles {
 public:
  // Tile `number`, which exists.
  FC_HOST_DEVICE PackedTile find(const PackedRows& rows, const PackedOrder& order, int number) {
    if (number < first_) *this = {};
    while (number >= past_) {
      first_ = past_;
      past_ += tiles_at(rows, order, ++place_);
    }
    const int tile = number - first_;
    if (order.by_level) return {order.sequence[tile], order.tiles[tile], place_ - (order.tiles[0] - order.tiles[tile])};
    return {order.count > 0 ? order.sequence[place_] : place_, past_ - first_, tile};
  }

 private:
  FC_HOST_DEVICE int tiles_at(const PackedRows& rows, const PackedOrder& order, int place) {
    if (!order.by_level) return order.count > 0 ? order.tiles[place] : rows.tiles(place);
    const int least = order.tiles[0] - place;  // tiles of a sequence that has one here
    while (sequences_ < order.count && order.tiles[sequences_] >= least) ++sequences_;
    return sequences_;
  }

  int place_ = -1;  // of a sequence, or a level, whose tiles are from first_ to past_
  int first_ = 0, past_ = 0;
  int sequences_ = 0;  // of the level
};

}  // namespace flash_cute
