// The producer threads of Hopper's forward: one loads Q and K and schedules, one loads V, one stores O.
#pragma once

#include "kernels/sm90/forward_pages.h"

namespace flash_cute::sm90 {

// Loads tile n of K, or of V, into all CTAs of the cluster.
template <KernelConfig C, int kDims, class Buffers>
CUTE_DEVICE void load_keys(Pipeline<C.stages, C.cluster>& pipeline, PipelineState<C.stages>& at, Buffers& buffers,
                           const RaggedMap& map, const typename ForwardTraits<C>::Work& work, int n) {
  const int listed_key = C.walks_lists() ? work.tiles.first_key(n) : 0;  // read before the wait
  pipeline.producer_acquire(at);
  auto* const to = buffers[at.stage()];
  map.template load<C.block_n, kDims, C.cluster>(
      to, pipeline.producer_expect_tx(at, C.block_n * kDims * sizeof(*to)), TMA::CacheHintSm90::EVICT_LAST,
      {work.seq.k.offset, work.tiles.keys.last}, C.walks_lists() ? listed_key : work.tiles.first_key(n), work.head_k,
      work.tile.batch);
  at.advance();
}

// Clears the rows of Q behind the last token of a tile, which no load writes: they share warps with other rows.
template <KernelConfig C>
CUTE_DEVICE void clear_rows_behind_tokens(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using Element = typename ForwardTraits<C>::Element;
  constexpr int kAtom = atom_columns(C.head_dim, sizeof(Element)), kVector = 16 / sizeof(Element);
  const int written = params.tokens * params.group.value * kAtom;
  for (auto& q : storage.q) {
    CUTE_NO_UNROLL
    for (int col = 0; col < C.head_dim; col += kAtom) {
      CUTE_NO_UNROLL
      for (int i = written + kVector * threadIdx.x; i < C.block_m * kAtom; i += kVector * threads(C)) {
        *reinterpret_cast<uint4*>(q + col * C.block_m + i) = uint4{};
      }
    }
  }
  cutlass::arch::fence_view_async_shared();
}

// Fetches work tiles, describes them to the other roles, and loads Q and (unless paged) K.
template <KernelConfig C>
CUTE_DEVICE void produce_queries_and_keys(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdParams& p = params.p;
  const int rank = C.cluster == 1 ? 0 : block_rank_in_cluster();
  const bool loads_keys = !in_pages<C>(params);
  PipelineState<C.stages> at_k;
  PipelineState<T::kStagesQ> at_q;
  PipelineState<2> at_next;

  const bool packed = is_packed<C>(p);
  FetchedLengths& lengths = storage.lengths;
  auto scheduler = [&] { return packed ? params.scheduler.with_tiles(lengths.tiles_of_head) : params.scheduler; };
  const int tiles = packed ? static_cast<int>(scheduler().tiles()) : params.tile_counter.tiles;
  const int queries = queries_of_tile<C>(params);

  int index = blockIdx.x / C.cluster;
  // As late as its latency allows: the CTA that finishes first should get the next tile.
  auto take = [&] {
    const TileCounter& counter = params.tile_counter;
    if (rank == 0) index = packed ? counter.with_tiles(tiles, gridDim.x).fetch() : counter.fetch();
  };
  // The first CTA of the cluster fetches for all of them.
  auto share = [&] {
    if constexpr (C.cluster > 1) {
      auto& [full, empty] = storage.pipeline_next;
      int* const next = &storage.next[at_next.stage()];
      if (rank == 0) {
        storage.pipeline_next.producer_acquire(at_next);
        for (int to = 0; to < C.cluster; ++to) {
          store_shared_remote(index, cast_smem_ptr_to_uint(next), cast_smem_ptr_to_uint(&full[at_next.stage()]), to);
        }
      }
      storage.pipeline_next.producer_expect_tx(at_next, sizeof(int));
      storage.pipeline_next.consumer_wait(at_next);
      index = *next;
      compiler_fence();
      empty[at_next.stage()].arrive(0u);
    }
    at_next.advance();
  };
  for (; index < tiles; share()) {
    const auto [tile, number_of_split] = scheduler().part_of(index);
    const QueryTile of_cluster =
        packed ? scheduler().at(tile, PackedRows::of_queries(p, queries), lengths.order, lengths.packed)
               : scheduler().at(tile, queries);
    const SeqInfo seq(p, of_cluster.batch);
    if (of_cluster.row >= seq.q.length) {
      take();
      continue;
    }
    // The CTAs of a cluster alternate in having the later rows, which see more keys: none stays ahead.
    const int row = of_cluster.row + (rank + at_next.count) % C.cluster * C.block_m;
    const KeySplit split{number_of_split, lengths.tiles_of_split};
    const QueryGroups groups{of_cluster, queries, {row, of_cluster.head, of_cluster.batch}, params.rows_of_head.value};
    const auto& work = *new (&storage.work[at_q.count % T::kWorkTiles]) typename T::Work(p, seq, groups, split);
    int n = loads_keys ? work.tiles.count - 1 : -1;
    auto load_k = [&] { load_keys<C, C.head_dim>(storage.pipeline_k, at_k, storage.k, params.k, work, n--); };
    if (n >= 0) load_k();
    storage.pipeline_q.producer_acquire(at_q);
    const uint32_t bytes_q =
        C.packs_tokens() ? params.tokens * params.group.value * (T::kBytesQ / C.block_m) : T::kBytesQ;
    uint64_t* const barrier = storage.pipeline_q.producer_expect_tx(at_q, work.tiles.count > 0 ? bytes_q : 0);
    if constexpr (C.packs_tokens()) {
      if (work.tiles.count > 0) {
        params.q.template load_tokens<C.block_m, C.head_dim>(storage.q[at_q.stage()], barrier,
                                                             TMA::CacheHintSm90::EVICT_FIRST, seq.q, row, work.head_k,
                                                             of_cluster.batch);
      }
    } else if (work.tiles.count > 0) {
      params.q.template load<C.block_m, C.head_dim>(storage.q[at_q.stage()], barrier, TMA::CacheHintSm90::EVICT_FIRST,
                                                    seq.q, row, of_cluster.head, of_cluster.batch);
    }
    at_q.advance();
    while (n >= 0) load_k();
    if (!loads_keys) storage.keys_sent_for.wait((at_q.count - 1) % 2);
    take();
  }
  storage.pipeline_q.producer_acquire(at_q);
  storage.work[at_q.count % T::kWorkTiles].tile.row = -1;
  storage.pipeline_q.producer_expect_tx(at_q, 0);
}

// Loads V of every work tile.
template <KernelConfig C>
CUTE_DEVICE void produce_values(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  PipelineState<C.stages> at_v;
  for (PipelineState<T::kStagesQ> at_q;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    storage.pipeline_q.empty[at_q.stage()].arrive();
    const auto& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) return;
    int n = work.tiles.count - 1;
    auto load_v = [&] { load_keys<C, C.head_dim_v>(storage.pipeline_v, at_v, storage.v, params.v, work, n--); };
    if constexpr (!T::kOwnOutput) {
      // After each of these waits the next buffer no longer holds the previous tile's O. The producer arrives, too, so
      // that the phase advances once per tile even if the tile has no keys.
      for (auto& barrier : storage.out_left) {
        barrier.wait((at_q.count + 1) % 2);
        barrier.arrive();
        if (n >= 0) load_v();
      }
    }
    while (n >= 0) load_v();
  }
}

