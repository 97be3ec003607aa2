// The warpgroups of Hopper's backward for wide heads: one computes scores, one sums up dV, and one dK.
#pragma once

#include "kernels/sm90/backward_consumers.h"
#include "kernels/sm90/backward_pair_producers.h"

namespace flash_cute::sm90 {

// An atom of dQ's columns that the CTA sums up. Key tiles add to it in global memory, or the first one stores it.
template <KernelConfig C, bool kInner>
class DqAtom {
  using T = PairTraits<C>;
  using Storage = typename T::Storage;

 public:
  CUTE_DEVICE DqAtom(const BackwardParams& params, Storage& storage, int rank)
      : params_(params), storage_(storage), rank_(rank) {}

  // Starts the products of a step, whose own dS is there.
  template <class Accumulator>
  CUTE_DEVICE void start(const Cursor<1>& at, Accumulator& acc) const {
    constexpr bool kOwnKeysOnly = kInner && T::kInnerShared;
    const int atom = T::dq_atom(rank_, kInner);
    if constexpr (!kOwnKeysOnly) storage_.ring_ds_of_other.wait(at);
    typename T::MmaDq mma;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    auto shared = [](auto* at) { return make_tensor(make_smem_ptr(at + afresh(0)), typename T::LayoutTileT{}); };
    auto add = [&](auto* ds, auto* k) {
      add_product(mma, mma.get_slice(0).partition_fragment_A(shared(ds)),
                  mma.get_slice(0).partition_fragment_B(shared(k)), acc);
    };
    start_sum<GMMA::ScaleOut::Zero>(acc, [&] {
      add(storage_.ds[0], storage_.k + atom * T::kTile);
      if constexpr (!kOwnKeysOnly) add(storage_.ds[1], storage_.k_of_other + (atom - rank_ * 2) * T::kTile);
    });
  }

  // Adds what they gave.
  template <class Accumulator>
  CUTE_DEVICE void add(const BackwardWork& work, const Cursor<1>& at, const Accumulator& acc, int head,
                       int first_query) const {
    const BwdProblem& p = params_.p;
    const bool waits = tiles_wait(params_.dq_order);
    const Cursor<T::kTurns> turn{at.count};
    // After this wait there are sums to add to, or this tile begins them.
    if (waits) storage_.ring_turn[kInner].wait(turn);
    const int64_t padded_row = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + first_query;
    float* const sums = T::dq_sums(p, padded_row, T::dq_place(rank_, kInner)) + afresh(threadIdx.x) % 128 * 4;
    if (waits && storage_.turn_is_first[kInner][turn.stage()]) {
      CUTE_UNROLL
      for (int i = 0; i < size(acc); i += 4) {
        *reinterpret_cast<float4*>(sums + i * 128) = make_float4(acc(i), acc(i + 1), acc(i + 2), acc(i + 3));
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(acc); i += 4) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + i * 128), "f"(acc(i)),
                     "f"(acc(i + 1)), "f"(acc(i + 2)), "f"(acc(i + 3))
                     : "memory");
      }
    }
    if (waits) storage_.ring_added[kInner].publish(turn);
  }

 private:
  const BackwardParams& params_;
  Storage& storage_;
  int rank_;
};

