// Decode for sm_80 and later (flash-decoding): CTAs split the keys of all sequences evenly among each other; pack_gqa
// fills a tile's rows with the query heads of a group, so that the cache is read once. Teams of warps work on different
// keys, each with its own cp.async stages; keys of the next split are loaded while the current one is computed.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/launch.h"
#include "kernels/passes/append.h"
#include "kernels/decode/attend.h"
#include "kernels/decode/load.h"
#include "kernels/decode/combine.h"
#include "kernels/decode/merge_splits.h"
#include "kernels/sm80/resources.h"

namespace flash_cute::sm80 {

using namespace flash_cute::decode;

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) decode(const __grid_constant__ DecodeParams p) {
  using T = DecodeTraits<C>;
  static_assert(sizeof(typename T::Storage) <= smem_bytes(C), "resources.h must agree");
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int team = threadIdx.x / T::kTeamThreads, thread = threadIdx.x % T::kTeamThreads;
  constexpr int kDescriber = C.threads() - 32;  // the thread that describes splits
  launch_dependent_grids();
  auto describe = [&](int i) {
    if (threadIdx.x != kDescriber) return;
    SplitsOf<C> splits = storage.more_splits;
    const KvSplit split = splits.next(p);
    storage.more_splits = splits;
    storage.splits[i] = split.quanta > 0 ? visible_of<C>(p, split) : VisibleSplit{split, {}};
  };
  KvLoader<C> loader(p, storage, team, thread);
  // Lengths in a tensor may still be written: their first values are good enough to prefetch by.
  const int passes = p.uniform.known || !has_pdl() ? 1 : 2;
  CUTE_NO_UNROLL
  for (int pass = 0; pass < passes; ++pass) {
    if (pass > 0) {
      // After this wait the lengths are final.
      wait_on_dependent_grids();
      // After this barrier no one still reads the description by early lengths.
      __syncthreads();
    }
    if (threadIdx.x >= kDescriber) {
      const SplitsOf<C> splits = splits_of_cta<C>(p);
      if (threadIdx.x == kDescriber) storage.more_splits = splits;
    }
    describe(0);
    // After this barrier the first split is described.
    __syncthreads();
    // Tail CTAs start long after the previous kernel has ended: nothing to prefetch.
    if (pass == 0 && blockIdx.x < p.resident_ctas) {
      const VisibleSplit& first = storage.splits[0];
      prefetch_kv_l2<PrefetchDepth<C>::kMost, C>(p, first,
                                                 PrefetchDepth<C>::of(p, first.split.last - first.split.first));
    }
  }
  // After this wait the keys are final, new ones included, and queries are rotated.
  wait_on_dependent_grids();
  loader.load(0);
  load_queries<C>(p, storage.splits[0].split, storage.q[0]);
  cp_async_fence();
  CUTE_NO_UNROLL
  for (int i = 1; i < T::kDescribed - 1; ++i) describe(i);
  // After this barrier the following splits are described.
  __syncthreads();
  CUTE_NO_UNROLL
  for (int i = 1; i < C.stages - 1; ++i) {
    loader.load(i);
    cp_async_fence();
  }
  cp_async_wait<C.stages - 2>();
  int stage = 0;
  for (unsigned n = 0;; ++n) {
    // After this barrier Q of the split is visible to all, no one still reads the previous Q or results, and one more
    // split is described.
    __syncthreads();
    const KvSplit& split = storage.splits[n % T::kDescribed].split;
    if (split.quanta == 0) return;
    load_queries<C>(p, storage.splits[(n + 1) % T::kDescribed].split, storage.q[(n + 1) % 2]);
    describe((n + T::kDescribed - 1) % T::kDescribed);
    if constexpr (C.widens_cache()) {
      prepare_queries<C>(storage.q[n % 2], storage.query_factors);
      // After this barrier Q in f16 and its factors are visible to all.
      __syncthreads();
    }
    attend<C>(p, split, storage, loader, storage.q[n % 2], team, thread, stage);
    // Q of the next split was loaded with the first tile requested in this one. In a short split no wait has covered
    // that tile yet.
    if (split.last - split.first < C.stages) cp_async_wait<0>();
    if constexpr (T::kTeams > 1) {
      const TeamMerge<C> merge(p, split);
      // After this barrier the results of all teams are in shared memory.
      __syncthreads();
      merge(storage, stage == 0 ? C.stages - 1 : stage - 1);
    }
    if (p.slots > 0 && split.index == 0 && threadIdx.x == 0)
      p.slots_of_tiles[number_of_tile(p, split, C.block_m)] = {split.all.count, split.all.first};
  }
}

// Few work tiles have many splits: then each row has a CTA.
template <KernelConfig C>
cudaError_t merge_splits(const DecodeParams& p, cudaStream_t stream) {
  constexpr int kRows = 4, kWarps = 8, kManySplits = 32;
  const int64_t tiles = int64_t(p.fwd.batch) * tiles_of_sequence(p, C.block_m) * p.fwd.heads_k;
  if (p.ctas() >= kManySplits * tiles) {
    return launch_with_pdl<merge_rows<C, 1, kWarps>>({tiles * C.block_m, 32 * kWarps, 0}, stream, p);
  }
  return launch_with_pdl<merge_rows<C, kRows, 1>>({tiles * cute::ceil_div(C.block_m, kRows), 32 * kRows, 0}, stream, p);
}

template <KernelConfig C>
cudaError_t launch_decode(const DecodeParams& p, cudaStream_t stream) {
  if (p.appends()) {
    if (cudaError_t e = append_keys(p, stream, p.resident_ctas)) return e;
  }
  if (p.fwd.total_q == 0 || p.fwd.batch == 0 || p.fwd.heads == 0) return cudaSuccess;
  if (cudaError_t e = launch_with_pdl<decode<C>>({p.ctas(), C.threads(), smem_bytes(C), p.cluster_ctas}, stream, p))
    return e;
  if (p.slots == 0) return cudaSuccess;
  return merge_splits<C>(p, stream);
}

}  // namespace flash_cute::sm80
