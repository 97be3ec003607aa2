// The consumer warpgroups of the 2-CTA backward: one computes P and dS, one dV and dQ, one dK.
#pragma once

#include "kernels/sm90/backward_consumers.h"
#include "kernels/sm90/backward_2cta_producers.h"

namespace flash_cute::sm90 {

// Adds a step's contribution to one atom of dQ's columns in global memory, or starts the sum. may_add() runs once the
// warpgroup has read dS.
template <KernelConfig C, bool kInner, class MayAdd>
CUTE_DEVICE void add_dq(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage, int rank,
                        const WorkOf<C>& work, const PipelineState<1>& at, const BackwardStep& step,
                        const MayAdd& may_add) {
  using T = TwoCtaTraits<C>;
  const int atom = T::dq_atom(rank, kInner);
  typename T::MmaDq mma;
  Tensor acc = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<T::kAtom>>{});  // (MMA,1,1)
  auto shared = [](auto* at) { return make_tensor(make_smem_ptr(at + opaque(0)), typename T::LayoutTileT{}); };
  auto add = [&](auto* ds, auto* k) {
    add_product(mma, mma.get_slice(0).partition_fragment_A(shared(ds)),
                mma.get_slice(0).partition_fragment_B(shared(k)), acc);
  };
  storage.pipeline_peer_ds.consumer_wait(at);
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  start_sum<GMMA::ScaleOut::Zero>(acc, [&] {
    add(storage.ds[0], storage.k + atom * T::kTile);
    add(storage.ds[1], storage.k_of_other + (atom - T::first_of_other(rank)) * T::kTile);
  });
  wait_products<0>(acc);
  may_add();

  const BwdParams& p = params.p;
  const int64_t padded_row =
      first_padded_row(p, C.block_m, work.tile.batch, step.head, work.seq.q.offset) + step.first_query;
  float* const sums = T::dq_sums(p, padded_row, atom) + opaque(threadIdx.x) % 128 * 4;
  if (uses_semaphore(params.p.dq_accumulate) && storage.first_stores[PipelineState<T::kSemaphores>{at.count}.stage()]) {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 4) {
      *reinterpret_cast<float4*>(sums + i * 128) = make_float4(acc(i), acc(i + 1), acc(i + 2), acc(i + 3));
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += 4) {
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + i * 128), "f"(acc(i)), "f"(acc(i + 1)),
                   "f"(acc(i + 2)), "f"(acc(i + 3))
                   : "memory");
    }
  }
}

