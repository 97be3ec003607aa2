// Attention forward for Hopper: persistent CTAs, in which two threads load tiles by TMA and two or three warpgroups
// compute 64 rows each by wgmma (FlashAttention-3, arXiv 2407.08608). CTAs of a cluster load keys for each other.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/counter.h"
#include "core/device.h"
#include "core/registry.h"
#include "kernels/common/fragment.h"
#include "kernels/common/forward_rules.h"
#include "kernels/common/mask.h"
#include "kernels/common/rows.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/launch.h"
#include "kernels/passes/gaps.h"
#include "kernels/passes/probabilities.h"
#include "kernels/sm90/ring.h"
#include "kernels/sm90/schedule.h"
#include "kernels/sm90/tensor_map.h"
#include "kernels/sm90/wgmma.h"

namespace flash_cute::sm90 {

struct ForwardParams {
  FwdProblem p;
  RaggedMap q, k, v, out;
  TileOrder order;
  int tiles;
  unsigned* counter;  // by which CTAs share out tiles; 0 before and after the kernel
};

// A tile of queries and what it has to do, from the producer to the consumers.
template <int kGroups>
struct Work {
  QueryTile tile;
  int head_k;  // of keys
  SeqInfo seq;
  RowSpan keys;  // that some of the rows see, those of the cluster's other CTAs included
  int key_tiles;  // that hold these, counted from keys.first on
  TileRange of_group[kGroups];  // of them, those that the rows of a warpgroup see

  // `of_cluster` is the tile of `rows` queries in which the CTA's own starts at `first_row`.
  CUTE_DEVICE Work(const FwdProblem& p, const QueryTile& of_cluster, int rows, int first_row, const SeqInfo& seq,
                   int block_n)
      : tile{first_row, of_cluster.head, of_cluster.batch},
        head_k(of_cluster.head / (p.heads / p.heads_k)),
        seq(seq),
        keys(visible_keys(seq, p.band, of_cluster.row, rows)) {
    key_tiles = max(0, ceil_div(keys.last - keys.first, block_n));
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const int row = tile.row + 64 * i;
      const bool exists = row < seq.q.length;
      of_group[i] = exists ? flash_cute::key_tiles(seq, p.band, row, 64, block_n, keys.first) : TileRange{};
    }
  }
};

