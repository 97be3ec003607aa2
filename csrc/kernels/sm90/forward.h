// Attention forward for Hopper: persistent CTAs, in which one warp loads tiles by TMA and two or three warpgroups compute
// 64 rows each by wgmma (FlashAttention-3, arXiv 2407.08608).
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
  unsigned* counter;  // tiles that were taken beyond the first of each CTA; 0 before and after the kernel
};

// A tile of queries and what it has to do, from the producer to the consumers.
template <int kGroups>
struct Work {
  QueryTile tile;
  SeqInfo seq;
  int first_key;                 // tiles of keys are counted from here
  TileRange range;               // of the whole tile
  TileRange of_group[kGroups];   // of the rows of each warpgroup

  CUTE_DEVICE Work(const FwdProblem& p, const QueryTile& tile, const SeqInfo& seq, int block_n)
      : tile(tile), seq(seq), first_key(visible_keys(seq, p.band, tile.row, 64 * kGroups).first) {
    range = key_tiles(seq, p.band, tile.row, 64 * kGroups, block_n, first_key);
    CUTE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const int row = tile.row + 64 * i;
      of_group[i] = row < seq.q.length ? key_tiles(seq, p.band, row, 64, block_n, first_key) : TileRange{};
    }
  }
};

template <KernelConfig C>
struct ForwardTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kGroups = C.warps / 4;  // warpgroups that compute
  using LayoutQ = RowsLayout<Element, C.block_m, C.head_dim>;      // (row,dim)
  using LayoutK = RowsLayout<Element, C.block_n, C.head_dim>;      // (key,dim)
  using LayoutV = ColumnsLayout<Element, C.block_n, C.head_dim_v>; // (dim,key)
  using LayoutO = RowsLayout<Element, C.block_m, C.head_dim_v>;    // (row,dim)
  using Groups = Layout<Shape<Int<kGroups>, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.block_n>, Int<C.head_dim>>>(), Groups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.head_dim_v>, Int<C.block_n>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Groups{}));
  using Softmax = OnlineSoftmax<2, 4>;
  static constexpr uint32_t kBytesQ = C.block_m * C.head_dim * sizeof(Element);
  static constexpr uint32_t kBytesK = C.block_n * C.head_dim * sizeof(Element);
  static constexpr uint32_t kBytesV = C.block_n * C.head_dim_v * sizeof(Element);
  static constexpr int kStagesQ = C.stages_q();
  static constexpr bool kOwnOutput = C.own_output();

  struct Storage {
    alignas(1024) Element q[kStagesQ][C.block_m * C.head_dim];
    alignas(1024) Element k[C.stages][C.block_n * C.head_dim];
    alignas(1024) Element v[C.stages][C.block_n * C.head_dim_v];  // O on the way out, unless it has
    alignas(1024) Element out[kOwnOutput ? C.block_m * C.head_dim_v : 1];
    Ring<C.stages> ring_k, ring_v;
    Ring<kStagesQ> ring_q;
    cutlass::arch::ClusterBarrier out_left;  // V's memory
    Work<kGroups> work[kStagesQ + 1];  // a tile's is read until its end, when those of all Q that are loaded are there already

    CUTE_DEVICE Element* out_tile() { return kOwnOutput ? out : v[0]; }
  };
  static_assert(C.block_m == 64 * kGroups && kGroups >= 2);
  static_assert(kOwnOutput || C.stages * C.block_n >= C.block_m, "O fits where V was");
  static_assert(sizeof(Storage) <= C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

// One thread that takes tiles of queries, and loads Q, K and V of each.
template <KernelConfig C>
CUTE_DEVICE void produce(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdProblem& p = params.p;
  const int tiles = params.order.row_tiles * params.order.heads * params.order.batch;
  const int group = p.heads / p.heads_k;
  Cursor<C.stages> at_k, at_v;
  Cursor<T::kStagesQ> at_q;
  Cursor<T::kStagesQ + 1> at_work;
  uint32_t out_phase = 1;
  auto wait_for_out = [&] {
    if constexpr (!T::kOwnOutput) storage.out_left.wait(out_phase);
    out_phase ^= 1;
  };
  auto hand_over = [&](const Work<T::kGroups>& work, uint32_t bytes_q) {
    storage.ring_q.empty[at_q.stage].wait(at_q.phase ^ 1);
    storage.work[at_work.stage] = work;
    storage.ring_q.full[at_q.stage].arrive_and_expect_tx(bytes_q);
    at_work.advance();
  };

  int index = blockIdx.x;
  while (index < tiles) {
    // As late as its latency allows: who comes first to the end of a tile should be the first to have another one.
    auto take = [&] { index = gridDim.x + atomicInc(params.counter, tiles - 1); };
    const QueryTile tile = params.order.at(index, C.block_m);
    const SeqInfo seq(p, tile.batch);
    if (tile.row >= seq.q.length) {
      take();
      continue;
    }
    const Work<T::kGroups> work(p, tile, seq, C.block_n);
    if (work.range.empty()) {
      take();
      wait_for_out();
      hand_over(work, 0);
      at_q.advance();
      continue;
    }
    const SeqSpan visible{seq.k.offset, visible_keys(seq, p.band, tile.row, C.block_m).last};
    const int head_k = tile.head / group;
    auto load_k = [&](int n) {
      uint64_t* barrier = storage.ring_k.acquire(at_k, T::kBytesK);
      params.k.template load<C.block_n, C.head_dim>(storage.k[at_k.stage], barrier, TMA::CacheHintSm90::EVICT_LAST,
                                                    visible, work.first_key + n * C.block_n, head_k, tile.batch);
      at_k.advance();
    };
    auto load_v = [&](int n) {
      uint64_t* barrier = storage.ring_v.acquire(at_v, T::kBytesV);
      params.v.template load<C.block_n, C.head_dim_v>(storage.v[at_v.stage], barrier, TMA::CacheHintSm90::EVICT_LAST,
                                                      visible, work.first_key + n * C.block_n, head_k, tile.batch);
      at_v.advance();
    };

    int n = work.range.end - 1;
    load_k(n);
    hand_over(work, T::kBytesQ);
    params.q.template load<C.block_m, C.head_dim>(storage.q[at_q.stage],
                                                  reinterpret_cast<uint64_t*>(&storage.ring_q.full[at_q.stage]),
                                                  TMA::CacheHintSm90::EVICT_FIRST, seq.q, tile.row, tile.head, tile.batch);
    at_q.advance();
    if (n > work.range.begin) load_k(n - 1);
    wait_for_out();
    for (; n - 1 > work.range.begin; --n) {
      load_v(n);
      load_k(n - 2);
    }
    take();
    for (; n >= work.range.begin; --n) load_v(n);
  }
  storage.ring_q.empty[at_q.stage].wait(at_q.phase ^ 1);
  storage.work[at_work.stage].tile.row = -1;
  storage.ring_q.full[at_q.stage].arrive();
}

// The right to issue products, which goes round among the warpgroups: while one issues, the others are at their
// exponentials.
template <int kGroups>
struct Baton {
  int group;

  static constexpr int kFirstBarrier = 1;
  CUTE_DEVICE explicit Baton(int group) : group(group) {
    if (group == 0) cutlass::arch::NamedBarrier::arrive(256, kFirstBarrier);  // the first turn is its own
  }
  CUTE_DEVICE void take() const { cutlass::arch::NamedBarrier::sync(256, kFirstBarrier + group); }
  CUTE_DEVICE void pass() const { cutlass::arch::NamedBarrier::arrive(256, kFirstBarrier + (group + 1) % kGroups); }
};

// A warpgroup that computes 64 rows of each tile of queries.
template <KernelConfig C>
CUTE_DEVICE void consume(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  using Element = typename T::Element;
  const FwdProblem& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;
  constexpr int kAllGroups = 1 + T::kGroups;  // named barriers; those before are the baton's
  const int group_barrier = kAllGroups + 1 + group;

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
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<C.block_m>, Int<C.block_n>>{});     // (MMA,1,1)
  Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,1,1)
  Tensor tSrP = make_tensor<Element>(tSrS.layout());
  Tensor scores = rows_of(tSrS);   // (rows,columns)
  Tensor output = rows_of(tOrO);   // (rows,dims)
  Tensor at = rows_of(mma_qk.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{})));
  const Baton<T::kGroups> baton(group);
  Cursor<C.stages> at_k, at_v;
  Cursor<T::kStagesQ> at_q;
  Cursor<T::kStagesQ + 1> at_work;
  for (;; at_q.advance(), at_work.advance()) {
    storage.ring_q.wait(at_q);
    const Work<T::kGroups>& work = storage.work[at_work.stage];
    const QueryTile tile = work.tile;
    if (tile.row < 0) break;
    Tensor tSrQ = fragment_q(at_q.stage);  // (MMA,1,MMA_K)
    const TileRange range = work.of_group[group];
    const int first_key = work.first_key, last_tile = work.range.end - 1;
    typename T::Softmax softmax(rule_scale_log2(p));
    const float slope = C.rich() ? slope_of(p.rules, tile.batch, tile.head) : 0.f;

    // Scores of key tile n, which are still in products' units, become weights. The result: whether sums of before were
    // rescaled, and outputs are to be multiplied by `factors`.
    auto weigh = [&](int n, auto masked, auto& factors) __attribute__((always_inline)) {
      const int key = first_key + n * C.block_n;
      if constexpr (C.rich()) apply_rules(scores, at, p, slope, tile.row + work.seq.shift(), key);
      if constexpr (decltype(masked)::value) BandMask(work.seq, p.band).hide(scores, at, tile.row, key);
      fill(factors, 1.f);
      const bool rescaled = softmax.raise(scores, factors);
      softmax.weigh(scores, 0, size<1>(scores));
      return rescaled;
    };

    // The warpgroup's turn, of which each tile of keys but the first has one.
    auto take_turn = [&](int n) {
      if (C.ping_pong && n < last_tile) baton.take();
    };
    auto pass_turn = [&](int n) {
      if (C.ping_pong && n < last_tile) baton.pass();
    };
    // Key tiles down to `until` that other warpgroups see and this one does not.
    int n = last_tile;
    auto skip = [&](int until) {
      CUTE_NO_UNROLL
      for (; n >= until; --n) {
        storage.ring_k.wait(at_k);
        storage.ring_k.release(at_k);
        at_k.advance();
        take_turn(n);
        pass_turn(n);
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
      take_turn(n);
      start_product<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, fragment_k(at_k.stage), tSrS);
      pass_turn(n);
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
        if constexpr (C.ping_pong) baton.take();
        start_product<GMMA::ScaleOut::Zero>(mma_qk, tSrQ, fragment_k(at_k.stage), tSrS);
        storage.ring_v.wait(at_v);
        start_product<GMMA::ScaleOut::One>(mma_pv, as_register_operand(tSrP), fragment_v(at_v.stage), tOrO);
        if constexpr (C.ping_pong) baton.pass();
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
      start_product<GMMA::ScaleOut::One>(mma_pv, as_register_operand(tSrP), fragment_v(at_v.stage), tOrO);
      wait_products<0>(tOrO);
      storage.ring_v.release(at_v);
      at_v.advance();
    } else {
      storage.ring_q.release(at_q);
    }
    skip(work.range.begin);

    const auto lse = softmax.finish(output, sink_of(p.sink, tile.head), p.rules.keep_scale);
    store_statistics(p, work.seq, tile, softmax, lse, at);
    const bool stores = thread % 128 == 0;
    if constexpr (T::kOwnOutput) {
      // After this barrier the O of the tile before has left shared memory.
      if (stores) tma_store_wait<0>();
      cutlass::arch::NamedBarrier::sync(128, group_barrier);
    } else {
      // After this barrier nobody still reads V.
      cutlass::arch::NamedBarrier::sync(128 * T::kGroups, kAllGroups);
    }
    auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_pv);
    auto thread_out = copy_out.get_thread_slice(thread);
    Tensor sO = make_tensor(make_smem_ptr(storage.out_tile()), typename T::LayoutO{});
    cute::copy(copy_out, thread_out.retile_S(converted<Element>(tOrO)), thread_out.partition_D(sO));
    tma_store_fence();
    // After this barrier the warpgroup's rows of O are in shared memory, for the TMA to see.
    cutlass::arch::NamedBarrier::sync(128, group_barrier);
    if (stores) {
      params.out.template store<C.block_m, C.head_dim_v>(storage.out_tile() + group * 64 * atom_columns(C.head_dim_v),
                                                         work.seq.q, tile.row + group * 64, tile.head, tile.batch);
      tma_store_arrive();
    }
    if (!T::kOwnOutput && stores) {
      tma_store_wait<0>();
      storage.out_left.arrive();
    }
  }
  if (thread % 128 == 0) tma_store_wait<0>();
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), 1) forward(const __grid_constant__ ForwardParams params) {
  using T = ForwardTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  if (threadIdx.x == 0) {
    storage.ring_k.init(C.warps);
    storage.ring_v.init(C.warps);
    storage.ring_q.init(C.warps);
    storage.out_left.init(T::kGroups);
    cutlass::arch::fence_barrier_init();
  }
  // After this barrier the rings are ready.
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kGroups == 3 ? 32 : 24>();
    if (cutlass::canonical_warp_idx_sync() == 0 && elect_one_sync()) produce<C>(params, storage);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kGroups == 3 ? 160 : 240>();
    consume<C>(params, storage);
  }
}

}  // namespace flash_cute::sm90

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  sm90::ForwardParams params;
  params.p = p;
  params.order = sm90::TileOrder::of(p, C.block_m);
  const int64_t tiles = params.order.tiles();
  if (tiles > kMaxCtas) return cudaErrorInvalidConfiguration;
  if (cudaError_t e = fill_gaps(p, stream)) return e;
  if (tiles == 0) return cudaSuccess;
  auto map_queries = [&](sm90::RaggedMap& map, const Matrices& m, int dim, int rows, int cols) {
    return sm90::make_ragged_map(map, m, dim, p.seqlen_q, p.total_q, p.heads, p.batch, rows, cols);
  };
  auto map_keys = [&](sm90::RaggedMap& map, const Matrices& m, int dim, int cols) {
    return sm90::make_ragged_map(map, m, dim, p.seqlen_k, p.total_k, p.heads_k, p.batch, C.block_n, cols);
  };
  if (cudaError_t e = map_queries(params.q, p.q, p.head_dim, C.block_m, C.head_dim)) return e;
  if (cudaError_t e = map_queries(params.out, p.out, p.head_dim_v, 64, C.head_dim_v)) return e;
  if (cudaError_t e = map_keys(params.k, p.k, p.head_dim, C.head_dim)) return e;
  if (cudaError_t e = map_keys(params.v, p.v, p.head_dim_v, C.head_dim_v)) return e;
  int device_index = 0;
  if (cudaError_t e = cudaGetDevice(&device_index)) return e;
  if (cudaError_t e = tile_counter(params.counter, stream)) return e;
  const int64_t ctas = std::min<int64_t>(tiles, device(device_index).sms);
  if (cudaError_t e = launch_kernel<sm90::forward<C>>(ctas, C.threads(), C.smem_bytes(), stream, params)) return e;
  return p.softmax == nullptr ? cudaSuccess : write_probabilities(p, stream);
}

}  // namespace flash_cute
