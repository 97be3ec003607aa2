// The warpgroups of Hopper's backward: products by wgmma, gradients of scores between them, and the way out of dK and dV.
#pragma once

#include "kernels/common/backward_scores.h"
#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Where this thread's elements are in a tile of scores, of which each warpgroup has 64 keys.
struct GroupPlace {
  static constexpr bool kColumnsInOrder = true;

  int key, query;  // of the first element

  CUTE_DEVICE explicit GroupPlace(int thread) : key(thread / 32 * 16 + thread % 32 / 4), query(thread % 4 * 2) {}

  // Row r and column c of rows_of(), counted from the first.
  CUTE_HOST_DEVICE static constexpr int down(int r) { return 8 * r; }
  CUTE_HOST_DEVICE static constexpr int across(int c) { return column_offset(c); }
};

template <class Gradient>
CUTE_DEVICE void scale(Gradient& gradient, float factor) {
  CUTE_UNROLL
  for (int i = 0; i < size(gradient); ++i) gradient(i) *= factor;
}

// Rounds a gradient of a warpgroup (MMA,1,1), keys by dims from `first_col` on, and sends it off through shared memory.
template <int kRows, int kCols, class Layout, class Element, class Mma, class Gradient>
CUTE_DEVICE void store_gradient(const RaggedMap& map, Element* shared, const Mma& mma, const Gradient& gradient,
                                const KeyTile& tile, const SeqSpan& span, int thread, int barrier, int first_col = 0) {
  const int group = thread / 128, row = tile.row + group * 64;
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto thread_out = copy_out.get_thread_slice(thread);
  Tensor out = make_tensor(make_smem_ptr(shared), Layout{});  // (key,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<Element>(gradient)), thread_out.partition_D(out));
  tma_store_fence();
  // After this barrier the warpgroup's rows are in shared memory, for the TMA to see.
  cutlass::arch::NamedBarrier::sync(128, barrier + group);
  if (thread % 128 != 0 || row >= span.length) return;
  map.store<kRows, kCols>(shared + group * 64 * atom_columns(kCols), span, row, tile.head, tile.batch, first_col);
  tma_store_arrive();
}

// Leaves a gradient of a warpgroup, over a part of the queries, to the pass that adds parts up.
template <KernelConfig C, bool kValues, class Gradient>
CUTE_DEVICE void store_part(const BwdProblem& p, const Gradient& gradient, const KeyTile& tile, const SeqSpan& span,
                            int thread) {
  const int row = tile.row + thread / 128 * kPartRows;
  if (row >= span.length) return;
  float* const sums = part_sums<C, kValues>(p, span, row, tile.head, tile.part, tile.batch) + thread % 128;
  // Not as vectors, which would need registers in fours: of 256 dims some spill.
  CUTE_UNROLL
  for (int i = 0; i < size(gradient); ++i) sums[i * 128] = gradient(i);
}

