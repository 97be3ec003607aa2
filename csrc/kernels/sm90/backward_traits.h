// What the threads of Hopper's backward share: its parameters, types of products, and shared memory.
#pragma once

#include "core/backward_order.h"
#include "kernels/common/backward_preprocess.h"
#include "kernels/common/backward_tiles.h"
#include "kernels/sm90/pipeline.h"
#include "kernels/sm90/tile_scheduler.h"
#include "kernels/sm90/tensor_map.h"
#include "kernels/sm90/wgmma.h"

namespace flash_cute::sm90 {

struct BackwardParams {
  BwdProblem p;
  RaggedMap q, k, v, dout, dq, dk, dv;
  TileCounter tile_counter;  // of tiles of keys, those that are cut by their splits
  KeyOrder order;
  FastDivmod splits;  // of a tile that is cut: how many
  DqAccumulate dq_accumulate;
  bool throttled;  // CTAs stay near each other: see L2Throttle
};

template <bool kSecond, class First, class Second>
CUTE_DEVICE auto& pick(First& first, Second& second) {
  if constexpr (kSecond) {
    return second;
  } else {
    return first;
  }
}

// What a CTA has to do for a tile of keys, and in which order: it goes through the query heads of a query tile, then to
// the next query tile. With several heads, tiles that run at once are to be at the same queries, which the L2 cache
// does not hold for all heads at different places: also under a causal mask, where a tile's queries are those from its
// keys on. The first tiles begin with the last queries, and end one after the other, late keys first. Those that follow
// begin with the first queries that see them: a later start is at later queries, so that these tiles are at the same
// ones, too. So sets of tiles that start together walk down and up by turns. Where a window ends to the left they
// cannot be at the same queries, and go through one head after the other, each from its last queries on. With one head
// every tile begins with the first queries that see it: under a causal mask those of a set are at different queries
// then, and do not add to the same sums of dQ at once.
//
// In turns, windows of three quarters of the keys or more count as none: their tiles differ in length, and would wait
// for each other at every head. Under a mask a set that walks up waits: each of its tiles begins where all earlier ones
// have just come to, which have their turns there one after the other. So sets walk down alone, as long as the L2 cache
// holds what tiles at different places need; with the tiles of twice as many heads together, half of a head's tiles run
// at once, and are nearer to each other.
//
// Wherever key tiles wait for each other (DqAccumulate), late keys of one head come first, and begin with the first queries
// that see them: under a causal mask these see no later keys, so that nobody waits for its first semaphore. But of the heads
// that are taken last early keys come first, and begin with the last queries: their tiles are the longest. So it is in
// turns with more heads, and with more tiles than start together: the wait is short for what comes after it. Where
// several heads wait for the first tile alone, this is the one with the earliest keys, and sets walk down and up: tiles
// that are at the same queries as the first one hardly wait.
//
// Where key tiles are fewer than SMs, the work on each is cut into splits, and so it is on the last ones, if they would
// leave SMs without a tile: shares of the query heads, and of the tiles of queries that see the keys, which may be
// none. A query tile of a head belongs to one split of each key tile that it sees, so that turns are counted as without
// splits. Parts of a tile have numbers that follow each other, so that who comes before in turns was taken before,
// whatever split it is.
class BackwardWork {
 public:
  int cut;  // number of the tile among those that are cut, or less than 0
  int split;
  KeyTile tile;
  SeqInfo seq;
  TileRange range;  // of queries that see some of the keys, those of the split
  int heads, first_head;  // of queries: how many, from which on
  uint32_t steps_until_end = 0;  // of the CTA, in all its tiles until this one's end; of pairs
  bool has_unfinished = false;  // the CTA's tile before had steps: its dV, dK and last dQ are still to be sent

  CUTE_DEVICE BackwardWork(const BackwardParams& params, int block_m, int block_n, int number)
      : BackwardWork(params, block_m, block_n, number, number - params.p.splits.whole_tiles) {}

