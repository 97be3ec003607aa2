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
    tiles = (seq.q.length * p.group() + block_m - 1) / block_m;
    first_block = keys.first / block_n;
    blocks = keys.first < keys.last ? (keys.last + block_n - 1) / block_n - first_block : 0;
    size = p.grain_blocks;
    if (p.num_splits > 0) size = (blocks + p.num_splits - 1) / p.num_splits;
    if (p.split_size > 0) size = (p.split_size + block_n - 1) / block_n;
    size = detail::at_least(size, 1);
    of_unit = detail::at_least((blocks + size - 1) / size, 1);
    all = tiles * p.fwd.heads_k * of_unit;
  }
};

// Consecutive grains that each CTA takes.
struct Shares {
  // Fewer grains than these are not worth a part of their own.
  static constexpr int kLeast = 4;

  bool even;  // grains of one unit make one part
  int size;  // grains

  FC_HOST_DEVICE Shares(const DecodeProblem& p, int grains)
      : even(p.num_splits == 0 && p.split_size == 0), size((grains + p.ctas - 1) / p.ctas) {
    if (even && size < kLeast) size = kLeast;
    if (size < 1) size = 1;
  }
};

// The parts of one unit, and where in the workspace they are. With even shares a CTA has two slots, the first for a unit
// that it goes on with, the second for one that it begins.
struct UnitParts {
  bool even;
  int count;
  int first;  // grain of the unit, or with even shares the CTA that takes it

  // Of a unit with `grains` grains from `first_grain` on.
  FC_HOST_DEVICE UnitParts(const Shares& shares, int first_grain, int grains)
      : even(shares.even), count(grains), first(first_grain) {
    if (!even) return;
    first = first_grain / shares.size;
    count = (first_grain + grains - 1) / shares.size - first + 1;
  }

  FC_HOST_DEVICE int slot(int i) const { return !even ? first + i : i == 0 ? 2 * first + 1 : 2 * (first + i); }
};

}  // namespace flash_cute
