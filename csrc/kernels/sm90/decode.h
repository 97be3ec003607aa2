// Decode for Hopper: a cluster of CTAs has one work tile (query rows of one kv head of one sequence), or a split of its
// keys; it shares these keys among its CTAs, and combines the results through distributed shared memory. Without splits
// nothing passes through global memory, and no CTA polls: in a call of a few microseconds that would be most of the
// time. kernels/sm80/decode.h shares keys evenly over all SMs, for many long caches.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/launch.h"
#include "kernels/passes/append.h"
#include "kernels/decode/attend.h"
#include "kernels/decode/load.h"
#include "kernels/decode/merge_splits.h"
#include "kernels/hopper/pipeline.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {

using namespace cute;
using namespace hopper;

template <KernelConfig C>
struct DecodeTraits : flash_cute::decode::DecodeTraits<C> {
  using Base = flash_cute::decode::DecodeTraits<C>;

  struct Storage : Base::OfCache::QueryFactors {
    alignas(128) typename Base::Element q[C.block_m * C.head_dim];
    typename Base::Tile kv[C.stages][Base::kTeams];
    alignas(16) RowSum sums[C.block_m][Base::kTeams];
    // The data that the cluster's CTAs send here: their sums, and the columns of O that this CTA combines, those of CTA
    // i from i * columns on. `handed_over` counts the bytes.
    alignas(16) RowSum sums_of_ctas[C.block_m][C.cluster];
    alignas(16) float outputs[C.block_m][2 * C.head_dim_v];  // fewer than twice as many CTAs send as combine
    cutlass::arch::ClusterTransactionBarrier handed_over;
  };
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

// This CTA in its cluster, the cluster's work, and the columns that each CTA combines.
struct ClusterRank {
  int ctas, rank;
  int split, work_tile;
  int column_bits;

  CUTE_DEVICE explicit ClusterRank(const TileClusters& clusters)
      : ctas(clusters.ctas.value), column_bits(clusters.column_bits) {
    const int cluster = clusters.ctas.div(blockIdx.x);
    rank = static_cast<int>(blockIdx.x) - cluster * ctas;
    split = clusters.work_tiles.div(cluster);
    work_tile = cluster - split * clusters.work_tiles.value;
  }

  CUTE_DEVICE int columns() const { return 1 << column_bits; }
};

// The CTA's share of the cluster's split, as sm80's functions need it, and the keys that its queries see. A split behind
// the last one of its work tile has no quanta.
template <KernelConfig C>
CUTE_DEVICE decode::VisibleSplit split_of_cta(const DecodeParams& p, const ClusterRank& place) {
  const int tile = p.heads_k.div(place.work_tile);  // over all sequences
  KvSplit split;
  split.head_k = place.work_tile - tile * p.fwd.heads_k;
  split.b = p.clusters.tiles.div(tile);
  split.row = (tile - split.b * p.clusters.tiles.value) * C.block_m;
  split.seq = cached_seq(p, split.b);
  const RowSpan queries = decode::queries_of(p, split, C.block_m);
  const RowSpan keys = visible_keys(split.seq, p.fwd.band, queries.first, queries.last - queries.first);
  const int first = keys.first / C.block_n, blocks = max(0, ceil_div(keys.last, C.block_n) - first);
  const int chunk = p.clusters.parts.div(blocks + p.clusters.parts.value - 1);
  const int part = place.split * place.ctas + place.rank;
  split.first = first + min(part * chunk, blocks);
  split.last = first + min((part + 1) * chunk, blocks);
  split.index = place.split;
  split.all = {false, 1, place.work_tile * p.clusters.splits};
  if (p.clusters.splits > 1 && blocks > 0) split.all.count = ceil_div(blocks, chunk * place.ctas);
  split.quanta = split.index < split.all.count;
  return {split, keys};
}

// Loads a team's tiles of a split, one after the other.
template <KernelConfig C>
class SplitLoader {
  using T = DecodeTraits<C>;

 public:
  CUTE_DEVICE SplitLoader(const DecodeParams& p, typename T::Storage& storage, const decode::VisibleSplit& chunk,
                          int team, int thread)
      : copy_(p, C.block_n, storage.kv[0][team], thread), left_(chunk.split.last - chunk.split.first) {
    const auto& [split, keys] = chunk;
    const int row = static_cast<int>(split.seq.k.offset);  // of key 0
    copy_.begin(split.b, split.head_k, {row + keys.first, row + keys.last},
                row + split.first * C.block_n + team * T::kKeys);
  }

