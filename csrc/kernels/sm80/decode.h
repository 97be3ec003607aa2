// Attention of few queries over a key/value cache, for sm_80 and later: CTAs share the keys of all sequences out among
// each other (flash decoding), and query heads of a group fill the rows of a tile, so that the cache is read once.
// Teams of warps work on different keys at their own pace, each with its own ring of tiles; keys of the next part enter
// it while those of the one before are computed.
#pragma once

#include "core/counter.h"
#include "core/registry.h"
#include "kernels/common/overlap.h"
#include "kernels/launch.h"
#include "kernels/passes/append.h"
#include "kernels/passes/gaps.h"
#include "kernels/sm80/decode_attend.h"
#include "kernels/sm80/decode_feed.h"
#include "kernels/sm80/decode_merge.h"

namespace flash_cute::sm80 {

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) decode(const __grid_constant__ DecodeProblem p) {
  using T = DecodeTraits<C>;
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int team = threadIdx.x / T::kTeamThreads, thread = threadIdx.x % T::kTeamThreads;
  constexpr int kDescriber = C.threads() - 32;  // a thread
  let_next_kernel_start();
  auto describe = [&](int i) {
    if (threadIdx.x != kDescriber) return;
    PartsOf<C> parts = storage.more_parts;
    const Part part = parts.next(p);
    storage.more_parts = parts;
    storage.parts[i] = part.grains > 0 ? seen_of<C>(p, part) : FedPart{part, {}};
  };
  KeyFeed<C> feed(p, storage, team, thread);
  // Lengths in a tensor may still be written: what they say at first is good for asking for keys ahead.
  const int turns = p.alike.known || !kernels_overlap() ? 1 : 2;
  CUTE_NO_UNROLL
  for (int turn = 0; turn < turns; ++turn) {
    if (turn > 0) {
      // After this lengths can be read.
      wait_for_kernel_before();
      // After this barrier nobody still reads what they said at first.
      __syncthreads();
    }
    if (threadIdx.x >= kDescriber) {
      const PartsOf<C> parts = parts_of_cta<C>(p);
      if (threadIdx.x == kDescriber) storage.more_parts = parts;
    }
    describe(0);
    // After this barrier the first part is described.
    __syncthreads();
    // CTAs that come late start when the kernel before has long ended.
    if (turn == 0 && blockIdx.x < p.at_once) {
      const FedPart& first = storage.parts[0];
      expect_keys<Expected<C>::kMost, C>(p, first, Expected<C>::of(p, first.part.last - first.part.first));
    }
  }
  // After this keys can be read, new ones among them, and so can queries, which are rotated.
  wait_for_kernel_before();
  feed.load(0);
  load_queries<C>(p, storage.parts[0].part, storage.q[0]);
  cp_async_fence();
  CUTE_NO_UNROLL
  for (int i = 1; i < T::kDescribed - 1; ++i) describe(i);
  // After this barrier so are those that follow.
  __syncthreads();
  CUTE_NO_UNROLL
  for (int i = 1; i < C.stages - 1; ++i) {
    feed.load(i);
    cp_async_fence();
  }
  cp_async_wait<C.stages - 2>();
  int stage = 0;
  for (unsigned n = 0;; ++n) {
    // After this barrier Q of the part is visible to all, nobody still reads that of the one before, or its results,
    // and one more part is described.
    __syncthreads();
    const Part& part = storage.parts[n % T::kDescribed].part;
    if (part.grains == 0) return;
    load_queries<C>(p, storage.parts[(n + 1) % T::kDescribed].part, storage.q[(n + 1) % 2]);
    describe((n + T::kDescribed - 1) % T::kDescribed);
    attend<C>(p, part, storage, feed, storage.q[n % 2], team, thread, stage);
    // Q of the next part came with the first tile that was asked for in this one. In a short part nobody has waited for
    // that tile yet.
    if (part.last - part.first < C.stages) cp_async_wait<0>();
    if constexpr (T::kTeams > 1) {
      const TeamMerge<C> merge(p, part);
      // After this barrier the results of all teams are there.
      __syncthreads();
      merge(storage, stage == 0 ? C.stages - 1 : stage - 1);
    }
    if (part.all.count > 1 && arrives_last(p, part.all, storage.last)) merge_parts<C>(p, part);
  }
}

}  // namespace flash_cute::sm80

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  if (cudaError_t e = fill_gaps(p.fwd, stream)) return e;
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
  return launch_overlapping<sm80::decode<C>>({p.ctas(), C.threads(), C.smem_bytes(), p.neighbours}, stream, decode);
}

}  // namespace flash_cute