// A warpgroup that computes the gradients of 64 keys. Products hold up the warps that issue them, nearly to their end, so
// that what hides the work on scores are the products of another warpgroup, half a step away: none waits for the others'
// dS, but takes it a step late.
template <KernelConfig C>
CUTE_DEVICE void consume(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  const BwdProblem& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;
  const BackwardWork& work = storage.work;
  const uint32_t steps = work.steps();

  typename T::template MmaScores<C.head_dim> mma_s;
  typename T::template MmaScores<C.head_dim_v> mma_dp;
  typename T::template MmaKeys<C.head_dim> mma_dk;
  typename T::template MmaKeys<C.head_dim_v> mma_dv;
  typename T::MmaQ mma_dq;
  auto shared = [](Element* at, auto layout) { return make_tensor(make_smem_ptr(at), layout); };
  auto operand_a = [&](const auto& mma, const auto& tensor) {  // (MMA,1,MMA_K), of the warpgroup
    return mma.get_slice(afresh(group) * 128).partition_fragment_A(tensor);
  };
  auto operand_b = [&](const auto& mma, const auto& tensor) {  // (MMA,1,MMA_K), of the warpgroup
    return mma.get_slice(afresh(group) * 128).partition_fragment_B(tensor);
  };
  Tensor tSrS = partition_fragment_C(mma_s, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tSrdP = partition_fragment_C(mma_dp, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tKrdK = partition_fragment_C(mma_dk, Shape<Int<C.block_n>, Int<C.head_dim>>{});  // (MMA,1,1)
  Tensor tVrdV = partition_fragment_C(mma_dv, Shape<Int<C.block_n>, Int<C.head_dim_v>>{});  // (MMA,1,1)
  clear(tKrdK);
  clear(tVrdV);
  auto copy_ds = make_tiled_copy_C(Copy_Atom<typename T::StoreDs, Element>{}, mma_s);
  auto& ring_dq = storage.ring_dq[group];

  // dQ of a step, from dS of all warpgroups.
  auto start_dq = [&](const Cursor<2>& at, bool ds_is_full, auto& tQrdQ) {
    storage.ring_ds.wait(at, ds_is_full);
    Element* const ds = storage.ds[at.stage()];
    start_product<GMMA::ScaleOut::Zero>(mma_dq, operand_a(mma_dq, shared(ds, typename T::LayoutDs{})),
                                        operand_b(mma_dq, shared(storage.k, typename T::LayoutKt{})), tQrdQ);
  };
  auto send_dq = [&](const Cursor<2>& at, bool room, const auto& tQrdQ) {
    storage.ring_ds.release(at);
    // After this wait the warpgroup's dQ of the step before has left shared memory.
    ring_dq.wait_empty({at.count + 1}, room);
    float* const dq = storage.dq[group];
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); i += 4) {
      *reinterpret_cast<float4*>(dq + i * 128 + thread % 128 * 4) = *reinterpret_cast<const float4*>(&tQrdQ(i));
    }
    cutlass::arch::fence_view_async_shared();
    ring_dq.publish(at);
  };
  // Answers to what is asked ahead wait in registers, which rules need.
  constexpr bool kAsksAhead = !C.rich();
  Cursor<C.stages> at;
  bool q_is_full = false;
  auto add = [&](auto is_first) __attribute__((always_inline)) {
    constexpr bool kFirst = decltype(is_first)::value;
    const int stage = at.stage();
    Element *const q = storage.q[stage], *const dout = storage.dout[stage];
    const Cursor<2> at_ds{at.count}, before{at.count - 1};
    storage.ring_q.wait(at, q_is_full);
    const bool dout_is_full = kAsksAhead && storage.ring_dout.is_full(at);
    start_product<GMMA::ScaleOut::Zero>(mma_s, operand_a(mma_s, shared(storage.k, typename T::LayoutK{})),
                                        operand_b(mma_s, shared(q, typename T::LayoutQ{})), tSrS);
    storage.ring_dout.wait(at, dout_is_full);
    start_product<GMMA::ScaleOut::Zero>(mma_dp, operand_a(mma_dp, shared(storage.v, typename T::LayoutV{})),
                                        operand_b(mma_dp, shared(dout, typename T::LayoutDout{})), tSrdP);
    // After this barrier all warpgroups may begin: one after the other.
    if (kFirst && group == 0) cutlass::arch::NamedBarrier::arrive(128 * T::kGroups, T::kAllGroupsBarrier);
    const bool ds_is_empty = kAsksAhead && storage.ring_ds.is_empty(at_ds);
    const bool ds_is_full = kAsksAhead && !kFirst && storage.ring_ds.is_full(before);
    const BackwardStep& step = storage.steps[stage];
    wait_products<T::kManyQueries ? 1 : 0>(tSrS);
    if constexpr (!T::kManyQueries) warpgroup_fence_operand(tSrdP);
    auto await_dp = [&] {
      if constexpr (T::kManyQueries) wait_products<0>(tSrdP);
    };
    const ScoreGradients<C, GroupPlace> gradients(p.fwd, work.seq, work.tile.batch, work.tile.row,
                                                  GroupPlace(afresh(thread)));
    gradients(rows_of(tSrS), rows_of(tSrdP), storage.lse_log2[stage], storage.row_dot[stage], step.head,
              step.first_query, step.full, await_dp);
    Tensor tSrP = converted<Element>(tSrS);  // (MMA,1,1)
    auto start_dv = [&] {
      start_product<GMMA::ScaleOut::One>(mma_dv, as_register_operand(tSrP),
                                         operand_b(mma_dv, shared(dout, typename T::LayoutDoutT{})), tVrdV);
    };
    if constexpr (T::kManyQueries) start_dv();
    Tensor tSrdS = converted<Element>(tSrdP);  // (MMA,1,1)
    // After this wait nobody still reads dS of two steps before.
    storage.ring_ds.wait_empty(at_ds, ds_is_empty);
    auto thread_ds = copy_ds.get_thread_slice(afresh(thread));
    cute::copy(copy_ds, thread_ds.retile_S(tSrdS),
               thread_ds.partition_D(shared(storage.ds[at_ds.stage()], typename T::LayoutDsT{})));
    if constexpr (!T::kManyQueries) start_dv();
    cutlass::arch::fence_view_async_shared();
    storage.ring_ds.publish(at_ds);
    Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
    if constexpr (!kFirst) start_dq(before, ds_is_full, tQrdQ);
    const bool room = kAsksAhead && !kFirst && ring_dq.is_empty(at_ds);
    start_product<GMMA::ScaleOut::One>(mma_dk, as_register_operand(tSrdS),
                                       operand_b(mma_dk, shared(q, typename T::LayoutQt{})), tKrdK);
    wait_products<1>(tVrdV);
    storage.ring_dout.release(at);
    if constexpr (!kFirst) {
      warpgroup_fence_operand(tQrdQ);
      send_dq(before, room, tQrdQ);
    }
    q_is_full = kAsksAhead && storage.ring_q.is_full({at.count + 1});
    wait_products<0>(tKrdK);
    storage.ring_q.release(at);
    at.advance();
  };
  if (steps > 0) {
    storage.ring_k.wait({});
    storage.ring_v.wait({});
    if (group > 0) cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
    add(true_type{});
    CUTE_NO_UNROLL
    while (at.count < steps) add(false_type{});
    Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
    start_dq({at.count - 1}, false, tQrdQ);
    wait_products<0>(tQrdQ);
    send_dq({at.count - 1}, false, tQrdQ);
  }

  scale(tKrdK, p.fwd.softmax_scale);
  if constexpr (C.drops()) {
    scale(tKrdK, p.fwd.rules.gradient_scale());
    scale(tVrdV, p.fwd.rules.keep_scale);
  }
  if (p.parts.count() > 1) {
    store_part<C, false>(p, tKrdK, work.tile, work.seq.k, thread);
    store_part<C, true>(p, tVrdV, work.tile, work.seq.k, thread);
    return;
  }
  // After this barrier nobody still reads K and V.
  cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
  store_gradient<C.block_n, C.head_dim, typename T::LayoutK>(params.dk, storage.k, mma_dk, tKrdK, work.tile, work.seq.k,
                                                             thread, T::kGroupBarrier);
  store_gradient<C.block_n, C.head_dim_v, typename T::LayoutV>(params.dv, storage.v, mma_dv, tVrdV, work.tile,
                                                               work.seq.k, thread, T::kGroupBarrier);
  if (thread % 128 == 0) tma_store_wait<0>();
}

}  // namespace flash_cute::sm90
