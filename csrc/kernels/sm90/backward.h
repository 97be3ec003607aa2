// Attention backward for Hopper. A persistent CTA processes tiles of keys of a kv head, for each one the query tiles of
// all query heads that read it. Two threads load by TMA, two store; two warpgroups compute 64 keys each by wgmma. dK
// and dV are summed in registers, without atomics even for GQA; dQ is summed in fp32 in global memory.
// Scores are computed transposed, keys by queries: P and dS are then already the register operands of dV and dK, and
// only dS passes through shared memory, for dQ. If key tiles are too few for the SMs, the query tiles of a key tile are
// split (BackwardWork), and backward_combine sums the splits.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/counter.h"
#include "kernels/launch.h"
#include "kernels/sm90/backward_consumers.h"
#include "kernels/sm90/backward_postprocess.h"
#include "kernels/sm90/backward_2cta.h"
#include "kernels/sm90/backward_combine.h"
#include "kernels/sm90/backward_producers.h"
#include "kernels/sm90/backward_senders.h"

namespace flash_cute::sm90 {

template <KernelConfig C>
__global__ void __launch_bounds__(threads(C), 1) backward(const __grid_constant__ BackwardParams params) {
  using T = BackwardTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  if (threadIdx.x == 0) {
    storage.pipeline_work.init(C.warps + 3);  // read by the MMA warps and the threads that load dO or store
    storage.pipeline_k.init(C.warps);
    storage.pipeline_v.init(C.warps);
    storage.pipeline_q.init(C.warps);
    storage.pipeline_dout.init(C.warps);
    storage.pipeline_ds.init(4 * T::kDqGroups, C.warps);
    for (auto& pipeline : storage.pipeline_dq) pipeline.init(1, 4);  // one thread, the warps of a warpgroup
    for (auto& pipeline : storage.pipeline_out) pipeline.init(1, 4);
    for (auto& barrier : storage.landed) barrier.init(1);
    if constexpr (kTakesStrips<C>) {
      for (auto& barrier : storage.written) barrier.init(1);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x == 32) params.prefetch_inputs();
  // After this barrier the pipelines are initialised.
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    const int packed_tiles = warp == 0 ? KeyTiles<C>::sort(params, storage.order) : 0;
    if (!(kTakesStrips<C> && warp < 2) && !elect_one_sync()) return;
    if (warp == 0) {
      produce_keys_and_queries<C>(params, storage, packed_tiles);
    } else if (warp == 1) {
      Loader<C, true> load(params, storage);
      for_each_work<kTakesStrips<C>>(storage, [&](const WorkOf<C>& work, uint32_t) { load(work); });
    } else {
      // After this wait the semaphores count this kernel's tiles only.
      wait_on_dependent_grids();
      Sender<C> send(params, storage, warp - 2);
      for_each_work(storage, [&](const WorkOf<C>& work, uint32_t) { send(work); });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    consume<C>(params, storage);
  }
}

template <KernelConfig C>
constexpr auto main_kernel() {
  if constexpr (two_cta(C)) {
    return backward_2cta<C>;
  } else {
    return backward<C>;
  }
}

template <KernelConfig C>
cudaError_t launch_backward(const BwdParams& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  const int64_t query_tiles = PassTile<C>::count(f);
  const int64_t key_tiles = int64_t(cute::ceil_div(f.seqlen_k, C.block_n * C.cluster)) * f.heads_k * f.batch;
  const int64_t split_tiles = p.sums_of_splits ? key_tiles - p.splits.whole_tiles : 0;
  const int64_t tiles = key_tiles + split_tiles * (p.splits.count() - 1);
  const int64_t workers = std::min<int64_t>(tiles, p.resident), ctas = workers * C.cluster;  // CTAs or clusters
  if (std::max(query_tiles, tiles + ctas) > kMaxCtas) return cudaErrorInvalidConfiguration;
  BackwardParams params;
  params.p = p;
  const int64_t total_q = f.dense() ? -1 : f.total_q, total_k = f.dense() ? -1 : f.total_k;
  auto map_queries = [&](RaggedMap& map, const TensorView& m, int dim, int rows, int cols) {
    return make_ragged_map<ElementOf<C.dtype>>(map, m, dim, f.seqlen_q, total_q, f.heads, f.batch, rows, cols);
  };
  auto map_keys = [&](RaggedMap& map, const TensorView& m, int dim, int rows, int cols) {
    return make_ragged_map<ElementOf<C.dtype>>(map, m, dim, f.seqlen_k, total_k, f.heads_k, f.batch, rows, cols);
  };
  if (cudaError_t e = map_queries(params.q, f.q, f.head_dim, C.block_m, C.head_dim)) return e;
  if (cudaError_t e = map_queries(params.dout, p.dout, f.head_dim_v, C.block_m, C.head_dim_v)) return e;
  if (cudaError_t e = map_keys(params.k, f.k, f.head_dim, C.block_n, C.head_dim)) return e;
  if (cudaError_t e = map_keys(params.v, f.v, f.head_dim_v, C.block_n, C.head_dim_v)) return e;
  if constexpr (kTakesStrips<C>) {
    if (cudaError_t e = map_queries(params.q_strips, f.q, f.head_dim, kStripRows, C.head_dim)) return e;
    if (cudaError_t e = map_queries(params.dout_strips, p.dout, f.head_dim_v, kStripRows, C.head_dim_v)) return e;
    const int masks = p.strips == nullptr ? 0 : f.lists.masks;
    if (cudaError_t e = launch_kernel<strips_of_masks<C>>(ceil_div(masks, C.warps), 32 * C.warps, 0, stream, p))
      return e;
  }
  if (!p.fp32_gradients) {  // threads write these without TMA
    if (cudaError_t e = map_queries(params.dq, p.dq, f.head_dim, C.block_m, C.head_dim)) return e;
    if (cudaError_t e = map_keys(params.dk, p.dk, f.head_dim, 64, C.head_dim)) return e;
    if (cudaError_t e = map_keys(params.dv, p.dv, f.head_dim_v, 64, C.head_dim_v)) return e;
  }
  params.splits = FastDivmod(p.splits.count());
  const bool waits = uses_semaphore(p.dq_accumulate) && adds_several_tiles<C>(f);
  params.tile_counter = TileCounter::of(tiles, workers, waits);
  if (cudaError_t e = zeroed_counters(params.tile_counter.counter, 1, stream)) return e;
  using Gaps = GapFills<Op::Bwd>;
  const int fillers = f.dense() ? 0 : Gaps::kCtas;
  if (cudaError_t e = launch_with_pdl<backward_preprocess<C>>({query_tiles + fillers, 32 * C.warps, 0}, stream, p,
                                                              Gaps::of_outputs(p), static_cast<int>(query_tiles),
                                                              !uses_semaphore(p.dq_accumulate)))
    return e;
  if (cudaError_t e = launch_with_pdl<main_kernel<C>()>({ctas, threads(C), smem_bytes(C)}, stream, params)) return e;
  if (split_tiles > 0) {
    const int64_t atoms = split_tiles * (C.block_n * C.cluster / kSlabRows) * (kAtomsOfDk<C> + kAtomsOfDv<C>);
    if (cudaError_t e = launch_with_pdl<backward_combine<C>>({atoms, 128, 0}, stream, params)) return e;
  }
  return launch_with_pdl<backward_postprocess<C>>({query_tiles, kPostprocessThreads<C>, 0}, stream, params);
}

}  // namespace flash_cute::sm90
