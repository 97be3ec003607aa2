// Parameters, work tiles, MMA types and shared memory of the roles of Hopper's forward.
#pragma once

#include "core/layout/key_splits.h"
#include "core/workspace.h"
#include "core/problem.h"
#include "kernels/common/forward_rules.h"
#include "kernels/common/gap_fill.h"
#include "kernels/common/query_tile.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tile_kinds.h"
#include "kernels/hopper/pipeline.h"
#include "kernels/hopper/tile_scheduler.h"
#include "kernels/hopper/tensor_map.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {

using namespace cute;
using namespace hopper;

struct ForwardParams {
  FwdParams p;
  RaggedMap q, k, v, out;
  FastDivmod page_size;
  int page_rows;  // contiguous rows of a page in a tile of keys
  TileScheduler scheduler;
  FastDivmod rows_of_head;  // rows of a tile of queries that each of its pack_gqa heads has
  FastDivmod group;  // rows of tokens: query heads of a group
  int tokens;  // rows of tokens: tokens of a tile
  TileCounter tile_counter;  // of tiles of queries
  SoftmaxCap cap;
  GapFills<Op::Fwd> gaps;
};

// A work tile: a tile of queries and the key tiles it visits; written by the producer, read by all roles.
template <SharedKvTiles Tiles>
struct WorkTile {
  QueryTile tile;
  int split;  // index of the split of its keys
  int head_k;  // kv head
  SeqInfo seq;
  Tiles tiles;  // of the split, that some row of the cluster sees; its groups are the warpgroups

  CUTE_DEVICE WorkTile(const FwdParams& p, const SeqInfo& seq, const QueryGroups& queries, KeySplit split)
      : tile(queries.tile),
        split(split.index),
        head_k(tile.head / (p.heads / p.heads_k)),
        seq(seq),
        tiles(p, seq, queries, split) {}

  // The tile's place in the workspace, where split s of head h is head s * heads + h.
  CUTE_DEVICE QueryTile of_results(const FwdProblem& p, const QueryTile& of_head) const {
    return {of_head.row, split * p.heads + of_head.head, of_head.batch};
  }
};

// With pack_gqa: the tile of the head that owns row `first` of the CTA's tile, numbered so that row i stays row i.
template <KernelConfig C>
CUTE_DEVICE decltype(auto) tile_of_head(const ForwardParams& params, const QueryTile& tile, int first) {
  if constexpr (max_pack_gqa(C) == 1) {
    return (tile);
  } else {
    const int head = params.rows_of_head.div(first);
    return QueryTile{tile.row - head * params.rows_of_head.value, tile.head + head, tile.batch};
  }
}

// Whether tiles of queries are numbered by PackedTiles.
template <KernelConfig C>
CUTE_HOST_DEVICE bool is_packed(const FwdProblem& p) {
  return C.cluster == 1 && !p.dense();
}

// Queries of a tile of the cluster.
template <KernelConfig C>
CUTE_HOST_DEVICE int queries_of_tile(const ForwardParams& params) {
  return C.packs_tokens() ? params.tokens : C.block_m * C.cluster;
}

// Sorts packed sequences, by a warp, and returns how many tiles of queries a head has.
template <KernelConfig C>
CUTE_DEVICE int sort_queries(const ForwardParams& params, PackedOrder& order) {
  const FwdParams& p = params.p;
  return sort_sequences(order, PackedRows::of_queries(p, queries_of_tile<C>(params)), p.by_level,
                        [&](int sequence) { return SeqInfo(p, sequence).k.length; });
}

// KeySplit::tiles, found by a warp; 0 if the host knew the lengths.
template <KernelConfig C>
CUTE_DEVICE int tiles_of_split(const ForwardParams& params) {
  const FwdParams& p = params.p;
  if (p.num_splits == 1 || p.knows_keys()) return 0;
  const int queries = queries_of_tile<C>(params);
  auto sum = [](int64_t x) {
    CUTE_UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  };
  auto for_each = [&](const auto& f) {
    for (int sequence = threadIdx.x % 32; sequence < p.batch; sequence += 32) f(SeqInfo(p, sequence));
  };
  KeyCount count;
  for_each([&](const SeqInfo& seq) { count.add(seq, p.band, queries, C.block_n); });
  count = {sum(count.query_tiles), sum(count.tiles), __reduce_max_sync(~0u, count.longest)};
  return count.of_split(p.heads / p.pack_gqa, gridDim.x / C.cluster, p.num_splits, [&](int tiles) {
    int64_t splits = 0;
    for_each([&](const SeqInfo& seq) { splits += KeyCount::splits(seq, queries, C.block_n, tiles); });
    return sum(splits);
  });
}

// Rows of tokens: the token and head of a row of the CTA's tile. Rows behind the last token are of none.
struct TokenRow {
  int token, query, head;

  CUTE_DEVICE TokenRow(const ForwardParams& params, const QueryTile& tile, int row)
      : token(params.group.div(row)), query(tile.row + token), head(tile.head + row - token * params.group.value) {}

  CUTE_DEVICE bool exists(const ForwardParams& params, const SeqInfo& seq) const {
    return token < params.tokens && query < seq.q.length;
  }
};

