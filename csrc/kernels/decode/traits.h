// MMA types and shared memory of decode's steps.
#pragma once

#include "core/workspace.h"
#include "core/layout/decode_scheduler.h"
#include "kernels/common/softmax.h"
#include "kernels/decode/cache_copy.h"
#include "kernels/decode/eight_bits.h"
#include "kernels/ampere/mma.h"
#include "kernels/ampere/widened.h"

namespace flash_cute::decode {

using namespace ampere;

// A split without the blocks that no query sees, and the keys that its queries see.
struct VisibleSplit {
  KvSplit split;
  RowSpan keys;
};

template <KernelConfig C>
using SplitsOf = SplitIterator<C.block_m, C.block_n>;

// Queries of a split's work tile.
CUTE_DEVICE RowSpan queries_of(const DecodeParams& p, const KvSplit& split, int block_m) {
  return {p.group.div(split.row), min(p.group.div(split.row + block_m - 1) + 1, split.seq.q.length)};
}

// The number of valid rows of the work tile.
CUTE_DEVICE int rows_of(const DecodeParams& p, const KvSplit& split, int block_m) {
  return min(split.seq.q.length * p.group.value - split.row, block_m);
}

// K and V of a team in shared memory, how they get there, and the operands that they are: of 16 bits.
template <KernelConfig C, int kKeys, int kTeamThreads>
struct CacheTraits {
  using Element = ElementOf<C.dtype>;
  using OperandK = SharedOperand<Side::B, false, Element, kKeys, C.head_dim, 1>;
  using OperandV = SharedOperand<Side::B, true, Element, kKeys, C.head_dim_v, 1>;
  using Copy = CacheCopy<Element, kTeamThreads, kKeys, C.head_dim, C.head_dim_v>;
  struct Tile {
    alignas(128) Element k[kKeys * C.head_dim];
    alignas(128) Element v[kKeys * C.head_dim_v];

    CUTE_DEVICE float* results() { return reinterpret_cast<float*>(this); }
  };
  struct QueryFactors {};
  static constexpr int kNeighbours = 2;  // consecutive columns of an output that a thread has
};

// The same of 8 bits.
template <KernelConfig C, int kKeys, int kTeamThreads>
  requires(C.widens_cache())
struct CacheTraits<C, kKeys, kTeamThreads> {
  using OperandK = WidenedKeys<C.cache, kKeys, C.head_dim>;
  using OperandV = WidenedValues<C.cache, kKeys, C.head_dim_v>;
  using Copy = EightBitCopy<kTeamThreads, kKeys, C.head_dim, C.head_dim_v>;
  using Tile = EightBitTile<kKeys, C.head_dim, C.head_dim_v>;
  struct QueryFactors {
    float query_factors[C.block_m];  // of prepare_queries()
  };
  static constexpr int kNeighbours = 4;
};

template <KernelConfig C>
struct DecodeTraits {
  using Element = ElementOf<C.dtype>;  // of queries and outputs
  static constexpr DType kOperand = C.widens_cache() ? DType::FP16 : C.dtype;  // of products
  static constexpr int kRowWarps = C.block_m / 16, kTeamThreads = 32 * kRowWarps;
  // Warps with 16 query rows each form a team on the same keys; teams work on different keys.
  static constexpr int kTeams = C.warps / kRowWarps;
  static constexpr int kKeys = C.block_n / kTeams;  // of a team's tile
  // Whether Q stays in registers; else it is read again for each tile of keys, into two alternating slots.
  static constexpr bool kKeepsQ = kRowWarps == 1 && C.head_dim <= (C.widens_cache() ? 128 : 64);
  static constexpr int kSteps = C.head_dim / 16, kSlots = kKeepsQ ? kSteps : 2;
  using Mma = RowsMma<kOperand, C.block_m, kRowWarps>;
  using OperandQ = SharedOperand<Side::A, false, Element, C.block_m, C.head_dim, kRowWarps>;
  using OfCache = CacheTraits<C, kKeys, kTeamThreads>;
  using OperandK = typename OfCache::OperandK;
  using OperandV = typename OfCache::OperandV;
  using Copy = typename OfCache::Copy;

  // Splits described at a time: the current one, those whose tiles may be in flight, and one being described.
  static constexpr int kDescribed = C.stages + 1;

  // K and V of a team. After a split's last tile the team's output takes their place: block_m rows of head_dim_v fp32
  // numbers, at result_column().
  using Tile = typename OfCache::Tile;
  struct Storage : OfCache::QueryFactors {
    alignas(128) Element q[2][C.block_m * C.head_dim];  // of the current split, and of the next
    Tile kv[C.stages][kTeams];
    VisibleSplit splits[kDescribed];  // a ring
    SplitsOf<C> more_splits;  // not described yet
    alignas(16) RowSum sums[C.block_m][kTeams];
  };
  static constexpr int kStageBytes = kTeams * sizeof(Tile);
  static_assert(C.warps % kRowWarps == 0 && C.block_n % (16 * kTeams) == 0);
  static_assert(C.stages >= 2);
  static_assert(kTeams == 1 || C.block_m * C.head_dim_v * sizeof(float) <= sizeof(Tile), "results fit into a tile");
};

// Swizzle of a results row: teams write eight rows at once without bank conflicts.
CUTE_DEVICE int result_column(int row, int column) {
  return column ^ row % 4 * 8;
}

}  // namespace flash_cute::decode