  CUTE_DEVICE uint32_t steps() const { return heads * (range.end - range.begin); }
  CUTE_DEVICE QueryStep first_step() const { return {range.empty() ? heads : 0, first()}; }
  // Behind the last step its head is none.
  CUTE_DEVICE QueryStep after(QueryStep step) const {
    const int next_head = step.head + 1;
    if (next_head < heads_inside_) return {next_head, step.m};
    if (step.m != (early_first_ ? range.end - 1 : range.begin))
      return {next_head - heads_inside_, early_first_ ? step.m + 1 : step.m - 1};
    return {next_head, first()};
  }

 private:
  // `behind`: so many numbers behind the tiles that are not cut.
  CUTE_DEVICE BackwardWork(const BackwardParams& params, int block_m, int block_n, int number, int behind)
      : cut(behind < 0 || params.splits.value == 1 ? -1 : params.splits.div(behind)),
        split(cut < 0 ? 0 : behind - cut * params.splits.value),
        tile(params.p.fwd, block_n, params.order.heads_together, params.order.late_first,
             cut < 0 ? number : params.p.splits.whole_tiles + cut),
        seq(params.p.fwd, tile.batch) {
    const BwdProblem& p = params.p;
    range = query_tiles(seq, p.fwd.band, tile.row, block_n, block_m);
    heads = p.fwd.heads / p.fwd.heads_k;
    first_head = tile.head * heads;
    if (cut >= 0) {
      range = even_share(range, split % p.splits.queries, p.splits.queries);
      heads /= p.splits.heads;
      first_head += split / p.splits.queries * heads;
    }
    const KeyOrder& order = params.order;
    heads_inside_ = order.heads_inside ? heads : 1;
    const bool in_odd_set = number / order.tiles_of_set % 2 == 1;
    early_first_ =
        heads == 1 ? !uses_semaphore(params.dq_accumulate) || tile.late_first : order.down_and_up && in_odd_set;
  }

  CUTE_DEVICE int first() const { return early_first_ ? range.begin : range.end - 1; }
  // One of `splits` even shares of the tiles.
  CUTE_DEVICE static TileRange even_share(TileRange range, int split, int splits) {
    const int first = range.begin, tiles = range.end - first;
    range.begin = first + tiles * split / splits;
    range.end = first + tiles * (split + 1) / splits;
    return range;
  }

  int heads_inside_;  // of a query tile that follow each other: all, or one
  bool early_first_;
};

// Sums of dK, or of dV, over a split of what sees the 64 keys of a warpgroup, from `row` of the sequence on, which are
// among those of a tile that is cut: an accumulator of all threads, then the next one.
template <KernelConfig C, bool kValues>
CUTE_DEVICE float* split_sums(const BwdProblem& p, int cut, const KeyTile& tile, const SeqSpan& keys, int row,
                              int split) {
  constexpr int kRows = C.block_n * C.cluster;
  const int64_t first = PaddedRows{kSlabRows}.first_row(keys.offset, tile.batch);
  const int64_t slab = p.fwd.dense_keys() ? (int64_t(cut) * kRows + row - tile.index * kRows) / kSlabRows
                                          : tile.head * p.slabs_of_head + (first + row) / kSlabRows;
  return p.split_sums + (slab * p.splits.count() + split) * kSlabRows * (C.head_dim + C.head_dim_v) +
         (kValues ? kSlabRows * C.head_dim : 0);
}

// A tile of queries, from the producer to the consumers.
struct BackwardStep {
  int first_query, head;
  bool full;  // the band hides nothing
  bool last = false;  // of the tile of keys; pairs count their steps
};

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
  // Found by trying: with 128 queries a step dS lies by queries in shared memory, the exponentials run under dP, and dV
  // begins before dS is rounded; with 64 dS lies by keys, the exponentials wait for dP, and dV begins once dS is
  // stored.
  static constexpr bool kManyQueries = C.block_m == 128;
  // Descriptors of operands are held ready, or made anew for each product. The latter takes no registers, of which
  // rules leave none, and with 128 queries a step it is faster, though it takes more instructions.
  static constexpr bool kHoldsDescriptors = !kManyQueries && !C.rich();
  using LayoutDs = std::conditional_t<kManyQueries, RowsLayout<Element, C.block_m, C.block_n>,
                                      ColumnsLayout<Element, C.block_n, C.block_m>>;  // (query,key)

