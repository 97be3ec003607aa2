// Attention backward for Hopper and heads of more than 128 dims. A CTA's registers hold dK and dV of 64 keys, no more, for
// which it would have to bring much through the L2 cache. So two CTAs, a cluster, have 128 keys together: each loads half
// of every Q and dO for both, and they exchange dS, so that each sums up half of dQ's columns over all of the keys. Of
// three warpgroups one computes P and dS, one sums up dV and one dK; the first two have dQ as well.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/overlap.h"
#include "kernels/sm90/backward_pair_consumers.h"
#include "kernels/sm90/backward_pair_producers.h"

namespace flash_cute::sm90 {

template <KernelConfig C>
__global__ void __cluster_dims__(C.cluster, 1, 1) __launch_bounds__(C.threads(), 1)
    backward_pair(const __grid_constant__ BackwardParams params) {
  using T = PairTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int rank = block_rank_in_cluster();
  if (threadIdx.x == 0) {
    new (&storage.work) BackwardWork(params.p, C.block_m, C.block_n * C.cluster, blockIdx.x / C.cluster);
    storage.work.tile.row += rank * C.block_n;
    storage.ring_k.init(4);  // warps of a warpgroup
    storage.ring_v.init(4);
    storage.ring_q.init(8);
    storage.ring_dout.init(8);
    storage.ring_p.init(4, 4);
    storage.ring_ds.init(12, 4);
    storage.ring_ds_of_other.init(1);
    for (auto& ring : storage.ring_turn) ring.init(4);
    for (auto& of_tensor : storage.landed) {
      for (auto& barrier : of_tensor) barrier.init(1);
    }
    storage.landed_k.init(1);
    cutlass::arch::fence_barrier_init();
  }
  // After this barrier the work is known and the rings are ready, in both CTAs.
  cluster_sync();
  let_next_kernel_start();
  if (storage.work.tile.row - rank * C.block_n >= storage.work.seq.k.length) {
    wait_for_kernel_before();  // no CTA ends before: the next kernel waits for this one alone
    return;
  }
  const int group = cutlass::canonical_warp_group_idx();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      if (elect_one_sync()) {
        load_keys<C>(params, storage, rank);
        produce_queries<C, false>(params, storage, rank);
      }
    } else if (warp == 1) {
      if (elect_one_sync()) produce_queries<C, true>(params, storage, rank);
    } else if (params.p.deterministic && elect_one_sync()) {
      give_turns<C>(params, storage, rank, warp == 3);
    }
  } else if (group == 1) {
    cutlass::arch::warpgroup_reg_alloc<T::kScoreRegisters>();
    if (!storage.work.range.empty()) score<C>(params, storage, rank);
    cutlass::arch::NamedBarrier::arrive(32 * C.warps, T::kAllGroupsBarrier);
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
