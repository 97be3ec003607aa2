// The order of packed sequences, which a warp makes in kernels (kernels/hopper/tile_scheduler.h).
#pragma once

#include "core/layout/packed_tiles.h"

namespace flash_cute {

template <class CostOf>
PackedOrder sorted_sequences(const PackedRows& rows, bool by_level, const CostOf& cost_of) {
  PackedOrder order;
  if (rows.batch > PackedOrder::kMost) return order;
  order.count = rows.batch;
  order.by_level = by_level;
  for (int sequence = 0; sequence < rows.batch; ++sequence) {
    const int place = PackedOrder::place_of(sequence, rows.batch, cost_of);
    order.sequence[place] = static_cast<uint8_t>(sequence);
    order.tiles[place] = rows.tiles(sequence);
  }
  return order;
}

}  // namespace flash_cute
