// The two threads of Hopper's forward that load tiles by TMA, but for keys and values that lie in pages.
#pragma once

#include "kernels/sm90/forward_pages.h"

namespace flash_cute::sm90 {

// Brings tile n of the keys of `work`, or of their values, to all CTAs of the cluster.
template <KernelConfig C, int kDims, class Buffers>
CUTE_DEVICE void load_keys(Ring<C.stages, C.cluster>& ring, Cursor<C.stages>& at, Buffers& buffers,
                           const RaggedMap& map, const Work<C.warps / 4>& work, int n) {
  ring.wait_empty(at);
  auto* const to = buffers[at.stage()];
  map.template load<C.block_n, kDims, C.cluster>(to, ring.expect(at, C.block_n * kDims * sizeof(*to)),
                                                 TMA::CacheHintSm90::EVICT_LAST, {work.seq.k.offset, work.keys.last},
                                                 work.keys.first + n * C.block_n, work.head_k, work.tile.batch);
  at.advance();
}

// One thread that takes tiles of queries, says what they have to do, and loads Q and K of each, if no warp loads K.
template <KernelConfig C>
CUTE_DEVICE void produce_queries_and_keys(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdProblem& p = params.p;
  const int rank = C.cluster == 1 ? 0 : block_rank_in_cluster();
  const bool loads_keys = !in_pages<C>(params);
  Cursor<C.stages> at_k;
  Cursor<T::kStagesQ> at_q;
  Cursor<2> at_next;

  int index = blockIdx.x / C.cluster;
  // Exactly once for each tile: so there are as many increments as tiles, after which the counter is 0 again. As late
  // as its latency allows: who comes first to the end of a tile should be the first to have another one.
  auto take = [&] {
    if (rank == 0) index = gridDim.x / C.cluster + atomicInc(params.counter, params.tiles - 1);
  };
  // What the first CTA of the cluster has taken is for all of them.
  auto share = [&] {
    if constexpr (C.cluster > 1) {
      auto& [full, empty] = storage.ring_next;
      int* const next = &storage.next[at_next.stage()];
      if (rank == 0) {
        storage.ring_next.wait_empty(at_next);
        for (int to = 0; to < C.cluster; ++to) {
          store_shared_remote(index, cast_smem_ptr_to_uint(next), cast_smem_ptr_to_uint(&full[at_next.stage()]), to);
        }
      }
      storage.ring_next.expect(at_next, sizeof(int));
      storage.ring_next.wait(at_next);
      index = *next;
      empty[at_next.stage()].arrive(0u);
    }
    at_next.advance();
  };
  for (; index < params.tiles; share()) {
    const QueryTile of_cluster = params.order.at(index, T::kClusterRows);
    const SeqInfo seq(p, of_cluster.batch);
    if (of_cluster.row >= seq.q.length) {
      take();
      continue;
    }
    // The CTAs take turns at having later rows, which see more keys: none is ahead of the others for long.
    const int row = of_cluster.row + (rank + at_next.count) % C.cluster * C.block_m;
    const int part = params.order.part(index);
    const auto& work = *new (&storage.work[at_q.count % T::kWorks]) Work<T::kGroups>(
        p, of_cluster, T::kClusterRows, row, params.rows_of_head, part, seq, C.block_n);
    int n = loads_keys ? work.key_tiles - 1 : -1;
    auto load_k = [&] { load_keys<C, C.head_dim>(storage.ring_k, at_k, storage.k, params.k, work, n--); };
    if (n >= 0) load_k();
    storage.ring_q.wait_empty(at_q);
    uint64_t* const barrier = storage.ring_q.expect(at_q, work.key_tiles > 0 ? T::kBytesQ : 0);
    if (work.key_tiles > 0) {
      params.q.template load<C.block_m, C.head_dim>(storage.q[at_q.stage()], barrier, TMA::CacheHintSm90::EVICT_FIRST,
                                                    seq.q, row, of_cluster.head, of_cluster.batch);
    }
    at_q.advance();
    while (n >= 0) load_k();
    if (!loads_keys) storage.keys_sent_for.wait((at_q.count - 1) % 2);
    take();
  }
  storage.ring_q.wait_empty(at_q);
  storage.work[at_q.count % T::kWorks].tile.row = -1;
  storage.ring_q.expect(at_q, 0);
}

// Another thread, that loads V of each.
template <KernelConfig C>
CUTE_DEVICE void produce_values(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  Cursor<C.stages> at_v;
  for (Cursor<T::kStagesQ> at_q;; at_q.advance()) {
    storage.ring_q.wait(at_q);
    storage.ring_q.empty[at_q.stage()].arrive();
    const auto& work = storage.work[at_q.count % T::kWorks];
    if (work.tile.row < 0) return;
    if constexpr (!T::kOwnOutput) storage.out_left.wait((at_q.count + 1) % 2);
    for (int n = work.key_tiles - 1; n >= 0; --n) {
      load_keys<C, C.head_dim_v>(storage.ring_v, at_v, storage.v, params.v, work, n);
    }
  }
}

}  // namespace flash_cute::sm90
