// The producer threads of Hopper's backward: two load tiles by TMA, two store dQ, dK and dV.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Keeps CTAs near each other on long walks through the queries, so that what one loads into L2 is still there for the
// others; unthrottled, CTAs drift apart until each reads from memory. A CTA that is ahead of the mean step waits for a
// bounded time: the others may not be resident. After kPatience futile waits it stops waiting.
class L2Throttle {
  static constexpr uint32_t kInterval = 16, kAhead = 16;  // steps
  static constexpr uint32_t kEnd = 1 << 23;  // steps that raise the mean so far that no CTA waits any more
  static constexpr int kPolls = 8;  // of a wait, about 1 us each
  static constexpr int kPatience = 16;  // futile waits in a row

 public:
  CUTE_DEVICE explicit L2Throttle(const BackwardParams& params)
      : all_steps_(params.p.l2_throttle ? params.p.dq_semaphores : nullptr) {}

  // Called after each step of this CTA.
  CUTE_DEVICE void step(uint32_t steps) {
    if (all_steps_ == nullptr || steps % kInterval != 0 || steps == 0) return;
    count(kInterval);
    if (futile_ == kPatience) return;
    ++futile_;
    CUTE_NO_UNROLL
    for (int i = 0; i < kPolls; ++i) {
      uint32_t all;
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(all) : "l"(all_steps_) : "memory");
      if (static_cast<int>(steps * gridDim.x - all) > static_cast<int>(kAhead * gridDim.x)) continue;
      futile_ = 0;
      return;
    }
  }

  // Called by a CTA that has no more tiles.
  CUTE_DEVICE void finish() const {
    if (all_steps_ != nullptr) count(kEnd);
  }

 private:
  CUTE_DEVICE void count(uint32_t steps) const {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(all_steps_), "r"(steps) : "memory");
  }

  int* all_steps_;  // of all CTAs; null: no throttle
  int futile_ = 0;
};

// One of two threads that load by TMA: K, then Q and LSE of each step; or V, then dO and its row sums. Rows before the
// first visible one arrive as zeros, like rows past the end: whatever they hold meets no product.
template <KernelConfig C, bool kValues>
class Loader {
  using T = BackwardTraits<C>;
  using Storage = typename T::Storage;
  static constexpr int kDims = kValues ? C.head_dim_v : C.head_dim, kStagesOfKeys = kValues ? 1 : 2;

 public:
  CUTE_DEVICE Loader(const BackwardParams& params, Storage& storage)
      : params_(params), storage_(storage), throttle_(params) {}

  CUTE_DEVICE void operator()(const WorkOf<C>& work) {
    const BwdParams& p = params_.p;
    auto& pipeline_keys = pick<kValues>(storage_.pipeline_k, storage_.pipeline_v);
    pipeline_keys.producer_acquire(at_keys_);
    if (work.queries.empty()) {
      pipeline_keys.producer_expect_tx(at_keys_, 0);
    } else {
      const RowSpan keys = visible_keys(work.seq, p.fwd.band, 0, work.seq.q.length);
      load(Int<C.block_n>{}, kValues ? params_.v : params_.k, pick<kValues>(storage_.k, storage_.v)[at_keys_.stage()],
           TMA::CacheHintSm90::EVICT_FIRST, {work.seq.k.offset, keys.last}, keys.first, work.tile.row, work.tile.head,
           work.tile.batch, [&](uint32_t bytes) { return pipeline_keys.producer_expect_tx(at_keys_, bytes); });
    }
    at_keys_.advance();
    const int first_query = seeing_queries(work.seq, p.fwd.band, 0, work.seq.k.length).first;
    // After this wait LSE and row sums of all queries are written, and dQ is zeroed if it starts from zeros.
    wait_on_dependent_grids();
    auto& pipeline = pick<kValues>(storage_.pipeline_q, storage_.pipeline_dout);
    for (QueryStep step = work.first_step(), next; step.head < work.heads; step = next, at_.advance()) {
      const int head = work.first_head + step.head, row = work.queries.first_query(step.m), stage = at_.stage();
      next = work.after(step);
      if constexpr (!kValues) throttle_.step(at_.count);
      pipeline.producer_acquire(at_);
      if constexpr (!kValues) {
        static_cast<BackwardStep&>(storage_.steps[stage]) = {row, head, work.queries.full(step.m),
                                                             next.head >= work.heads};
        if constexpr (C.walks_lists()) storage_.steps[stage].code = work.queries.code(step.m);
      }
      load(Int<C.block_m>{}, kValues ? params_.dout : params_.q, pick<kValues>(storage_.q, storage_.dout)[stage],
           TMA::CacheHintSm90::EVICT_LAST, work.seq.q, first_query, row, head, work.tile.batch, [&](uint32_t bytes) {
             constexpr uint32_t kStatistic = C.block_m * sizeof(float);
             uint64_t* const full = pipeline.producer_expect_tx(at_, bytes + kStatistic);
             const int64_t padded_row = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + row;
             SM90_BULK_COPY_G2S::copy((kValues ? p.row_dot : p.lse_log2).ptr + padded_row, full,
                                      pick<kValues>(storage_.lse_log2, storage_.row_dot)[stage], kStatistic);
             return full;
           });
    }
  }

