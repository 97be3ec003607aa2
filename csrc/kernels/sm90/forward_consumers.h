// The consumer warpgroups of Hopper's forward: two wgmma products per tile of keys, online softmax, and the epilogue.
#pragma once

#include "kernels/common/forward_rules.h"
#include "kernels/common/fragment.h"
#include "kernels/common/list_mask.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/forward_dropout.h"
#include "kernels/sm90/forward_traits.h"

namespace flash_cute::sm90 {

// Ping-pong (FlashAttention-3): one warpgroup at a time issues products, while the others are at their exponentials.
template <class T>
struct PingPong {
  int group;

  CUTE_DEVICE explicit PingPong(int group) : group(group) {
    if (T::kPingPong && group == 0) cutlass::arch::NamedBarrier::arrive(256, T::kPingPongBarrier);  // it begins
  }
  // After this barrier the warpgroup may issue products.
  CUTE_DEVICE void wait() const { cutlass::arch::NamedBarrier::sync(256, T::kPingPongBarrier + group); }
  // Lets the next warpgroup issue.
  CUTE_DEVICE void arrive() const {
    cutlass::arch::NamedBarrier::arrive(256, T::kPingPongBarrier + (group + 1) % T::kGroups);
  }
};

// The query, head and batch of a row of the CTA's tile, whose warp has the tile `tile`; a negative row if there is none.
template <KernelConfig C>
CUTE_DEVICE QueryTile place_of_row(const ForwardParams& params, const typename ForwardTraits<C>::Work& work,
                                   const QueryTile& tile, int row) {
  if constexpr (C.packs_tokens()) {
    const TokenRow at(params, tile, row);
    return {at.exists(params, work.seq) ? at.query : -1, at.head, tile.batch};
  } else {
    return {tile.row + row < work.seq.q.length ? tile.row + row : -1, tile.head, tile.batch};
  }
}

// Writes a warpgroup's output (MMA,1,1) of one split of the keys to the workspace.
template <KernelConfig C, class Mma, class Output>
CUTE_DEVICE void store_split(const ForwardParams& params, const typename ForwardTraits<C>::Work& work,
                             const QueryTile& tile, const Mma& mma, const Output& tOrO, int thread) {
  const FwdParams& p = params.p;
  Tensor output = rows_of(tOrO);  // (rows,dims)
  Tensor at =
      rows_of(mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.head_dim_v>>{})));
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const QueryTile place = place_of_row<C>(params, work, tile, get<0>(at(r, 0)));
    if (place.row < 0) continue;
    const int64_t row = first_of(p.split_lse, work.of_results(p, place), work.seq) + place.row;
    float* const to = p.split_out + row * C.head_dim_v + get<1>(at(r, 0));
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); c += 2) {
      *reinterpret_cast<float2*>(to + column_offset(c)) = make_float2(output(r, c), output(r, c + 1));
    }
  }
}

// Waits until a warpgroup may write its O to shared memory.
template <KernelConfig C>
CUTE_DEVICE void wait_for_room(typename ForwardTraits<C>::Storage& storage, int group, const PipelineState<1>& at_out,
                               const PipelineState<C.stages>& at_v) {
  using T = ForwardTraits<C>;
  if constexpr (T::kOwnOutput) {
    // After this wait the warpgroup's previous O has been stored.
    storage.pipeline_out[group].producer_acquire(at_out);
  } else if (group == 0) {
    // After these waits both warpgroups' previous O are stored, and no one reads V of the second to last tile.
    for (auto& pipeline : storage.pipeline_out) pipeline.producer_acquire(at_out);
    storage.pipeline_v.producer_acquire({at_v.count});
    cutlass::arch::NamedBarrier::arrive(256, T::kAllGroupsBarrier);
  } else {
    // After this barrier the same holds, and no one reads V of the last tile. This warpgroup cannot wait on the other's
    // pipeline of O, which may be two phases ahead.
    cutlass::arch::NamedBarrier::sync(256, T::kAllGroupsBarrier);
  }
}

// Rounds a warpgroup's output (MMA,1,1) into shared memory, for the thread that stores it by TMA.
template <KernelConfig C, class Output>
CUTE_DEVICE void store_output(typename ForwardTraits<C>::Element* to, const Output& tOrO, int thread) {
  using T = ForwardTraits<C>;
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, typename T::Element>{}, typename T::MmaO{});
  auto thread_out = copy_out.get_thread_slice(thread % 128);
  Tensor sO = make_tensor(make_smem_ptr(to), typename T::LayoutO{});  // (row,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<typename T::Element>(tOrO)), thread_out.partition_D(sO));
  tma_store_fence();
}