  // Starts the copy of the next tile, if any, to a stage.
  CUTE_DEVICE void load(int stage) {
    if (left_ == 0) return;
    copy_.load(stage * T::kStageBytes);
    --left_;
  }

 private:
  typename T::Copy copy_;
  int left_;
};

// Whether the first tile of a split precedes the rows that the append writes: then it need not wait for the append,
// which lets this kernel start once all before it has ended.
template <KernelConfig C>
CUTE_DEVICE bool was_in_cache(const DecodeParams& p, const KvSplit& split) {
  if (!p.appends() || split.quanta == 0) return false;
  return (split.first + 1) * C.block_n <= split.seq.k.length - new_rows(p.added, split.b).length;
}

// Whether a CTA prefetches its first block of keys into L2, by measurement. For one or two blocks the copies are as
// early. With few CTAs many start on idle SMs and would disturb the previous kernel.
CUTE_DEVICE bool should_prefetch_kv(const DecodeParams& p, const KvSplit& split) {
  constexpr int kFew = 3;
  return split.last - split.first >= kFew && 3 * p.ctas() >= 2 * p.resident_ctas;
}

// Stores two numbers to the shared memory of a CTA of the cluster, at the address of `to` there, and counts them at its
// barrier.
CUTE_DEVICE void hand_over(int cta, void* to, float x, float y, void* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   cute::set_block_rank(cast_smem_ptr_to_uint(to), cta)),
               "f"(x), "f"(y), "r"(cute::set_block_rank(cast_smem_ptr_to_uint(barrier), cta))
               : "memory");
}

// Combines the teams' results in the tiles of `stage`, and sends each column to the CTA that combines it.
template <KernelConfig C>
CUTE_DEVICE void merge_teams(typename DecodeTraits<C>::Storage& storage, int stage, int rows,
                             const ClusterRank& place) {
  using T = DecodeTraits<C>;
  constexpr int kTogether = 2, kAcross = C.head_dim_v / kTogether;
  const int columns = place.columns(), mergers = C.head_dim_v >> place.column_bits;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < rows * kAcross; i += C.threads()) {
    const int row = i / kAcross, column = i % kAcross * kTogether;
    const MergedRow<T::kTeams> merged(storage.sums[row]);
    const auto outputs = merged.template undivided<kTogether>([&](int team) {
      return storage.kv[stage][team].results() + row * C.head_dim_v + decode::result_column(row, column);
    });
    hand_over(column >> place.column_bits, &storage.outputs[row][place.rank * columns + (column & (columns - 1))],
              outputs[0], outputs[1], &storage.handed_over);
    if (i % kAcross < mergers) {
      hand_over(i % kAcross, &storage.sums_of_ctas[row][place.rank], merged.sum().reference, merged.sum().value,
                &storage.handed_over);
    }
  }
}