// P and dS of each step, for the other warpgroups; dS also for the other CTA, and an atom of dQ. A step begins with dP,
// whose product runs while dS of the step before is on its way: dO is there long before Q, which dK holds up.
template <KernelConfig C>
CUTE_DEVICE void score(const BackwardParams& params, typename PairTraits<C>::Storage& storage, int rank) {
  using T = PairTraits<C>;
  using Element = typename T::Element;
  const BwdProblem& p = params.p;
  const int thread = threadIdx.x % 128;
  typename T::MmaScores mma;
  typename T::MmaV0 mma_v0;
  auto shared = [](Element* at, auto layout) { return make_tensor(make_smem_ptr(at + afresh(0)), layout); };
  auto operand_a = [&](const auto& tensor) { return mma.get_slice(0).partition_fragment_A(tensor); };  // (MMA,1,MMA_K)
  auto operand_b = [&](const auto& tensor) { return mma.get_slice(0).partition_fragment_B(tensor); };  // (MMA,1,MMA_K)
  Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tSrdP = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto store = [&](const auto& values, Element* to) {
    auto thread_out = copy_out.get_thread_slice(afresh(thread));
    cute::copy(copy_out, thread_out.retile_S(values), thread_out.partition_D(shared(to, typename T::LayoutTile{})));
    cutlass::arch::fence_view_async_shared();
  };
  auto copy_v0 = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma_v0);
  Tensor v0 = shared(storage.v, typename T::LayoutTile{});  // (key,dim)
  Tensor tSrV0 = mma_v0.get_thread_slice(thread).partition_fragment_A(v0);  // (MMA,1,MMA_K)

  DqAtom<C, true> dq(params, storage, rank);
  int head, first_query, head_before, first_query_before;  // of dS, and of a step before
  Tensor tSrdS = make_tensor<Element>(tSrdP.layout());  // (MMA,1,1)
  auto start_dq = [&](const Cursor<1>& at) { dq.start(at, tSrS); };
  // Hands on dS of a step, which waits in registers.
  auto hand_on = [&](const Cursor<1>& at) {
    // After this wait nobody still reads dS of the step before, in neither CTA.
    storage.ring_ds.wait_empty(at);
    store(tSrdS, storage.ds[0]);
    storage.ring_ds.publish(at);
    // After this barrier the tile is complete, for the other CTA too.
    cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier);
    if (thread == 0) {
      constexpr uint32_t kBytes = T::kTile * sizeof(Element);
      send_to_cta(1 - rank, storage.ds[1], storage.ds[0], kBytes, storage.ring_ds_of_other.expect(at, kBytes));
    }
  };
  auto end_dq = [&](const Cursor<1>& at) {
    warpgroup_fence_operand(tSrS);
    storage.ring_ds.release(at);
  };
  Cursor<C.stages> at;
  auto add = [&](const BackwardWork& work, auto is_first, bool has_dq) __attribute__((always_inline)) {
    const int stage = at.stage();
    const Cursor<1> now{at.count}, before{at.count - 1}, long_before{at.count - 2};
    Element* const dout = storage.dout[stage];
    storage.ring_dout.wait(at);
    if (has_dq) start_dq(long_before);
    warpgroup_fence_operand(tSrV0);
    mma_v0.accumulate_ = GMMA::ScaleOut::Zero;
    mma.accumulate_ = GMMA::ScaleOut::One;
    start_sum<GMMA::ScaleOut::Zero>(tSrdP, [&] {
      add_product(mma_v0, tSrV0, operand_b(shared(dout, typename T::LayoutTile{})), tSrdP);
      add_product(mma, operand_a(shared(storage.v + T::kTile, typename T::LayoutV1{})),
                  operand_b(shared(dout + T::kTile, typename T::LayoutV1{})), tSrdP);
    });
    if constexpr (!decltype(is_first)::value) {
      warpgroup_wait<1>();
      if (has_dq) end_dq(long_before);
      hand_on(before);
      if (has_dq) dq.add(work, long_before, tSrS, head_before, first_query_before);
      head_before = head;
      first_query_before = first_query;
    }
    storage.ring_q.wait(at);
    start_product<GMMA::ScaleOut::Zero>(mma, operand_a(shared(storage.k, typename T::LayoutK{})),
                                        operand_b(shared(storage.q[stage], typename T::LayoutQ{})), tSrS);
    wait_products<0>(tSrdP);
    warpgroup_fence_operand(tSrS);
    const BackwardStep& step = storage.steps[0][stage];
    head = step.head;
    first_query = step.first_query;
    const ScoreGradients<C, GroupPlace> gradients(p.fwd, work.seq, work.tile.batch, work.tile.row,
                                                  GroupPlace(afresh(thread)));
    gradients(rows_of(tSrS), rows_of(tSrdP), storage.lse_log2[stage], storage.row_dot[stage], head, first_query,
              step.full, [] {});
    storage.ring_q.release(at);
    storage.ring_dout.release(at);
    // After this wait nobody still reads P of the step before.
    storage.ring_p.wait_empty(now);
    store(converted<Element>(tSrS), storage.v);
    storage.ring_p.publish(now);
    convert(tSrdP, tSrdS);
    at.advance();
  };
  for (Cursor<2> tile;; tile.advance()) {
    storage.ring_work.wait(tile);
    const BackwardWork& work = storage.work[tile.stage()];
    if (work.tile.row < 0) return;
    // Also of a tile without steps: who left out a phase would take the next one for it.
    storage.ring_k.wait({tile.count});
    storage.ring_v.wait({tile.count});
    if (!work.range.empty()) {
      cute::copy(copy_v0, copy_v0.get_thread_slice(afresh(thread)).partition_S(v0),
                 copy_v0.get_thread_slice(afresh(thread)).retile_D(tSrV0));
      // After this barrier the first columns of V are in registers, and their place is free for P.
      cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier);
      add(work, true_type{}, false);
      bool has_dq = false;
      CUTE_NO_UNROLL
      while (at.count < work.steps_until_end) {
        add(work, false_type{}, has_dq);
        has_dq = true;
      }
      auto finish_dq = [&](const Cursor<1>& at, int head, int first_query) {
        start_dq(at);
        warpgroup_wait<0>();
        end_dq(at);
        dq.add(work, at, tSrS, head, first_query);
      };
      if (has_dq) finish_dq({at.count - 2}, head_before, first_query_before);
      hand_on({at.count - 1});
      finish_dq({at.count - 1}, head, first_query);
      cutlass::arch::NamedBarrier::arrive(32 * C.warps, T::kAllGroupsBarrier);
    }
    storage.ring_k.release({tile.count});
    storage.ring_v.release({tile.count});
    storage.ring_work.release(tile);
  }
}

