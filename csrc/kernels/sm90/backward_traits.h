// Parameters, work, MMA types and shared memory of the roles of Hopper's backward.
#pragma once

#include "core/layout/backward_work.h"
#include "core/layout/query_strips.h"
#include "core/workspace.h"
#include "kernels/common/backward_preprocess.h"
#include "kernels/common/tile_kinds.h"
#include "kernels/hopper/pipeline.h"
#include "kernels/hopper/tile_scheduler.h"
#include "kernels/hopper/tensor_map.h"
#include "kernels/hopper/wgmma.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {

using namespace cute;
using namespace hopper;

struct BackwardParams {
  BwdParams p;
  RaggedMap q, k, v, dout, dq, dk, dv;
  TileCounter tile_counter;  // over key tiles, where each split of a tile has a number of its own
  FastDivmod splits;  // splits of a tile that is split
  RaggedMap q_strips, dout_strips;  // of sparse calls

  CUTE_DEVICE void prefetch_inputs() const {
    q.prefetch();
    k.prefetch();
    v.prefetch();
    dout.prefetch();
  }
};

template <bool kSecond, class First, class Second>
CUTE_DEVICE auto& pick(First& first, Second& second) {
  if constexpr (kSecond) {
    return second;
  } else {
    return first;
  }
}

template <KernelConfig C>
using WorkOf = BackwardWork<QueryTilesOf<C>>;

// The order of packed sequences. Calls over lists have none: neither registers nor shared memory are left.
struct NoOrder {};
template <KernelConfig C>
using PackedOrderOf = std::conditional_t<C.walks_lists(), NoOrder, PackedOrder>;

// Partial sums of dK or dV over one split, of the 64 keys of a warpgroup from `row` of the sequence on: one accumulator
// register of all threads after the other.
template <KernelConfig C, bool kValues>
CUTE_DEVICE float* split_sums(const BwdParams& p, int split_tile, const KeyTile& tile, const SeqSpan& keys, int row,
                              int split) {
  constexpr int kRows = C.block_n * C.cluster;
  const int64_t first = PaddedRows{kSlabRows}.first_row(keys.offset, tile.batch);
  const int64_t slab = p.fwd.dense_keys() ? (int64_t(split_tile) * kRows + row - tile.index * kRows) / kSlabRows
                                          : tile.head * p.slabs_of_head + (first + row) / kSlabRows;
  return p.split_sums + (slab * p.splits.count() + split) * kSlabRows * (C.head_dim + C.head_dim_v) +
         (kValues ? kSlabRows * C.head_dim : 0);
}

// A step, a tile of queries of one head, from the producer to the consumers.
struct BackwardStep {
  int first_query, head;
  bool full;  // no element is masked
  bool last = false;  // of the tile of keys (the 2-CTA backward counts steps instead)
};

struct ListedStep : BackwardStep {
  TileCode code;
};

// A step over strips of queries, which may lie anywhere. Strips that do not exist are behind the others.
template <KernelConfig C>
struct StripStep : BackwardStep {
  static constexpr int kStrips = C.block_m / kStripRows;
  int m;  // if steps are tiles of queries
  bool together;  // the strips are one tile of queries
  Strip strips[kStrips];

  // A query's row in its tile of the list, and the tile's code, by its place in the step.
  CUTE_DEVICE Strip query(int i) const {
    const Strip strip = strips[i / kStripRows];
    return {strip.row % kTileSide + i % kStripRows, strip.code};
  }
};

template <KernelConfig C>
using StepOf =
    std::conditional_t<!C.walks_lists(), BackwardStep, std::conditional_t<two_cta(C), ListedStep, StripStep<C>>>;

// Whether steps are made of strips of queries.
template <KernelConfig C>
constexpr bool kTakesStrips = C.walks_lists() && !two_cta(C);

// The place of a thread's accumulators i to i + 3 among a warpgroup's sums of dQ: four numbers of a thread, then of the
// next thread. With strips, of which each warp has one, those of a warp are together.
template <KernelConfig C>
CUTE_DEVICE int dq_place(int i, int thread) {
  if constexpr (kTakesStrips<C>) {
    constexpr int kSumsOfWarp = kStripRows * C.head_dim / (C.warps / 4);
    return thread % 128 / 32 * kSumsOfWarp + i * 32 + thread % 32 * 4;
  } else {
    return i * 128 + thread % 128 * 4;
  }
}

