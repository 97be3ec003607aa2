// Attention backward of fp32 inputs for sm_80 and later: two kernels of one template. A CTA owns a tile of keys of one
// kv head and sums dK and dV over the queries of all its query heads, or it owns a tile of queries and sums dQ over the
// keys. Both recompute scores and their gradients. Every sum has one order, so all gradients are deterministic.
#pragma once

#include "core/workspace.h"
#include "kernels/common/gap_fill.h"
#include "kernels/common/dropout.h"
#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tile_kinds.h"
#include "kernels/launch.h"
#include "kernels/sm80/fp32/mma.h"
#include "kernels/sm80/fp32/resources.h"

namespace flash_cute::sm80::fp32 {

enum class Owner { Queries, Keys };

// The tile has block_n rows, the tiles of the other side block_m. A warp has 16 of its rows; if there are more warps
// than 16-row parts, they share the columns of the sums, and each computes the scores.
template <KernelConfig C, Owner kOwner>
struct BackwardTraits {
  static constexpr bool kKeys = kOwner == Owner::Keys;
  using TilesMet = std::conditional_t<kKeys, QueryTilesOf<C>, KvTilesOf<C, C.block_m>>;
  static constexpr int kWarpsDown = C.block_n / 16;
  static constexpr int kWarpsAcross = C.warps / kWarpsDown;
  static constexpr int kCols = C.head_dim / kWarpsAcross, kColsV = C.head_dim_v / kWarpsAcross;  // of a warp
  using Own = RowOperand<Side::A, C.block_n, C.head_dim, kWarpsDown>;  // K, or Q
  using OwnV = RowOperand<Side::A, C.block_n, C.head_dim_v, kWarpsDown>;  // V, or dO
  using Met = RowOperand<Side::B, C.block_m, C.head_dim, 1>;  // Q, or K
  using MetV = RowOperand<Side::B, C.block_m, C.head_dim_v, 1>;  // dO, or V
  using MetColumns = ColumnOperand<C.block_m, kCols>;  // Q, or K
  using MetColumnsV = ColumnOperand<C.block_m, kColsV>;  // dO
  struct Storage {
    alignas(128) float own[C.block_n * C.head_dim];
    alignas(128) float own_v[C.block_n * C.head_dim_v];
    alignas(128) float met[C.stages][C.block_m * C.head_dim];
    alignas(128) float met_v[C.stages][C.block_m * C.head_dim_v];
  };
  static_assert(C.stages == 1 || C.stages == 2);
  static_assert(C.warps % kWarpsDown == 0 && C.block_m % 16 == 0);
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

// The row statistics of a query.
struct RowStatistics {
  float lse;  // +inf if the query does not exist or sees no key: its weights are then 0
  float dot;  // softmax_d

  CUTE_DEVICE static RowStatistics of(const BwdProblem& p, const SeqInfo& seq, int batch, int head, int row) {
    auto at = [&](const RowStats& s) { return s.ptr[batch * s.batch + head * s.head + seq.q.offset + row]; };
    const float lse = row < seq.q.length ? at(p.fwd.lse) : -INFINITY;
    if (lse == -INFINITY) return {INFINITY, 0.f};
    return {lse, at(p.softmax_d)};
  }
};

// The position of a thread's first element: its row of the tile, and the row that it meets.
struct Place {
  int own, met;
};

// Products s of queries and keys become P with dropout, short of its factor; products dp of dO and V become the
// gradients of s, short of the scale. Both (rows of the tile,rows that it meets).
template <bool kKeys, class Scores, class Statistic>
CUTE_DEVICE void differentiate(Scores&& s, Scores&& dp, const BwdProblem& p, const Statistic* row_stats, Place first,
                               int shift, float slope, const Dropout& dropout) {
  constexpr int kColumns = decltype(size<1>(s))::value;
  const ScoreRules& rules = p.fwd.rules;
  const ScoreMod mod(p.fwd);
  const float inverse = mod.inverse_outer();
  mod.apply_fp32(s);
  uint32_t keep_bits = ~0u;
  if (rules.rng != nullptr) {
    keep_bits = 0;
    each_kept<kKeys, 2, kColumns>(
        dropout, [&](int r) { return first.own + 8 * r; }, [&](int c) { return first.met + column_offset(c); },
        [&](int r, int c, bool keep) { keep_bits |= uint32_t(keep) << (2 * c + r); });
  }
  const int ahead = kKeys ? first.met + shift - first.own : first.own + shift - first.met;  // of the query's place
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const int step = 8 * r - column_offset(c);
      const RowStatistics& row = row_stats[kKeys ? c : r];
      const float value = s(r, c) * inverse;
      const float score = Alibi::value(s(r, c), slope, float(abs(kKeys ? ahead - step : ahead + step)));
      const float weight = exp2_approx((score - row.lse) * kLog2e);
      const bool keep = keep_bits >> (2 * c + r) & 1;
      s(r, c) = keep ? weight : 0.f;
      dp(r, c) = weight * ((keep ? dp(r, c) * rules.keep_scale : 0.f) - row.dot) * mod.derivative(value);
    }
  }
}

