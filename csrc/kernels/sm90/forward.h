// Attention forward for Hopper: persistent CTAs, in which threads load and store tiles by TMA and two or three
// warpgroups compute 64 rows each by wgmma (FlashAttention-3, arXiv 2407.08608). CTAs of a cluster load keys for each
// other; paged keys are loaded by warps. Kernels with dropout have one more warpgroup, which generates the keep mask.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/counter.h"
#include "kernels/common/pdl.h"
#include "kernels/launch.h"
#include "kernels/sm90/forward_consumers.h"
#include "kernels/sm90/forward_dropout.h"
#include "kernels/sm90/forward_pages.h"
#include "kernels/sm90/forward_producers.h"

namespace flash_cute::sm90 {

template <KernelConfig C>
__global__ void __cluster_dims__(C.cluster, 1, 1) __launch_bounds__(threads(C), 1)
    forward(const __grid_constant__ ForwardParams params) {
  using T = ForwardTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  if (threadIdx.x == 0) {
    storage.pipeline_k.init(C.warps);
    storage.pipeline_v.init(C.warps);
    const bool has_dropout = has_mask_warpgroup(C) && params.p.rules.rng != nullptr;
    const int loading = in_pages<C>(params) ? 2 : 1;  // the thread that loads V, or the two warps that load K and V
    storage.pipeline_q.init(C.warps + loading + (has_dropout ? kMaskWarps : 0) + 1);  // and the thread that stores O
    storage.pipeline_mask.init(C.warps, kMaskWarps);
    storage.pipeline_next.init(1);
    storage.keys_sent_for.init(1);
    for (auto& pipeline : storage.pipeline_out) pipeline.init(1, 4);  // one thread, the warps of a warpgroup
    for (auto& barrier : storage.out_left)
      barrier.init(C.cluster + 1);  // the threads that store O, and the one that waits
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x == 32) {
    params.q.prefetch();
    params.k.prefetch();
    params.v.prefetch();
    if constexpr (!C.packs_tokens()) params.out.prefetch();
  }
  if constexpr (C.packs_tokens()) clear_rows_behind_tokens<C>(params, storage);
  // After this barrier the pipelines of the whole cluster are initialised, and rows of Q that no load writes are 0.
  if constexpr (C.cluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  // After this wait the kernel before has ended: its results may be read, its inputs overwritten, and the counter of
  // tiles is this kernel's.
  wait_on_dependent_grids();
  const int group = cutlass::canonical_warp_group_idx();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kServingRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      const int of_head = is_packed<C>(params.p) ? sort_queries<C>(params, storage.lengths.order) : 0;
      const int of_split = tiles_of_split<C>(params);
      if (elect_one_sync()) {
        storage.lengths.tiles_of_head = of_head;
        storage.lengths.tiles_of_split = of_split;
        storage.lengths.packed = {};
        produce_queries_and_keys<C>(params, storage);
      }
    } else if (warp == 3) {
      if (elect_one_sync()) send_outputs<C>(params, storage);
    } else if (in_pages<C>(params)) {
      if constexpr (C.cluster == 1) {
        if (warp == 1) produce_from_pages<C, true>(params, storage);
        if (warp == 2) produce_from_pages<C, false>(params, storage);
      }
    } else if (warp == 1) {
      if (elect_one_sync()) produce_values<C>(params, storage);
    } else if (fills_gaps(C, false, params.p.batch) && !params.p.dense()) {
      params.gaps.fill(0, 1, blockIdx.x, gridDim.x);
    }
  } else if (has_mask_warpgroup(C) && group == T::kGroups + 1) {
    cutlass::arch::warpgroup_reg_dealloc<T::kServingRegisters>();
    if constexpr (has_mask_warpgroup(C)) generate_keep_mask<C>(params, storage);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    consume<C>(params, storage);
  }
  // After this barrier no CTA of the cluster still writes to this CTA's shared memory.
  if constexpr (C.cluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& p, cudaStream_t stream) {
  ForwardParams params;
  params.p = p;
  params.gaps = GapFills<Op::Fwd>::of_outputs(p);
  const bool merges = p.num_splits > 1;
  if (merges) {
    params.p.lse = p.split_lse;
    if (p.row_max.ptr != nullptr) params.p.row_max = p.split_row_max;
    params.p.sink = {};
  }
  const int rows = C.packs_tokens() ? C.block_m : C.block_m / p.pack_gqa;
  params.group = FastDivmod(p.heads / p.heads_k);
  params.tokens = C.block_m / params.group.value;
  params.scheduler = TileScheduler::of(p, queries_of_tile<C>(params), is_packed<C>(p));
  params.rows_of_head = FastDivmod(rows);
  const int64_t tiles = params.scheduler.tiles();
  params.page_size = FastDivmod(std::max(1, p.pages.size));
  params.page_rows = p.pages.together(C.block_n);
  params.cap = SoftmaxCap::of(p);
  const int64_t workers = std::min<int64_t>(tiles, p.resident), ctas = workers * C.cluster;  // CTAs or clusters
  if (tiles + ctas > kMaxCtas) return cudaErrorInvalidConfiguration;  // numbers that fetch() may return
  if (tiles == 0) return cudaSuccess;
  const int64_t total_q = p.dense() ? -1 : p.total_q, total_k = p.dense_keys() ? -1 : p.total_k;
  auto map_queries = [&](RaggedMap& map, const TensorView& m, int dim, int all_rows, int cols) {
    const int box_rows = std::min(rows, all_rows);
    return make_ragged_map<ElementOf<C.dtype>>(map, m, dim, p.seqlen_q, total_q, p.heads, p.batch, box_rows, cols,
                                               all_rows / box_rows);
  };
  auto map_keys = [&](RaggedMap& map, const TensorView& m, int dim, int cols) {
    if (p.pages.ids == nullptr) {
      return make_ragged_map<ElementOf<C.dtype>>(map, m, dim, p.seqlen_k, total_k, p.heads_k, p.batch,
                                                 C.block_n / C.cluster, cols);
    }
    return make_ragged_map<ElementOf<C.dtype>>(map, m, dim, p.pages.size, -1, p.heads_k, p.pages.count,
                                               params.page_rows, cols);
  };
  if constexpr (C.packs_tokens()) {
    if (cudaError_t e = make_token_map<ElementOf<C.dtype>>(params.q, p.q, p.head_dim, p.seqlen_q, total_q, p.heads,
                                                           p.batch, params.group.value, params.tokens, C.head_dim))
      return e;
  } else {
    if (cudaError_t e = map_queries(params.q, p.q, p.head_dim, C.block_m, C.head_dim)) return e;
    if (cudaError_t e = map_queries(params.out, p.out, p.head_dim_v, 64, C.head_dim_v)) return e;
  }
  if (cudaError_t e = map_keys(params.k, p.k, p.head_dim, C.head_dim)) return e;
  if (cudaError_t e = map_keys(params.v, p.v, p.head_dim_v, C.head_dim_v)) return e;
  params.tile_counter = TileCounter::of(tiles, workers, false);
  if (cudaError_t e = zeroed_counters(params.tile_counter.counter, 1, stream)) return e;
  return launch_with_pdl<forward<C>>({ctas, threads(C), smem_bytes(C)}, stream, params);
}

}  // namespace flash_cute::sm90