// P and dS of each step for the other warpgroups, dS also for the other CTA. All others wait for them, so this
// warpgroup does nothing else. A step starts with dP: dO arrives long before Q, whose buffer dK holds.
template <KernelConfig C>
CUTE_DEVICE void compute_ds(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage, int rank) {
  using T = TwoCtaTraits<C>;
  using Element = typename T::Element;
  const BwdParams& p = params.p;
  const int thread = threadIdx.x % 128;
  typename T::MmaScores mma;
  typename T::MmaV0 mma_v0;
  auto shared = [](Element* at, auto layout) { return make_tensor(make_smem_ptr(at + opaque(0)), layout); };
  auto operand_a = [&](const auto& tensor) { return mma.get_slice(0).partition_fragment_A(tensor); };  // (MMA,1,MMA_K)
  auto operand_b = [&](const auto& tensor) { return mma.get_slice(0).partition_fragment_B(tensor); };  // (MMA,1,MMA_K)
  Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tSrdP = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto store = [&](const auto& values, Element* to) {
    auto thread_out = copy_out.get_thread_slice(opaque(thread));
    cute::copy(copy_out, thread_out.retile_S(converted<Element>(values)),
               thread_out.partition_D(shared(to, typename T::LayoutTile{})));
    cutlass::arch::fence_view_async_shared();
  };
  auto copy_v0 = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma_v0);
  Tensor v0 = shared(storage.v, typename T::LayoutTile{});  // (key,dim)
  Tensor tSrV0 = mma_v0.get_thread_slice(thread).partition_fragment_A(v0);  // (MMA,1,MMA_K)

  PipelineState<C.stages> at;
  auto hand_on_p = [&] {
    const PipelineState<1> now{at.count};
    // After this wait no one still reads P of the previous step.
    storage.pipeline_p.producer_acquire(now);
    store(tSrS, storage.v);
    storage.pipeline_p.producer_commit(now);
  };
  auto hand_on_ds = [&] {
    const PipelineState<1> now{at.count};
    // After this wait no one still reads dS of the previous step, in either CTA.
    storage.pipeline_ds.producer_acquire(now);
    store(tSrdP, storage.ds[0]);
    storage.pipeline_ds.producer_commit(now);
    // After this barrier the tile is complete, also for the copy to the other CTA.
    cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier);
    if (thread == 0) {
      constexpr uint32_t kBytes = T::kTile * sizeof(Element);
      send_to_cta(1 - rank, storage.ds[1], storage.ds[0], kBytes,
                  storage.pipeline_peer_ds.producer_expect_tx(now, kBytes));
    }
  };
  auto add = [&](const WorkOf<C>& work) __attribute__((always_inline)) {
    const int stage = at.stage();
    Element* const dout = storage.dout[stage];
    storage.pipeline_dout.consumer_wait(at);
    warpgroup_fence_operand(tSrV0);
    mma_v0.accumulate_ = GMMA::ScaleOut::Zero;
    mma.accumulate_ = GMMA::ScaleOut::One;
    start_sum<GMMA::ScaleOut::Zero>(tSrdP, [&] {
      add_product(mma_v0, tSrV0, operand_b(shared(dout, typename T::LayoutTile{})), tSrdP);
      add_product(mma, operand_a(shared(storage.v + T::kTile, typename T::LayoutV1{})),
                  operand_b(shared(dout + T::kTile, typename T::LayoutV1{})), tSrdP);
    });
    storage.pipeline_q.consumer_wait(at);
    start_product<GMMA::ScaleOut::Zero>(mma, operand_a(shared(storage.k, typename T::LayoutK{})),
                                        operand_b(shared(storage.q[stage], typename T::LayoutQ{})), tSrS);
    wait_products<0>(tSrS);
    warpgroup_fence_operand(tSrdP);
    const std::conditional_t<C.walks_lists(), const StepOf<C>&, BackwardStep> step = storage.steps[0][stage];
    const float* const lse_log2 = storage.lse_log2[stage];
    const float* const row_dot = storage.row_dot[stage];
    const ScoreGradients<C, WarpgroupCoords> gradients(p.fwd, work.seq, work.tile.batch, work.tile.row,
                                                       WarpgroupCoords(opaque(thread)));
    Tensor scores = rows_of(tSrS), dp = rows_of(tSrdP);  // (keys,queries)
    auto hide = [&](auto&... elements) {
      if constexpr (C.walks_lists()) {
        if (step.full) return;
        const WarpPairs<C.block_m> pairs(p.fwd.lists, rank * C.block_n + opaque(thread) / 32 * 16,
                                         [&](int i) { return Strip{step.first_query % kTileSide + i, step.code}; });
        pairs.template hide<WarpgroupCoords>(elements...);
      }
    };
    if constexpr (C.rich()) {
      gradients(scores, dp, lse_log2, row_dot, step.head, step.first_query, step.full, [] {});
      hide(scores, dp);
      hand_on_p();
    } else {
      gradients.probabilities(scores, lse_log2, step.first_query, step.full);
      hide(scores);
      hand_on_p();
      gradients.score_gradients(scores, dp, row_dot, step.first_query, step.full);
      hide(dp);
    }
    storage.pipeline_q.consumer_release(at);
    storage.pipeline_dout.consumer_release(at);
    hand_on_ds();
    at.advance();
  };
  for (PipelineState<2> tile;; tile.advance()) {
    storage.pipeline_work.consumer_wait(tile);
    const WorkOf<C>& work = storage.work[tile.stage()];
    if (work.tile.row < 0) return;
    // Also for a tile without steps: a skipped phase would be mistaken for the next one.
    storage.pipeline_k.consumer_wait({tile.count});
    storage.pipeline_v.consumer_wait({tile.count});
    if (!work.queries.empty()) {
      cute::copy(copy_v0, copy_v0.get_thread_slice(opaque(thread)).partition_S(v0),
                 copy_v0.get_thread_slice(opaque(thread)).retile_D(tSrV0));
      // After this barrier the first columns of V are in registers, and their buffer is free for P.
      cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier);
      CUTE_NO_UNROLL
      while (at.count < work.steps_until_end) add(work);
      cutlass::arch::NamedBarrier::arrive(32 * C.warps, T::kAllGroupsBarrier);
    }
    storage.pipeline_k.consumer_release({tile.count});
    storage.pipeline_v.consumer_release({tile.count});
    storage.pipeline_work.consumer_release(tile);
  }
}

// Rounds a gradient made of several products, 64 keys by kCols dims, into shared memory.
template <int kCols, class Element, class Gradient>
CUTE_DEVICE void write_products(Element* shared, Gradient& gradient, int thread) {
  constexpr int kProducts = decltype(size<2>(gradient))::value, kEach = kCols / kProducts;  // columns of a product
  CUTE_UNROLL
  for (int n = 0; n < kProducts; ++n) {
    Tensor product = gradient(_, _, n);
    warpgroup_fence_operand(product);  // one product at a time, for want of registers
    write_gradient<kEach>(shared + n * 64 * kEach, converted<Element>(product), thread);
  }
}