// Hidden elements of P and dS are selected away: hidden keys and values may hold anything.
template <bool kKeys, class Scores>
CUTE_DEVICE void hide_both(Scores&& weights, Scores&& ds, const BandMask& mask, Place first) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(weights); ++c) {
      const int own = first.own + 8 * r, met = first.met + column_offset(c);
      if (!(kKeys ? mask.visible(met, own) : mask.visible(own, met))) weights(r, c) = ds(r, c) = 0.f;
    }
  }
}

template <KernelConfig C, Owner kOwner>
__global__ void __launch_bounds__(C.threads(), C.ctas) backward(const __grid_constant__ BwdProblem p) {
  using T = BackwardTraits<C, kOwner>;
  constexpr bool kKeys = T::kKeys;
  constexpr int kThreads = C.threads();
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int lane = threadIdx.x % 32, down = threadIdx.x / 32 % T::kWarpsDown, across = threadIdx.x / 32 / T::kWarpsDown;

  const FwdProblem& f = p.fwd;
  const int tiles = ceil_div(kKeys ? f.seqlen_k : f.seqlen_q, C.block_n), heads = kKeys ? f.heads_k : f.heads;
  // Under a causal mask early keys and late queries have the most to do: those first.
  const int tile_row = (kKeys ? blockIdx.x % tiles : tiles - 1 - blockIdx.x % tiles) * C.block_n;
  const int head = blockIdx.x / tiles % heads, batch = blockIdx.x / tiles / heads;
  const SeqInfo seq(f, batch);
  const SeqSpan& own_rows = kKeys ? seq.k : seq.q;
  const SeqSpan& met_rows = kKeys ? seq.q : seq.k;
  if (tile_row >= own_rows.length) return;
  const int group = f.heads / f.heads_k, heads_met = kKeys ? group : 1;
  const auto tiles_met = [&] {
    if constexpr (kKeys) {
      return T::TilesMet::of(f, seq, KeyTile(tile_row / C.block_n, tile_row, head, batch));
    } else {
      return T::TilesMet::of(f, seq, QueryTile{tile_row, head, batch}, C.block_n);
    }
  }();
  auto first_met = [&](int m) {
    if constexpr (kKeys) {
      return tiles_met.first_query(m);
    } else {
      return tiles_met.first_key(m);
    }
  };
  const RowSpan span = kKeys ? visible_keys(seq, f.band, 0, seq.q.length) : RowSpan{0, seq.q.length};
  const RowSpan span_met =
      kKeys ? seeing_queries(seq, f.band, tile_row, C.block_n) : visible_keys(seq, f.band, tile_row, C.block_n);
  auto head_met = [&](int i) { return kKeys ? head * group + i : head / group; };

  auto load_met = [&](int i, int m, int stage) {
    if (i < heads_met) {
      const HeadRows from(kKeys ? f.q : f.k, batch, head_met(i), met_rows.offset, f.head_dim);
      const HeadRows from_v(kKeys ? p.dout : f.v, batch, head_met(i), met_rows.offset, f.head_dim_v);
      load_tile<kThreads, C.block_m, C.head_dim>(storage.met[stage], from, first_met(m), span_met);
      load_tile<kThreads, C.block_m, C.head_dim_v>(storage.met_v[stage], from_v, first_met(m), span_met);
    }
    cp_async_fence();
  };
  int i = tiles_met.empty() ? heads_met : 0, m = tiles_met.begin;  // the step: the head and the tile that are met
  if (i < heads_met) {
    const HeadRows from(kKeys ? f.k : f.q, batch, head, own_rows.offset, f.head_dim);
    const HeadRows from_v(kKeys ? f.v : p.dout, batch, head, own_rows.offset, f.head_dim_v);
    load_tile<kThreads, C.block_n, C.head_dim>(storage.own, from, tile_row, span);
    load_tile<kThreads, C.block_n, C.head_dim_v>(storage.own_v, from_v, tile_row, span);
  }
  load_met(i, m, 0);  // commits the tile's own rows too

  const typename T::Own own(storage.own, down);
  const typename T::OwnV own_v(storage.own_v, down);
  const typename T::Met met(storage.met[0], 0);
  const typename T::MetV met_v(storage.met_v[0], 0);
  const typename T::MetColumns met_columns(storage.met[0], across * T::kCols);
  const typename T::MetColumnsV met_columns_v(storage.met_v[0], across * T::kColsV);
  Tensor sum = make_accumulator<1, T::kCols>();  // (MMA,1,MMA_D): dK, or dQ
  Tensor sum_v = make_accumulator<1, kKeys ? T::kColsV : 8>();  // (MMA,1,MMA_DV): dV
  clear(sum);
  clear(sum_v);
  const BandMask mask(seq, f.band);
  const Place thread_first{tile_row + 16 * down + lane / 4, lane % 4 * 2};
  RowStatistics row_stats[kKeys ? C.block_m / 4 : 2];
  CUTE_UNROLL
  for (int r = 0; !kKeys && r < 2; ++r) {
    row_stats[r] = RowStatistics::of(p, seq, batch, head, thread_first.own + 8 * r);
  }

  int stage = 0;
  CUTE_NO_UNROLL
  while (i < heads_met) {
    Tensor tSrS = make_accumulator<1, C.block_m>();  // (MMA,1,MMA_M)
    Tensor tSrdP = make_accumulator<1, C.block_m>();  // (MMA,1,MMA_M)
    clear(tSrS);
    clear(tSrdP);
    const int head_q = kKeys ? head_met(i) : head;
    const Place first{thread_first.own, thread_first.met + first_met(m)};
    const bool full = tiles_met.full(m);
    CUTE_UNROLL
    for (int c = 0; kKeys && c < C.block_m / 4; ++c) {
      row_stats[c] = RowStatistics::of(p, seq, batch, head_q, first.met + column_offset(c));
    }
    if (++m == tiles_met.end) m = tiles_met.begin, ++i;

    // After this barrier the step's rows are visible to all, and nobody still reads those of the last step.
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (C.stages == 2) load_met(i, m, stage ^ 1);
    const int bytes = stage * int(sizeof(storage.met[0])), bytes_v = stage * int(sizeof(storage.met_v[0]));
    gemm<C.dtype>(tSrS, own, met.at(bytes));
    gemm<C.dtype>(tSrdP, own_v, met_v.at(bytes_v));
    differentiate<kKeys>(rows_and_columns(tSrS), rows_and_columns(tSrdP), p, row_stats, first, seq.shift(),
                         slope_of(f.rules, batch, head_q), Dropout(f.rules, int64_t(batch) * f.heads + head_q));
    if (!full) hide_both<kKeys>(rows_and_columns(tSrS), rows_and_columns(tSrdP), mask, first);
    if constexpr (kKeys) gemm<C.dtype>(sum_v, as_operand_a(tSrS), met_columns_v.at(bytes_v));
    gemm<C.dtype>(sum, as_operand_a(tSrdP), met_columns.at(bytes));
    if constexpr (C.stages == 1) {
      // After this barrier nobody still reads the step's rows.
      __syncthreads();
      load_met(i, m, 0);
    }
    stage ^= C.stages - 1;
  }

  const HeadRows to(kKeys ? p.dk : p.dq, batch, head, own_rows.offset, f.head_dim);
  store_values<0>(rows_and_columns(sum), to, thread_first.own, own_rows.length, thread_first.met + across * T::kCols,
                  f.softmax_scale);
  if constexpr (kKeys) {
    const HeadRows to_v(p.dv, batch, head, own_rows.offset, f.head_dim_v);
    store_values<0>(rows_and_columns(sum_v), to_v, thread_first.own, own_rows.length,
                    thread_first.met + across * T::kColsV, f.rules.keep_scale);
  }
}

