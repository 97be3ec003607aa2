// The warpgroups of Hopper's backward: products by wgmma, gradients of scores between them, and the way out of dK and dV.
#pragma once

#include "kernels/common/backward_scores.h"
#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Where this thread's elements are in a tile of scores, of which each warpgroup has 64 keys.
struct GroupPlace {
  int key, query;  // of the first element

  CUTE_DEVICE explicit GroupPlace(int thread) : key(thread / 32 * 16 + thread % 32 / 4), query(thread % 4 * 2) {}

  // Row r and column c of rows_of(), counted from the first.
  CUTE_HOST_DEVICE static constexpr int down(int r) { return 8 * r; }
  CUTE_HOST_DEVICE static constexpr int across(int c) { return column_offset(c); }
};

// Rounds a gradient of a warpgroup (MMA,1,1), keys by dims, and sends it off through shared memory.
template <int kRows, int kCols, class Layout, class Element, class Mma, class Gradient>
CUTE_DEVICE void store_gradient(const RaggedMap& map, Element* shared, const Mma& mma, const Gradient& gradient,
                                const KeyTile& tile, const SeqSpan& span, int thread, int barrier) {
  const int group = thread / 128, row = tile.row + group * 64;
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto thread_out = copy_out.get_thread_slice(thread);
  Tensor out = make_tensor(make_smem_ptr(shared), Layout{});  // (key,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<Element>(gradient)), thread_out.partition_D(out));
  tma_store_fence();
  // After this barrier the warpgroup's rows are in shared memory, for the TMA to see.
  cutlass::arch::NamedBarrier::sync(128, barrier + group);
  if (thread % 128 != 0 || row >= span.length) return;
  map.store<kRows, kCols>(shared + group * 64 * atom_columns(kCols), span, row, tile.head, tile.batch);
  tma_store_arrive();
}

// A warpgroup that computes the gradients of 64 keys. While it is at the scores of one step, products of this step and of
// the one before run: S of the next step starts before dQ of this one is on its way out.
template <KernelConfig C>
CUTE_DEVICE void consume(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  const BwdProblem& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;
  const auto& [tile, seq, range, heads] = storage.work;
  const int steps = heads * (range.end - range.begin);

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
  auto copy_ds = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_s);
  auto thread_ds = copy_ds.get_thread_slice(thread);
  const ScoreGradients<C, GroupPlace> gradients(p.fwd, seq, tile.batch, tile.row, GroupPlace(thread));
  auto& ring_dq = storage.ring_dq[group];

  Cursor<C.stages> at;
  Cursor<1> at_dq;
  auto start_s = [&] {
    storage.ring_q.wait(at);
    start_product<GMMA::ScaleOut::Zero>(mma_s, operand_a(mma_s, shared(storage.k, typename T::LayoutK{})),
                                        operand_b(mma_s, shared(storage.q[at.stage()], typename T::LayoutQ{})), tSrS);
  };
  // Starts dP of this step, and makes P of S meanwhile.
  auto weigh = [&] {
    storage.ring_dout.wait(at);
    start_product<GMMA::ScaleOut::Zero>(mma_dp, operand_a(mma_dp, shared(storage.v, typename T::LayoutV{})),
                                        operand_b(mma_dp, shared(storage.dout[at.stage()], typename T::LayoutDout{})),
                                        tSrdP);
    wait_products<1>(tSrS);
    if constexpr (!C.rich()) {
      const BackwardStep& step = storage.steps[at.stage()];
      gradients.weigh(rows_of(tSrS), storage.lse_log2[at.stage()], step.first_query, step.full);
    }
    wait_products<0>(tSrdP);
  };
  // Adds the step's part of the gradients. Begins the next one where there is one: its first product runs while dQ of this
  // one is on its way out.
  auto add = [&](auto has_next) __attribute__((always_inline)) {
    constexpr int kNext = decltype(has_next)::value;
    const int stage = at.stage();
    const BackwardStep& step = storage.steps[stage];
    Tensor tSrP = make_tensor<Element>(tSrS.layout());  // (MMA,1,1)
    auto start_dv = [&] {
      convert(tSrS, tSrP);
      start_product<GMMA::ScaleOut::One>(mma_dv, as_register_operand(tSrP),
                                         operand_b(mma_dv, shared(storage.dout[stage], typename T::LayoutDoutT{})),
                                         tVrdV);
    };
    if constexpr (T::kEarlyDv) start_dv();
    if constexpr (C.rich()) {
      gradients(rows_of(tSrS), rows_of(tSrdP), storage.lse_log2[stage], storage.row_dot[stage], step.head,
                step.first_query, step.full);
    } else {
      gradients.differentiate(rows_of(tSrS), rows_of(tSrdP), storage.row_dot[stage], step.first_query, step.full);
    }
    if constexpr (!T::kEarlyDv) start_dv();
    Tensor tSrdS = converted<Element>(tSrdP);  // (MMA,1,1)
    Element* const ds = storage.ds[at.count % 2];
    cute::copy(copy_ds, thread_ds.retile_S(tSrdS), thread_ds.partition_D(shared(ds, typename T::LayoutDs{})));
    cutlass::arch::fence_view_async_shared();
    // After this barrier dS of all warpgroups is in shared memory, and nobody still reads that of two steps before.
    cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
    Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
    start_product<GMMA::ScaleOut::Zero>(mma_dq, operand_a(mma_dq, shared(ds, typename T::LayoutDsT{})),
                                        operand_b(mma_dq, shared(storage.k, typename T::LayoutKt{})), tQrdQ);
    wait_products<1>(tVrdV);
    storage.ring_dout.release(at);
    start_product<GMMA::ScaleOut::One>(mma_dk, as_register_operand(tSrdS),
                                       operand_b(mma_dk, shared(storage.q[stage], typename T::LayoutQt{})), tKrdK);
    const Cursor<C.stages> done = at;
    at.advance();
    if constexpr (kNext) start_s();
    wait_products<1 + kNext>(tQrdQ);
    // The warpgroup's dQ of the step before has left shared memory.
    ring_dq.wait_empty(at_dq);
    float* const dq = storage.dq[group];
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); i += 4) {
      *reinterpret_cast<float4*>(dq + i * 128 + thread % 128 * 4) = *reinterpret_cast<const float4*>(&tQrdQ(i));
    }
    cutlass::arch::fence_view_async_shared();
    ring_dq.publish(at_dq);
    at_dq.advance();
    wait_products<kNext>(tKrdK);
    storage.ring_q.release(done);
    if constexpr (kNext) weigh();
  };
  if (!range.empty()) {
    storage.ring_k.wait({});
    storage.ring_v.wait({});
    start_s();
    weigh();
    CUTE_NO_UNROLL
    while (at.count + 1 < steps) add(true_type{});
    add(false_type{});
  }

  CUTE_UNROLL
  for (int i = 0; i < size(tKrdK); ++i) tKrdK(i) *= p.fwd.softmax_scale;
  // After this barrier nobody still reads K and V.
  cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
  store_gradient<C.block_n, C.head_dim, typename T::LayoutK>(params.dk, storage.k, mma_dk, tKrdK, tile, seq.k, thread,
                                                             T::kGroupBarrier);
  store_gradient<C.block_n, C.head_dim_v, typename T::LayoutV>(params.dv, storage.v, mma_dv, tVrdV, tile, seq.k, thread,
                                                               T::kGroupBarrier);
  if (thread % 128 == 0) tma_store_wait<0>();
}

}  // namespace flash_cute::sm90