template <KernelConfig C>
struct BackwardTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kGroups = C.warps / 4;  // warpgroups that compute
  using LayoutK = RowsLayout<Element, C.block_n, C.head_dim>;  // (key,dim)
  using LayoutV = RowsLayout<Element, C.block_n, C.head_dim_v>;  // (key,dim)
  using LayoutKt = ColumnsLayout<Element, C.block_n, C.head_dim>;  // (dim,key)
  using LayoutQ = RowsLayout<Element, C.block_m, C.head_dim>;  // (query,dim)
  using LayoutQt = ColumnsLayout<Element, C.block_m, C.head_dim>;  // (dim,query)
  using LayoutDout = RowsLayout<Element, C.block_m, C.head_dim_v>;  // (query,dim)
  using LayoutDoutT = ColumnsLayout<Element, C.block_m, C.head_dim_v>;  // (dim,query)
  // Two schedules, by measurement. With 128 queries a step: dS row-major by queries in shared memory, exponentials
  // under dP, dV before dS is rounded. With 64: dS by keys, exponentials after dP, dV once dS is stored.
  static constexpr bool kManyQueries = C.block_m == 128;
  // Whether smem descriptors live in registers. Recomputing them needs none (score rules leave none) and is faster with
  // 128 queries a step, though it takes more instructions.
  static constexpr bool kHoldsDescriptors = !kManyQueries && !C.rich();
  using LayoutDs = std::conditional_t<kManyQueries, RowsLayout<Element, C.block_m, C.block_n>,
                                      ColumnsLayout<Element, C.block_n, C.block_m>>;  // (query,key)

  using Down = Layout<Shape<Int<kGroups>, _1, _1>>;  // warpgroups along the rows of a result
  static constexpr bool kRowsOfDq = C.block_m == 64 * kGroups;  // a warpgroup has rows of dQ, not columns
  static constexpr bool kAlternatesDq = alternates_dq(C);  // or all of it, in every second step
  static constexpr int kDqGroups = kAlternatesDq ? 1 : kGroups;
  template <int kDims>  // S^T = K Q^T and dP^T = V dO^T
  using MmaScores = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_n>, Int<C.block_m>, Int<kDims>>>(), Down{}));
  template <int kDims>  // dK = dS^T Q and dV = P^T dO
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<C.block_n>, Int<kDims>, Int<C.block_m>>, GMMA::Major::K,
                           GMMA::Major::MN>(),
      Down{}));
  static constexpr int kDqColumns = kRowsOfDq ? C.head_dim : C.head_dim / kDqGroups;  // of a warpgroup
  using MmaQ = decltype(make_tiled_mma(  // dQ = dS K
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<kDqColumns>, Int<C.block_n>>,
                           kManyQueries ? GMMA::Major::K : GMMA::Major::MN, GMMA::Major::MN>(),
      std::conditional_t<kRowsOfDq, Down, Layout<Shape<_1, Int<kDqGroups>, _1>>>{}));
  static_assert(tile_size<1>(MmaScores<C.head_dim>{}) == C.block_m &&
                    tile_size<1>(MmaKeys<C.head_dim>{}) == C.head_dim &&
                    tile_size<1>(MmaQ{}) == kDqColumns * (kRowsOfDq ? 1 : kDqGroups),
                "no wgmma of so many columns: units.cmake");
  static constexpr int kDqSums = C.block_m * C.head_dim / kDqGroups;  // numbers of a tile's dQ that a warpgroup adds
  static constexpr int kStripSums = kDqSums / (C.block_m / kStripRows);  // of them those of a strip
  static_assert(!C.walks_lists() || (!kRowsOfDq && !kAlternatesDq && C.block_m == 4 * kStripRows),
                "a warp has a strip of dQ");
  // The address of a warpgroup's sums of dQ, in accumulator order.
  CUTE_DEVICE static float* dq_sums(const BwdParams& p, int64_t padded_row, int group) {
    return p.dq_accum + padded_row * C.head_dim + group % kDqGroups * kDqSums;
  }
  // Per thread after setmaxnreg; their sum over threads is what the CTA starts with.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kPingPongBarrier = 1;  // named: one per warpgroup
  // Descriptions of steps: in the stages of Q and dO; of sparse calls more than the threads that store are behind.
  static constexpr int kSteps = C.walks_lists() ? 8 : C.stages;

  struct Storage {
    alignas(1024) Element k[2][C.block_n * C.head_dim];
    alignas(1024) Element v[1][C.block_n * C.head_dim_v];
    alignas(1024) Element q[C.stages][C.block_m * C.head_dim];
    alignas(1024) Element dout[C.stages][C.block_m * C.head_dim_v];
    alignas(1024) Element ds[2][C.block_n * C.block_m];
    alignas(1024) float dq[kGroups][kDqSums];  // also dV and dK in the epilogue
    alignas(128) float lse_log2[C.stages][C.block_m];
    alignas(128) float row_dot[C.stages][C.block_m];
    WorkOf<C> work[2];
    PackedOrderOf<C> order;
    StepOf<C> steps[kSteps];
    cutlass::arch::ClusterBarrier written[kTakesStrips<C> ? kSteps : 1];  // a step of a sparse call
    Pipeline<2> pipeline_work;
    Pipeline<C.stages> pipeline_q, pipeline_dout;
    Pipeline<2> pipeline_k;
    Pipeline<1> pipeline_v;
    Pipeline<2> pipeline_ds;
    Pipeline<2> pipeline_dq[kGroups];  // one buffer, two barriers: two threads, or warpgroups, alternate
    Pipeline<1> pipeline_out[kGroups];  // the same buffer, with dV, then dK
    cutlass::arch::ClusterTransactionBarrier landed[2];  // a tile has landed whose first rows the producer clears
  };
  static_assert(C.block_n == 64 * kGroups && kGroups == 2, "a warpgroup has 64 keys");
  static_assert(kDqSums * sizeof(float) >= 64 * std::max(C.head_dim, C.head_dim_v) * sizeof(Element), "dV and dK fit");
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

