// The threads of Hopper's backward that load tiles by TMA, and those that add dQ to global memory.
#pragma once

#include "kernels/common/overlap.h"
#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// One of two threads that load tiles by TMA: K, and Q and the LSE of each step; or V, and dO and its row sums. Rows in
// front of those that see anything, or are seen, arrive as zeros, as those behind the sequence's end do: whatever they
// hold, it meets no product.
template <KernelConfig C, bool kValues>
CUTE_DEVICE void produce(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage) {
  const BackwardWork& work = storage.work;
  constexpr int kDims = kValues ? C.head_dim_v : C.head_dim;
  const BwdProblem& p = params.p;
  auto& ring = pick<kValues>(storage.ring_q, storage.ring_dout);
  auto& landed = storage.landed[kValues];
  uint32_t phase = 0;
  // Brings kRows rows from `row` on to the barrier that expect(bytes) gives.
  auto load = [&](auto rows, const RaggedMap& map, auto* to, TMA::CacheHintSm90 hint, const SeqSpan& span, int first,
                  int row, int head, auto expect) {
    constexpr int kRows = decltype(rows)::value, kBytes = kRows * kDims * sizeof(*to);
    const bool clears = row < first;
    if (clears) landed.arrive_and_expect_tx(kBytes);
    uint64_t* const barrier = clears ? reinterpret_cast<uint64_t*>(&landed) : expect(kBytes);
    map.template load<kRows, kDims>(to, barrier, hint, span, row, head, work.tile.batch);
    if (!clears) return;
    landed.wait(phase);
    phase ^= 1;
    constexpr int kAtom = atom_columns(kDims), kVector = 16 / sizeof(*to);
    for (int col = 0; col < kDims; col += kAtom) {
      for (int i = 0; i < min(first - row, kRows) * kAtom; i += kVector) {
        *reinterpret_cast<uint4*>(to + col * kRows + i) = uint4{};
      }
    }
    cutlass::arch::fence_view_async_shared();
    expect(0);
  };
  if (!work.range.empty()) {
    const RowSpan keys = visible_keys(work.seq, p.fwd.band, 0, work.seq.q.length);
    load(Int<C.block_n>{}, kValues ? params.v : params.k, pick<kValues>(storage.k, storage.v),
         TMA::CacheHintSm90::EVICT_FIRST, {work.seq.k.offset, keys.last}, keys.first, work.tile.row, work.tile.head,
         [&](uint32_t bytes) { return pick<kValues>(storage.ring_k, storage.ring_v).expect(Cursor<1>{}, bytes); });
  }
  const int first_query = seeing_queries(work.seq, p.fwd.band, 0, work.seq.k.length).first;
  // After this wait the LSE and row sums of all queries are there, and sums of dQ are 0.
  wait_for_kernel_before();
  Cursor<C.stages> at;
  for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), at.advance()) {
    const int head = work.first_head + step.head, row = step.m * C.block_m, stage = at.stage();
    ring.wait_empty(at);
    if constexpr (!kValues) storage.steps[stage] = {row, head, work.range.full(step.m)};
    load(Int<C.block_m>{}, kValues ? params.dout : params.q, pick<kValues>(storage.q, storage.dout)[stage],
         TMA::CacheHintSm90::EVICT_LAST, work.seq.q, first_query, row, head, [&](uint32_t bytes) {
           constexpr uint32_t kStatistic = C.block_m * sizeof(float);
           uint64_t* const full = ring.expect(at, bytes + kStatistic);
           const int64_t padded_row = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + row;
           SM90_BULK_COPY_G2S::copy((kValues ? p.row_dot : p.lse_log2).ptr + padded_row, full,
                                    pick<kValues>(storage.lse_log2, storage.row_dot)[stage], kStatistic);
           return full;
         });
  }
}

// A step's turn to add to dQ, or to one place of its columns, where sums are deterministic: key tiles add in the order in
// which their CTAs were launched, so that one waits for earlier CTAs alone.
template <KernelConfig C>
class Turn {
 public:
  CUTE_DEVICE Turn(const BwdProblem& p, const BackwardWork& work, QueryStep step, int place = 0) {
    const int head = work.first_head + step.head, row = step.m * C.block_m;
    padded_row_ = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + row;
    counter_ = p.turns + padded_row_ / C.block_m * C.warps + place;
    const TileRange keys = key_tiles(work.seq, p.fwd.band, row, C.block_m, C.block_n * C.cluster);
    before_ = work.tile.late_first ? keys.end - 1 - work.tile.index : work.tile.index - keys.begin;
  }

  // Whether all tiles before have added.
  CUTE_DEVICE bool has_come() const {
    int done;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter_) : "memory");
    return done >= before_;
  }

  // To be called when the additions are complete for this thread. The release makes them so for all: it costs a
  // microsecond, and without it tiles have been seen to add in another order.
  CUTE_DEVICE void end() const { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter_) : "memory"); }

  // The query tile's first row, among the padded rows of all heads.
  CUTE_DEVICE int64_t padded_row() const { return padded_row_; }

 private:
  int64_t padded_row_;
  int* counter_;
  int before_;
};

// Starts to add a warpgroup's sums of dQ to global memory; they have left shared memory when it returns.
template <KernelConfig C>
CUTE_DEVICE void add_sums(const BwdProblem& p, typename BackwardTraits<C>::Storage& storage, int64_t padded_row,
                          int group, const Cursor<2>& at) {
  using T = BackwardTraits<C>;
  storage.ring_dq[group].wait(at);
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   T::dq_sums(p, padded_row, group)),
               "r"(cast_smem_ptr_to_uint(storage.dq[group])), "r"(T::kDqSums * int(sizeof(float)))
               : "memory");
  tma_store_arrive();
  tma_store_wait<0>();
  storage.ring_dq[group].empty[at.stage()].arrive();
}

// One thread for each warpgroup, that adds its sums of dQ.
template <KernelConfig C>
CUTE_DEVICE void add_dq(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage, int group) {
  const BackwardWork& work = storage.work;
  Cursor<2> at;
  for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), at.advance()) {
    const int head = work.first_head + step.head;
    const int64_t padded_row = first_padded_row(params.p, C.block_m, work.tile.batch, head, work.seq.q.offset);
    add_sums<C>(params.p, storage, padded_row + step.m * C.block_m, group, at);
  }
}

// One of two threads that add all warpgroups' sums, of every second step, in turns: while one is at the end of its turn,
// the other begins with the next.
template <KernelConfig C>
CUTE_DEVICE void add_dq_in_turns(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage,
                                 uint32_t thread) {
  const BackwardWork& work = storage.work;
  // After this wait no turn has been taken but those of this kernel.
  wait_for_kernel_before();
  Cursor<2> at;
  for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), at.advance()) {
    if (at.stage() != thread) continue;
    const Turn<C> turn(params.p, work, step);
    while (!turn.has_come()) continue;
    CUTE_NO_UNROLL
    for (int group = 0; group < BackwardTraits<C>::kGroups; ++group) {
      add_sums<C>(params.p, storage, turn.padded_row(), group, at);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // they are in global memory
    turn.end();
  }
}

}  // namespace flash_cute::sm90