// Stores O of every work tile.
template <KernelConfig C>
CUTE_DEVICE void send_outputs(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const bool whole = params.p.num_splits == 1;
  uint32_t key_tiles = 0;  // of all tiles of queries
  for (PipelineState<T::kStagesQ> at_q;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    storage.pipeline_q.empty[at_q.stage()].arrive();
    const auto& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) return;
    key_tiles += work.tiles.count;
    for (int group = 0; group < T::kGroups; ++group) {
      auto& pipeline = storage.pipeline_out[group];
      pipeline.consumer_wait({at_q.count});
      const QueryTile of_head = tile_of_head<C>(params, work.tile, group * 64);
      const int row = of_head.row + group * 64;
      if (!C.packs_tokens() && whole && row < work.seq.q.length) {  // tokens' rows are stored by those that compute
        params.out.template store<64, C.head_dim_v>(T::output(storage, group, key_tiles), work.seq.q, row, of_head.head,
                                                    of_head.batch);
        tma_store_arrive();
        // After this wait the TMA store has read O.
        tma_store_wait<0>();
      }
      pipeline.empty[0].arrive();
      if constexpr (!T::kOwnOutput) {
        for (uint32_t rank = 0; rank < C.cluster; ++rank) storage.out_left[group].arrive(rank);
      }
    }
  }
}

}  // namespace flash_cute::sm90