// The tiles of keys of a CTA or a cluster. Of packed keys the host knows a bound alone.
template <KernelConfig C>
class KeyTiles {
 public:
  static constexpr int kKeys = C.block_n * C.cluster;

  // If keys are packed: a head has `packed_tiles`, in this order; `packed` finds them.
  CUTE_DEVICE KeyTiles(const BackwardParams& params, int packed_tiles, const PackedOrderOf<C>& order,
                       PackedTiles& packed)
      : params_(params), packed_tiles_(packed_tiles), order_(order), packed_(packed) {}

  CUTE_DEVICE static bool are_packed(const BackwardParams& params) {
    return !C.walks_lists() && !params.p.fwd.dense_keys();
  }
  // Sorts packed sequences, by a warp, and returns how many tiles a head has; 0 if keys are not packed.
  CUTE_DEVICE static int sort(const BackwardParams& params, PackedOrderOf<C>& order) {
    if constexpr (!C.walks_lists()) {
      const FwdProblem& p = params.p.fwd;
      if (are_packed(params)) {
        return sort_sequences(order, PackedRows::of_keys(p, kKeys), params.p.order.by_level,
                              [&](int sequence) { return SeqInfo(p, sequence).q.length; });
      }
    }
    return 0;
  }

  // Numbers, where each split of a tile has one of its own.
  CUTE_DEVICE int numbers() const {
    if (!are_packed(params_)) return params_.tile_counter.tiles;
    const BwdParams& p = params_.p;  // all tiles of packed keys are split, or none
    return packed_tiles_ * p.fwd.heads_k * (p.sums_of_splits ? params_.splits.value : 1);
  }
  CUTE_DEVICE int fetch() const {
    const TileCounter& counter = params_.tile_counter;
    return are_packed(params_) ? counter.with_tiles(numbers(), gridDim.x / C.cluster).fetch() : counter.fetch();
  }
  CUTE_DEVICE void describe(WorkOf<C>& work, int number) {
    const BwdParams& p = params_.p;
    if constexpr (!C.walks_lists()) {
      if (are_packed(params_)) {
        new (&work) WorkOf<C>(p, params_.splits, kKeys, number, packed_tiles_, order_, packed_);
        return;
      }
    }
    new (&work) WorkOf<C>(p, params_.splits, kKeys, number);
  }

 private:
  const BackwardParams& params_;
  int packed_tiles_;
  const PackedOrderOf<C>& order_;
  PackedTiles& packed_;
};

// Whether more than one tile of keys may add to a query's dQ.
template <KernelConfig C>
CUTE_HOST_DEVICE constexpr bool adds_several_tiles(const FwdProblem& p) {
  return p.seqlen_k > C.block_n * C.cluster;
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

}  // namespace flash_cute::sm90
