// The producer threads of the 2-CTA backward: two load by TMA, two acquire and release the semaphores of dQ.
#pragma once

#include "kernels/sm90/backward_2cta_traits.h"
#include "kernels/sm90/backward_producers.h"
#include "kernels/sm90/backward_senders.h"

namespace flash_cute::sm90 {

// Clears the first rows of a tile that has landed.
template <int kAtoms, class Element>
CUTE_DEVICE void clear_rows(Element* tile, int rows) {
  constexpr int kAtom = 64, kVector = 16 / sizeof(Element);
  CUTE_NO_UNROLL
  for (int atom = 0; atom < kAtoms; ++atom) {
    CUTE_NO_UNROLL
    for (int i = 0; i < min(rows, kAtom) * kAtom; i += kVector) {
      *reinterpret_cast<uint4*>(tile + atom * kAtom * kAtom + i) = uint4{};
    }
  }
  compiler_fence();
  cutlass::arch::fence_view_async_shared();
}

// Loads the CTA's K and V, and the columns of the other CTA's K that its half of dQ needs. Keys that no query sees
// become zeros, as they meet dS, which is 0 there.
template <KernelConfig C>
CUTE_DEVICE void load_keys(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage,
                           const WorkOf<C>& work, const PipelineState<1>& tile) {
  const int rank = block_rank_in_cluster();
  using T = TwoCtaTraits<C>;
  using Element = typename T::Element;
  // After these waits the previous tile's dK and dV are stored, and all who waited for its K and V have seen them.
  storage.pipeline_k.producer_acquire(tile);
  storage.pipeline_v.producer_acquire(tile);
  if (work.queries.empty()) {
    storage.pipeline_k.producer_expect_tx(tile, 0);
    storage.pipeline_v.producer_expect_tx(tile, 0);
    return;
  }
  const RowSpan keys = visible_keys(work.seq, params.p.fwd.band, 0, work.seq.q.length);
  const SeqSpan span{work.seq.k.offset, keys.last};
  auto load = [&](auto atoms, const RaggedMap& map, Element* to, uint64_t* barrier, int row, int first_atom) {
    CUTE_NO_UNROLL
    for (int atom = 0; atom < decltype(atoms)::value; ++atom) {
      map.load_atom(to + atom * T::kTile, barrier, TMA::CacheHintSm90::EVICT_FIRST, span, row,
                    (first_atom + atom) * T::kAtom, work.tile.head, work.tile.batch);
    }
  };
  const int row = work.tile.row, row_of_other = rank == 0 ? row + C.block_n : row - C.block_n;
  auto hidden = [&](int row) { return row < keys.last ? keys.first - row : 1; };  // a moved box: its first row alone
  constexpr uint32_t kBytes = (T::kAtoms + T::kAtomsOfOther) * T::kTile * sizeof(Element);
  const bool clears = hidden(row) > 0 || hidden(row_of_other) > 0;
  if (clears) storage.landed_k.arrive_and_expect_tx(kBytes);
  uint64_t* const landed =
      clears ? reinterpret_cast<uint64_t*>(&storage.landed_k) : storage.pipeline_k.producer_expect_tx(tile, kBytes);
  load(Int<T::kAtoms>{}, params.k, storage.k, landed, row, 0);
  load(Int<T::kAtomsOfOther>{}, params.k, storage.k_of_other, landed, row_of_other, T::first_of_other(rank));
  load(Int<C.head_dim_v / T::kAtom>{}, params.v, storage.v,
       storage.pipeline_v.producer_expect_tx(tile, C.block_n * C.head_dim_v * sizeof(Element)), row, 0);
  if (!clears) return;
  storage.landed_k.wait(storage.times_landed_k++ % 2);
  compiler_fence();
  clear_rows<T::kAtoms>(storage.k, hidden(row));
  clear_rows<T::kAtomsOfOther>(storage.k_of_other, hidden(row_of_other));
  storage.pipeline_k.producer_expect_tx(tile, 0);
}

// One of two threads that load Q and LSE of each step, or dO and its row sums: every second atom of columns, for both
// CTAs. Rows before the first visible one arrive as zeros: whatever they hold meets no product.
template <KernelConfig C, bool kValues>
class QueryLoader {
  using T = TwoCtaTraits<C>;
  using Storage = typename T::Storage;

 public:
  CUTE_DEVICE QueryLoader(const BackwardParams& params, Storage& storage) : params_(params), storage_(storage) {}