 private:
  // Loads kRows rows from `row` on; expect(bytes) returns the barrier that counts them.
  template <int kRows, class Element, class Expect>
  CUTE_DEVICE void load(Int<kRows>, const RaggedMap& map, Element* to, TMA::CacheHintSm90 hint, const SeqSpan& span,
                        int first, int row, int head, int batch, const Expect& expect) {
    constexpr int kBytes = kRows * kDims * sizeof(Element);
    auto& landed = storage_.landed[kValues];
    const bool clears = row < first;
    if (clears) landed.arrive_and_expect_tx(kBytes);
    uint64_t* const barrier = clears ? reinterpret_cast<uint64_t*>(&landed) : expect(kBytes);
    map.template load<kRows, kDims>(to, barrier, hint, span, row, head, batch);
    if (!clears) return;
    landed.wait(phase_);
    compiler_fence();
    phase_ ^= 1;
    constexpr int kAtom = atom_columns(kDims, sizeof(Element)), kVector = 16 / sizeof(Element);
    for (int col = 0; col < kDims; col += kAtom) {
      for (int i = 0; i < min(first - row, kRows) * kAtom; i += kVector) {
        *reinterpret_cast<uint4*>(to + col * kRows + i) = uint4{};
      }
    }
    compiler_fence();
    cutlass::arch::fence_view_async_shared();
    expect(0);
  }

  const BackwardParams& params_;
  Storage& storage_;
  PipelineState<kStagesOfKeys> at_keys_;
  PipelineState<C.stages> at_;
  uint32_t phase_ = 0;  // of landed
  L2Throttle throttle_;
};

// The thread that loads K and Q also fetches key tiles and describes them to the other roles.
template <KernelConfig C>
CUTE_DEVICE void produce_keys_and_queries(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage) {
  Loader<C, false> load(params, storage);
  PipelineState<2> at;
  bool has_unfinished = false;
  auto publish = [&](WorkOf<C>& work) {
    work.has_unfinished = has_unfinished;
    has_unfinished = !work.queries.empty();
    storage.pipeline_work.producer_expect_tx(at, 0);
    at.advance();
  };
  const TileCounter& tile_counter = params.tile_counter;
  // As late as the counter's latency allows: the CTA that finishes first should get the next tile.
  auto take = [&] {
    // After this wait the counter is this kernel's alone: a launch from another host thread may share it.
    wait_on_dependent_grids();
    return tile_counter.fetch();
  };
  for (int number = tile_counter.first_tiles > 0 ? int(blockIdx.x) : take(); number < tile_counter.tiles;
       number = take()) {
    storage.pipeline_work.producer_acquire(at);
    auto& work = *new (&storage.work[at.stage()]) WorkOf<C>(params.p, params.splits, C.block_n, number);
    if (work.tile.row >= work.seq.k.length) continue;
    publish(work);
    load(work);
  }
  storage.pipeline_work.producer_acquire(at);
  WorkOf<C>& end = storage.work[at.stage()];
  end.tile.row = -1;
  publish(end);
  wait_on_dependent_grids();  // no CTA may exit earlier: the next kernel waits for this one only
  L2Throttle(params).finish();
  launch_dependent_grids();
}

// Runs do_work(work, number of tiles before) for each tile of keys of the CTA.
template <class Storage, class Do>
CUTE_DEVICE void for_each_work(Storage& storage, const Do& do_work) {
  for (PipelineState<2> at;; at.advance()) {
    storage.pipeline_work.consumer_wait(at);
    const auto& work = storage.work[at.stage()];
    if (work.tile.row < 0) return;
    do_work(work, at.count);
    storage.pipeline_work.empty[at.stage()].arrive();
  }
}

// The dQ semaphore of a query tile (or of one CTA's columns of it): key tiles add in the order of their numbers, so
// each waits only for tiles that a running CTA owns. The first tile stores instead of adding.
template <KernelConfig C>
class DqSemaphore {
 public:
  CUTE_DEVICE DqSemaphore(const BackwardParams& params, const WorkOf<C>& work, QueryStep step, int place = 0)
      : serialized_(params.p.dq_accumulate == DqAccumulate::Serialized) {
    const BwdParams& p = params.p;
    const int head = work.first_head + step.head, row = work.queries.first_query(step.m);
    padded_row_ = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + row;
    counter_ = p.dq_semaphores + padded_row_ / C.block_m * C.warps + place;
    before_ = work.queries.turn(step.m).rank(p.fwd, work.seq, work.tile);
  }

