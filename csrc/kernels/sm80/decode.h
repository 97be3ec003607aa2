// Attention of few queries over a key/value cache, for sm_80 and later: CTAs share the keys of all sequences out among
// each other (flash decoding), and query heads of a group fill the rows of a tile, so that the cache is read once.
// Teams of warps work on different keys at their own pace, each with its own ring of tiles; keys of the next part enter
// it while those of the one before are computed.
#pragma once

#include "core/counter.h"
#include "core/registry.h"
#include "kernels/common/pdl.h"
#include "kernels/launch.h"
#include "kernels/passes/append.h"
#include "kernels/passes/zero_fill.h"
#include "kernels/sm80/decode_attend.h"
#include "kernels/sm80/decode_load.h"
#include "kernels/sm80/decode_merge.h"

namespace flash_cute::sm80 {

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) decode(const __grid_constant__ DecodeProblem p) {
  using T = DecodeTraits<C>;
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int team = threadIdx.x / T::kTeamThreads, thread = threadIdx.x % T::kTeamThreads;
  constexpr int kDescriber = C.threads() - 32;  // a thread
  launch_dependent_grids();
  auto describe = [&](int i) {
    if (threadIdx.x != kDescriber) return;
    SplitsOf<C> splits = storage.more_splits;
    const KvSplit split = splits.next(p);
    storage.more_splits = splits;
    storage.splits[i] = split.quanta > 0 ? visible_of<C>(p, split) : VisibleSplit{split, {}};
  };
  KvLoader<C> loader(p, storage, team, thread);
  // Lengths in a tensor may still be written: what they say at first is good for asking for keys ahead.
  const int turns = p.uniform.known || !has_pdl() ? 1 : 2;
  CUTE_NO_UNROLL
  for (int turn = 0; turn < turns; ++turn) {
    if (turn > 0) {
      // After this lengths can be read.
      wait_on_dependent_grids();
      // After this barrier nobody still reads what they said at first.
      __syncthreads();
    }
    if (threadIdx.x >= kDescriber) {
      const SplitsOf<C> splits = splits_of_cta<C>(p);
      if (threadIdx.x == kDescriber) storage.more_splits = splits;
    }
    describe(0);
    // After this barrier the first part is described.
    __syncthreads();
    // CTAs that come late start when the kernel before has long ended.
    if (turn == 0 && blockIdx.x < p.resident_ctas) {
      const VisibleSplit& first = storage.splits[0];
      prefetch_kv_l2<PrefetchDepth<C>::kMost, C>(p, first,
                                                 PrefetchDepth<C>::of(p, first.split.last - first.split.first));
    }
  }
  // After this keys can be read, new ones among them, and so can queries, which are rotated.
  wait_on_dependent_grids();
  loader.load(0);
  load_queries<C>(p, storage.splits[0].split, storage.q[0]);
  cp_async_fence();
  CUTE_NO_UNROLL
  for (int i = 1; i < T::kDescribed - 1; ++i) describe(i);
  // After this barrier so are those that follow.
  __syncthreads();
  CUTE_NO_UNROLL
  for (int i = 1; i < C.stages - 1; ++i) {
    loader.load(i);
    cp_async_fence();
  }
  cp_async_wait<C.stages - 2>();
  int stage = 0;
  for (unsigned n = 0;; ++n) {
    // After this barrier Q of the part is visible to all, nobody still reads that of the one before, or its results,
    // and one more part is described.
    __syncthreads();
    const KvSplit& split = storage.splits[n % T::kDescribed].split;
    if (split.quanta == 0) return;
    load_queries<C>(p, storage.splits[(n + 1) % T::kDescribed].split, storage.q[(n + 1) % 2]);
    describe((n + T::kDescribed - 1) % T::kDescribed);
    attend<C>(p, split, storage, loader, storage.q[n % 2], team, thread, stage);
    // Q of the next part came with the first tile that was asked for in this one. In a short part nobody has waited for
    // that tile yet.
    if (split.last - split.first < C.stages) cp_async_wait<0>();
    if constexpr (T::kTeams > 1) {
      const TeamMerge<C> merge(p, split);
      // After this barrier the results of all teams are there.
      __syncthreads();
      merge(storage, stage == 0 ? C.stages - 1 : stage - 1);
    }
    if (split.all.count > 1 && arrives_last(p, split.all, storage.last)) combine_splits<C>(p, split);
  }
}

}  // namespace flash_cute::sm80

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  if (cudaError_t e = zero_fill(p.fwd, stream)) return e;
  DecodeProblem decode = p;
  if (p.arrived != nullptr) {
    if (cudaError_t e = cudaMemsetAsync(p.arrived, 0, p.slots * sizeof(*p.arrived), stream)) return e;
  } else if (p.slots > 0) {
    if (cudaError_t e = zeroed_counters(decode.arrived, p.ctas(), stream)) return e;
  }
  if (p.appends()) {
    if (cudaError_t e = append_keys(p, stream, true)) return e;
  }
  if (p.fwd.total_q == 0 || p.fwd.batch == 0 || p.fwd.heads == 0) return cudaSuccess;
  return launch_with_pdl<sm80::decode<C>>({p.ctas(), C.threads(), C.smem_bytes(), p.cluster_ctas}, stream, decode);
}

}  // namespace flash_cute
