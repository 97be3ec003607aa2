// Attention forward of fp32 inputs for sm_80 and later: one CTA computes one tile of query rows of one head. One kernel
// does plain and rich problems.
#pragma once

#include "kernels/common/tile_kinds.h"
#include "core/workspace.h"
#include "kernels/ampere/kv_loads.h"
#include "kernels/common/mask.h"
#include "kernels/common/query_tile.h"
#include "kernels/common/dropout.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"
#include "kernels/launch.h"
#include "kernels/sm80/fp32/mma.h"
#include "kernels/sm80/fp32/resources.h"

namespace flash_cute::sm80::fp32 {

template <KernelConfig C>
struct ForwardTraits {
  static constexpr int kPieces = C.block_m / (16 * C.warps);  // of 16 rows, that a warp has
  using OperandQ = RowOperand<Side::A, C.block_m, C.head_dim, C.warps>;
  using OperandK = RowOperand<Side::B, C.block_n, C.head_dim, 1>;
  using OperandV = ColumnOperand<C.block_n, C.head_dim_v>;
  struct Storage {
    alignas(128) float q[C.block_m * C.head_dim];
    alignas(128) float k[C.stages][C.block_n * C.head_dim];
    alignas(128) float v[C.stages][C.block_n * C.head_dim_v];
  };
  static_assert(C.stages == 1 || C.stages == 2);
  static_assert(C.block_m % (16 * C.warps) == 0, "every warp owns whole 16-row MMA tiles");
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

// ALiBi, for scores (rows,columns) of queries at key positions from `row` on and keys from `col` on.
template <class Scores, class Coordinates>
CUTE_DEVICE void lower_by_distance(Scores&& scores, const Coordinates& at, float slope, int row, int col) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const float distance = float(row + get<0>(at(r, 0)) - col - get<1>(at(0, 0)));
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = Alibi::value(scores(r, c), slope, fabsf(distance - float(column_offset(c))));
    }
  }
}

// Weights (rows,columns) that dropout does not keep become 0.
template <class Weights, class Coordinates>
CUTE_DEVICE void drop(Weights&& weights, const Coordinates& at, const Dropout& dropout, int row, int col) {
  CUTE_UNROLL
  for (int piece = 0; piece < size<0>(weights); piece += 2) {
    each_kept<false, 2, decltype(size<1>(weights))::value>(
        dropout, [&](int r) { return row + get<0>(at(piece + r, 0)); }, [&](int c) { return col + get<1>(at(0, c)); },
        [&](int r, int c, bool keep) {
          if (!keep) weights(piece + r, c) = 0.f;
        });
  }
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) forward(const __grid_constant__ FwdProblem p) {
  using T = ForwardTraits<C>;
  constexpr int kThreads = C.threads();
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int thread = threadIdx.x, warp = thread / 32;

  const QueryTile tile = tile_of_block(p, C.block_m);
  const SeqInfo seq(p, tile.batch);
  if (tile.row >= seq.q.length) return;
  const int head_k = tile.head / (p.heads / p.heads_k);
  const auto tiles = KvTilesOf<C>::of(p, seq, tile, C.block_m);
  const RowSpan keys = visible_keys(seq, p.band, tile.row, C.block_m);

  const HeadRows from_q(p.q, tile.batch, tile.head, seq.q.offset, p.head_dim);
  const HeadRows from_k(p.k, tile.batch, head_k, seq.k.offset, p.head_dim);
  const HeadRows from_v(p.v, tile.batch, head_k, seq.k.offset, p.head_dim_v);
  auto load_k = [&](int n, int stage) {
    if (n >= tiles.begin)
      load_tile<kThreads, C.block_n, C.head_dim>(storage.k[stage], from_k, tiles.first_key(n), keys);
  };
  auto load_v = [&](int n, int stage) {
    if (n >= tiles.begin)
      load_tile<kThreads, C.block_n, C.head_dim_v>(storage.v[stage], from_v, tiles.first_key(n), keys);
  };
  const KvLoads<C.stages, decltype(load_k), decltype(load_v)> loads{load_k, load_v};
  if (!tiles.empty()) load_tile<kThreads, C.block_m, C.head_dim>(storage.q, from_q, tile.row, {0, seq.q.length});
  loads.start(tiles.end - 1);

  const typename T::OperandQ q(storage.q, warp);
  const typename T::OperandK k(storage.k[0], 0);
  const typename T::OperandV v(storage.v[0], 0);
  Tensor tOrO = make_accumulator<T::kPieces, C.head_dim_v>();  // (MMA,MMA_M,MMA_DV)
  clear(tOrO);
  Tensor output = rows_and_columns(tOrO);  // (rows,dims)
  Tensor tScS =
      WarpMma<C.warps>{}.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{}));
  Tensor at = rows_and_columns(tScS);  // (rows,columns) -> (row, column) of the tile
  OnlineSoftmax<2 * T::kPieces> softmax(kLog2e);
  const BandMask mask(seq, p.band);
  const Dropout dropout(p.rules, int64_t(tile.batch) * p.heads + tile.head);
  const float slope = slope_of(p.rules, tile.batch, tile.head);

  int stage = 0;
  CUTE_NO_UNROLL
  for (int n = tiles.end - 1; n >= tiles.begin; --n, stage ^= C.stages - 1) {
    Tensor tSrS = make_accumulator<T::kPieces, C.block_n>();  // (MMA,MMA_M,MMA_N)
    Tensor scores = rows_and_columns(tSrS);  // (rows,columns)
    clear(tSrS);

    loads.before_scores(n, stage);
    gemm<C.dtype>(tSrS, q, k.at(stage * int(sizeof(storage.k[0]))));
    ScoreMod(p).apply_fp32(scores);
    if (slope != 0.f) lower_by_distance(scores, at, slope, tile.row + seq.shift(), tiles.first_key(n));
    if (!tiles.full(n)) mask.hide(scores, at, tile.row, tiles.first_key(n));
    softmax.update_max(scores, output);
    softmax.exponentiate(scores, 0, size<1>(scores));
    if (p.rules.rng != nullptr) drop(scores, at, dropout, tile.row, tiles.first_key(n));

    loads.before_values(n);
    gemm<C.dtype>(tOrO, as_operand_a(tSrS), v.at(stage * int(sizeof(storage.v[0]))));
  }

  const auto lse = softmax.finish(output, sink_of(p.sink, tile.head), p.rules.keep_scale);
  store_row_stats(p, seq, tile, softmax, lse, at);
  const HeadRows to(p.out, tile.batch, tile.head, seq.q.offset, p.head_dim_v);
  store_values<16 * C.warps>(output, to, tile.row + get<0>(at(0, 0)), seq.q.length, get<1>(at(0, 0)), 1.f);
}

template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& params, cudaStream_t stream) {
  const FwdProblem& p = params;
  const int64_t tiles = int64_t(cute::ceil_div(p.seqlen_q, C.block_m)) * p.heads * p.batch;
  return launch_kernel<forward<C>>(tiles, C.threads(), smem_bytes(C), stream, p);
}

}  // namespace flash_cute::sm80::fp32
