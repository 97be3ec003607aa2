// The tiles of queries of packed sequences that exist, without those between a short sequence's end and the longest one's.
#pragma once

#include "core/layout/tiles.h"

namespace flash_cute {

// Numbers tiles by sequence, then by row, for one that asks for numbers in descending order, or starts over: it walks the
// sequences and holds no table.
class PackedTiles {
 public:
  // `tiles`: of all sequences.
  FC_HOST_DEVICE PackedTiles(const FwdProblem& p, int tiles) : p_(p), tiles_(tiles) { start_over(); }

  FC_HOST_DEVICE int tiles() const { return tiles_; }

  // Of `rows` queries each.
  FC_HOST_DEVICE static int of_sequence(const FwdProblem& p, int rows, int b) {
    return detail::ceil_div(seq_span(p.varlen.cu_q, p.varlen.used_q, b, p.seqlen_q, p.total_q).length, rows);
  }

  // Sets the sequence and row of tile `number`, which exists.
  FC_HOST_DEVICE void place(QueryTile& tile, int number, int rows) {
    if (number >= past_) start_over();
    while (number < first_) {
      past_ = first_;
      first_ -= of_sequence(p_, rows, --b_);
    }
    tile.batch = b_;
    tile.row = (number - first_) * rows;
  }

 private:
  FC_HOST_DEVICE void start_over() {
    b_ = p_.batch;
    first_ = past_ = tiles_;
  }

  const FwdProblem& p_;
  int tiles_;
  int b_;  // a sequence, whose tiles are from first_ to past_
  int first_, past_;
};

}  // namespace flash_cute