// softmax_d = rowsum(dout * out) - dlse, of a tile of queries a CTA and one warp a row. CTAs behind those of the tiles
// fill the rows of no packed sequence.
template <KernelConfig C>
__global__ void __launch_bounds__(C.threads())
    row_dots(const __grid_constant__ BwdProblem p, const __grid_constant__ GapFills<Op::Bwd> gaps, int all_tiles) {
  const int filler = static_cast<int>(blockIdx.x) - all_tiles;
  if (filler >= 0) return gaps.fill(threadIdx.x / 32, C.warps, filler, gridDim.x - all_tiles);
  const FwdProblem& f = p.fwd;
  const int lane = threadIdx.x % 32, tiles = ceil_div(f.seqlen_q, int(C.block_m));
  const int first = blockIdx.x % tiles * C.block_m + threadIdx.x / 32;
  const int head = blockIdx.x / tiles % f.heads, batch = blockIdx.x / tiles / f.heads;
  const SeqSpan span = SeqInfo(f, batch).q;
  for (int row = first; row < span.length && row < first + C.block_m; row += C.warps) {
    const HeadRows dout(p.dout, batch, head, span.offset + row, f.head_dim_v);
    const HeadRows out(f.out, batch, head, span.offset + row, f.head_dim_v);
    float dot = 0.f;
    for (int col = lane; col < f.head_dim_v; col += 32) dot += dout.ptr[col] * out.ptr[col];
    CUTE_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) dot += __shfl_xor_sync(0xffffffff, dot, distance);
    auto at = [&](const RowStats& s) { return s.ptr + batch * s.batch + head * s.head + span.offset + row; };
    if (lane == 0) *at(p.softmax_d) = p.dlse.ptr == nullptr ? dot : dot - *at(p.dlse);
  }
}

