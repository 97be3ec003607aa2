// The consumer warpgroups of Hopper's backward: five wgmma products per step, the gradient of the scores, and the
// epilogue of dK and dV.
#pragma once

#include "kernels/common/backward_scores.h"
#include "kernels/common/list_mask.h"
#include "kernels/sm90/backward_ds.h"

namespace flash_cute::sm90 {

// Coordinates of a thread's elements in a tile of scores, where each warpgroup has 64 keys.
struct WarpgroupCoords {
  static constexpr bool kColumnsInOrder = true;

  int key, query;  // of the first element

  CUTE_DEVICE explicit WarpgroupCoords(unsigned thread)
      : key(thread / 32 * 16 + thread % 32 / 4), query(thread % 4 * 2) {}

  // Offsets of row r and column c of rows_of() from the first.
  CUTE_HOST_DEVICE static constexpr int down(int r) { return 8 * r; }
  CUTE_HOST_DEVICE static constexpr int across(int c) { return column_offset(c); }
};

template <class Gradient>
CUTE_DEVICE void scale(Gradient& gradient, float factor) {
  CUTE_UNROLL
  for (int i = 0; i < size(gradient); ++i) gradient(i) *= factor;
}

// Writes a warpgroup's rounded gradient, 64 keys by dims, to shared memory for a TMA store.
template <int kCols, class Element, class Rounded>
CUTE_DEVICE void write_gradient(Element* shared, Rounded&& rounded, int thread) {
  using Mma = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kCols>, _64>>()));
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, Mma{});
  auto thread_out = copy_out.get_thread_slice(thread);
  // The registers are in the same order whether one product or several made them.
  Tensor all = make_tensor(rounded.data(), partition_shape_C(Mma{}, Shape<_64, Int<kCols>>{}));  // (MMA,1,1)
  Tensor out = make_tensor(make_smem_ptr(shared), RowsLayout<Element, 64, kCols>{});  // (key,dim)
  cute::copy(copy_out, thread_out.retile_S(all), thread_out.partition_D(out));
  tma_store_fence();
}

// Writes a warpgroup's partial gradient over one split of the queries to the workspace.
template <KernelConfig C, bool kValues, class Gradient>
CUTE_DEVICE void store_split(const BwdParams& p, const Gradient& gradient, const WorkOf<C>& work, int thread) {
  const int row = work.tile.row + thread / 128 * kSlabRows;
  if (row >= work.seq.k.length) return;
  float* const sums = split_sums<C, kValues>(p, work.split_tile, work.tile, work.seq.k, row, work.split) + thread % 128;
  // Scalar stores: vectors need aligned registers, and 256 dims would spill.
  CUTE_UNROLL
  for (int i = 0; i < size(gradient); ++i) sums[i * 128] = gradient(i);
}

// An operand of a warpgroup's products as a function of the buffer: (MMA,1,MMA_K).
template <class T, class Buffers, class Layout, class Partition>
CUTE_DEVICE auto operand(int group, Buffers& buffers, Layout layout, Partition partition) {
  if constexpr (T::kHoldsDescriptors) {
    Tensor held = with_unknown_descriptors(partition(group, shared_tiles(buffers, layout)));  // (MMA,1,MMA_K,buffer)
    return [=](int buffer) { return held(_, _, _, buffer); };
  } else {
    return [=, &buffers](int buffer) {
      return partition(opaque(group), make_tensor(make_smem_ptr(buffers[buffer]), layout));
    };
  }
}

template <class T, class Mma, class Buffers, class Layout>
CUTE_DEVICE auto operand_a(Mma mma, int group, Buffers& buffers, Layout layout) {
  return operand<T>(group, buffers, layout, [=](int group, const auto& tiles) {
    return mma.get_slice(group * 128).partition_fragment_A(tiles);
  });
}

template <class T, class Mma, class Buffers, class Layout>
CUTE_DEVICE auto operand_b(Mma mma, int group, Buffers& buffers, Layout layout) {
  return operand<T>(group, buffers, layout, [=](int group, const auto& tiles) {
    return mma.get_slice(group * 128).partition_fragment_B(tiles);
  });
}

// Passes a consumer warpgroup's gradients to the storing threads: dQ of each step, dV and dK of each key tile.
template <KernelConfig C>
struct GradientSender {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;

