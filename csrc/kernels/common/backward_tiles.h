// The order of work in backward: tiles of keys, and the query steps of each.
#pragma once

#include "core/layout/tiles.h"

namespace flash_cute {

using namespace cute;

// The tile's place in the problem.
struct KeyTile {
  int index, row, head, batch;
  bool late_first;

  // Early keys first: under a causal mask they see the most queries. With `late` the late ones first, except in the
  // last heads, whose longest tiles would finish last. Tiles of `heads_together` heads alternate, as many as L2 holds
  // the queries of.
  CUTE_DEVICE KeyTile(const FwdProblem& p, int block_n, int heads_together, bool late = false,
                      int number = blockIdx.x) {
    const int tiles = ceil_div(p.seqlen_k, block_n);
    const int first_head = number / (tiles * heads_together) * heads_together;
    const int heads_left = p.heads_k * p.batch - first_head, together = min(heads_together, heads_left);
    late_first = late && heads_left > together;
    const int place = number - first_head * tiles;
    index = late_first ? tiles - 1 - place / together : place / together;
    row = index * block_n;
    const int any_head = first_head + place % together;
    head = any_head % p.heads_k;
    batch = any_head / p.heads_k;
  }
};

// A step: one query head of the group and one query tile, late tiles first. Under a band an early key tile then ends
// with the query tiles that later ones start with, and semaphores rarely wait.
struct QueryStep {
  int head, m;

  CUTE_DEVICE QueryStep next(const TileRange& range) const {
    return m > range.begin ? QueryStep{head, m - 1} : QueryStep{head + 1, range.end - 1};
  }
};

}  // namespace flash_cute