// What the device's lengths say, of the thread that fetches tiles: in shared memory, as it has few registers.
struct FetchedLengths {
  int tiles_of_head;  // if queries are packed: tiles of queries, over all sequences
  int tiles_of_split;  // KeySplit::tiles
  PackedOrder order;
  PackedTiles packed;
};

template <KernelConfig C>
struct ForwardTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kGroups = C.warps / 4;  // warpgroups that compute
  using Work = WorkTile<SharedKvTilesOf<C, kGroups>>;
  using LayoutQ = RowsLayout<Element, C.block_m, C.head_dim>;  // (row,dim)
  using LayoutK = RowsLayout<Element, C.block_n, C.head_dim>;  // (key,dim)
  using LayoutV = ColumnsLayout<Element, C.block_n, C.head_dim_v>;  // (dim,key)
  using LayoutO = RowsLayout<Element, 64, C.head_dim_v>;  // (row,dim) of a warpgroup
  using Groups = Layout<Shape<Int<kGroups>, _1, _1>>;
  template <int kKeys>
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<kKeys>, Int<C.head_dim>>>(), Groups{}));
  static_assert(tile_size<1>(MmaQK<C.block_n>{}) == C.block_n, "no wgmma of block_n columns: units.cmake");
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.head_dim_v>, Int<C.block_n>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Groups{}));
  using MmaO = decltype(make_tiled_mma(  // a warpgroup's share of it
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<C.head_dim_v>, Int<C.block_n>>, GMMA::Major::K,
                           GMMA::Major::MN>()));
  using Softmax = OnlineSoftmax<2, kGroups == 2 && C.head_dim_v <= 192 ? 4 : 2>;  // chains: as many as fit in registers
  static constexpr uint32_t kBytesQ = C.block_m * C.head_dim * sizeof(Element);
  static constexpr int kClusterRows = C.block_m * C.cluster;  // of queries
  static constexpr int kStagesQ = stages_q(C);
  static constexpr int kWorkTiles = kStagesQ + 2;
  static constexpr bool kOwnOutput = own_output(C), kPingPong = ping_pong(C);
  // Whether the first product may cover half a tile; score rules and lists together leave no registers for it.
  static constexpr bool kHalves = C.block_n % 32 == 0 && !(C.rich() && C.walks_lists());
  static_assert(!kHalves || tile_size<1>(MmaQK<C.block_n / 2>{}) == C.block_n / 2,
                "no wgmma of block_n / 2 columns: units.cmake");
  // Per thread after setmaxnreg; their sum over threads is what the CTA starts with.
  static constexpr int kServingRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : has_mask_warpgroup(C) ? 216 : 232;
  // Named barriers: one per warpgroup for the ping-pong, and one of all.
  static constexpr int kPingPongBarrier = 1, kAllGroupsBarrier = kPingPongBarrier + kGroups;

  struct Storage {
    alignas(1024) Element q[kStagesQ][C.block_m * C.head_dim];
    alignas(1024) Element k[C.stages][C.block_n * C.head_dim];
    alignas(1024) Element v[C.stages][C.block_n * C.head_dim_v];  // also O in the epilogue, unless kOwnOutput
    alignas(1024) Element out[kOwnOutput ? kGroups : 1][kOwnOutput ? 64 * C.head_dim_v : 1];
    Pipeline<C.stages, C.cluster> pipeline_k, pipeline_v;
    Pipeline<kStagesQ> pipeline_q;
    // A bit per column of each thread's two rows: whether dropout keeps it.
    uint32_t keep_mask[has_mask_warpgroup(C) ? C.warps : 1][2][has_mask_warpgroup(C) ? 32 : 1];
    Pipeline<1> pipeline_mask;
    Pipeline<2, C.cluster> pipeline_next;  // of next[]
    int next[2];  // tile numbers that the cluster fetched
    FetchedLengths lengths;
    cutlass::arch::ClusterBarrier keys_sent_for;  // all paged keys of a tile are under way
    Pipeline<1> pipeline_out[kGroups];  // of each warpgroup's O
    cutlass::arch::ClusterBarrier out_left[kGroups];  // O has left the buffer of V, in all CTAs of the cluster
    Work work[kWorkTiles];  // one is in use, kStagesQ wait, one is being written
  };
  // Where a warpgroup writes O after `key_tiles` tiles: its own buffer, or the V buffer of one of the last two tiles.
  CUTE_DEVICE static Element* output(Storage& storage, int group, uint32_t key_tiles) {
    return kOwnOutput ? storage.out[group] : storage.v[(key_tiles + group) % C.stages];
  }

  static_assert(C.block_m == 64 * kGroups && (kGroups == 2 || kGroups == 3),
                "registers and named barriers are for these");
  static_assert(!has_mask_warpgroup(C) || (kGroups == 2 && C.block_n % 32 == 0 && C.block_n <= 128),
                "keep_mask[] and registers");
  static_assert(kOwnOutput || (kGroups == 2 && C.stages == 2 && C.block_n >= 64), "each has a buffer of V for its O");
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

}  // namespace flash_cute::sm90