  const BwdParams& p;
  typename T::Storage& storage;
  const int thread, group;

  CUTE_DEVICE auto& pipeline_dq() const { return storage.pipeline_dq[group]; }
  CUTE_DEVICE auto& pipeline_out() const { return storage.pipeline_out[group]; }

  // Whether the warpgroup computes dQ of a step, or part of it.
  CUTE_DEVICE bool has_dq(uint32_t step) const { return !T::kAlternatesDq || step % 2 == group; }
  // Of pipeline_dq: once it is empty, dQ of the step may be written.
  CUTE_DEVICE PipelineState<2> room_for_dq(uint32_t step) const { return {T::kAlternatesDq ? step : step + 1}; }
  // The same for dV, before dQ of the last of `steps` (0: no step yet).
  CUTE_DEVICE PipelineState<2> room_for_dv(uint32_t steps) const {
    if (!T::kAlternatesDq) return {steps};
    const uint32_t last = max(steps, 1u) - 1;
    return {has_dq(last) ? last : last + 1};
  }

  // dQ (MMA,MMA_M,1) of a step. `room`: whether the buffer is known to be free.
  template <class Gradient>
  CUTE_DEVICE void send_dq(const PipelineState<2>& at, bool room, const Gradient& tQrdQ) const {
    storage.pipeline_ds.consumer_release(at);
    // After this wait the warpgroup's previous dQ has been stored.
    pipeline_dq().producer_acquire(room_for_dq(at.count), room);
    float* const dq = storage.dq[group];
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); i += 4) {
      *reinterpret_cast<float4*>(dq + dq_place<C>(i, thread)) = *reinterpret_cast<const float4*>(&tQrdQ(i));
    }
    compiler_fence();
    cutlass::arch::fence_view_async_shared();
    pipeline_dq().producer_commit(at);
  }

  // At the end of a tile, after its last step's products.
  template <class Keys, class Values>
  CUTE_DEVICE void scale_gradients(Keys& tKrdK, Values& tVrdV) const {
    scale(tKrdK, p.fwd.softmax_scale);
    if constexpr (C.rich()) {
      scale(tKrdK, p.fwd.rules.gradient_scale());
      scale(tVrdV, p.fwd.rules.keep_scale);
    }
  }

  // dV, rounded, is stored from the buffer of dQ; `steps`: of all tiles so far.
  template <class Rounded>
  CUTE_DEVICE void send_dv(uint32_t tile, uint32_t steps, Rounded& rounded) const {
    // After this wait the last dQ that was sent has been stored.
    pipeline_dq().producer_acquire(room_for_dv(steps));
    send_gradient<true>(tile, rounded);
  }
  // dK, after dV.
  template <class Rounded>
  CUTE_DEVICE void send_dk(uint32_t tile, Rounded& rounded) const {
    send_gradient<false>(tile, rounded);
    storage.pipeline_work.consumer_release({tile});
  }
  // After this wait dV and dK of the tile have been stored.
  CUTE_DEVICE void wait_sent(uint32_t tile) const { pipeline_out().producer_acquire({2 * tile + 2}); }

  // Sends both, and waits until they have been stored.
  template <class Keys, class Values>
  CUTE_DEVICE void send_gradients(uint32_t tile, uint32_t steps, Keys& tKrdK, Values& tVrdV) const {
    scale_gradients(tKrdK, tVrdV);
    if (const WorkOf<C>& work = storage.work[tile % 2]; work.split_tile >= 0) {
      store_split<C, false>(p, tKrdK, work, thread);
      store_split<C, true>(p, tVrdV, work, thread);
      storage.pipeline_work.consumer_release({tile});
      return;
    }
    Tensor tVrV = converted<Element>(tVrdV);  // (MMA,1,1)
    Tensor tKrK = converted<Element>(tKrdK);  // (MMA,1,1)
    send_dv(tile, steps, tVrV);
    send_dk(tile, tKrK);
    wait_sent(tile);
  }

  // Zeros for a key tile that no query sees.
  template <class Keys, class Values>
  CUTE_DEVICE void send_zeros(uint32_t tile, uint32_t steps, Keys& tKrdK, Values& tVrdV) const {
    storage.pipeline_k.consumer_wait({tile});
    storage.pipeline_k.consumer_release({tile});
    storage.pipeline_v.consumer_wait({tile});
    storage.pipeline_v.consumer_release({tile});
    clear(tKrdK);
    clear(tVrdV);
    send_gradients(tile, steps + 1, tKrdK, tVrdV);  // after the last dQ, too, which has been sent
  }

 private:
  template <bool kValues, class Rounded>
  CUTE_DEVICE void send_gradient(uint32_t tile, Rounded& rounded) const {
    const PipelineState<1> at_out{2 * tile + !kValues};
    // After this wait the previous gradient has been stored.
    pipeline_out().producer_acquire(at_out);
    write_gradient<kValues ? C.head_dim_v : C.head_dim>(reinterpret_cast<Element*>(storage.dq[group]), rounded,
                                                        opaque(thread) % 128);
    pipeline_out().producer_commit(at_out);
  }
};

