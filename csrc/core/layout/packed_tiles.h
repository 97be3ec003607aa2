// The tiles of packed sequences that exist, without those between a short sequence's end and the longest one's.
#pragma once

#include "core/layout/tiles.h"

namespace flash_cute {

// The rows of packed sequences, of queries or of keys.
struct PackedSequences {
  const int *cu, *used;
  int longest, batch;
  int64_t total;

  FC_HOST_DEVICE static PackedSequences of_queries(const FwdProblem& p) {
    return {p.varlen.cu_q, p.varlen.used_q, p.seqlen_q, p.batch, p.total_q};
  }
  FC_HOST_DEVICE static PackedSequences of_keys(const FwdProblem& p) {
    return {p.varlen.cu_k, p.varlen.used_k, p.seqlen_k, p.batch, p.total_k};
  }

  // Tiles of `rows` rows of sequence b.
  FC_HOST_DEVICE int tiles(int b, int rows) const {
    return detail::ceil_div(seq_span(cu, used, b, longest, total).length, rows);
  }
};

// Finds tiles by number, where they are numbered by sequence, then by row. It holds no table, and walks the sequences from
// the one that it found last: for numbers in order.
class PackedTiles {
 public:
  // Sets sequence and row of tile `number`, which exists, of `rows` rows.
  FC_HOST_DEVICE void find(const PackedSequences& sequences, int number, int rows, int& b, int& row) {
    while (number >= past_) {
      first_ = past_;
      past_ += sequences.tiles(++b_, rows);
    }
    while (number < first_) {
      past_ = first_;
      first_ -= sequences.tiles(--b_, rows);
    }
    b = b_;
    row = (number - first_) * rows;
  }

 private:
  int b_ = -1;  // a sequence, whose tiles are from first_ to past_
  int first_ = 0, past_ = 0;
};

}  // namespace flash_cute
