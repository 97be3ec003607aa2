// A forward kernel's tile of query rows: its place, and the LSE and row max it writes.
#pragma once

#include "kernels/common/fragment.h"
#include "core/layout/tiles.h"

namespace flash_cute {

// The tile of a kernel with one CTA a tile.
CUTE_DEVICE QueryTile tile_of_block(const FwdProblem& p, int block_m) {
  const int tiles = ceil_div(p.seqlen_q, block_m);
  QueryTile tile;
  tile.row = (tiles - 1 - blockIdx.x % tiles) * block_m;  // late rows first: under a causal mask they are the longest
  tile.head = blockIdx.x / tiles % p.heads;
  tile.batch = blockIdx.x / tiles / p.heads;
  return tile;
}

// The last of packed sequences of which has(sequence) is true, or -1; by a warp. Offsets may be in any order.
template <class Has>
CUTE_DEVICE int last_sequence(int sequences, const Has& has) {
  int last = -1;
  for (int first = 0; first < sequences; first += 32) {
    const int sequence = first + static_cast<int>(threadIdx.x % 32);
    const uint32_t some = __ballot_sync(~0u, sequence < sequences && has(sequence));
    if (some != 0) last = first + 31 - __clz(some);
  }
  return last;
}

// Offset of the tile's sequence in statistics with one number per row and head.
CUTE_DEVICE int64_t first_of(const RowStats& s, const QueryTile& tile, const SeqInfo& seq) {
  return tile.batch * s.batch + tile.head * s.head + seq.q.offset;
}

// Writes the natural-log LSE of each row, and the maximum if p.row_max is given.
template <class Softmax, class Lse, class Coordinates>
CUTE_DEVICE void store_row_stats(const FwdProblem& p, const SeqInfo& seq, const QueryTile& tile, const Softmax& softmax,
                                 const Lse& lse, const Coordinates& at) {
  if (get<1>(at(0, 0)) != 0) return;  // one thread of the quad writes
  const int64_t lse_base = first_of(p.lse, tile, seq), max_base = first_of(p.row_max, tile, seq);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(at); ++r) {
    const int row = tile.row + get<0>(at(r, 0));
    if (row >= seq.q.length) continue;
    p.lse.ptr[lse_base + row] = lse[r];
    if (p.row_max.ptr != nullptr) p.row_max.ptr[max_base + row] = softmax.natural_max(r);
  }
}

}  // namespace flash_cute
