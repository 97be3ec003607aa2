// The consumer warpgroups of Hopper's forward: the main loop, and the epilogue.
#pragma once

#include "kernels/sm90/forward_mainloop.h"

namespace flash_cute::sm90 {

// Writes a warpgroup's output (MMA,1,1) of one split of the keys to the workspace.
template <KernelConfig C, class Output>
CUTE_DEVICE void store_split(const ForwardParams& params, const WorkTile<ForwardTraits<C>::kGroups>& work,
                             const QueryTile& tile, const Output& tOrO, int thread) {
  const FwdParams& p = params.p;
  Tensor output = rows_of(tOrO);  // (rows,dims)
  auto slice = typename ForwardTraits<C>::MmaPV{}.get_slice(thread);
  Tensor at = rows_of(slice.partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.head_dim_v>>{})));
  const int64_t first = first_of(p.split_lse, work.of_results(p, tile), work.seq);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const int row = tile.row + get<0>(at(r, 0));
    if (row >= work.seq.q.length) continue;
    float* const to = p.split_out + (first + row) * C.head_dim_v + get<1>(at(r, 0));
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); c += 2) {
      *reinterpret_cast<float2*>(to + column_offset(c)) = make_float2(output(r, c), output(r, c + 1));
    }
  }
}

// Waits until a warpgroup may write its O to shared memory.
template <KernelConfig C>
CUTE_DEVICE void wait_for_room(typename ForwardTraits<C>::Storage& storage, int group, const PipelineState<1>& at_out,
                               const PipelineState<C.stages>& at_v) {
  using T = ForwardTraits<C>;
  if constexpr (T::kOwnOutput) {
    // After this wait the warpgroup's previous O has been stored.
    storage.pipeline_out[group].producer_acquire(at_out);
  } else if (group == 0) {
    // After these waits both warpgroups' previous O are stored, and no one reads V of the second to last tile.
    for (auto& pipeline : storage.pipeline_out) pipeline.producer_acquire(at_out);
    storage.pipeline_v.producer_acquire({at_v.count});
    cutlass::arch::NamedBarrier::arrive(256, T::kAllGroupsBarrier);
  } else {
    // After this barrier the same holds, and no one reads V of the last tile. This warpgroup cannot wait on the other's
    // pipeline of O, which may be two phases ahead.
    cutlass::arch::NamedBarrier::sync(256, T::kAllGroupsBarrier);
  }
}

// Rounds a warpgroup's output (MMA,1,1) into shared memory, for the thread that stores it by TMA.
template <KernelConfig C, class Output>
CUTE_DEVICE void store_output(typename ForwardTraits<C>::Element* to, const Output& tOrO, int thread) {
  using T = ForwardTraits<C>;
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, typename T::Element>{}, typename T::MmaO{});
  auto thread_out = copy_out.get_thread_slice(thread % 128);
  Tensor sO = make_tensor(make_smem_ptr(to), typename T::LayoutO{});  // (row,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<typename T::Element>(tOrO)), thread_out.partition_D(sO));
  tma_store_fence();
}

// A consumer warpgroup: 64 rows of every work tile of the CTA.
template <KernelConfig C>
CUTE_DEVICE void consume(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const int thread = threadIdx.x - 128;
  ForwardMainloop<C> mainloop(params, storage, cutlass::canonical_warp_group_idx() - 1, thread);
  for (PipelineState<T::kStagesQ> at_q;; at_q.advance()) {
    // After this wait Q and the work tile are in shared memory.
    storage.pipeline_q.consumer_wait(at_q);
    const WorkTile<T::kGroups>& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) break;
    QueryRows<C> rows(params, work, cutlass::canonical_warp_group_idx() - 1, thread);
    mainloop(rows, at_q);

    Tensor output = rows_of(mainloop.tOrO);  // (rows,dims)
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) rows.softmax.normalize(output, r, rows.totals[r]);
    const PipelineState<1> at_out{at_q.count};
    // Recomputed: kept through the main loop it would take a register.
    const int group = cutlass::canonical_warp_group_idx() - 1;
    wait_for_room<C>(storage, group, at_out, mainloop.at_v());
    if (params.p.num_splits == 1) {
      store_output<C>(T::output(storage, group, mainloop.at_v().count), mainloop.tOrO, thread);
    } else {
      store_split<C>(params, work, rows.tile, mainloop.tOrO, thread);
    }
    storage.pipeline_out[group].producer_commit(at_out);
  }
}

}  // namespace flash_cute::sm90
