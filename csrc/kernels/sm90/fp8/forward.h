// Attention forward of e4m3 inputs for Hopper: the persistent CTAs of sm90/forward.h, with products of fp8, and V that
// a pass has transposed (csrc/kernels/passes/transpose_values.h).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/counter.h"
#include "kernels/common/pdl.h"
#include "kernels/launch.h"
#include "kernels/sm90/forward_producers.h"
#include "kernels/sm90/fp8/consumers.h"

namespace flash_cute::sm90::fp8 {

// Loads V of every work tile.
template <KernelConfig C>
CUTE_DEVICE void produce_values(const Fp8Params& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdParams& p = params.p;
  PipelineState<C.stages> at_v;
  for (PipelineState<T::kStagesQ> at_q;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    storage.pipeline_q.empty[at_q.stage()].arrive();
    const auto& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) return;
    const auto first = static_cast<int>(TransposedValues::first_key(p, work.seq.k, work.tile.batch));
    for (int n = work.tiles.count - 1; n >= 0; --n) {
      storage.pipeline_v.producer_acquire(at_v);
      params.values.load(storage.v[at_v.stage()], storage.pipeline_v.producer_expect_tx(at_v, T::kBytesV),
                         first + work.tiles.first_key(n), work.head_k, p.dense_keys() ? work.tile.batch : 0);
      at_v.advance();
    }
  }
}

// Fills the rows behind V's dims, which no load writes.
template <KernelConfig C>
CUTE_DEVICE void write_ones(typename ForwardTraits<C>::Storage& storage) {
  constexpr uint32_t kFourOnes = 0x38383838;
  for (auto& v : storage.v) {
    auto* const ones = reinterpret_cast<uint32_t*>(v + C.head_dim_v * C.block_n);
    for (int i = threadIdx.x; i < kOnes * C.block_n / 4; i += threads(C)) ones[i] = kFourOnes;
  }
  cutlass::arch::fence_view_async_shared();
}

template <KernelConfig C>
__global__ void __launch_bounds__(threads(C), 1) forward(const __grid_constant__ Fp8Params params) {
  using T = ForwardTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  if (threadIdx.x == 0) {
    storage.pipeline_k.init(C.warps);
    storage.pipeline_v.init(C.warps);
    storage.pipeline_q.init(C.warps + (in_pages<C>(params) ? 2 : 1));  // and those that load V, and paged K
    storage.pipeline_next.init(1);
    storage.keys_sent_for.init(1);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x == 32) {
    params.q.prefetch();
    params.k.prefetch();
    prefetch_tma_descriptor(&params.values.map);
  }
  write_ones<C>(storage);
  // After this barrier the pipelines are initialised, and the rows of ones are written.
  __syncthreads();
  // After this wait the kernel before has ended: its results may be read, its inputs overwritten, and the counter of
  // tiles is this kernel's.
  wait_on_dependent_grids();
  const int group = cutlass::canonical_warp_group_idx();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kServingRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      const int of_head = is_packed<C>(params.p) ? sort_queries<C>(params, storage.lengths.order) : 0;
      if (elect_one_sync()) {
        storage.lengths.tiles_of_head = of_head;
        storage.lengths.tiles_of_split = 0;
        storage.lengths.packed = {};
        produce_queries_and_keys<C>(params, storage);
      }
    } else if (warp == 1) {
      if (elect_one_sync()) fp8::produce_values<C>(params, storage);
    } else if (warp == 2 && in_pages<C>(params)) {
      produce_from_pages<C, false>(params, storage);
    } else if (warp == 3 && sm90::fills_gaps(C, false, params.p.batch) && !params.p.dense()) {
      params.gaps.fill(0, 1, blockIdx.x, gridDim.x);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    if (params.p.fp8.two_level) {
      consume<C, true>(params, storage);
    } else {
      consume<C, false>(params, storage);
    }
  }
}

template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& p, cudaStream_t stream) {
  using Element = ElementOf<C.dtype>;
  Fp8Params params;
  params.p = p;
  params.gaps = GapFills<Op::Fwd>::of_outputs(p);
  params.group = FastDivmod(p.heads / p.heads_k);
  params.scheduler = TileScheduler::of(p, C.block_m, is_packed<C>(p));
  params.rows_of_head = FastDivmod(C.block_m);
  params.page_size = FastDivmod(std::max(1, p.pages.size));
  params.page_rows = p.pages.together(C.block_n);
  const int64_t tiles = params.scheduler.tiles(), ctas = std::min<int64_t>(tiles, p.resident);
  if (tiles + ctas > kMaxCtas) return cudaErrorInvalidConfiguration;  // numbers that fetch() may return
  if (tiles == 0) return cudaSuccess;
  if (cudaError_t e = make_ragged_map<Element>(params.q, p.q, p.head_dim, p.seqlen_q, p.dense() ? -1 : p.total_q,
                                               p.heads, p.batch, C.block_m, C.head_dim))
    return e;
  const bool paged = p.pages.ids != nullptr;
  if (cudaError_t e = make_ragged_map<Element>(params.k, p.k, p.head_dim, paged ? p.pages.size : p.seqlen_k,
                                               p.dense_keys() ? -1 : p.total_k, p.heads_k,
                                               paged ? p.pages.count : p.batch, params.page_rows, C.head_dim))
    return e;
  const auto values = TransposedValues::of(p);
  params.keys_of_values = values.keys;
  const cuuint64_t sizes[5] = {cuuint64_t(values.keys), cuuint64_t(p.head_dim_v), cuuint64_t(p.heads_k),
                               cuuint64_t(values.sequences), 1};
  const cuuint64_t of_head = sizes[0] * sizes[1], of_sequence = of_head * sizes[2];
  const cuuint64_t strides[4] = {sizes[0], of_head, of_sequence, of_sequence};
  const cuuint32_t box[5] = {cuuint32_t(C.block_n), cuuint32_t(C.head_dim_v), 1, 1, 1};
  if (cudaError_t e = encode_map<sizeof(Element)>(params.values.map, p.values, sizes, strides, box)) return e;
  params.tile_counter = TileCounter::of(tiles, ctas, false);
  if (cudaError_t e = zeroed_counters(params.tile_counter.counter, 1, stream)) return e;
  return launch_with_pdl<forward<C>>({ctas, threads(C), smem_bytes(C)}, stream, params);
}

}  // namespace flash_cute::sm90::fp8
