// Paged keys and values in Hopper's forward: one warp loads K, one loads V; each lane loads the rows of one page that
// are contiguous.
#pragma once

#include "core/layout/cached_seq.h"
#include "kernels/sm90/forward_traits.h"

namespace flash_cute::sm90 {

// Whether K and V are paged. CTAs of a cluster cannot multicast pages.
template <KernelConfig C>
CUTE_DEVICE bool in_pages(const ForwardParams& params) {
  return C.cluster == 1 && params.p.pages.ids != nullptr;
}

// Loads tile n of K, or of V. Rows of a page that does not exist become zeros.
template <KernelConfig C, int kDims, class Buffers>
CUTE_DEVICE void load_from_pages(const ForwardParams& params, Pipeline<C.stages>& pipeline, PipelineState<C.stages>& at,
                                 Buffers& buffers, const RaggedMap& map, const typename ForwardTraits<C>::Work& work,
                                 int n) {
  constexpr int kAtom = atom_columns(kDims, element_bytes(C.dtype));
  const Pages& pages = params.p.pages;
  auto* const to = buffers[at.stage()];
  const int lane = threadIdx.x % 32, rows = params.page_rows, row = lane * rows;
  const bool has_rows = row < C.block_n;
  // Rows past the last key are masked, but must be finite: they repeat the last key's row.
  const int key = min(work.tiles.first_key(n) + row, work.tiles.keys.last - 1);
  const int block = params.page_size.div(key), begin = block * pages.size;
  const int page = has_rows ? page_id(pages, work.tile.batch, block) : 0;
  const bool exists = 0 <= page && page < pages.count;
  pipeline.producer_acquire(at);
  if (!exists) {
    constexpr int kVector = 16 / sizeof(*to);
    for (int col = 0; col < kDims; col += kAtom) {
      for (int i = row * kAtom; i < (row + rows) * kAtom; i += kVector) {
        *reinterpret_cast<uint4*>(to + col * C.block_n + i) = uint4{};
      }
    }
    compiler_fence();
    cutlass::arch::fence_view_async_shared();
  }
  const int missing = __popc(__ballot_sync(0xffffffff, !exists)) * rows;
  __syncwarp();
  if (lane == 0) pipeline.producer_expect_tx(at, (C.block_n - missing) * kDims * sizeof(*to));
  __syncwarp();
  for (int col = 0; has_rows && exists && col < kDims; col += kAtom) {
    map.load_atom(to + col * C.block_n + row * kAtom, reinterpret_cast<uint64_t*>(&pipeline.full[at.stage()]),
                  TMA::CacheHintSm90::EVICT_LAST, {0, min(work.tiles.keys.last - begin, pages.size)}, key - begin, col,
                  work.head_k, page);
  }
  at.advance();
}

// The warp that loads all K, or all V.
template <KernelConfig C, bool kValues>
CUTE_DEVICE void produce_from_pages(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  PipelineState<C.stages> at;
  for (PipelineState<T::kStagesQ> at_q;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    storage.pipeline_q.consumer_release(at_q);
    const auto& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) return;
    if constexpr (kValues && !T::kOwnOutput) {
      for (auto& barrier : storage.out_left) barrier.wait((at_q.count + 1) % 2);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        for (auto& barrier : storage.out_left) barrier.arrive();
      }
    }
    for (int n = work.tiles.count - 1; n >= 0; --n) {
      if constexpr (kValues) {
        load_from_pages<C, C.head_dim_v>(params, storage.pipeline_v, at, storage.v, params.v, work, n);
      } else {
        load_from_pages<C, C.head_dim>(params, storage.pipeline_k, at, storage.k, params.k, work, n);
      }
    }
    if (!kValues && threadIdx.x % 32 == 0) storage.keys_sent_for.arrive();
  }
}

}  // namespace flash_cute::sm90