  using Down = Layout<Shape<Int<kGroups>, _1, _1>>;  // warpgroups along the rows of a result
  using Across = Layout<Shape<_1, Int<kGroups>, _1>>;  // along its columns
  static constexpr bool kRowsOfDq = C.block_m == 64 * kGroups;  // whether each has rows of dQ, and not columns
  template <int kDims>  // S^T = K Q^T and dP^T = V dO^T
  using MmaScores = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_n>, Int<C.block_m>, Int<kDims>>>(), Down{}));
  template <int kDims>  // dK = dS^T Q and dV = P^T dO
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<C.block_n>, Int<kDims>, Int<C.block_m>>, GMMA::Major::K,
                           GMMA::Major::MN>(),
      Down{}));
  static constexpr int kDqColumns = kRowsOfDq ? C.head_dim : C.head_dim / kGroups;  // of a warpgroup
  using MmaQ = decltype(make_tiled_mma(  // dQ = dS K
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<kDqColumns>, Int<C.block_n>>,
                           kManyQueries ? GMMA::Major::K : GMMA::Major::MN, GMMA::Major::MN>(),
      std::conditional_t<kRowsOfDq, Down, Across>{}));
  static constexpr int kDqSums = C.block_m * C.head_dim / kGroups;  // of a tile's dQ, those of a warpgroup
  static constexpr int kDqGroups = kGroups;
  // The sums of dQ that a warpgroup adds, in the order of its accumulators: four numbers of a thread lie together, then
  // come those of the next thread.
  CUTE_DEVICE static float* dq_sums(const BwdProblem& p, int64_t padded_row, int group) {
    return p.dq_accum + padded_row * C.head_dim + group * kDqSums;
  }
  // Of a thread, together as many as the CTA has at its start.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kPingPongBarrier = 1;  // named: the first warpgroup's, then the second's

  struct Storage {
    alignas(1024) Element k[2][C.block_n * C.head_dim];
    alignas(1024) Element v[1][C.block_n * C.head_dim_v];
    alignas(1024) Element q[C.stages][C.block_m * C.head_dim];
    alignas(1024) Element dout[C.stages][C.block_m * C.head_dim_v];
    alignas(1024) Element ds[2][C.block_n * C.block_m];
    alignas(1024) float dq[kGroups][kDqSums];  // dV and dK too on the way out
    alignas(128) float lse_log2[C.stages][C.block_m];
    alignas(128) float row_dot[C.stages][C.block_m];
    BackwardWork work[2];
    BackwardStep steps[C.stages];  // that use Q and dO
    Pipeline<2> pipeline_work;
    Pipeline<C.stages> pipeline_q, pipeline_dout;
    Pipeline<2> pipeline_k;
    Pipeline<1> pipeline_v;
    Pipeline<2> pipeline_ds;
    Pipeline<2> pipeline_dq[kGroups];  // one buffer; two barriers, as two threads may empty it by turns
    Pipeline<1> pipeline_out[kGroups];  // the same buffer, with dV, then dK
    cutlass::arch::ClusterTransactionBarrier landed[2];  // a tile of which a producer clears rows
  };
  static_assert(C.block_n == 64 * kGroups && kGroups == 2, "a warpgroup has 64 keys");
  static_assert(kDqSums * sizeof(float) >= 64 * std::max(C.head_dim, C.head_dim_v) * sizeof(Element), "dV and dK fit");
  static_assert(sizeof(Storage) <= C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

}  // namespace flash_cute::sm90