template <KernelConfig C>
struct ForwardTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kGroups = C.warps / 4;  // warpgroups that compute
  using LayoutQ = RowsLayout<Element, C.block_m, C.head_dim>;  // (row,dim)
  using LayoutK = RowsLayout<Element, C.block_n, C.head_dim>;  // (key,dim)
  using LayoutV = ColumnsLayout<Element, C.block_n, C.head_dim_v>;  // (dim,key)
  using LayoutO = RowsLayout<Element, C.block_m, C.head_dim_v>;  // (row,dim)
  using Groups = Layout<Shape<Int<kGroups>, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.block_n>, Int<C.head_dim>>>(),
      Groups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.head_dim_v>, Int<C.block_n>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Groups{}));
  using Softmax = OnlineSoftmax<2, kGroups == 2 && C.head_dim_v <= 192 ? 4 : 2>;  // chains: as many as registers hold
  static constexpr uint32_t kBytesQ = C.block_m * C.head_dim * sizeof(Element);
  static constexpr int kClusterRows = C.block_m * C.cluster;  // of queries
  static constexpr int kStagesQ = C.stages_q();
  static constexpr int kWorks = kStagesQ + 2;
  static constexpr bool kOwnOutput = C.own_output(), kPingPong = C.ping_pong();
  // Of a thread, together as many as the CTA has at its start.
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40, kConsumerRegisters = kGroups == 3 ? 160 : 232;
  // Named barriers: one of each warpgroup's turn, of all warpgroups, and of the threads of each.
  static constexpr int kTurnBarrier = 1, kAllGroupsBarrier = kTurnBarrier + kGroups;
  static constexpr int kGroupBarrier = kAllGroupsBarrier + 1;

  struct Storage {
    alignas(1024) Element q[kStagesQ][C.block_m * C.head_dim];
    alignas(1024) Element k[C.stages][C.block_n * C.head_dim];
    alignas(1024) Element v[C.stages][C.block_n * C.head_dim_v];  // O on the way out, unless it has
    alignas(1024) Element out[kOwnOutput ? C.block_m * C.head_dim_v : 1];
    Ring<C.stages, C.cluster> ring_k, ring_v;
    Ring<kStagesQ> ring_q;
    Ring<2, C.cluster> ring_next;  // of next[]
    int next[2];  // tiles that the cluster is to do
    cutlass::arch::ClusterBarrier out_left;  // O of each warpgroup of the cluster has left V's memory
    Work<kGroups> work[kWorks];  // one is read until its tile's end, as many wait as there are Q, one is written
  };
  static_assert(C.block_m == 64 * kGroups && (kGroups == 2 || kGroups == 3),
                "registers and named barriers are for these");
  static_assert(kOwnOutput || C.stages * C.block_n >= C.block_m, "O fits where V was");
  static_assert(sizeof(Storage) <= C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

// Brings tile n of the keys of `work`, or of their values, to all CTAs of the cluster.
template <KernelConfig C, int kDims, class Buffers>
CUTE_DEVICE void load_keys(Ring<C.stages, C.cluster>& ring, Cursor<C.stages>& at, Buffers& buffers,
                           const RaggedMap& map, const Work<C.warps / 4>& work, int n) {
  ring.wait_empty(at);
  auto* const to = buffers[at.stage()];
  map.template load<C.block_n, kDims, C.cluster>(to, ring.expect(at, C.block_n * kDims * sizeof(*to)),
                                                 TMA::CacheHintSm90::EVICT_LAST, {work.seq.k.offset, work.keys.last},
                                                 work.keys.first + n * C.block_n, work.head_k, work.tile.batch);
  at.advance();
}

// One thread that takes tiles of queries, says what they have to do, and loads Q and K of each.
template <KernelConfig C>
CUTE_DEVICE void produce_queries_and_keys(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdProblem& p = params.p;
  const int rank = C.cluster == 1 ? 0 : block_rank_in_cluster();
  Cursor<C.stages> at_k;
  Cursor<T::kStagesQ> at_q;
  Cursor<2> at_next;

  int index = blockIdx.x / C.cluster;
  // Exactly once for each tile: so there are as many increments as tiles, after which the counter is 0 again. As late
  // as its latency allows: who comes first to the end of a tile should be the first to have another one.
  auto take = [&] {
    if (rank == 0) index = gridDim.x / C.cluster + atomicInc(params.counter, params.tiles - 1);
  };
  // What the first CTA of the cluster has taken is for all of them.
  auto share = [&] {
    if constexpr (C.cluster > 1) {
      auto& [full, empty] = storage.ring_next;
      int* const next = &storage.next[at_next.stage()];
      if (rank == 0) {
        storage.ring_next.wait_empty(at_next);
        for (int to = 0; to < C.cluster; ++to) {
          store_shared_remote(index, cast_smem_ptr_to_uint(next), cast_smem_ptr_to_uint(&full[at_next.stage()]), to);
        }
      }
      storage.ring_next.expect(at_next, sizeof(int));
      storage.ring_next.wait(at_next);
      index = *next;
      empty[at_next.stage()].arrive(0u);
    }
    at_next.advance();
  };
  for (; index < params.tiles; share()) {
    const QueryTile of_cluster = params.order.at(index, T::kClusterRows);
    const SeqInfo seq(p, of_cluster.batch);
    if (of_cluster.row >= seq.q.length) {
      take();
      continue;
    }
    // The CTAs take turns at having later rows, which see more keys: none is ahead of the others for long.
    const int row = of_cluster.row + (rank + at_next.count) % C.cluster * C.block_m;
    const auto& work = *new (&storage.work[at_q.count % T::kWorks])
                           Work<T::kGroups>(p, of_cluster, T::kClusterRows, row, seq, C.block_n);
    int n = work.key_tiles - 1;
    auto load_k = [&] { load_keys<C, C.head_dim>(storage.ring_k, at_k, storage.k, params.k, work, n--); };
    if (n >= 0) load_k();
    storage.ring_q.wait_empty(at_q);
    uint64_t* const barrier = storage.ring_q.expect(at_q, work.key_tiles > 0 ? T::kBytesQ : 0);
    if (work.key_tiles > 0) {
      params.q.template load<C.block_m, C.head_dim>(storage.q[at_q.stage()], barrier, TMA::CacheHintSm90::EVICT_FIRST,
                                                    seq.q, row, of_cluster.head, of_cluster.batch);
    }
    at_q.advance();
    while (n >= 0) load_k();
    take();
  }
  storage.ring_q.wait_empty(at_q);
  storage.work[at_q.count % T::kWorks].tile.row = -1;
  storage.ring_q.expect(at_q, 0);
}

// Another thread, that loads V of each.
template <KernelConfig C>
CUTE_DEVICE void produce_values(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  Cursor<C.stages> at_v;
  for (Cursor<T::kStagesQ> at_q;; at_q.advance()) {
    storage.ring_q.wait(at_q);
    storage.ring_q.empty[at_q.stage()].arrive();
    const auto& work = storage.work[at_q.count % T::kWorks];
    if (work.tile.row < 0) return;
    if constexpr (!T::kOwnOutput) storage.out_left.wait((at_q.count + 1) % 2);
    for (int n = work.key_tiles - 1; n >= 0; --n) {
      load_keys<C, C.head_dim_v>(storage.ring_v, at_v, storage.v, params.v, work, n);
    }
  }
}

// The right to issue products, which goes round among the warpgroups: while one issues, the others are at their
// exponentials.
template <class T>
struct Baton {
  int group;

  CUTE_DEVICE explicit Baton(int group) : group(group) {
    if (T::kPingPong && group == 0) cutlass::arch::NamedBarrier::arrive(256, T::kTurnBarrier);  // its own first turn
  }
  CUTE_DEVICE void take() const { cutlass::arch::NamedBarrier::sync(256, T::kTurnBarrier + group); }
  CUTE_DEVICE void pass() const {
    cutlass::arch::NamedBarrier::arrive(256, T::kTurnBarrier + (group + 1) % T::kGroups);
  }
};

// Rounds the outputs of a warpgroup (MMA,1,1) and sends them off through shared memory.
template <KernelConfig C, class Mma, class Output>
CUTE_DEVICE void store_output(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage,
                              const Work<ForwardTraits<C>::kGroups>& work, const Mma& mma, const Output& tOrO,
                              int thread) {
  using T = ForwardTraits<C>;
  using Element = typename T::Element;
  const int group = thread / 128;
  const bool stores = thread % 128 == 0;
  if constexpr (T::kOwnOutput) {
    // After this barrier the warpgroup's O of the tile before has left shared memory.
    if (stores) tma_store_wait<0>();
    cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier + group);
  } else {
    // After this barrier nobody still reads V.
    cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
  }
  Element* const to = T::kOwnOutput ? storage.out : storage.v[0];
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto thread_out = copy_out.get_thread_slice(thread);
  Tensor sO = make_tensor(make_smem_ptr(to), typename T::LayoutO{});  // (row,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<Element>(tOrO)), thread_out.partition_D(sO));
  tma_store_fence();
  // After this barrier the warpgroup's rows of O are in shared memory, for the TMA to see.
  cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier + group);
  if (!stores) return;
  const int row = work.tile.row + group * 64;
  if (row < work.seq.q.length) {
    params.out.template store<C.block_m, C.head_dim_v>(to + group * 64 * atom_columns(C.head_dim_v), work.seq.q, row,
                                                       work.tile.head, work.tile.batch);
    tma_store_arrive();
  }
  if constexpr (!T::kOwnOutput) {
    tma_store_wait<0>();
    for (uint32_t rank = 0; rank < C.cluster; ++rank) storage.out_left.arrive(rank);
  }
}