// dV of the CTA's 64 keys, and an atom of dQ; or their dK.
template <KernelConfig C, bool kValues>
CUTE_DEVICE void sum_up(const BackwardParams& params, typename PairTraits<C>::Storage& storage, int rank) {
  using T = PairTraits<C>;
  using Element = typename T::Element;
  constexpr int kDims = kValues ? C.head_dim_v : C.head_dim, kBarrier = T::kGroupBarrier + (kValues ? 1 : 2);
  const BwdProblem& p = params.p;
  typename T::template MmaKeys<kDims> mma;
  auto shared = [](Element* at, auto layout) { return make_tensor(make_smem_ptr(at), layout); };
  auto& ring = pick<kValues>(storage.ring_q, storage.ring_dout);
  auto& ring_scores = pick<kValues>(storage.ring_ds, storage.ring_p);
  Tensor gradient = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<kDims>>{});  // (MMA,1,MMA_N)
  DqAtom<C, false> dq(params, storage, rank);
  Cursor<C.stages> at;
  for (Cursor<2> tile;; tile.advance()) {
    storage.ring_work.wait(tile);
    const BackwardWork& work = storage.work[tile.stage()];
    if (work.tile.row < 0) return;
    clear(gradient);
    storage.ring_k.wait({tile.count});
    if constexpr (kValues) storage.ring_v.wait({tile.count});

    for (; at.count < storage.work[afresh(tile.stage())].steps_until_end; at.advance()) {
      const Cursor<1> of_scores{at.count};
      ring.wait(at);
      const BackwardStep step = storage.steps[kValues][at.stage()];
      ring_scores.wait(of_scores);
      Tensor scores = shared(pick<kValues>(storage.ds[0], storage.v), typename T::LayoutTile{});  // (key,query)
      Tensor rows =
          shared(pick<kValues>(storage.q, storage.dout)[at.stage()],
                 std::conditional_t<kValues, typename T::LayoutDoutT, typename T::LayoutQt>{});  // (dim,query)
      start_product<GMMA::ScaleOut::One>(mma, mma.get_slice(0).partition_fragment_A(scores),
                                         mma.get_slice(0).partition_fragment_B(rows), gradient);
      wait_products<0>(gradient);
      ring.release(at);
      ring_scores.release(of_scores);
      if constexpr (kValues) {
        storage.ring_ds.wait(of_scores);
        Tensor tQrdQ = partition_fragment_C(typename T::MmaDq{}, Shape<Int<C.block_m>, Int<T::kAtom>>{});  // (MMA,1,1)
        dq.start(of_scores, tQrdQ);
        wait_products<0>(tQrdQ);
        storage.ring_ds.release(of_scores);
        dq.add(work, of_scores, tQrdQ, step.head, step.first_query);
      }
    }

    // After this barrier nobody still reads K and V. The two warpgroups that wait do so in code of their own: an
    // aligned barrier is for warps at the same instruction.
    const BackwardWork& done = storage.work[afresh(tile.stage())];
    if (!done.range.empty()) {
      cutlass::arch::NamedBarrier(32 * C.warps, T::kAllGroupsBarrier).arrive_and_wait_unaligned();
    }
    auto factor = [&] {
      const float of_values = C.drops() ? p.fwd.rules.keep_scale : 1.f;
      const float of_keys = p.fwd.softmax_scale * (C.drops() ? p.fwd.rules.gradient_scale() : 1.f);
      return kValues ? of_values : of_keys;
    };
    if (done.cut >= 0) {
      scale(gradient, factor());
      store_part<C, kValues>(p, gradient, done, afresh(threadIdx.x) % 128);
    } else {
      store_gradient<kDims>(kValues ? params.dv : params.dk, pick<kValues>(storage.k, storage.v), gradient, factor(),
                            done.tile, done.seq.k, afresh(threadIdx.x) % 128, kBarrier);
    }
    storage.ring_work.release(tile);
    // After this wait what the warpgroup has sent has left.
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();
    storage.ring_k.release({tile.count});
    if constexpr (kValues) storage.ring_v.release({tile.count});
  }
}

}  // namespace flash_cute::sm90
