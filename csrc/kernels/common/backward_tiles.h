// The order of work in backward: tiles of keys, and what each of them walks over.
#pragma once

#include "kernels/common/tiles.h"

namespace flash_cute {

using namespace cute;

// The tile's place in the problem.
struct KeyTile {
  int index, row, head, batch;
  bool late_first;

  // Early keys first: under a causal mask they have the most queries. Or late ones, but not of the last heads, whose
  // longest tiles would end long after all others. Tiles of several heads alternate, so that tiles of one head do not
  // all start together, as many heads as the L2 cache holds the queries of.
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

// A step is one query head of the group and one query tile, late tiles first: under a band early key tiles then finish
// with the tiles that later ones start with, and with turns nobody waits for long.
struct QueryStep {
  int head, m;

  CUTE_DEVICE QueryStep next(const TileRange& range) const {
    return m > range.begin ? QueryStep{head, m - 1} : QueryStep{head + 1, range.end - 1};
  }
};

// How many heads have `tiles` tiles of keys. How many tiles are worth it was found by trying.
CUTE_HOST_DEVICE int heads_of(const FwdProblem& p, int block_n, int tiles) {
  return max(1, tiles / ceil_div(p.seqlen_k, block_n));
}

}  // namespace flash_cute