// The kinds of steps of a key tile.
enum class StepKind {
  Alone,  // first step, nothing left of the previous tile
  Next,  // first step, which also finishes the previous tile
  Inside,
};

// A consumer warpgroup: gradients of 64 keys of each key tile. A warp that issues wgmma stalls almost until it ends, so
// the work on scores hides under the other warpgroup's products: the two run half a step apart, and take each other's
// dS one step late. A tile's last dQ, dV and dK go out during the next tile's first step, so products never pause.
template <KernelConfig C>
CUTE_DEVICE void consume(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  const BwdParams& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;
  typename T::template MmaScores<C.head_dim> mma_s;
  typename T::template MmaScores<C.head_dim_v> mma_dp;
  typename T::template MmaKeys<C.head_dim> mma_dk;
  typename T::template MmaKeys<C.head_dim_v> mma_dv;
  typename T::MmaQ mma_dq;
  auto tSsK = operand_a<T>(mma_s, group, storage.k, typename T::LayoutK{});
  auto tSsQ = operand_b<T>(mma_s, group, storage.q, typename T::LayoutQ{});
  auto tSsV = operand_a<T>(mma_dp, group, storage.v, typename T::LayoutV{});
  auto tSsdO = operand_b<T>(mma_dp, group, storage.dout, typename T::LayoutDout{});
  auto tVsdO = operand_b<T>(mma_dv, group, storage.dout, typename T::LayoutDoutT{});
  auto tKsQ = operand_b<T>(mma_dk, group, storage.q, typename T::LayoutQt{});
  const int part_of_dq = T::kAlternatesDq ? 0 : group;
  auto tQsdS = operand_a<T>(mma_dq, part_of_dq, storage.ds, typename T::LayoutDs{});
  auto tQsK = operand_b<T>(mma_dq, part_of_dq, storage.k, typename T::LayoutKt{});
  Tensor tSrS = partition_fragment_C(mma_s, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tSrdP = partition_fragment_C(mma_dp, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tKrdK = partition_fragment_C(mma_dk, Shape<Int<C.block_n>, Int<C.head_dim>>{});  // (MMA,1,1)
  Tensor tVrdV = partition_fragment_C(mma_dv, Shape<Int<C.block_n>, Int<C.head_dim_v>>{});  // (MMA,1,1)
  const GradientSender<C> sender{p, storage, thread, group};
  PipelineState<C.stages> at;  // a step, over all tiles of this CTA
  uint32_t tile = 0;  // of keys, of this CTA

  // Ping-pong: a warpgroup issues from dK of one step to dP of the next. Meanwhile the other one computes dS and the
  // products that need it.
  static_assert(T::kGroups == 2);
  constexpr int kBoth = 2 * 128;
  bool holds_ping_pong = false;  // across the end of a tile
  // After this barrier the other warpgroup has issued its products.
  auto ping_pong_wait = [&] { cutlass::arch::NamedBarrier::sync(kBoth, T::kPingPongBarrier + group); };
  auto ping_pong_arrive = [&] { cutlass::arch::NamedBarrier::arrive(kBoth, T::kPingPongBarrier + 1 - group); };
  if (group == 1) ping_pong_arrive();  // group 0 begins

  // dQ of a step, from dS of both warpgroups.
  auto start_dq = [&](const PipelineState<2>& at, uint32_t tile, bool ds_is_full, auto& tQrdQ) {
    storage.pipeline_ds.consumer_wait(at, ds_is_full);
    start_product<GMMA::ScaleOut::Zero>(mma_dq, tQsdS(at.stage()), tQsK(tile % 2), tQrdQ);
  };
  // Score rules need the registers that early barrier tests and an unfinished tile would take.
  constexpr bool kTestsBarriersEarly = !C.rich(), kOverlapsEpilogue = !C.rich();
  bool q_is_full = false;
  // One step of a tile; returns whether it was the last. `has_dq`: of the step before.
  auto step_with = [&](auto place, auto has_dq) __attribute__((always_inline)) {
    constexpr bool kFirst = place != StepKind::Inside, kHasBefore = place != StepKind::Alone;
    constexpr bool kHasDq = decltype(has_dq)::value;
    constexpr bool kFinishes = place == StepKind::Next;
    constexpr auto kSum = kFirst ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    const WorkOf<C>& work = storage.work[tile % 2];
    const int stage = at.stage();
    const PipelineState<2> at_ds{at.count}, before{at.count - 1};
    if constexpr (kFinishes) sender.scale_gradients(tKrdK, tVrdV);
    Tensor tVrV = converted<Element>(tVrdV);  // (MMA,1,1), of the tile before
    Tensor tKrK = converted<Element>(tKrdK);  // (MMA,1,1)
    if constexpr (kFirst) storage.pipeline_k.consumer_wait({tile});
    storage.pipeline_q.consumer_wait(at, q_is_full);
    if (kFirst && !holds_ping_pong) ping_pong_wait();
    const bool dout_is_full = kTestsBarriersEarly && storage.pipeline_dout.consumer_test_wait(at);
    start_product<GMMA::ScaleOut::Zero>(mma_s, tSsK(tile % 2), tSsQ(stage), tSrS);
    if constexpr (kFirst) storage.pipeline_v.consumer_wait({tile});
    storage.pipeline_dout.consumer_wait(at, dout_is_full);
    start_product<GMMA::ScaleOut::Zero>(mma_dp, tSsV(0), tSsdO(stage), tSrdP);
    ping_pong_arrive();
    if constexpr (kFinishes) sender.send_dv(tile - 1, at.count, tVrV);
    const bool ds_is_empty = kTestsBarriersEarly && storage.pipeline_ds.producer_test_acquire(at_ds);
    const bool ds_is_full = kTestsBarriersEarly && kHasDq && storage.pipeline_ds.consumer_test_wait(before);
    const StepOf<C>& step = storage.steps[at.count % T::kSteps];
    [[maybe_unused]] auto pairs_of_step = [&] {
      if constexpr (C.walks_lists()) {
        return WarpPairs<C.block_m>(p.fwd.lists, opaque(thread) / 32 * 16, [&](int i) { return step.query(i); });
      }
    };
    constexpr bool kReadsListsEarly = C.walks_lists() && !C.rich();  // under products; rules need the registers
    [[maybe_unused]] const auto pairs = [&] {
      if constexpr (kReadsListsEarly) {
        WarpPairs<C.block_m> pairs;
        if (!step.full) pairs = pairs_of_step();
        return pairs;
      } else {
        return pairs_of_step;
      }
    }();
    wait_products<T::kManyQueries ? 1 : 0>(tSrS);
    if constexpr (!T::kManyQueries) warpgroup_fence_operand(tSrdP);
    auto await_dp = [&] {
      if constexpr (T::kManyQueries) wait_products<0>(tSrdP);
    };
    const ScoreGradients<C, WarpgroupCoords> gradients(p.fwd, work.seq, work.tile.batch, work.tile.row,
                                                       WarpgroupCoords(opaque(thread)));
    gradients(rows_of(tSrS), rows_of(tSrdP), storage.lse_log2[stage], storage.row_dot[stage], step.head,
              step.first_query, step.full, await_dp);
    if constexpr (C.walks_lists()) {
      if (!step.full) {
        if constexpr (kReadsListsEarly) {
          pairs.template hide<WarpgroupCoords>(rows_of(tSrS), rows_of(tSrdP));
        } else {
          pairs().template hide<WarpgroupCoords>(rows_of(tSrS), rows_of(tSrdP));
        }
      }
    }
    if (step.last) storage.pipeline_v.consumer_release({tile});
    Tensor tSrP = converted<Element>(tSrS);  // (MMA,1,1)
    auto start_dv = [&] { start_product<kSum>(mma_dv, as_register_operand(tSrP), tVsdO(stage), tVrdV); };
    if constexpr (T::kManyQueries) start_dv();
    Tensor tSrdS = converted<Element>(tSrdP);  // (MMA,1,1)
    // After this wait no warpgroup still reads dS of two steps before.
    storage.pipeline_ds.producer_acquire(at_ds, ds_is_empty);
    DsStore<C>(opaque(thread)).store(storage.ds[at_ds.stage()], tSrdS);
    if constexpr (!T::kManyQueries) start_dv();
    cutlass::arch::fence_view_async_shared();
    storage.pipeline_ds.producer_commit(at_ds);
    Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
    if constexpr (kHasDq) start_dq(before, tile - kFinishes, ds_is_full, tQrdQ);
    ping_pong_wait();
    if constexpr (kFinishes) sender.send_dk(tile - 1, tKrK);
    const bool room =
        kTestsBarriersEarly && kHasDq && sender.pipeline_dq().producer_test_acquire(sender.room_for_dq(before.count));
    start_product<kSum>(mma_dk, as_register_operand(tSrdS), tKsQ(stage), tKrdK);
    wait_products<1>(tVrdV);
    storage.pipeline_dout.consumer_release(at);
    if constexpr (kHasDq) warpgroup_fence_operand(tQrdQ);
    if constexpr (kFinishes) {
      storage.pipeline_k.consumer_release({tile - 1});
      sender.wait_sent(tile - 1);
    }
    if constexpr (kHasDq) sender.send_dq(before, room, tQrdQ);
    q_is_full = kTestsBarriersEarly && storage.pipeline_q.consumer_test_wait({at.count + 1});
    const bool is_last = step.last;
    wait_products<0>(tKrdK);
    storage.pipeline_q.consumer_release(at);
    at.advance();
    return is_last;
  };
  auto mainloop_step = [&](auto place) __attribute__((always_inline)) {
    if constexpr (place == StepKind::Alone) {
      return step_with(place, false_type{});
    } else if constexpr (!T::kAlternatesDq) {
      return step_with(place, true_type{});
    } else {
      return sender.has_dq(at.count - 1) ? step_with(place, true_type{}) : step_with(place, false_type{});
    }
  };
  // Finishes the previous tile on its own.
  auto finish = [&] {
    if (holds_ping_pong) ping_pong_arrive();
    holds_ping_pong = false;
    Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
    const bool has_dq = sender.has_dq(at.count - 1);
    if (has_dq) {
      start_dq({at.count - 1}, tile - 1, false, tQrdQ);
      wait_products<0>(tQrdQ);
    }
    storage.pipeline_k.consumer_release({tile - 1});
    sender.send_gradients(tile - 1, at.count, tKrdK, tVrdV);
    if (has_dq) sender.send_dq({at.count - 1}, false, tQrdQ);
  };
  for (;; ++tile) {
    storage.pipeline_work.consumer_wait({tile});
    const WorkOf<C>& work = storage.work[tile % 2];
    const bool ends = work.tile.row < 0, is_empty = ends || work.queries.empty();
    const bool overlaps_epilogue =
        kOverlapsEpilogue && work.has_unfinished && !is_empty && storage.work[(tile - 1) % 2].split_tile < 0;
    if (work.has_unfinished && !overlaps_epilogue) finish();
    if (ends) return;
    if (is_empty) {  // no query sees these keys
      sender.send_zeros(tile, at.count, tKrdK, tVrdV);
      continue;
    }
    bool is_last = false;
    if (overlaps_epilogue) {
      if constexpr (kOverlapsEpilogue) is_last = mainloop_step(cute::C<StepKind::Next>{});
    } else {
      is_last = mainloop_step(cute::C<StepKind::Alone>{});
    }
    if constexpr (C.walks_lists()) holds_ping_pong = !is_last;
    CUTE_NO_UNROLL
    while (!is_last) is_last = mainloop_step(cute::C<StepKind::Inside>{});
    // The next tile's keys arrive after both warpgroups' first step of this one. A warpgroup without a second step must
    // pass the ping-pong on, or the other could not start.
    if constexpr (!C.walks_lists()) holds_ping_pong = work.steps() > 1;
    if (!holds_ping_pong) ping_pong_arrive();
  }
}

}  // namespace flash_cute::sm90
