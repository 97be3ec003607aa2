// The main loop of Hopper's forward: for 64 rows of queries, S = Q K^T, online softmax, O += P V, a tile of keys a step.
// S of a step and P V of the step before run while another warpgroup computes exponentials.
#pragma once

#include <utility>

#include "core/layout/kv_tiles.h"
#include "kernels/common/forward_rules.h"
#include "kernels/common/fragment.h"
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
  CUTE_DEVICE void wait() const {
    if constexpr (T::kPingPong) cutlass::arch::NamedBarrier::sync(256, T::kPingPongBarrier + group);
  }
  // The next warpgroup may.
  CUTE_DEVICE void arrive() const {
    if constexpr (T::kPingPong)
      cutlass::arch::NamedBarrier::arrive(256, T::kPingPongBarrier + (group + 1) % T::kGroups);
  }
};

// A warpgroup's rows of a work tile, and what their softmax has gathered.
template <KernelConfig C>
struct QueryRows {
  using T = ForwardTraits<C>;
  using Softmax = typename T::Softmax;

  const WorkTile<T::kGroups>& work;
  decltype(tile_of_head<C>(std::declval<const ForwardParams&>(), std::declval<const QueryTile&>(),
                           0)) tile;  // of a warp
  KvInterval<C.block_n> tiles;  // that these rows see
  ForwardRules<true> rules;
  Softmax softmax;
  typename Softmax::Total totals[2];  // once all keys are met

  CUTE_DEVICE QueryRows(const ForwardParams& params, const WorkTile<T::kGroups>& work, int group, int thread)
      : work(work),
        tile(tile_of_head<C>(params, work.tile, thread / 32 * 16)),
        tiles{work.of_group[group], work.keys.first},
        rules(params.p, tile.batch, tile.head),
        softmax(rules.scale_log2()) {}

  CUTE_DEVICE int key_of_first_query() const { return tile.row + work.seq.shift(); }
};

// A warpgroup's accumulators, and its places in the pipelines, through all work tiles of the CTA.
template <KernelConfig C>
class ForwardMainloop {
  using T = ForwardTraits<C>;
  using MmaQK = typename T::template MmaQK<C.block_n>;
  using MmaPV = typename T::MmaPV;
  using FragmentS = decltype(partition_fragment_C(MmaQK{}, Shape<Int<C.block_m>, Int<C.block_n>>{}));
  using FragmentO = decltype(partition_fragment_C(MmaPV{}, Shape<Int<C.block_m>, Int<C.head_dim_v>>{}));
  using FragmentP = decltype(make_tensor<typename T::Element>(FragmentS{}.layout()));
  using Factors = decltype(make_tensor<float>(Shape<_2, _1>{}));
  static constexpr Int<C.block_n> kAllKeys{};

 public:
  CUTE_DEVICE ForwardMainloop(const ForwardParams& params, typename T::Storage& storage, int group, int thread)
      : params_(params),
        storage_(storage),
        group_(group),
        thread_(thread),
        ping_pong_(group),
        drops_(C.has_mask_warpgroup() && params.p.rules.rng != nullptr) {}

  // O of the rows, unnormalized, and their totals, once Q of the work tile is in shared memory.
  CUTE_DEVICE void operator()(QueryRows<C>& rows, const PipelineState<T::kStagesQ>& at_q) {
    clear(tOrO);
    const KvTiles auto& tiles = rows.tiles;
    int n = rows.work.key_tiles - 1;
    if (tiles.empty()) {
      storage_.pipeline_q.consumer_release(at_q);
      finalize(rows);
    } else {
      skip(n, tiles.end);
      begin(rows, at_q, n);
      CUTE_NO_UNROLL
      for (--n; n >= tiles.begin; --n) {
        if (tiles.full(n)) {
          step(rows, at_q, n, false_type{});
        } else {
          step(rows, at_q, n, true_type{});
        }
      }
      if (!kReleasesEarly) storage_.pipeline_q.consumer_release(at_q);
      start_values();
      finalize(rows);
      wait_products<0>(tOrO);
      release_values();
    }
    skip(n, 0);
  }

  FragmentO tOrO;  // (MMA,1,1)

  CUTE_DEVICE const PipelineState<C.stages>& at_v() const { return at_v_; }

 private:
  // With one buffer of Q, the next Q is loaded from the last S product on. With more, a branch in each step would cost
  // more than it gains.
  static constexpr bool kReleasesEarly = T::kStagesQ == 1;
  // Columns whose exponentials run before the wait for P V; more would delay what follows the wait.
  static constexpr int kEarly = 4;

