// Attention backward for Hopper and heads of more than 128 dims. A CTA's registers hold dK and dV of 64 keys, no more,
// for which it would have to bring much through the L2 cache. So two CTAs, a cluster, have 128 keys together: each
// loads half of every Q and dO for both, and they exchange dS, so that each sums up half of dQ's columns over all of
// the keys. Of three warpgroups one computes P and dS, one sums up dV and has dQ as well, and one sums up dK.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/overlap.h"
#include "kernels/sm90/backward_pair_consumers.h"

namespace flash_cute::sm90 {

template <KernelConfig C>
__global__ void __cluster_dims__(C.cluster, 1, 1) __launch_bounds__(C.threads(), 1)
    backward_pair(const __grid_constant__ BackwardParams params) {
  using T = PairTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int rank = block_rank_in_cluster();
  if (threadIdx.x == 0) {
    storage.ring_work.init(1 + C.warps + 2 * tiles_wait(params.dq_order));  // a loader, warps, threads of turns
    storage.ring_next.init(1);
    storage.taken = {static_cast<int>(blockIdx.x) / C.cluster};
    for (auto& of_tensor : storage.times_landed) {
      for (auto& times : of_tensor) times = 0;
    }
    storage.times_landed_k = 0;
    storage.ring_k.init(12);
    storage.ring_v.init(8);
    storage.ring_q.init(8);
    storage.ring_dout.init(8);
    storage.ring_p.init(4, 4);
    storage.ring_ds.init(8, 4);
    storage.ring_ds_of_other.init(1);
    storage.ring_turn.init(1);  // the thread that ends turns
    storage.ring_added.init(1, 4);
    for (auto& of_tensor : storage.landed) {
      for (auto& barrier : of_tensor) barrier.init(1);
    }
    storage.landed_k.init(1);
    cutlass::arch::fence_barrier_init();
  }
  // After this barrier the rings are ready, in both CTAs.
  cluster_sync();
  let_next_kernel_start();
  const int group = cutlass::canonical_warp_group_idx();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      if (elect_one_sync()) {
        QueryLoader<C, false> load(params, storage);
        for_each_work(storage, [&](const BackwardWork& work, uint32_t tile) {
          load_keys<C>(params, storage, work, {tile});
          // After this wait the LSE of all queries is there, and zeros, where sums of dQ begin with them.
          wait_for_kernel_before();
          load(work);
        });
        wait_for_kernel_before();  // no CTA ends before: the next kernel waits for this one alone
      }
    } else if (warp == 1) {
      if (elect_one_sync()) {
        QueryLoader<C, true> load(params, storage);
        // As late as may be: who comes first to the end of a tile should be the first to have another one.
        while (const BackwardWork* work = take_work<C>(params, storage)) {
          // After this wait the row sums of all queries are there.
          wait_for_kernel_before();
          load(*work);
        }
      }
    } else if (tiles_wait(params.dq_order) && elect_one_sync()) {
      if (warp == 2) {
        give_turns<C>(params, storage, rank);
      } else {
        end_turns<C>(params, storage, rank);
      }
    }
  } else if (group == 1) {
    cutlass::arch::warpgroup_reg_alloc<T::kScoreRegisters>();
    score<C>(params, storage, rank);
  } else if (group == 2) {
    cutlass::arch::warpgroup_reg_alloc<T::kValueRegisters>();
    sum_up<C, true>(params, storage, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kKeyRegisters>();
    sum_up<C, false>(params, storage, rank);
  }
  // After this barrier nobody of the cluster still sends anything here.
  __syncwarp();
  cluster_sync();
}

}  // namespace flash_cute::sm90
