// The threads of Hopper's backward that load by TMA; one of them fetches work.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/sm90/backward_strips.h"
#include "kernels/sm90/l2_throttle.h"
#include "kernels/sm90/mean_position.h"

namespace flash_cute::sm90 {

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
      : params_(params), storage_(storage), sharing_(params) {}

  CUTE_DEVICE void operator()(const WorkOf<C>& work) {
    const BwdParams& p = params_.p;
    auto& pipeline_keys = pick<kValues>(storage_.pipeline_k, storage_.pipeline_v);
    pipeline_keys.producer_acquire(at_keys_);
    if (leads<C>()) load_keys(work);
    at_keys_.advance();
    const int first_query = seeing_queries(work.seq, p.fwd.band, 0, work.seq.k.length).first;
    // After this wait LSE and row sums of all queries are written, and dQ is zeroed if it starts from zeros.
    wait_on_dependent_grids();
    if constexpr (kTakesStrips<C>) {
      if constexpr (kValues) {
        load_written_steps(work, first_query);
      } else {
        if (has_strips<C>(p, work)) {
          write_strips(work, first_query);
        } else {
          write_tiles(work, first_query);
        }
        if (at_.count < written_) load_step(work, first_query, storage_.steps[at_.count % T::kSteps]);
      }
    } else {
      for (QueryStep step = work.first_step(), next; step.head < work.heads; step = next, at_.advance()) {
        const int head = work.first_head + step.head, row = work.queries.first_query(step.m);
        next = work.after(step);
        if constexpr (!kValues) sharing_.step(at_.count);
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

  CUTE_DEVICE void load_keys(const WorkOf<C>& work) {
    auto expect = [&](uint32_t bytes) {
      return pick<kValues>(storage_.pipeline_k, storage_.pipeline_v).producer_expect_tx(at_keys_, bytes);
    };
    if (work.queries.empty()) {
      expect(0);
      return;
    }
    const RowSpan keys = visible_keys(work.seq, params_.p.fwd.band, 0, work.seq.q.length);
    load(Int<C.block_n>{}, kValues ? params_.v : params_.k, pick<kValues>(storage_.k, storage_.v)[at_keys_.stage()],
         TMA::CacheHintSm90::EVICT_FIRST, {work.seq.k.offset, keys.last}, keys.first, work.tile.row, work.tile.head,
         work.tile.batch, expect);
  }

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
    int steps = 0;
    for (QueryStep at = work.first_step(), next; at.head < work.heads; at = next) {
      next = work.after(at);
      const int m = work.queries.walked(at.m), row = work.queries.first_query(m), lane = threadIdx.x % 32;
      write(work, first_query, {row, work.first_head + at.head, work.queries.full(m), next.head >= work.heads}, m, true,
            {row + lane * kStripRows, work.queries.code(m)});
      sharing_.move(steps, steps + 1, work.steps());
      ++steps;
    }
  }

  // Steps of strips, each with all heads.
  CUTE_DEVICE void write_strips(const WorkOf<C>& work, int first_query) {
    for (StripWalk<C> walk(params_.p, work); !walk.ended();) {
      const int passed = walk.passed();
      const Strip strip = walk.take();
      sharing_.move(passed, walk.passed(), work.queries.entries());
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
  std::conditional_t<kTakesStrips<C>, MeanPosition, L2Throttle> sharing_;
};

// The thread, or warp, that loads K and Q also fetches key tiles and describes them to the other roles.
template <KernelConfig C>
CUTE_DEVICE void produce_keys_and_queries(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage,
                                          int packed_tiles) {
  Loader<C, false> load(params, storage);
  PipelineState<2> at;
  bool has_unfinished = false;
  auto publish = [&](WorkOf<C>& work) {
    if (leads<C>()) work.has_unfinished = has_unfinished;
    has_unfinished = !work.queries.empty();
    if (leads<C>()) storage.pipeline_work.producer_expect_tx(at, 0);
    at.advance();
  };
  PackedTiles packed;
  KeyTiles<C> tiles(params, packed_tiles, storage.order, packed);
  // As late as the counter's latency allows: the CTA that finishes first should get the next tile.
  auto take = [&] {
    // After this wait the counter is this kernel's alone: a launch from another host thread may share it.
    wait_on_dependent_grids();
    const int number = leads<C>() ? tiles.fetch() : 0;
    return kTakesStrips<C> ? __shfl_sync(~0u, number, 0) : number;
  };
  for (int number = params.tile_counter.first_tiles > 0 ? int(blockIdx.x) : take(); number < tiles.numbers();
       number = take()) {
    storage.pipeline_work.producer_acquire(at);
    if (leads<C>()) tiles.describe(storage.work[at.stage()], number);
    auto& work = storage.work[at.stage()];
    if constexpr (kTakesStrips<C>) {
      if (leads<C>()) work.queries.start = MeanPosition(params).start(work.queries.entries());
      __syncwarp();  // after this barrier the work is described
    }
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
  if constexpr (!kTakesStrips<C>) L2Throttle(params).finish();
  launch_dependent_grids();
}

}  // namespace flash_cute::sm90