  // One slice for all threads: descriptors are warpgroup-uniform.
  template <class Mma>
  CUTE_DEVICE auto slice(Mma mma) const {
    return mma.get_slice(group_ * 128);
  }
  CUTE_DEVICE auto coordinates() const {  // (rows,columns)
    return rows_of(
        MmaQK{}.get_slice(thread_).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{})));
  }

  // The accumulators of a tile's first `keys` keys.
  template <class Keys>
  CUTE_DEVICE auto scores_of(Keys) {
    typename T::template MmaQK<Keys::value> mma;
    return make_tensor(tSrS_.data(), partition_fragment_C(mma, Shape<Int<C.block_m>, Keys>{}).layout());
  }

  // Issues S = Q K^T of a tile's first `keys` keys, in ping-pong order.
  template <class Keys>
  CUTE_DEVICE void start_scores(Keys keys, const PipelineState<T::kStagesQ>& at_q) {
    typename T::template MmaQK<Keys::value> mma;
    Tensor sQ = make_tensor(make_smem_ptr(storage_.q[at_q.stage()]), typename T::LayoutQ{});  // (row,dim)
    Tensor all_k = make_tensor(make_smem_ptr(storage_.k[at_k_.stage()]), typename T::LayoutK{});  // (key,dim)
    Tensor sK = local_tile(all_k, Shape<Keys, Int<C.head_dim>>{}, make_coord(0, 0));  // (key,dim)
    Tensor tSrQ = slice(MmaQK{}).partition_fragment_A(sQ);  // (MMA,1,MMA_K)
    Tensor tSrK = slice(mma).partition_fragment_B(sK);  // (MMA,1,MMA_K)
    Tensor acc = scores_of(keys);  // (MMA,1,1)
    // After this wait K of the tile is in shared memory.
    storage_.pipeline_k.consumer_wait(at_k_);
    ping_pong_.wait();
    start_product<GMMA::ScaleOut::Zero>(mma, tSrQ, tSrK, acc);
  }

  // Issues O += P V.
  CUTE_DEVICE void start_values() {
    // After this wait V of the tile is in shared memory.
    storage_.pipeline_v.consumer_wait(at_v_);
    Tensor sV = make_tensor(make_smem_ptr(storage_.v[at_v_.stage()]), typename T::LayoutV{});  // (dim,key)
    Tensor tOrV = slice(MmaPV{}).partition_fragment_B(sV);  // (MMA,1,MMA_K)
    MmaPV mma;
    start_product<GMMA::ScaleOut::One>(mma, as_register_operand(tSrP_), tOrV, tOrO);
  }

  CUTE_DEVICE void release_keys(const QueryRows<C>& rows, const PipelineState<T::kStagesQ>& at_q, int n) {
    storage_.pipeline_k.consumer_release(at_k_);
    at_k_.advance();
    if (kReleasesEarly && n == rows.tiles.begin) storage_.pipeline_q.consumer_release(at_q);
  }
  CUTE_DEVICE void release_values() {
    storage_.pipeline_v.consumer_release(at_v_);
    at_v_.advance();
  }

  // The first tile, of which half may be enough.
  CUTE_DEVICE void begin(QueryRows<C>& rows, const PipelineState<T::kStagesQ>& at_q, int n) {
    if (T::kHalves && rows.work.half[group_]) {
      begin_with(rows, at_q, n, Int<C.block_n / 2>{}, true_type{});
    } else if (rows.tiles.full(n)) {
      begin_with(rows, at_q, n, kAllKeys, false_type{});
    } else {
      begin_with(rows, at_q, n, kAllKeys, true_type{});
    }
    round();
  }
  template <class Keys, class Masked>
  CUTE_DEVICE void begin_with(QueryRows<C>& rows, const PipelineState<T::kStagesQ>& at_q, int n, Keys keys,
                              Masked masked) {
    start_scores(keys, at_q);
    ping_pong_.arrive();
    wait_products<0>(tSrS_);
    release_keys(rows, at_q, n);
    softmax_step(rows, n, keys, masked);
    CUTE_UNROLL
    for (int i = size(scores_of(keys)); i < size(tSrS_); ++i) tSrS_(i) = 0.f;
  }

  // S of tile n beside P V of tile n + 1.
  template <class Masked>
  CUTE_DEVICE void step(QueryRows<C>& rows, const PipelineState<T::kStagesQ>& at_q, int n, Masked masked) {
    start_scores(kAllKeys, at_q);
    start_values();
    ping_pong_.arrive();
    wait_products<1>(tSrS_);
    release_keys(rows, at_q, n);
    const bool rescaled = softmax_step(rows, n, kAllKeys, masked);
    wait_products<0>(tOrO);
    release_values();
    round();
    if (rescaled) {
      Tensor output = rows_of(tOrO);  // (rows,dims)
      CUTE_UNROLL
      for (int i = 0; i < size(output); ++i) output(i) *= factors_(i % 2);
    }
  }

  // Online-softmax step of tile n: raw scores become weights. Returns whether earlier sums were rescaled; then O is to
  // be multiplied by the factors.
  template <class Keys, class Masked>
  CUTE_DEVICE bool softmax_step(QueryRows<C>& rows, int n, Keys keys, Masked) {
    Tensor scores = rows_of(scores_of(keys));  // (rows,columns)
    const int key = rows.tiles.first_key(n);
    if constexpr (C.rich() && !Masked::value) {
      if (const SoftmaxCap& cap = params_.cap; cap.is_possible) {
        const auto magnitudes = T::Softmax::magnitudes(scores);
        const bool suits = cap.suits(magnitudes);
        const bool fits = __all_sync(~0u, suits & rows.softmax.fits_limit(magnitudes, cap.most_weight));
        if (fits || __all_sync(~0u, suits)) return capped_step(rows.softmax, scores, fits);
      }
    }
    if constexpr (C.rich()) rows.rules.apply(scores, coordinates(), rows.key_of_first_query(), key);
    if constexpr (Masked::value)
      BandMask(rows.work.seq, params_.p.band).hide(scores, coordinates(), rows.tile.row, key);
    fill(factors_, 1.f);
    const bool rescaled = rows.softmax.update_max(scores, factors_, UnitFactor{}, [&]() __attribute__((always_inline)) {
      rows.softmax.begin_exponentials(scores, kEarly);
    });
    rows.softmax.end_exponentials(scores, kEarly);
    return rescaled;
  }

  // The same of small scores under a softcap, whose tanh is a polynomial in the exponents. `fits`: no row can need a
  // rescale.
  template <class Scores>
  CUTE_DEVICE bool capped_step(typename T::Softmax& softmax, Scores& scores, bool fits) {
    const SoftmaxCap& cap = params_.cap;
    constexpr int kAll = decltype(size<1>(scores))::value;  // all exponentials before the wait hide its latency
    auto begin_exponentials = [&]() __attribute__((always_inline)) {
      softmax.begin_exponentials(scores, kAll, cap.weight);
    };
    fill(factors_, 1.f);
    bool rescaled = false;
    if (fits) {
      begin_exponentials();
    } else {
      rescaled = softmax.update_max(scores, factors_, cap.factor, begin_exponentials);
    }
    softmax.end_exponentials(scores, kAll);
    return rescaled;
  }

  // Rounds P to the operand of P V, with dropped elements set to 0.
  CUTE_DEVICE void round() {
    convert(tSrS_, tSrP_);
    if constexpr (C.has_mask_warpgroup()) {
      if (!drops_) return;
      // After this wait the keep mask of the tile is in shared memory.
      storage_.pipeline_mask.consumer_wait(at_mask_);
      apply_keep_mask(tSrP_, storage_.keep_mask[thread_ / 32], thread_ % 32);
      storage_.pipeline_mask.consumer_release(at_mask_);
      at_mask_.advance();
    }
  }

  // Skips key tiles down to `until`: other warpgroups see them, this one does not.
  CUTE_DEVICE void skip(int& n, int until) {
    CUTE_NO_UNROLL
    for (; n >= until; --n) {
      storage_.pipeline_k.consumer_wait(at_k_);
      storage_.pipeline_k.consumer_release(at_k_);
      at_k_.advance();
      ping_pong_.wait();
      ping_pong_.arrive();
      storage_.pipeline_v.consumer_wait(at_v_);
      release_values();
      if (drops_) {
        storage_.pipeline_mask.consumer_wait(at_mask_);
        storage_.pipeline_mask.consumer_release(at_mask_);
        at_mask_.advance();
      }
    }
  }

  // Finalizes the row sums and writes LSE and row max, under the last P V product.
  CUTE_DEVICE void finalize(QueryRows<C>& rows) const {
    const FwdProblem& p = params_.p;
    cutlass::Array<float, 2> lse;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      rows.totals[r] = rows.softmax.template finalize<true>(r, sink_of(p.sink, rows.tile.head), p.rules.keep_scale);
      lse[r] = rows.totals[r].lse;
    }
    store_row_stats(p, rows.work.seq, rows.work.of_results(p, rows.tile), rows.softmax, lse, coordinates());
  }

  const ForwardParams& params_;
  typename T::Storage& storage_;
  int group_, thread_;
  PingPong<T> ping_pong_;
  bool drops_;
  PipelineState<C.stages> at_k_, at_v_;
  PipelineState<1> at_mask_;
  FragmentS tSrS_;  // (MMA,1,1)
  FragmentP tSrP_;  // (MMA,1,1)
  Factors factors_;
};

}  // namespace flash_cute::sm90