// dV of the CTA's 64 keys and two atoms of dQ; or dK of these keys.
template <KernelConfig C, bool kValues>
CUTE_DEVICE void accumulate_dkdv(const BackwardParams& params, typename TwoCtaTraits<C>::Storage& storage, int rank) {
  using T = TwoCtaTraits<C>;
  using Element = typename T::Element;
  constexpr int kDims = kValues ? C.head_dim_v : C.head_dim, kBarrier = T::kGroupBarrier + (kValues ? 1 : 2);
  const BwdParams& p = params.p;
  typename T::template MmaKeys<kDims> mma;
  auto shared = [](Element* at, auto layout) { return make_tensor(make_smem_ptr(at), layout); };
  auto& pipeline = pick<kValues>(storage.pipeline_q, storage.pipeline_dout);
  auto& pipeline_scores = pick<kValues>(storage.pipeline_ds, storage.pipeline_p);
  Tensor gradient = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<kDims>>{});  // (MMA,1,MMA_N)
  PipelineState<C.stages> at;
  for (PipelineState<2> tile;; tile.advance()) {
    storage.pipeline_work.consumer_wait(tile);
    const WorkOf<C>& work = storage.work[tile.stage()];
    if (work.tile.row < 0) return;
    clear(gradient);
    storage.pipeline_k.consumer_wait({tile.count});
    if constexpr (kValues) storage.pipeline_v.consumer_wait({tile.count});

    for (; at.count < storage.work[opaque(tile.stage())].steps_until_end; at.advance()) {
      const PipelineState<1> of_scores{at.count};
      pipeline.consumer_wait(at);
      const BackwardStep step = storage.steps[kValues][at.stage()];
      pipeline_scores.consumer_wait(of_scores);
      Tensor scores = shared(pick<kValues>(storage.ds[0], storage.v), typename T::LayoutTile{});  // (key,query)
      Tensor rows =
          shared(pick<kValues>(storage.q, storage.dout)[at.stage()],
                 std::conditional_t<kValues, typename T::LayoutDoutT, typename T::LayoutQt>{});  // (dim,query)
      start_product<GMMA::ScaleOut::One>(mma, mma.get_slice(0).partition_fragment_A(scores),
                                         mma.get_slice(0).partition_fragment_B(rows), gradient);
      wait_products<0>(gradient);
      pipeline.consumer_release(at);
      pipeline_scores.consumer_release(of_scores);
      if constexpr (kValues) {
        storage.pipeline_ds.consumer_wait(of_scores);
        const bool waits = uses_semaphore(params.p.dq_accumulate);
        const PipelineState<T::kSemaphores> at_semaphore{at.count};
        auto await_turn = [&] {
          // After this wait this tile may add, or it starts the sums.
          if (waits) storage.pipeline_semaphore.consumer_wait(at_semaphore);
        };
        if (T::has_inner(rank, step)) add_dq<C, true>(params, storage, rank, work, of_scores, step, await_turn);
        add_dq<C, false>(params, storage, rank, work, of_scores, step, [&] {
          storage.pipeline_ds.consumer_release(of_scores);
          await_turn();
        });
        if (waits) storage.pipeline_added.producer_commit(at_semaphore);
      }
    }

    // Recomputed at every use: in registers they would spill.
    auto thread = [&] { return opaque(threadIdx.x) % 128; };
    auto done = [&]() -> const WorkOf<C>& { return storage.work[opaque(tile.stage())]; };
    // After this barrier no one still reads K and V. The two warpgroups that wait do so in code of their own: an
    // aligned barrier is for warps at the same instruction.
    if (!done().queries.empty()) {
      cutlass::arch::NamedBarrier(32 * C.warps, T::kAllGroupsBarrier).arrive_and_wait_unaligned();
    }
    const float of_values = C.rich() ? p.fwd.rules.keep_scale : 1.f;
    const float of_keys = p.fwd.softmax_scale * (C.rich() ? p.fwd.rules.gradient_scale() : 1.f);
    scale(gradient, kValues ? of_values : of_keys);
    if (done().split_tile >= 0) {
      store_split<C, kValues>(p, gradient, done(), thread());
    } else {
      Element* const out = pick<kValues>(storage.k, storage.v);
      write_products<kDims>(out, gradient, thread());
      // After this barrier all rows are in shared memory.
      cutlass::arch::NamedBarrier::sync(128, kBarrier);
      if (const WorkOf<C>& work = done(); thread() == 0 && work.tile.row < work.seq.k.length) {
        (kValues ? params.dv : params.dk)
            .template store<64, kDims>(out, work.seq.k, work.tile.row, work.tile.head, work.tile.batch);
        tma_store_arrive();
      }
    }
    storage.pipeline_work.consumer_release(tile);
    // After this wait the TMA store has read the gradient.
    if (thread() == 0) tma_store_wait<0>();
    storage.pipeline_k.consumer_release({tile.count});
    if constexpr (kValues) storage.pipeline_v.consumer_release({tile.count});
  }
}

}  // namespace flash_cute::sm90