// A warpgroup that computes 64 rows of each tile of queries.
template <KernelConfig C>
CUTE_DEVICE void consume(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdProblem& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;

  typename T::MmaQK mma_qk;
  typename T::MmaPV mma_pv;
  auto group_qk = mma_qk.get_slice(group * 128);  // of the warpgroup, so that descriptors are the same in all threads
  auto group_pv = mma_pv.get_slice(group * 128);
  auto fragment_k = [&](int stage) {  // (MMA,1,MMA_K)
    return group_qk.partition_fragment_B(make_tensor(make_smem_ptr(storage.k[stage]), typename T::LayoutK{}));
  };
  auto fragment_v = [&](int stage) {  // (MMA,1,MMA_K)
    return group_pv.partition_fragment_B(make_tensor(make_smem_ptr(storage.v[stage]), typename T::LayoutV{}));
  };
  auto fragment_q = [&](int stage) {  // (MMA,1,MMA_K)
    return group_qk.partition_fragment_A(make_tensor(make_smem_ptr(storage.q[stage]), typename T::LayoutQ{}));
  };
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<C.block_m>, Int<C.block_n>>{});  // (MMA,1,1)
  Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,1,1)
  Tensor tSrP = make_tensor<typename T::Element>(tSrS.layout());
  Tensor scores = rows_of(tSrS);  // (rows,columns)
  Tensor output = rows_of(tOrO);  // (rows,dims)
  Tensor at =
      rows_of(mma_qk.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{})));
  const Baton<T> baton(group);
  Cursor<C.stages> at_k, at_v;
  Cursor<T::kStagesQ> at_q;
  for (;; at_q.advance()) {
    storage.ring_q.wait(at_q);
    const Work<T::kGroups>& work = storage.work[at_q.count % T::kWorks];
    const QueryTile& tile = work.tile;
    if (tile.row < 0) break;
    Tensor tSrQ = fragment_q(at_q.stage());  // (MMA,1,MMA_K)
    const TileRange range = work.of_group[group];
    typename T::Softmax softmax(rule_scale_log2(p));
    const float slope = C.rich() ? slope_of(p.rules, tile.batch, tile.head) : 0.f;

    // Scores of key tile n, which are still in products' units, become weights. The result: whether sums of before were
    // rescaled, and outputs are to be multiplied by `factors`.
    auto weigh = [&](int n, auto masked, auto& factors) __attribute__((always_inline)) {
      const int key = work.keys.first + n * C.block_n;
      if constexpr (C.rich()) apply_rules(scores, at, p, slope, tile.row + work.seq.shift(), key);
      if constexpr (decltype(masked)::value) BandMask(work.seq, p.band).hide(scores, at, tile.row, key);
      fill(factors, 1.f);
      const bool rescaled = softmax.raise(scores, factors);
      softmax.weigh(scores, 0, size<1>(scores));
      return rescaled;
    };

    // The warpgroup's turn, of which each tile of keys but the first has one.
    auto has_turn = [&](int n) { return T::kPingPong && n < work.key_tiles - 1; };
    // Key tiles down to `until` that other warpgroups see and this one does not.
    int n = work.key_tiles - 1;
    auto skip = [&](int until) {
      CUTE_NO_UNROLL
      for (; n >= until; --n) {
        storage.ring_k.wait(at_k);
        storage.ring_k.release(at_k);
        at_k.advance();
        if (has_turn(n)) {
          baton.take();
          baton.pass();
        }
        storage.ring_v.wait(at_v);
        storage.ring_v.release(at_v);
        at_v.advance();
      }
    };

    clear(tOrO);
    if (!range.empty()) {
      Tensor factors = make_tensor<float>(Shape<_2, _1>{});
      skip(range.end);
      storage.ring_k.wait(at_k);
      if (has_turn(n)) baton.take();
      start_product<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, fragment_k(at_k.stage()), tSrS);
      if (has_turn(n)) baton.pass();
      wait_products<0>(tSrS);
      storage.ring_k.release(at_k);
      at_k.advance();
      if (range.full(n)) {
        weigh(n, false_type{}, factors);
      } else {
        weigh(n, true_type{}, factors);
      }
      convert(tSrS, tSrP);
      // While the products of the scores of tile n and of the outputs of tile n + 1 run, one turn's exponentials do.
      auto step = [&](auto masked) __attribute__((always_inline)) {
        storage.ring_k.wait(at_k);
        if constexpr (T::kPingPong) baton.take();
        start_product<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, fragment_k(at_k.stage()), tSrS);
        storage.ring_v.wait(at_v);
        start_product<GMMA::ScaleOut::One>(mma_pv, as_register_operand(tSrP), fragment_v(at_v.stage()), tOrO);
        if constexpr (T::kPingPong) baton.pass();
        wait_products<1>(tSrS);
        storage.ring_k.release(at_k);
        at_k.advance();
        const bool rescaled = weigh(n, masked, factors);
        wait_products<0>(tOrO);
        storage.ring_v.release(at_v);
        at_v.advance();
        convert(tSrS, tSrP);
        if (rescaled) {
          CUTE_UNROLL
          for (int i = 0; i < size(output); ++i) output(i) *= factors(i % 2);
        }
      };
      CUTE_NO_UNROLL
      for (--n; n >= range.begin; --n) {
        if (range.full(n)) {
          step(false_type{});
        } else {
          step(true_type{});
        }
      }
      storage.ring_q.release(at_q);
      storage.ring_v.wait(at_v);
      start_product<GMMA::ScaleOut::One>(mma_pv, as_register_operand(tSrP), fragment_v(at_v.stage()), tOrO);
      wait_products<0>(tOrO);
      storage.ring_v.release(at_v);
      at_v.advance();
    } else {
      storage.ring_q.release(at_q);
    }
    skip(0);

    const auto lse = softmax.finish(output, sink_of(p.sink, tile.head), p.rules.keep_scale);
    store_statistics(p, work.seq, tile, softmax, lse, at);
    store_output<C>(params, storage, work, mma_pv, tOrO, thread);
  }
  if (thread % 128 == 0) tma_store_wait<0>();
}