// Stores a warp's rows of tokens from where store_output() has written them.
template <KernelConfig C>
CUTE_DEVICE void store_tokens(const ForwardParams& params, const typename ForwardTraits<C>::Work& work,
                              const typename ForwardTraits<C>::Element* from, int thread) {
  using Element = typename ForwardTraits<C>::Element;
  constexpr int kTogether = 16 / sizeof(Element), kVectors = C.head_dim_v / kTogether;
  const FwdParams& p = params.p;
  // After this barrier the warp has written its rows.
  __syncwarp();
  Tensor sO = make_tensor(make_smem_ptr(from), typename ForwardTraits<C>::LayoutO{});  // (row,dim)
  CUTE_NO_UNROLL
  for (int i = thread % 32; i < 16 * kVectors; i += 32) {
    const int row = thread / 32 * 16 + i / kVectors, col = i % kVectors * kTogether;
    const QueryTile place = place_of_row<C>(params, work, work.tile, row);
    if (place.row < 0 || col >= p.head_dim_v) continue;
    Element* const to = static_cast<Element*>(p.out.ptr) + place.batch * p.out.batch + place.head * p.out.head +
                        (work.seq.q.offset + place.row) * p.out.row + col;
    const Element* const vector = &sO(row % 64, col);
    if (col + kTogether <= p.head_dim_v) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(vector);
    } else {
      for (int j = 0; col + j < p.head_dim_v; ++j) to[j] = vector[j];
    }
  }
  // After this barrier the warp has read its rows.
  __syncwarp();
}

// A consumer warpgroup's states of the pipelines of keys, values and dropout's masks, over all its work tiles.
template <KernelConfig C>
struct KeyPipelines {
  using T = ForwardTraits<C>;

  typename T::Storage& storage;
  const PingPong<T>& ping_pong;
  const bool drops;
  PipelineState<C.stages> at_k, at_v;
  PipelineState<1> at_mask;

  CUTE_DEVICE void release_k() {
    storage.pipeline_k.consumer_release(at_k);
    at_k.advance();
  }
  CUTE_DEVICE void release_v() {
    storage.pipeline_v.consumer_release(at_v);
    at_v.advance();
  }
  CUTE_DEVICE void release_mask() {
    storage.pipeline_mask.consumer_release(at_mask);
    at_mask.advance();
  }

  // Skips key tiles from `n` down to `until`: other warpgroups see them, this one does not.
  CUTE_DEVICE void skip(int& n, int until) {
    CUTE_NO_UNROLL
    for (; n >= until; --n) {
      storage.pipeline_k.consumer_wait(at_k);
      release_k();
      if constexpr (T::kPingPong) {
        ping_pong.wait();
        ping_pong.arrive();
      }
      storage.pipeline_v.consumer_wait(at_v);
      release_v();
      if (drops) {
        storage.pipeline_mask.consumer_wait(at_mask);
        release_mask();
      }
    }
  }

  // Rounds P (MMA,1,1) to the operand of P V, with dropped elements set to 0.
  template <class Weights, class Rounded>
  CUTE_DEVICE void round(const Weights& tSrS, Rounded& tSrP, int thread) {
    convert(tSrS, tSrP);
    if constexpr (has_mask_warpgroup(C)) {
      if (!drops) return;
      storage.pipeline_mask.consumer_wait(at_mask);
      apply_keep_mask(tSrP, storage.keep_mask[thread / 32], thread % 32);
      release_mask();
    }
  }
};

// A warp's rows of a work tile: the online softmax over their scores, and their statistics.
template <KernelConfig C>
struct WarpRows {
  using T = ForwardTraits<C>;
  using Softmax = typename T::Softmax;

  const ForwardParams& params;
  const typename T::Work& work;
  const QueryTile& tile;  // of the warp's head
  const ForwardRules<true> rules;
  const int first_query_pos;  // key position of the tile's first query
  Softmax softmax;
  typename Softmax::Total totals[2];

  CUTE_DEVICE WarpRows(const ForwardParams& params, const typename T::Work& work, const QueryTile& tile)
      : params(params),
        work(work),
        tile(tile),
        rules(params.p, tile.batch, tile.head),
        first_query_pos(tile.row + work.seq.shift()),
        softmax(rules.scale_log2()) {}