  // Whether this tile may add: all earlier ones have (Serialized), or the first one has stored (FirstStores).
  CUTE_DEVICE bool is_ready() const {
    if (is_first()) return true;
    int done;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter_) : "memory");
    return done >= (serialized_ ? before_ : min(before_, 1));
  }

  CUTE_DEVICE bool is_first() const { return before_ == 0; }

  // Whether other tiles wait for this one.
  CUTE_DEVICE bool is_awaited() const { return serialized_ || is_first(); }

  // Called when this thread's stores or adds are complete. The release publishes them to all: it costs about 1 us, and
  // without it tiles were seen to add in another order.
  CUTE_DEVICE void release() const {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter_) : "memory");
  }

  // The query tile's first row among the padded rows of all heads.
  CUTE_DEVICE int64_t padded_row() const { return padded_row_; }

 private:
  int64_t padded_row_;
  int* counter_;
  int before_;
  bool serialized_;
};

// One of two threads that store what the warpgroups wrote to shared memory: dQ, added to or starting the sums in global
// memory, and dV and dK of each key tile before its last dQ. Each serves one warpgroup. With semaphores each serves
// both warpgroups on every second step, so that one waits while the other stores; the first stores dV and dK of both.
template <KernelConfig C>
class Sender {
  using T = BackwardTraits<C>;
  using Storage = typename T::Storage;

 public:
  CUTE_DEVICE Sender(const BackwardParams& params, Storage& storage, uint32_t number)
      : params_(params), storage_(storage), number_(number) {}

  CUTE_DEVICE void operator()(const WorkOf<C>& work) {
    const bool waits = uses_semaphore(params_.p.dq_accumulate), whole = work.split_tile < 0;
    QueryStep step = work.first_step();
    auto add = [&] {
      if (!waits || at_.stage() == number_) add_sums(work, step);
      step = work.after(step);
      at_.advance();
    };
    auto store = [&](auto is_values) {
      constexpr bool kValues = decltype(is_values)::value;
      if (whole && (!waits || number_ == 0)) store_gradient<kValues>(work);
    };
    const uint32_t steps = work.steps();
    for (uint32_t i = 1; i < steps; ++i) add();
    store(true_type{});
    store(false_type{});
    if (steps > 0) add();
    ++tile_;
  }

 private:
  // Stores the buffers that this thread serves.
  template <int kStages, class SendOf>
  CUTE_DEVICE void send(Pipeline<kStages> (&pipelines)[T::kGroups], const PipelineState<kStages>& at,
                        const SendOf& send_of) const {
    const bool all = uses_semaphore(params_.p.dq_accumulate);
    CUTE_NO_UNROLL
    for (int group = all ? 0 : number_; group < (all ? T::kGroups : number_ + 1); ++group) {
      pipelines[group].consumer_wait(at);
      send_of(group);
      tma_store_arrive();
      // After this wait the TMA store has read the buffer.
      tma_store_wait<0>();
      pipelines[group].empty[at.stage()].arrive();
    }
  }

  CUTE_DEVICE void add_sums(const WorkOf<C>& work, QueryStep step) const {
    const BwdParams& p = params_.p;
    auto add = [&](int64_t padded_row, bool is_first = false) {
      send(storage_.pipeline_dq, at_, [&](int group) {
        float* const to = T::dq_sums(p, padded_row, group);
        const uint32_t from = cast_smem_ptr_to_uint(storage_.dq[group]), bytes = T::kDqSums * sizeof(float);
        if (is_first) {
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                       : "memory");
        } else {
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                       "r"(from), "r"(bytes)
                       : "memory");
        }
      });
    };
    if (!uses_semaphore(params_.p.dq_accumulate)) {
      const int head = work.first_head + step.head;
      add(first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + work.queries.first_query(step.m));
      return;
    }
    const DqSemaphore<C> semaphore(params_, work, step);
    while (!semaphore.is_ready()) continue;
    asm volatile("fence.proxy.async.global;" ::: "memory");  // orders the bulk reductions after the acquire
    add(semaphore.padded_row(), semaphore.is_first());
    if (!semaphore.is_awaited()) return;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // they are complete in global memory
    semaphore.release();
  }

  template <bool kValues>
  CUTE_DEVICE void store_gradient(const WorkOf<C>& work) const {
    send(storage_.pipeline_out, {2 * tile_ + !kValues}, [&](int group) {
      const int row = work.tile.row + group * 64;
      if (row >= work.seq.k.length) return;
      (kValues ? params_.dv : params_.dk)
          .template store<64, kValues ? C.head_dim_v : C.head_dim>(
              reinterpret_cast<const typename T::Element*>(storage_.dq[group]), work.seq.k, row, work.tile.head,
              work.tile.batch);
    });
  }

  const BackwardParams& params_;
  Storage& storage_;
  uint32_t number_, tile_ = 0;
  PipelineState<2> at_;
};

}  // namespace flash_cute::sm90