template <KernelConfig C>
__global__ void __cluster_dims__(C.cluster, 1, 1) __launch_bounds__(C.threads(), 1)
    forward(const __grid_constant__ ForwardParams params) {
  using T = ForwardTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  if (threadIdx.x == 0) {
    storage.ring_k.init(C.warps);
    storage.ring_v.init(C.warps);
    storage.ring_q.init(C.warps + 1);  // and the thread that loads V
    storage.ring_next.init(1);
    storage.out_left.init(T::kGroups * C.cluster);
    cutlass::arch::fence_barrier_init();
  }
  // After this barrier the rings are ready, those of the whole cluster.
  if constexpr (C.cluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0 && elect_one_sync()) produce_queries_and_keys<C>(params, storage);
    if (warp == 1 && elect_one_sync()) produce_values<C>(params, storage);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    consume<C>(params, storage);
  }
  // After this barrier nobody of the cluster still sends anything here.
  if constexpr (C.cluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace flash_cute::sm90

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  sm90::ForwardParams params;
  params.p = p;
  params.order = sm90::TileOrder::of(p, C.block_m * C.cluster);
  const int64_t tiles = params.order.tiles();
  params.tiles = static_cast<int>(tiles);
  int device_index = 0;
  if (cudaError_t e = cudaGetDevice(&device_index)) return e;
  const int64_t ctas = std::min<int64_t>(tiles, device(device_index).sms / C.cluster) * C.cluster;
  if (tiles + ctas > kMaxCtas) return cudaErrorInvalidConfiguration;  // numbers that take() may give
  if (cudaError_t e = fill_gaps(p, stream)) return e;
  if (tiles == 0) return cudaSuccess;
  const int64_t total_q = p.dense() ? -1 : p.total_q, total_k = p.dense() ? -1 : p.total_k;
  auto map_queries = [&](sm90::RaggedMap& map, const Matrices& m, int dim, int rows, int cols) {
    return sm90::make_ragged_map(map, m, dim, p.seqlen_q, total_q, p.heads, p.batch, rows, cols);
  };
  auto map_keys = [&](sm90::RaggedMap& map, const Matrices& m, int dim, int cols) {
    return sm90::make_ragged_map(map, m, dim, p.seqlen_k, total_k, p.heads_k, p.batch, C.block_n / C.cluster, cols);
  };
  if (cudaError_t e = map_queries(params.q, p.q, p.head_dim, C.block_m, C.head_dim)) return e;
  if (cudaError_t e = map_queries(params.out, p.out, p.head_dim_v, 64, C.head_dim_v)) return e;
  if (cudaError_t e = map_keys(params.k, p.k, p.head_dim, C.head_dim)) return e;
  if (cudaError_t e = map_keys(params.v, p.v, p.head_dim_v, C.head_dim_v)) return e;
  if (cudaError_t e = tile_counter(params.counter, stream)) return e;
  if (cudaError_t e = launch_kernel<sm90::forward<C>>(ctas, C.threads(), C.smem_bytes(), stream, params)) return e;
  return p.softmax == nullptr ? cudaSuccess : write_probabilities(p, stream);
}

}  // namespace flash_cute