  // Online-softmax step: raw scores (rows,columns) of tile n become weights. Returns whether earlier sums were
  // rescaled; then O is to be multiplied by `factors`. `at`: coordinates of scores.
  template <bool kMasked, class Scores, class Coordinates, class Factors>
  CUTE_DEVICE bool step(Scores scores, const Coordinates& at, const KvTiles auto& tiles, int n, Factors& factors) {
    const int key = tiles.first_key(n);
    // Columns whose exponentials run before the wait for P V; more would delay what follows the wait.
    constexpr int kEarly = 4;
    if constexpr (C.rich() && !kMasked) {
      if (const SoftmaxCap& cap = params.cap; cap.is_possible) {
        const auto magnitudes = Softmax::magnitudes(scores);
        const bool suits = cap.suits(magnitudes);
        const bool fits = __all_sync(~0u, suits & softmax.fits_limit(magnitudes, cap.most_weight));
        if (fits || __all_sync(~0u, suits)) return small_softcap_step(scores, cap, fits, factors);
      }
    }
    if constexpr (C.rich()) rules.apply(scores, at, first_query_pos, key);
    if constexpr (kMasked && C.walks_lists()) {
      if (!tiles.in_band(n)) BandMask(work.seq, params.p.band).hide(scores, at, tile.row, key);
      hide_unlisted(tiles, params.p.lists, n, 0, scores, at);
    } else if constexpr (kMasked && C.packs_tokens()) {
      BandMask(work.seq, params.p.band)
          .hide_from(
              scores, [&](int r) { return TokenRow(params, tile, get<0>(at(r, 0))).query; }, key + get<1>(at(0, 0)));
    } else if constexpr (kMasked) {
      BandMask(work.seq, params.p.band).hide(scores, at, tile.row, key);
    }
    fill(factors, 1.f);
    const bool rescaled = softmax.update_max(scores, factors, UnitFactor{}, [&]() __attribute__((always_inline)) {
      softmax.begin_exponentials(scores, kEarly);
    });
    softmax.end_exponentials(scores, kEarly);
    return rescaled;
  }

  // Finalizes the row sums and writes LSE and row max; O follows.
  template <class Coordinates>
  CUTE_DEVICE void finalize(const Coordinates& at) {
    const FwdParams& p = params.p;
    cutlass::Array<float, 2> lse;
    auto head_of = [&](int r) { return C.packs_tokens() ? TokenRow(params, tile, get<0>(at(r, 0))).head : tile.head; };
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      totals[r] = softmax.template finalize<true>(r, sink_of(p.sink, head_of(r)), p.rules.keep_scale);
      lse[r] = totals[r].lse;
    }
    if constexpr (C.packs_tokens()) {
      if (get<1>(at(0, 0)) != 0) return;  // one thread of the quad writes
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const QueryTile place = place_of_row<C>(params, work, tile, get<0>(at(r, 0)));
        if (place.row < 0) continue;
        const QueryTile of_row = work.of_results(p, place);
        p.lse.ptr[first_of(p.lse, of_row, work.seq) + place.row] = lse[r];
        if (p.row_max.ptr != nullptr) {
          p.row_max.ptr[first_of(p.row_max, of_row, work.seq) + place.row] = softmax.natural_max(r);
        }
      }
    } else {
      store_row_stats(p, work.seq, work.of_results(p, tile), softmax, lse, at);
    }
  }

 private:
  // A step of small scores, whose softcap is part of the softmax's scale. `fits`: no row needs a new reference.
  template <class Scores, class Factors>
  CUTE_DEVICE bool small_softcap_step(Scores& scores, const SoftmaxCap& cap, bool fits, Factors& factors) {
    constexpr int kAll = decltype(size<1>(scores))::value;  // all exponentials before the wait hide its latency
    auto begin_exponentials = [&]() __attribute__((always_inline)) {
      softmax.begin_exponentials(scores, kAll, cap.weight);
    };
    fill(factors, 1.f);
    bool rescaled = false;
    if (fits) {
      begin_exponentials();
    } else {
      rescaled = softmax.update_max(scores, factors, cap.factor, begin_exponentials);
    }
    softmax.end_exponentials(scores, kAll);
    return rescaled;
  }
};

// Instead of a flag whether a tile is masked: its list has it.
struct AsListed {};