  CUTE_DEVICE void operator()(const WorkOf<C>& work) {
    constexpr int kDims = kValues ? C.head_dim_v : C.head_dim;
    constexpr uint32_t kBytes = C.block_m * kDims * sizeof(typename T::Element), kStatistic = C.block_m * sizeof(float);
    const BwdParams& p = params_.p;
    auto& pipeline = pick<kValues>(storage_.pipeline_q, storage_.pipeline_dout);
    const int first_query = seeing_queries(work.seq, p.fwd.band, 0, work.seq.k.length).first;
    for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), at_.advance()) {
      const int head = work.first_head + step.head, row = work.queries.first_query(step.m), stage = at_.stage();
      auto* const to = pick<kValues>(storage_.q, storage_.dout)[stage];
      auto& landed = storage_.landed[kValues][stage];
      const bool clears = row < first_query;
      // After this wait both CTAs have read the buffer.
      pipeline.producer_acquire(at_);
      static_cast<BackwardStep&>(storage_.steps[kValues][stage]) = {row, head, work.queries.full(step.m)};
      if constexpr (C.walks_lists()) storage_.steps[kValues][stage].code = work.queries.code(step.m);
      if (clears) landed.arrive_and_expect_tx(kBytes);
      uint64_t* const barrier =
          clears ? reinterpret_cast<uint64_t*>(&landed) : pipeline.producer_expect_tx(at_, kBytes + kStatistic);
      CUTE_NO_UNROLL
      for (int atom = (block_rank_in_cluster() + kValues) % 2; atom < kDims / T::kAtom; atom += 2) {
        (kValues ? params_.dout : params_.q)
            .template load_atom<C.cluster>(to + atom * T::kTile, barrier, TMA::CacheHintSm90::EVICT_LAST, work.seq.q,
                                           row, atom * T::kAtom, head, work.tile.batch);
      }
      if (clears) {
        landed.wait(storage_.times_landed[kValues][stage]++ % 2);
        compiler_fence();
        clear_rows<kDims / T::kAtom>(to, first_query - row);
        pipeline.producer_expect_tx(at_, kStatistic);
      }
      const int64_t padded_row = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + row;
      SM90_BULK_COPY_G2S::copy((kValues ? p.row_dot : p.lse_log2).ptr + padded_row,
                               reinterpret_cast<uint64_t*>(&pipeline.full[stage]),
                               pick<kValues>(storage_.lse_log2, storage_.row_dot)[stage], kStatistic);
    }
  }

 private:
  const BackwardParams& params_;
  Storage& storage_;
  PipelineState<C.stages> at_;
};

// Runs f(semaphore, state) for each step's semaphore of the CTA.
template <KernelConfig C, class F>
CUTE_DEVICE void for_each_dq_semaphore(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage,
                                       int rank, const F& f) {
  // After this wait the semaphores count this kernel's tiles only.
  wait_on_dependent_grids();
  PipelineState<TwoCtaTraits<C>::kSemaphores> at;
  for_each_work(storage, [&](const WorkOf<C>& work, uint32_t) {
    for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), at.advance()) {
      f(DqSemaphore<C>(params, work, step, rank), at);
    }
  });
}

// The thread that waits for each semaphore, and tells the warpgroup that adds.
template <KernelConfig C>
CUTE_DEVICE void acquire_dq_semaphores(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage,
                                       int rank) {
  for_each_dq_semaphore<C>(params, storage, rank, [&](const DqSemaphore<C>& semaphore, const auto& at) {
    // After this wait the semaphore that this stage held has been released.
    storage.pipeline_semaphore.producer_acquire(at);
    while (!semaphore.is_ready()) continue;
    storage.first_stores[at.stage()] = semaphore.is_first();
    storage.pipeline_semaphore.producer_expect_tx(at, 0);
  });
}

// The thread that releases each semaphore once the warpgroup has added.
template <KernelConfig C>
CUTE_DEVICE void release_dq_semaphores(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage,
                                       int rank) {
  for_each_dq_semaphore<C>(params, storage, rank, [&](const DqSemaphore<C>& semaphore, const auto& at) {
    // After this wait the warpgroup has added.
    storage.pipeline_added.consumer_wait(at);
    if (semaphore.is_awaited()) semaphore.release();
    storage.pipeline_semaphore.empty[at.stage()].arrive();
  });
}

// The first CTA fetches a tile number for both.
template <KernelConfig C>
CUTE_DEVICE void fetch_tile(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage) {
  auto& [number, packed_tiles, packed, steps, at, at_next] = storage.fetched;
  auto& [full, empty] = storage.pipeline_next;
  if (block_rank_in_cluster() == 0) {
    // After this wait the counter is this kernel's alone: a launch from another host thread may share it.
    wait_on_dependent_grids();
    const int taken = KeyTiles<C>(params, packed_tiles, storage.order, packed).fetch();
    storage.pipeline_next.producer_acquire(at_next);
    for (int to = 0; to < C.cluster; ++to) {
      store_shared_remote(taken, cast_smem_ptr_to_uint(&storage.next), cast_smem_ptr_to_uint(full), to);
    }
  }
  storage.pipeline_next.producer_expect_tx(at_next, sizeof(int));
  storage.pipeline_next.consumer_wait(at_next);
  number = storage.next;
  compiler_fence();
  empty[0].arrive(0u);
  at_next.advance();
}

// The next tile of keys, described for all roles of the CTA; null at the end.
template <KernelConfig C>
CUTE_DEVICE const WorkOf<C>* next_work(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage) {
  auto& [number, packed_tiles, packed, steps, at, at_next] = storage.fetched;
  KeyTiles<C> tiles(params, packed_tiles, storage.order, packed);
  // After this wait no one still reads the description of the tile before the last.
  storage.pipeline_work.producer_acquire(at);
  WorkOf<C>& work = storage.work[at.stage()];
  auto exists = [&] {
    tiles.describe(work, number);
    return work.tile.row < work.seq.k.length;
  };
  if (at.count > 0 || params.tile_counter.first_tiles == 0) fetch_tile<C>(params, storage);
  while (number < tiles.numbers() && !exists()) fetch_tile<C>(params, storage);
  const bool ends = number >= tiles.numbers();
  work.tile.row = ends ? -1 : work.tile.row + int(block_rank_in_cluster()) * C.block_n;
  if (!ends) work.steps_until_end = steps += work.steps();
  storage.pipeline_work.producer_expect_tx(at, 0);
  at.advance();
  return ends ? nullptr : &work;
}

}  // namespace flash_cute::sm90
