// How the keys of all sequences are shared out among CTAs, worked out on the device: lengths are known there alone.
//
// A unit is a tile of query rows of one kv head of one sequence: the rows of its query heads, all heads of a query side
// by side. A unit's keys come in blocks, and blocks in grains. Grains are numbered through all units of all sequences,
// and every CTA takes as many grains that follow each other. Where the caller asks for parts of his own, a grain is one
// of them; else a grain is one block, or as few as keep numbers of grains below 2^31, and those that a CTA takes of a
// unit make one part.
#pragma once

#include "kernels/common/cached_seq.h"
#include "kernels/common/tiles.h"

namespace flash_cute {

// The work of one sequence.
struct Grains {
  int tiles;  // of query rows, for each kv head
  int first_block;  // of those that some query sees
  int blocks;
  int size;  // blocks
  int of_unit;  // at least one, so that rows without keys are written too
  int all;

  FC_HOST_DEVICE Grains(const DecodeProblem& p, const SeqInfo& seq, int block_m, int block_n) {
    const RowSpan keys = visible_keys(seq, p.fwd.band, 0, seq.q.length);
    tiles = (seq.q.length * p.group.value + block_m - 1) / block_m;
    first_block = keys.first / block_n;
    blocks = keys.first < keys.last ? (keys.last + block_n - 1) / block_n - first_block : 0;
    size = p.grain_blocks;
    if (p.num_splits > 0) size = (blocks + p.num_splits - 1) / p.num_splits;
    if (p.split_size > 0) size = (p.split_size + block_n - 1) / block_n;
    size = detail::at_least(size, 1);
    of_unit = detail::at_least(size == 1 ? blocks : (blocks + size - 1) / size, 1);
    all = tiles * p.fwd.heads_k * of_unit;
  }
};

// Consecutive grains that each CTA takes.
struct Shares {
  static constexpr int kLeast = 2;  // fewer grains are not worth a part of their own
  static constexpr int kPart = 3;  // about as many take as long as what a part costs beside its grains

  bool even;  // grains of one unit make one part
  int size;  // grains

  // Of `grains` grains, of which units of the first sequence have `of_unit`: where all sequences are as long, a little
  // larger shares may end where units do, and spare parts.
  FC_HOST_DEVICE static Shares of(const DecodeProblem& p, int grains, int of_unit) {
    const bool even = p.num_splits == 0 && p.split_size == 0;
    const int size = detail::at_least((grains + p.ctas - 1) / p.ctas, even ? kLeast : 1);
    if (!even) return {even, size};
    int aligned = size;
    if (size < of_unit) {
      const int shares_a_unit = of_unit / size, share = of_unit / shares_a_unit;
      if (share * shares_a_unit == of_unit) aligned = share;
    } else {
      aligned = (size + of_unit - 1) / of_unit * of_unit;
    }
    return {even, aligned - size <= kPart ? aligned : size};
  }
};

// The parts of one unit, and where in the workspace they are. With even shares a CTA has two slots, the first for a unit
// that it goes on with, the second for one that it begins.
struct UnitParts {
  bool even;
  int count;
  int first;  // grain of the unit, or with even shares the CTA that takes it

  // Of a unit with `grains` grains from `first_grain` on.
  FC_HOST_DEVICE static UnitParts of(const Shares& shares, int first_grain, int grains) {
    if (!shares.even) return {false, grains, first_grain};
    const int first_cta = first_grain / shares.size, last_cta = (first_grain + grains - 1) / shares.size;
    return {true, last_cta - first_cta + 1, first_cta};
  }

  FC_HOST_DEVICE int slot(int i) const { return !even ? first + i : i == 0 ? 2 * first + 1 : 2 * (first + i); }
};

// A part of a unit's keys.
struct Part {
  SeqInfo seq;
  int b, head_k;
  int row;  // of the sequence's packed rows, the unit's first
  int first, last;  // blocks of keys
  int grains;
  UnitParts all;  // of the unit
  int index;  // among them
};

// The part that a CTA begins with a grain of sequence b, whose first grain is `first_grain`. It ends before grain `end`.
FC_HOST_DEVICE Part part_from(const SeqInfo& seq, int b, const Grains& grains, const Shares& shares, int first_grain,
                              int grain, int end, int block_m, int cta) {
  const int unit = (grain - first_grain) / grains.of_unit, at = grain - first_grain - unit * grains.of_unit;
  const int head_k = grains.tiles == 1 ? unit : unit / grains.tiles;
  const int count = shares.even ? detail::at_most(grains.of_unit - at, end - grain) : 1;
  const UnitParts all = UnitParts::of(shares, grain - at, grains.of_unit);
  const int first = grains.first_block + at * grains.size, behind = grains.first_block + grains.blocks;
  return {.seq = seq,
          .b = b,
          .head_k = head_k,
          .row = (unit - head_k * grains.tiles) * block_m,
          .first = first,
          .last = detail::at_most(first + count * grains.size, behind),
          .grains = count,
          .all = all,
          .index = shares.even ? cta - all.first : at};
}

}  // namespace flash_cute
