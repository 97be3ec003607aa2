// The threads of Hopper's backward that store dQ, dK and dV.
#pragma once

#include "kernels/sm90/backward_strips.h"

namespace flash_cute::sm90 {

// The dQ semaphore of a query tile (or of one CTA's columns of it): key tiles add in the order of their numbers, so
// each waits only for tiles that a running CTA owns. The first tile stores instead of adding.
template <KernelConfig C>
class DqSemaphore {
 public:
  CUTE_DEVICE DqSemaphore(const BackwardParams& params, const WorkOf<C>& work, QueryStep step, int place = 0)
      : serialized_(params.p.dq_accumulate == DqAccumulate::Serialized),
        has_others_(adds_several_tiles<C>(params.p.fwd)) {
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
  CUTE_DEVICE bool is_awaited() const { return has_others_ && (serialized_ || is_first()); }

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
  bool serialized_, has_others_;
};

// One of two threads that store what the warpgroups wrote to shared memory: dQ, added to or starting the sums in global
// memory, and dV and dK of each key tile before its last dQ. Each serves one warpgroup. With semaphores each serves
// both warpgroups on every second step, so that one waits while the other stores; the first stores dV and dK of both.
// (Warpgroups that alternate in computing dQ are served by one thread each in any case.)
template <KernelConfig C>
class Sender {
  using T = BackwardTraits<C>;
  using Storage = typename T::Storage;

 public:
  CUTE_DEVICE Sender(const BackwardParams& params, Storage& storage, uint32_t number)
      : params_(params),
        storage_(storage),
        number_(number),
        serves_both_(!T::kAlternatesDq && uses_semaphore(params.p.dq_accumulate)) {}

  CUTE_DEVICE void operator()(const WorkOf<C>& work) {
    const bool whole = work.split_tile < 0;
    auto store = [&](auto is_values) {
      constexpr bool kValues = decltype(is_values)::value;
      if (whole && (!serves_both_ || number_ == 0)) store_gradient<kValues>(work);
    };
    auto add_in_turn = [&](const auto& add) {
      if (!(serves_both_ || T::kAlternatesDq) || at_.stage() == number_) add();
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
    CUTE_NO_UNROLL
    for (int group = serves_both_ ? 0 : number_; group < (serves_both_ ? T::kGroups : number_ + 1); ++group) {
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
  bool serves_both_;
  PipelineState<2> at_;
};

}  // namespace flash_cute::sm90
