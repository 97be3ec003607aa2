// The producer threads of Hopper's backward: two load tiles by TMA, two store dQ, dK and dV.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/sm90/backward_strips.h"

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
// first visible one arrive as zeros, like rows past the end: whatever they hold meets no product. For strips it is a warp,
// whose lanes load one strip each.
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
    if (!leads<C>()) {
    } else if (work.queries.empty()) {
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
    if constexpr (kTakesStrips<C>) {
      if constexpr (kValues) {
        load_written_steps(work, first_query);
      } else {
        if (C.rich() || p.strips == nullptr) {
          write_tiles(work, first_query);
        } else {
          write_strips(work, first_query);
        }
        if (at_.count < written_) load_step(work, first_query, storage_.steps[at_.count % T::kSteps]);
      }
    } else {
      for (QueryStep step = work.first_step(), next; step.head < work.heads; step = next, at_.advance()) {
        const int head = work.first_head + step.head, row = work.queries.first_query(step.m);
        next = work.after(step);
        if constexpr (!kValues) throttle_.step(at_.count);
        pipeline().producer_acquire(at_);
        if constexpr (!kValues) {
          storage_.steps[at_.stage()] = {row, head, work.queries.full(step.m), next.head >= work.heads};
        }
        load_queries(work, first_query, row, head);
      }
    }
  }

 private:
  CUTE_DEVICE auto& pipeline() const { return pick<kValues>(storage_.pipeline_q, storage_.pipeline_dout); }

  CUTE_DEVICE void load_queries(const WorkOf<C>& work, int first_query, int row, int head) {
    load(Int<C.block_m>{}, kValues ? params_.dout : params_.q, pick<kValues>(storage_.q, storage_.dout)[at_.stage()],
         TMA::CacheHintSm90::EVICT_LAST, work.seq.q, first_query, row, head, work.tile.batch, [&](uint32_t bytes) {
           constexpr uint32_t kStatistic = C.block_m * sizeof(float);
           uint64_t* const full = pipeline().producer_expect_tx(at_, bytes + kStatistic);
           const int64_t padded_row = first_padded_row(params_.p, C.block_m, work.tile.batch, head, work.seq.q.offset);
           load_statistic<C.block_m>(padded_row + row, 0, full);
           return full;
         });
  }

  // LSE or row sums of kRows rows, to those of the step from `place` on.
  template <int kRows>
  CUTE_DEVICE void load_statistic(int64_t padded_row, int place, uint64_t* full) const {
    const BwdParams& p = params_.p;
    SM90_BULK_COPY_G2S::copy((kValues ? p.row_dot : p.lse_log2).ptr + padded_row, full,
                             pick<kValues>(storage_.lse_log2, storage_.row_dot)[at_.stage()] + place,
                             kRows * sizeof(float));
  }

  // Steps of tiles of queries, in the order of the work.
  CUTE_DEVICE void write_tiles(const WorkOf<C>& work, int first_query) {
    for (QueryStep at = work.first_step(), next; at.head < work.heads; at = next) {
      next = work.after(at);
      const int row = work.queries.first_query(at.m), lane = threadIdx.x % 32;
      write(work, first_query, {row, work.first_head + at.head, work.queries.full(at.m), next.head >= work.heads}, at.m,
            true, {row + lane * kStripRows, work.queries.code(at.m)});
    }
  }

  // Steps of strips, each with all heads.
  CUTE_DEVICE void write_strips(const WorkOf<C>& work, int first_query) {
    for (StripWalk<C> walk(params_.p, work); !walk.ended();) {
      const Strip strip = walk.take();
      constexpr uint32_t kLanes = (1u << StepOf<C>::kStrips) - 1;
      auto all = [&](bool of_lane) { return (__ballot_sync(~0u, of_lane) & kLanes) == kLanes; };
      const int row = __shfl_sync(~0u, strip.row, 0);
      const bool together = row % C.block_m == 0 && all(strip.row == row + int(threadIdx.x % 32) * kStripRows);
      const bool full = all(strip.code.shows(TileCode::kWhole)) && work.queries.shows_all_keys();
      for (int head = 0; head < work.heads; ++head) {
        write(work, first_query, {row, work.first_head + head, full, walk.ended() && head + 1 == work.heads}, 0,
              together, strip);
      }
    }
  }

  // Describes a step, whose strips are in the first lanes, to the other roles, then loads for the step before. No role is
  // six steps behind, as buffers of the second step before are acquired: the description that is replaced has been read.
  CUTE_DEVICE void write(const WorkOf<C>& work, int first_query, const BackwardStep& of_head, int m, bool together,
                         const Strip& of_lane) {
    const int place = written_ % T::kSteps, lane = threadIdx.x % 32;
    StepOf<C>& step = storage_.steps[place];
    if (lane < step.kStrips) step.strips[lane] = of_lane;
    if (leads<C>()) {
      static_cast<BackwardStep&>(step) = of_head;
      step.m = m;
      step.together = together;
    }
    // After this barrier the warp has written the step.
    __syncwarp();
    compiler_fence();
    if (leads<C>()) storage_.written[place].arrive();
    ++written_;
    if (at_.count + 1 < written_) load_step(work, first_query, storage_.steps[at_.count % T::kSteps]);
  }

  CUTE_DEVICE void load_written_steps(const WorkOf<C>& work, int first_query) {
    for (bool last = work.queries.empty(); !last;) {
      const StepOf<C>& step = written_step<C>(storage_, at_.count);
      last = step.last;
      load_step(work, first_query, step);
    }
  }

  CUTE_DEVICE void load_step(const WorkOf<C>& work, int first_query, const StepOf<C>& step) {
    // After this wait all have read the buffer.
    pipeline().producer_acquire(at_);
    if (!step.together) {
      load_strips(work, step);
    } else if (leads<C>()) {
      load_queries(work, first_query, step.first_query, step.head);
    }
    at_.advance();
  }

  // What does not exist is loaded, too, as the first strip: it has no weight, but must be no NaN.
  CUTE_DEVICE void load_strips(const WorkOf<C>& work, const StepOf<C>& step) const {
    constexpr int kAtom = atom_columns(kDims, sizeof(typename T::Element));
    constexpr uint32_t kBytes = C.block_m * (kDims * sizeof(typename T::Element) + sizeof(float));
    const int lane = threadIdx.x % 32;
    uint64_t* const full = reinterpret_cast<uint64_t*>(&pipeline().full[at_.stage()]);
    if (leads<C>()) pipeline().producer_expect_tx(at_, kBytes);
    // After this barrier the bytes are expected.
    __syncwarp();
    if (lane >= step.kStrips) return;
    const int place = lane * kStripRows, row = step.strips[lane].row < 0 ? step.first_query : step.strips[lane].row;
    auto* const to = pick<kValues>(storage_.q, storage_.dout)[at_.stage()] + place * kAtom;
    CUTE_UNROLL
    for (int col = 0; col < kDims; col += kAtom) {
      (kValues ? params_.dout_strips : params_.q_strips)
          .load_atom(to + col * C.block_m, full, TMA::CacheHintSm90::EVICT_LAST, work.seq.q, row, col, step.head,
                     work.tile.batch);
    }
    const int64_t first = first_padded_row(params_.p, C.block_m, work.tile.batch, step.head, work.seq.q.offset);
    load_statistic<kStripRows>(first + row, place, full);
  }

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
  uint32_t written_ = 0;  // steps that are described
  uint32_t phase_ = 0;  // of landed
  L2Throttle throttle_;
};

