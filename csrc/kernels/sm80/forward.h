// Attention forward for sm_80 and later: one CTA computes one tile of query rows of one head (FlashAttention-2, arXiv
// 2307.08691).
#pragma once

#include "core/workspace.h"
#include "kernels/common/forward_rules.h"
#include "kernels/common/list_mask.h"
#include "kernels/common/mask.h"
#include "kernels/common/query_tile.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tile_kinds.h"
#include "kernels/launch.h"
#include "kernels/ampere/kv_loads.h"
#include "kernels/ampere/mma.h"
#include "kernels/ampere/tile_io.h"
#include "kernels/sm80/resources.h"

namespace flash_cute::sm80 {

using namespace ampere;

template <KernelConfig C>
struct ForwardTraits {
  using Element = ElementOf<C.dtype>;
  using Mma = RowsMma<C.dtype, C.block_m, C.warps>;
  using OperandQ = SharedOperand<Side::A, false, Element, C.block_m, C.head_dim, C.warps>;
  using OperandK = SharedOperand<Side::B, false, Element, C.block_n, C.head_dim, 1>;
  using OperandV = SharedOperand<Side::B, true, Element, C.block_n, C.head_dim_v, 1>;
  using ResultO = SharedResult<Element, C.block_m, C.head_dim_v, C.warps, 1>;
  struct Storage {
    alignas(128) Element q[C.block_m * std::max(C.head_dim, C.head_dim_v)];  // O on the way out
    alignas(128) Element k[C.stages][C.block_n * C.head_dim];
    alignas(128) Element v[C.stages][C.block_n * C.head_dim_v];
  };
  // Steps of Q that stay in registers: as many as the accumulators leave room for, found by trying. The others are read
  // again for each tile of keys, into two alternating slots.
  static constexpr int kPieces = C.block_m / (16 * C.warps), kSteps = C.head_dim / 16;
  static constexpr int kRoom = (kPieces == 1 ? 176 : 160) - C.block_m * (C.head_dim_v + C.block_n) / C.threads();
  static constexpr int kKept = std::clamp(kRoom / (4 * kPieces), 0, kSteps);
  static constexpr int kSlots = kKept == kSteps ? kSteps : kKept + 2;
  static constexpr int slot(int step) { return step < kKept ? step : kKept + (step - kKept) % 2; }
  static_assert(C.stages == 1 || C.stages == 2);
  static_assert(C.block_m % (16 * C.warps) == 0, "every warp owns whole 16-row MMA tiles");
  static_assert(!C.rich() || C.block_n % 32 == 0, "random bits of dropout are for 32 keys");
  static_assert(sizeof(Storage) == smem_bytes(C), "resources.h must agree");
};

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) forward(const __grid_constant__ FwdProblem p) {
  using T = ForwardTraits<C>;
  using Element = typename T::Element;
  constexpr int kThreads = C.threads();
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int thread = threadIdx.x;

  const QueryTile tile = tile_of_block(p, C.block_m);
  const SeqInfo seq(p, tile.batch);
  if (tile.row >= seq.q.length) return;
  const int head_k = tile.head / (p.heads / p.heads_k);
  const auto tiles = KvTilesOf<C>::of(p, seq, tile, C.block_m);
  const RowSpan keys = visible_keys(seq, p.band, tile.row, C.block_m);

  const int past_keys = tiles.past_keys();  // where copies come from, going down
  const RowSpan queries{0, seq.q.length};
  TileCopy<Element, kThreads, C.block_m, C.head_dim> copy_q(p.q, tile.batch, tile.head, seq.q.offset, tile.row, queries,
                                                            p.head_dim, storage.q, thread);
  TileCopy<Element, kThreads, C.block_n, C.head_dim> copy_k(p.k, tile.batch, head_k, seq.k.offset, past_keys, keys,
                                                            p.head_dim, storage.k[0], thread);
  TileCopy<Element, kThreads, C.block_n, C.head_dim_v> copy_v(p.v, tile.batch, head_k, seq.k.offset, past_keys, keys,
                                                              p.head_dim_v, storage.v[0], thread);
  auto load_k = [&](int n, int stage) {
    if (n < tiles.begin) return;
    copy_k.move(tiles.step(n));
    copy_k.load(stage * int(sizeof(storage.k[0])));
  };
  auto load_v = [&](int n, int stage) {
    if (n < tiles.begin) return;
    copy_v.move(tiles.step(n));
    copy_v.load(stage * int(sizeof(storage.v[0])));
  };
  const KvLoads<C.stages, decltype(load_k), decltype(load_v)> loads{load_k, load_v};
  if (!tiles.empty()) copy_q.load();
  loads.start(tiles.end - 1);

  typename T::Mma mma;
  const int warp = thread / 32;
  const typename T::OperandQ q(storage.q, warp);
  const typename T::OperandK k(storage.k[0], 0);
  const typename T::OperandV v(storage.v[0], 0);
  Tensor tOrO = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,MMA_M,MMA_DV)
  clear(tOrO);
  Tensor output = rows_and_columns(tOrO);  // (rows,dims)
  Tensor tScS = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{}));
  Tensor at = rows_and_columns(tScS);  // (rows,columns) -> (row, column) of the tile
  const ForwardRules<false> rules(p, tile.batch, tile.head);
  OnlineSoftmax<decltype(size<0>(at))::value> softmax(rules.scale_log2());
  const BandMask mask(seq, p.band);
  const Dropout dropout(p.rules, int64_t(tile.batch) * p.heads + tile.head);

  Tensor rQ = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<T::kPieces>, Int<T::kSlots>>{});  // (MMA,MMA_M,slot)
  auto read_q = [&](int step) {
    Tensor words = recast<uint32_t>(rQ);
    CUTE_UNROLL
    for (int i = 0; i < T::kPieces; ++i) q.load(&words(0, i, T::slot(step)), step, i);
  };
  if constexpr (T::kKept > 0) {
    // After this barrier Q is visible to all.
    cp_async_wait<0>();
    __syncthreads();
    CUTE_UNROLL
    for (int step = 0; step < T::kKept; ++step) read_q(step);
  }

  int stage = 0;
  CUTE_NO_UNROLL
  for (int n = tiles.end - 1; n >= tiles.begin; --n, stage ^= C.stages - 1) {
    Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.block_n>>{});  // (MMA,MMA_M,MMA_N)
    Tensor scores = rows_and_columns(tSrS);  // (rows,columns)
    clear(tSrS);

    loads.before_scores(n, stage);
    const auto k_n = k.at(stage * int(sizeof(storage.k[0])));
    if constexpr (T::kKept == 0) read_q(0);
    auto query = [&](int step) {
      if (T::kKept <= step + 1 && step + 1 < T::kSteps) read_q(step + 1);
      return rQ(_, _, T::slot(step));
    };
    gemm_registers(mma, tSrS, query, k_n);
    if constexpr (C.rich()) rules.apply(scores, at, tile.row + seq.shift(), tiles.first_key(n));
    if (!tiles.full(n)) {
      mask.hide(scores, at, tile.row, tiles.first_key(n));
      if constexpr (C.walks_lists()) hide_unlisted(tiles, p.lists, n, tile.row % kTileSide, scores, at);
    }
    softmax.update_max(scores, output);

    loads.before_values(n);
    Tensor rP = as_operand_a(tSrS);  // (MMA,MMA_M,MMA_N/2)
    auto weights = [&](int step) {  // of 16 keys; those of 32 together where they share random bits
      constexpr int kColumns = C.rich() ? 8 : 4;
      if (4 * step % kColumns == 0) {
        softmax.exponentiate(scores, 4 * step, 4 * step + kColumns);
        if (C.rich() && p.rules.rng != nullptr)
          drop<kColumns>(scores, 4 * step, at, dropout, tile.row, tiles.first_key(n));
      }
      return converted<Element>(rP(_, _, step));
    };
    gemm_registers(mma, tOrO, weights, v.at(stage * int(sizeof(storage.v[0]))));
  }

  const auto lse = softmax.finish(output, sink_of(p.sink, tile.head), p.rules.keep_scale);
  store_row_stats(p, seq, tile, softmax, lse, at);
  // After this barrier nobody still reads Q, whose memory O takes on the way out.
  __syncthreads();
  typename T::ResultO(storage.q, warp).store(tOrO);
  // After this barrier all of O is in shared memory.
  __syncthreads();
  TileCopy<Element, kThreads, C.block_m, C.head_dim_v>(p.out, tile.batch, tile.head, seq.q.offset, tile.row, queries,
                                                       p.head_dim_v, storage.q, thread)
      .store();
}

template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& params, cudaStream_t stream) {
  const FwdProblem& p = params;
  const int64_t tiles = int64_t(cute::ceil_div(p.seqlen_q, C.block_m)) * p.heads * p.batch;
  return launch_kernel<forward<C>>(tiles, C.threads(), smem_bytes(C), stream, p);
}

}  // namespace flash_cute::sm80
