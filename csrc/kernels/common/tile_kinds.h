// The kinds of tiles that kernels walk over, by their config. Producers and consumers name them through these alone.
#pragma once

#include "core/config.h"
#include "core/layout/kv_tiles.h"
#include "core/layout/query_tiles.h"

namespace flash_cute {

// Of keys, for a tile of queries; in Hopper's forward, for all groups of queries of a CTA.
template <KernelConfig C, int kKeys = C.block_n>
using KvTilesOf = KvInterval<kKeys>;
template <KernelConfig C, int kGroups>
using SharedKvTilesOf = SharedKvInterval<C.block_n, kGroups>;

// Of queries, for the tile of keys of a CTA or a cluster. kTogether tiles share a semaphore of dQ.
template <KernelConfig C, int kTogether = 1>
using QueryTilesOf = QueryInterval<C.block_m, C.block_n * C.cluster, kTogether>;

}  // namespace flash_cute