// A consumer warpgroup: 64 rows of every work tile of the CTA.
template <KernelConfig C>
CUTE_DEVICE void consume(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const FwdParams& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;

  typename T::template MmaQK<C.block_n> mma_qk;
  typename T::MmaPV mma_pv;
  auto group_qk = mma_qk.get_slice(group * 128);  // one slice for all threads: descriptors are warpgroup-uniform
  auto group_pv = mma_pv.get_slice(group * 128);
  auto fragment_v = [&](int stage) {  // (MMA,1,MMA_K)
    return group_pv.partition_fragment_B(make_tensor(make_smem_ptr(storage.v[stage]), typename T::LayoutV{}));
  };
  auto fragment_q = [&](int stage) {  // (MMA,1,MMA_K)
    return group_qk.partition_fragment_A(make_tensor(make_smem_ptr(storage.q[stage]), typename T::LayoutQ{}));
  };
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<C.block_m>, Int<C.block_n>>{});  // (MMA,1,1)
  Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,1,1)
  Tensor tSrP = make_tensor<typename T::Element>(tSrS.layout());
  Tensor output = rows_of(tOrO);  // (rows,dims)
  Tensor at =
      rows_of(mma_qk.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{})));
  const PingPong<T> ping_pong(group);
  PipelineState<T::kStagesQ> at_q;
  KeyPipelines<C> pipes{storage, ping_pong, has_mask_warpgroup(C) && p.rules.rng != nullptr};
  constexpr Int<C.block_n> all_keys;
  for (;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    const typename T::Work& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) break;
    const QueryTile& tile = tile_of_head<C>(params, work.tile, thread / 32 * 16);  // of the warp
    Tensor tSrQ = fragment_q(at_q.stage());  // (MMA,1,MMA_K)
    const KvTiles auto tiles = work.tiles.of_group(group);
    WarpRows<C> rows(params, work, tile);

    // The accumulators of a tile's first `keys` keys.
    auto scores_of = [&](auto keys) __attribute__((always_inline)) {
      typename T::template MmaQK<decltype(keys)::value> mma;
      return make_tensor(tSrS.data(), partition_fragment_C(mma, Shape<Int<C.block_m>, decltype(keys)>{}).layout());
    };

    // Issues S = Q K^T of a tile's first `keys` keys, in ping-pong order.
    auto start_scores = [&](auto keys) __attribute__((always_inline)) {
      typename T::template MmaQK<decltype(keys)::value> mma;
      Tensor all_k = make_tensor(make_smem_ptr(storage.k[pipes.at_k.stage()]), typename T::LayoutK{});  // (key,dim)
      Tensor k = local_tile(all_k, Shape<decltype(keys), Int<C.head_dim>>{}, make_coord(0, 0));  // (key,dim)
      Tensor tSrK = mma.get_slice(group * 128).partition_fragment_B(k);  // (MMA,1,MMA_K)
      Tensor acc = scores_of(keys);  // (MMA,1,1)
      // After this wait K of the tile is in shared memory.
      storage.pipeline_k.consumer_wait(pipes.at_k);
      if constexpr (T::kPingPong) ping_pong.wait();
      start_product<GMMA::ScaleOut::Zero>(mma, tSrQ, tSrK, acc);
    };

    // Raw scores of tile n become weights. `masked`: a constant, or a bool.
    auto softmax_step = [&](int n, auto keys, auto masked, auto& factors) __attribute__((always_inline)) {
      auto with = [&](auto masked) __attribute__((always_inline)) {
        return rows.template step<decltype(masked)::value>(rows_of(scores_of(keys)), at, tiles, n, factors);
      };
      if constexpr (is_same_v<decltype(masked), bool>) {
        return masked ? with(true_type{}) : with(false_type{});
      } else {
        return with(masked);
      }
    };

    int n = work.tiles.count - 1;
    clear(tOrO);
    if (!tiles.empty()) {
      Tensor factors = make_tensor<float>(Shape<_2, _1>{});
      pipes.skip(n, tiles.end);
      // With one buffer of Q, the next Q is loaded from the last S product on. With more, a branch in each step would
      // cost more than it gains.
      constexpr bool kReleasesEarly = T::kStagesQ == 1;
      auto release_queries = [&]() __attribute__((always_inline)) {
        if (kReleasesEarly && n == tiles.begin) storage.pipeline_q.consumer_release(at_q);
      };
      auto begin = [&](auto keys, auto masked) __attribute__((always_inline)) {
        start_scores(keys);
        if constexpr (T::kPingPong) ping_pong.arrive();
        wait_products<0>(tSrS);
        pipes.release_k();
        release_queries();
        softmax_step(n, keys, masked, factors);
        CUTE_UNROLL
        for (int i = size(scores_of(keys)); i < size(tSrS); ++i) tSrS(i) = 0.f;
      };
      if (T::kHalves && work.tiles.ends_in_half(group)) {
        begin(Int<C.block_n / 2>{}, true_type{});
      } else if (tiles.full(n)) {
        begin(all_keys, false_type{});
      } else {
        begin(all_keys, true_type{});
      }
      pipes.round(tSrS, tSrP, thread);
      auto rescale = [&]() __attribute__((always_inline)) {
        CUTE_UNROLL
        for (int i = 0; i < size(output); ++i) output(i) *= factors(i % 2);
      };
      // S of tile n and P V of tile n + 1 run while the other warpgroup computes exponentials.
      auto step = [&](auto masked) __attribute__((always_inline)) {
        start_scores(all_keys);
        storage.pipeline_v.consumer_wait(pipes.at_v);
        start_product<GMMA::ScaleOut::One>(mma_pv, as_register_operand(tSrP), fragment_v(pipes.at_v.stage()), tOrO);
        if constexpr (T::kPingPong) ping_pong.arrive();
        const auto hides = [&] {  // lists are read here, under products
          if constexpr (is_same_v<decltype(masked), AsListed>) {
            return !rows_see_all(tiles, p.lists, n, thread / 32 * 16);
          } else {
            return masked;
          }
        }();
        wait_products<1>(tSrS);
        pipes.release_k();
        release_queries();
        const bool rescaled = softmax_step(n, all_keys, hides, factors);
        wait_products<0>(tOrO);
        pipes.release_v();
        pipes.round(tSrS, tSrP, thread);
        if (rescaled) rescale();
      };
      auto add_values = [&]() __attribute__((always_inline)) {
        storage.pipeline_v.consumer_wait(pipes.at_v);
        start_product<GMMA::ScaleOut::One>(mma_pv, as_register_operand(tSrP), fragment_v(pipes.at_v.stage()), tOrO);
      };
      // The same after tiles that this warpgroup does not see, with P V before them.
      auto step_after_gap = [&](const auto& listed) __attribute__((always_inline)) {
        add_values();
        wait_products<0>(tOrO);
        pipes.release_v();
        pipes.skip(n, listed.listed_before(n) + 1);
        start_scores(all_keys);
        if constexpr (T::kPingPong) ping_pong.arrive();
        const bool hides = !rows_see_all(tiles, p.lists, n, thread / 32 * 16);
        wait_products<0>(tSrS);
        pipes.release_k();
        release_queries();
        if (softmax_step(n, all_keys, hides, factors)) rescale();
        pipes.round(tSrS, tSrP, thread);
      };
      CUTE_NO_UNROLL
      for (--n; n >= tiles.begin; --n) {
        if constexpr (C.walks_lists()) {
          if (tiles.in_full_range(n)) {
            step(false_type{});
          } else if (tiles.listed(n)) {
            step(AsListed{});
          } else {
            step_after_gap(tiles);
          }
        } else if (tiles.full(n)) {
          step(false_type{});
        } else {
          step(true_type{});
        }
      }
      if (!kReleasesEarly) storage.pipeline_q.consumer_release(at_q);
      add_values();
      rows.finalize(at);
      wait_products<0>(tOrO);
      pipes.release_v();
    } else {
      storage.pipeline_q.consumer_release(at_q);
      rows.finalize(at);
    }
    pipes.skip(n, 0);

    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) rows.softmax.normalize(output, r, rows.totals[r]);
    const PipelineState<1> at_out{at_q.count};
    const int group =
        cutlass::canonical_warp_group_idx() - 1;  // recomputed: kept through the loop it would take a register
    wait_for_room<C>(storage, group, at_out, pipes.at_v);
    if (p.num_splits == 1) {
      auto* const to = T::output(storage, group, pipes.at_v.count);
      store_output<C>(to, tOrO, thread);
      if constexpr (C.packs_tokens()) store_tokens<C>(params, work, to, thread);
    } else {
      store_split<C>(params, work, tile, mma_pv, tOrO, thread);
    }
    storage.pipeline_out[group].producer_commit(at_out);
  }
}

}  // namespace flash_cute::sm90