template <KernelConfig C>
cudaError_t launch_backward(const BwdParams& params, cudaStream_t stream) {
  const BwdProblem& p = params;
  const FwdProblem& f = p.fwd;
  auto tiles = [&](int rows, int block, int heads) { return int64_t(cute::ceil_div(rows, block)) * heads * f.batch; };
  constexpr auto keys = backward<C, Owner::Keys>, queries = backward<C, Owner::Queries>;
  const int64_t dot_tiles = tiles(f.seqlen_q, C.block_m, f.heads), key_tiles = tiles(f.seqlen_k, C.block_n, f.heads_k),
                query_tiles = tiles(f.seqlen_q, C.block_n, f.heads);
  using Gaps = GapFills<Op::Bwd>;
  const int fillers = f.dense() ? 0 : Gaps::kCtas;
  if (cudaError_t e = launch_kernel<row_dots<C>>(dot_tiles + fillers, C.threads(), 0, stream, p, Gaps::of_outputs(p),
                                                 static_cast<int>(dot_tiles)))
    return e;
  if (cudaError_t e = launch_kernel<keys>(key_tiles, C.threads(), smem_bytes(C), stream, p)) return e;
  return launch_kernel<queries>(query_tiles, C.threads(), smem_bytes(C), stream, p);
}

}  // namespace flash_cute::sm80::fp32
