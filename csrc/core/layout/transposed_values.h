// V of e4m3 with keys as the contiguous dimension, as wgmma reads it: [sequences, heads_k, head_dim_v, keys]; and
// factors of scores, [sequences, heads_k, keys].
#pragma once

#include "core/layout/seq.h"
#include "core/workspace.h"

namespace flash_cute {

// Keys are padded to whole tiles, with zeros. Packed sequences are one, in which each starts a tile. In 32 keys the
// order is that of a thread's weights: two of an n-tile of an accumulator, two of the next one.
struct TransposedValues {
  static constexpr int kTile = 128;  // keys

  int sequences;
  int64_t keys;  // of each
  bool scales_keys;  // there are factors

  static TransposedValues of(const FwdProblem& p) {
    const bool scales_keys = p.fp8.k.each || p.fp8.negative;
    if (p.dense_keys()) return {p.batch, PaddedRows{kTile}.dense(p.seqlen_k), scales_keys};
    return {1, PaddedRows{kTile}.packed(p.total_k, p.batch), scales_keys};
  }

  // The first key of a sequence.
  FC_HOST_DEVICE static int64_t first_key(const FwdProblem& p, const SeqSpan& span, int b) {
    return p.dense_keys() ? 0 : PaddedRows{kTile}.first_row(span.offset, b);
  }

  // Of the keys at four consecutive places of 16, counted from 4 * `word`, the first and the third; the others follow.
  FC_HOST_DEVICE static constexpr int first_pair(int word) { return 2 * word; }
  FC_HOST_DEVICE static constexpr int second_pair(int word) { return 2 * word + 8; }
};

}  // namespace flash_cute
