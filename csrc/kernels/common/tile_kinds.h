// The kinds of tiles that kernels visit, by their config. Producers and consumers use only these aliases.
#pragma once

#include <type_traits>

#include "core/config.h"
#include "core/layout/kv_list.h"
#include "core/layout/kv_tiles.h"
#include "core/layout/query_list.h"
#include "core/layout/query_tiles.h"

namespace flash_cute {

template <TileKind>
struct TilesOfKind {
  template <int kKeys>
  using Kv = KvInterval<kKeys>;
  template <int kKeys, int kGroups>
  using SharedKv = SharedKvInterval<kKeys, kGroups>;
  template <int kQueries, int kKeys, int kTogether>
  using Query = QueryInterval<kQueries, kKeys, kTogether>;
};

template <>
struct TilesOfKind<TileKind::List> {
  template <int kKeys>
  using Kv = KvList<kKeys>;
  template <int kKeys, int kGroups>
  using SharedKv = SharedKvList<kKeys, kGroups>;
  template <int kQueries, int kKeys, int>
  using Query = QueryList<kQueries, kKeys>;
};

template <>
struct TilesOfKind<TileKind::Tokens> : TilesOfKind<TileKind::Interval> {
  template <int kKeys, int>
  using SharedKv = SharedKvOfTokens<kKeys>;
};

// The tiles of keys for a tile of queries; in Hopper's forward for all groups of queries of a CTA.
template <KernelConfig C, int kKeys = C.block_n>
using KvTilesOf = typename TilesOfKind<C.tiles>::template Kv<kKeys>;
template <KernelConfig C, int kGroups>
using SharedKvTilesOf = typename TilesOfKind<C.tiles>::template SharedKv<C.block_n, kGroups>;

// The tiles of queries for the tile of keys of a CTA or a cluster. kTogether tiles share a semaphore of dQ.
template <KernelConfig C, int kTogether = 1>
using QueryTilesOf = typename TilesOfKind<C.tiles>::template Query<C.block_m, C.block_n * C.cluster, kTogether>;

}  // namespace flash_cute