// Combines this CTA's columns over all CTAs of the cluster.
template <KernelConfig C>
CUTE_DEVICE void merge_ctas(const DecodeParams& p, const KvSplit& split, typename DecodeTraits<C>::Storage& storage,
                            int rows, const ClusterRank& place) {
  constexpr int kTogether = 2;
  const int columns = place.columns(), across = columns / kTogether;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < rows * across; i += C.threads()) {
    const int row = i / across, column = i % across * kTogether;
    const decode::RowDestination<C> to(p, split, row, split.all.count == 1);
    // After this wait the results of all CTAs are here.
    storage.handed_over.wait(0);
    compiler_fence();
    RowSum sums[C.cluster];
    float2 outputs[C.cluster];
    CUTE_UNROLL
    for (int n = 0; n < C.cluster; ++n) {
      const bool there = n < place.ctas;
      sums[n] = there ? storage.sums_of_ctas[row][n] : RowSum{-FLT_MAX, 0.f};
      const float* from = &storage.outputs[row][n * columns + column];
      outputs[n] = there ? *reinterpret_cast<const float2*>(from) : float2{0.f, 0.f};
    }
    const MergedRow<C.cluster> merged(sums, to.sink);
    const auto all = merged.template outputs<kTogether>([&](int n) { return &outputs[n].x; });
    const int to_column = place.rank * columns + column;
    if (to_column == 0) *to.lse = merged.lse();
    if (to_column < p.fwd.head_dim_v) to.visit([&](auto* out) { decode::store(out + to_column, all); });
  }
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) decode(const __grid_constant__ DecodeParams p) {
  using T = DecodeTraits<C>;
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int team = threadIdx.x / T::kTeamThreads, thread = threadIdx.x % T::kTeamThreads;
  const ClusterRank place(p.clusters);
  launch_dependent_grids();
  if (threadIdx.x == 0) {
    storage.handed_over.init(1);
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  decode::VisibleSplit chunk = split_of_cta<C>(p, place);
  // The append leaves lengths alone, and lets this kernel start once all before it has ended.
  if (!p.uniform.known && !p.appends()) {
    // Lengths in a tensor may still be written: their first values are good enough to prefetch by.
    if (should_prefetch_kv(p, chunk.split)) decode::prefetch_kv_l2<1, C>(p, chunk);
    // After this wait the lengths are final.
    wait_on_dependent_grids();
    chunk = split_of_cta<C>(p, place);
  }
  const KvSplit& split = chunk.split;
  const int rows = decode::rows_of(p, split, C.block_m);
  // Packed sequences may have fewer queries than the longest one, and work tiles fewer splits.
  if (rows <= 0 || split.quanta == 0) {
    // No CTA may exit earlier: the next kernel waits for this one only, and others of the cluster may still arrive.
    wait_on_dependent_grids();
    cute::cluster_wait();
    return;
  }
  if (threadIdx.x == 0) {
    constexpr int kSum = sizeof(RowSum) / sizeof(float);  // numbers
    storage.handed_over.arrive_and_expect_tx(rows * place.ctas * (place.columns() + kSum) * sizeof(float));
  }
  if (p.uniform.known && should_prefetch_kv(p, split)) decode::prefetch_kv_l2<1, C>(p, chunk);
  // After this wait the page table is final; the append leaves it alone, too.
  if (p.fwd.pages.ids != nullptr && !p.appends()) wait_on_dependent_grids();
  SplitLoader<C> loader(p, storage, chunk, team, thread);
  // After this wait the first tile's keys are final.
  if (!was_in_cache<C>(p, split)) wait_on_dependent_grids();
  loader.load(0);
  // After this wait new keys are in the cache, and queries are rotated.
  wait_on_dependent_grids();
  if (p.slots > 0 && split.index == 0 && place.rank == 0 && threadIdx.x == 0)
    p.slots_of_tiles[decode::number_of_tile(p, split, C.block_m)] = {split.all.count, split.all.first};
  decode::load_queries<C>(p, split, storage.q);
  cp_async_fence();
  CUTE_NO_UNROLL
  for (int i = 1; i < C.stages - 1; ++i) {
    loader.load(i);
    cp_async_fence();
  }
  cp_async_wait<C.stages - 2>();
  // After this barrier Q is visible to all.
  __syncthreads();
  if constexpr (C.widens_cache()) {
    decode::prepare_queries<C>(storage.q, storage.query_factors);
    // After this barrier so is Q in f16, and its factors.
    __syncthreads();
  }
  int stage = 0;
  decode::attend<C>(p, split, storage, loader, storage.q, team, thread, stage);
  stage = stage == 0 ? C.stages - 1 : stage - 1;
  // After this barrier the results of all teams are in shared memory.
  __syncthreads();
  if (place.ctas == 1) return decode::TeamMerge<C>(p, split)(storage, stage);
  // After this wait all CTAs of the cluster run, and their barriers are initialised.
  cute::cluster_wait();
  merge_teams<C>(storage, stage, rows, place);
  if (place.rank << place.column_bits >= C.head_dim_v) return;
  merge_ctas<C>(p, split, storage, rows, place);
}

template <KernelConfig C>
cudaError_t launch_decode(const DecodeParams& p, cudaStream_t stream) {
  if (p.appends()) {
    if (cudaError_t e = append_keys(p, stream)) return e;
  }
  if (p.fwd.total_q == 0 || p.fwd.batch == 0 || p.fwd.heads == 0) return cudaSuccess;
  if (cudaError_t e = launch_with_pdl<decode<C>>({p.ctas(), C.threads(), smem_bytes(C), p.cluster_ctas}, stream, p))
    return e;
  if (p.slots == 0) return cudaSuccess;
  constexpr int kRows = 4;  // of a CTA, a warp each: clusters are few
  const int64_t ctas = int64_t(p.clusters.work_tiles.value) * cute::ceil_div(C.block_m, kRows);
  return launch_with_pdl<decode::merge_rows<C, kRows, 1>>({ctas, 32 * kRows, 0}, stream, p);
}

}  // namespace flash_cute::sm90