// The thread, or warp, that loads K and Q also fetches key tiles and describes them to the other roles.
template <KernelConfig C>
CUTE_DEVICE void produce_keys_and_queries(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage) {
  Loader<C, false> load(params, storage);
  PipelineState<2> at;
  bool has_unfinished = false;
  auto publish = [&](WorkOf<C>& work) {
    if (leads<C>()) work.has_unfinished = has_unfinished;
    has_unfinished = !work.queries.empty();
    if (leads<C>()) storage.pipeline_work.producer_expect_tx(at, 0);
    at.advance();
  };
  const TileCounter& tile_counter = params.tile_counter;
  // As late as the counter's latency allows: the CTA that finishes first should get the next tile.
  auto take = [&] {
    // After this wait the counter is this kernel's alone: a launch from another host thread may share it.
    wait_on_dependent_grids();
    const int number = leads<C>() ? tile_counter.fetch() : 0;
    return kTakesStrips<C> ? __shfl_sync(~0u, number, 0) : number;
  };
  for (int number = tile_counter.first_tiles > 0 ? int(blockIdx.x) : take(); number < tile_counter.tiles;
       number = take()) {
    storage.pipeline_work.producer_acquire(at);
    if (leads<C>()) new (&storage.work[at.stage()]) WorkOf<C>(params.p, params.splits, C.block_n, number);
    if constexpr (kTakesStrips<C>) __syncwarp();  // after this barrier the work is described
    auto& work = storage.work[at.stage()];
    if (work.tile.row >= work.seq.k.length) continue;
    if constexpr (kTakesStrips<C>) drop_without_strips<C>(params.p, work);
    publish(work);
    load(work);
  }
  storage.pipeline_work.producer_acquire(at);
  WorkOf<C>& end = storage.work[at.stage()];
  if (leads<C>()) end.tile.row = -1;
  publish(end);
  wait_on_dependent_grids();  // no CTA may exit earlier: the next kernel waits for this one only
  L2Throttle(params).finish();
  launch_dependent_grids();
}

