// Attention backward for Hopper with head dims over 128. A CTA's registers hold dK and dV of only 64 keys, which alone
// would load too much through L2. So a cluster of two CTAs has 128 keys: each loads half of every Q and dO for both
// (multicast), and they exchange dS, so that each sums half of dQ's columns over all 128 keys. Of three warpgroups one
// computes P and dS, one dV and dQ, one dK.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/pdl.h"
#include "kernels/sm90/backward_2cta_consumers.h"

namespace flash_cute::sm90 {

template <KernelConfig C>
__global__ void __cluster_dims__(C.cluster, 1, 1) __launch_bounds__(threads(C), 1)
    backward_2cta(const __grid_constant__ BackwardParams params) {
  using T = TwoCtaTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int rank = block_rank_in_cluster();
  if (threadIdx.x == 0) {
    storage.pipeline_work.init(
        1 + C.warps + 2 * uses_semaphore(params.p.dq_accumulate));  // a loader, the warps, the semaphore threads
    storage.pipeline_next.init(1);
    storage.fetched = {.number = static_cast<int>(blockIdx.x) / C.cluster};
    for (auto& of_tensor : storage.times_landed) {
      for (auto& times : of_tensor) times = 0;
    }
    storage.times_landed_k = 0;
    storage.pipeline_k.init(12);
    storage.pipeline_v.init(8);
    storage.pipeline_q.init(8);
    storage.pipeline_dout.init(8);
    storage.pipeline_p.init(4, 4);
    storage.pipeline_ds.init(8, 4);
    storage.pipeline_peer_ds.init(1);
    storage.pipeline_semaphore.init(1);  // the thread that releases semaphores
    storage.pipeline_added.init(1, 4);
    for (auto& of_tensor : storage.landed) {
      for (auto& barrier : of_tensor) barrier.init(1);
    }
    storage.landed_k.init(1);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x == 32) params.prefetch_inputs();
  // After this barrier the pipelines of both CTAs are initialised.
  cluster_sync();
  launch_dependent_grids();
  const int group = cutlass::canonical_warp_group_idx();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      if (elect_one_sync()) {
        QueryLoader<C, false> load(params, storage);
        for_each_work(storage, [&](const WorkOf<C>& work, uint32_t tile) {
          load_keys<C>(params, storage, work, {tile});
          // After this wait LSE of all queries is written, and dQ is zeroed if it starts from zeros.
          wait_on_dependent_grids();
          load(work);
        });
        wait_on_dependent_grids();  // no CTA may exit earlier: the next kernel waits for this one only
      }
    } else if (warp == 1) {
      const int packed_tiles = KeyTiles<C>::sort(params, storage.order);
      if (elect_one_sync()) {
        storage.fetched.packed_tiles = packed_tiles;
        QueryLoader<C, true> load(params, storage);
        // As late as possible: the cluster that finishes first should get the next tile.
        while (const WorkOf<C>* work = next_work<C>(params, storage)) {
          // After this wait the row sums of all queries are written.
          wait_on_dependent_grids();
          load(*work);
        }
      }
    } else if (uses_semaphore(params.p.dq_accumulate) && elect_one_sync()) {
      if (warp == 2) {
        acquire_dq_semaphores<C>(params, storage, rank);
      } else {
        release_dq_semaphores<C>(params, storage, rank);
      }
    }
  } else if (group == 1) {
    cutlass::arch::warpgroup_reg_alloc<T::kScoreRegisters>();
    compute_ds<C>(params, storage, rank);
  } else if (group == 2) {
    cutlass::arch::warpgroup_reg_alloc<T::kValueRegisters>();
    accumulate_dkdv<C, true>(params, storage, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kKeyRegisters>();
    accumulate_dkdv<C, false>(params, storage, rank);
  }
  // After this barrier no CTA of the cluster still writes to this CTA's shared memory.
  __syncwarp();
  cluster_sync();
}

}  // namespace flash_cute::sm90