// Runs do_work(work, number of tiles before) for each tile of keys of the CTA, in a thread, or in all of a warp.
template <bool kWarp = false, class Storage, class Do>
CUTE_DEVICE void for_each_work(Storage& storage, const Do& do_work) {
  for (PipelineState<2> at;; at.advance()) {
    storage.pipeline_work.consumer_wait(at);
    const auto& work = storage.work[at.stage()];
    if (work.tile.row < 0) return;
    do_work(work, at.count);
    if constexpr (kWarp) __syncwarp();  // after this barrier the warp has read the work
    if (!kWarp || threadIdx.x % 32 == 0) storage.pipeline_work.empty[at.stage()].arrive();
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
    auto store = [&](auto is_values) {
      constexpr bool kValues = decltype(is_values)::value;
      if (whole && (!waits || number_ == 0)) store_gradient<kValues>(work);
    };
    auto add_in_turn = [&](const auto& add) {
      if (!waits || at_.stage() == number_) add();
      at_.advance();
    };
    if constexpr (kTakesStrips<C>) {
      bool last = work.queries.empty();
      auto store_both = [&] {
        store(true_type{});
        store(false_type{});
      };
      if (last) store_both();
      while (!last) {
        const StepOf<C>& step = written_step<C>(storage_, at_.count);
        last = step.last;
        if (last) store_both();
        add_in_turn([&] {
          if (C.rich() || params_.p.strips == nullptr) {
            add_sums(work, {step.head - work.first_head, step.m});
          } else {
            add_strips(work, step);
          }
        });
      }
    } else {
      QueryStep step = work.first_step();
      auto add = [&] {
        add_in_turn([&] { add_sums(work, step); });
        step = work.after(step);
      };
      const uint32_t steps = work.steps();
      for (uint32_t i = 1; i < steps; ++i) add();
      store(true_type{});
      store(false_type{});
      if (steps > 0) add();
    }
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
        const float* const from = storage_.dq[group];
        if (is_first) {
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                       "r"(cast_smem_ptr_to_uint(from)), "r"(uint32_t(T::kDqSums * sizeof(float)))
                       : "memory");
        } else {
          add_to_sums(to, from, T::kDqSums);
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

  // Adds the sums of each strip that exists.
  CUTE_DEVICE void add_strips(const WorkOf<C>& work, const StepOf<C>& step) const {
    const BwdParams& p = params_.p;
    const int64_t first = first_padded_row(p, C.block_m, work.tile.batch, step.head, work.seq.q.offset);
    send(storage_.pipeline_dq, at_, [&](int group) {
      if (step.together)
        return add_to_sums(T::dq_sums(p, first + step.first_query, group), storage_.dq[group], T::kDqSums);
      CUTE_NO_UNROLL
      for (int i = 0; i < step.kStrips && step.strips[i].row >= 0; ++i) {
        const int row = step.strips[i].row, place = row % C.block_m / kStripRows;
        float* const to = T::dq_sums(p, first + row - row % C.block_m, group) + place * T::kStripSums;
        add_to_sums(to, storage_.dq[group] + i * T::kStripSums, T::kStripSums);
      }
    });
  }

  CUTE_DEVICE static void add_to_sums(float* to, const float* from, int count) {
    const uint32_t bytes = count * sizeof(float);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(cast_smem_ptr_to_uint(from)), "r"(bytes)
                 : "memory");
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
