// Attention over one split: Q into shared memory, then products and online softmax over the split's tiles.
#pragma once

#include "kernels/common/mask.h"
#include "kernels/common/tile_kinds.h"
#include "kernels/decode/combine.h"

namespace flash_cute::decode {

using namespace ampere;

// Starts the copy of Q of a split's work tile.
template <KernelConfig C>
CUTE_DEVICE void load_queries(const DecodeParams& p, const KvSplit& split, typename DecodeTraits<C>::Element* shared) {
  using Element = typename DecodeTraits<C>::Element;
  const TensorView& q = p.fwd.q;
  constexpr int kAcross = C.head_dim / kVector;
  if (split.quanta == 0) return;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < C.block_m * kAcross; i += C.threads()) {
    const int col = i % kAcross * kVector;
    const Row row(p, split, i / kAcross);
    const bool there = row.query < split.seq.q.length && col < p.fwd.head_dim;
    const Element* from = static_cast<const Element*>(q.ptr);
    if (there) from += split.b * q.batch + (split.seq.q.offset + row.query) * q.row + row.head * q.head + col;
    const auto to = shared + SharedLayout<C.block_m, C.head_dim>{}(i / kAcross, col);
    cp_async_16(cast_smem_ptr_to_uint(to), from, there ? 16 : 0);
  }
}

// A team's attention over its tiles of a split; the first tile is in `stage`.
template <KernelConfig C, class Storage, class Loader>
CUTE_DEVICE void attend(const DecodeParams& p, const KvSplit& split, Storage& storage, Loader& loader,
                        const typename DecodeTraits<C>::Element* shared_q, int team, int thread, int& stage) {
  using T = DecodeTraits<C>;
  using Operand = ElementOf<T::kOperand>;
  const FwdProblem& f = p.fwd;
  const SeqInfo& seq = split.seq;
  auto team_sync = [&] {
    if constexpr (T::kRowWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(T::kTeamThreads) : "memory");
    }
  };

  typename T::Mma mma;
  const typename T::OperandQ q(shared_q, thread / 32);
  const typename T::OperandK k(storage.kv[0][team].k, 0);
  const typename T::OperandV v(storage.kv[0][team].v, 0);
  Tensor tOrO = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,MMA_M,MMA_DV)
  clear(tOrO);
  Tensor output = [&] {
    if constexpr (C.widens_cache()) {
      return columns_in_order(tOrO);
    } else {
      return rows_and_columns(tOrO);
    }
  }();  // (rows,dims)
  Tensor tScS = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<T::kKeys>>{}));
  Tensor at = rows_and_columns(tScS);  // (rows,columns) -> (row, column) of the tile
  constexpr int kRows = decltype(size<0>(at))::value;
  const int first_column = get<1>(at(0, 0));
  const ScoreMod mod(f);
  OnlineSoftmax<kRows> softmax(rule_scale_log2(mod, f.rules.alibi != nullptr));
  const BandMask mask(seq, f.band);
  const RowSpan queries = queries_of(p, split, C.block_m);
  const auto tiles =
      KvTilesOf<C, T::kKeys>::of(f, seq, {queries.first, split.head_k, split.b}, queries.last - queries.first);
  int query[kRows];
  float slope[kRows];
  [[maybe_unused]] Descaling<kRows> descaling(p, split.b, split.head_k);
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Row row(p, split, get<0>(at(r, 0)));
    query[r] = row.query;
    slope[r] = slope_of(f.rules, split.b, row.head);
    if constexpr (C.widens_cache()) descaling.begin_row(r, storage.query_factors[get<0>(at(r, 0))]);
  }

  Tensor factors = make_tensor<float>(Shape<Int<kRows>, _1>{});
  Tensor rQ = make_tensor<Operand>(Shape<Shape<_2, _2, _2>, _1, Int<T::kSlots>>{});  // (MMA,MMA_M,slot)
  auto read_q = [&](int step) { q.load(&recast<uint32_t>(rQ)(0, 0, step % T::kSlots), step, 0); };
  CUTE_UNROLL
  for (int step = 0; T::kKeepsQ && step < T::kSteps; ++step) read_q(step);

  int before = stage == 0 ? C.stages - 1 : stage - 1;
  CUTE_NO_UNROLL
  for (int n = split.first, last = split.last; n < last; ++n) {
    // After this the team's tile of block n is visible to the team, and none of it still reads the previous one.
    cp_async_wait<C.stages - 2>();
    team_sync();
    loader.load(before);
    cp_async_fence();

    Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<T::kKeys>>{});  // (MMA,MMA_M,MMA_N)
    Tensor scores = rows_and_columns(tSrS);  // (rows,columns)
    clear(tSrS);
    const int tile = n * T::kTeams + team, column = tiles.first_key(tile) + first_column;
    if constexpr (!T::kKeepsQ) read_q(0);
    auto queries_of = [&](int step) {
      if (!T::kKeepsQ && step + 1 < T::kSteps) read_q(step + 1);
      return rQ(_, _, step % T::kSlots);
    };
    gemm_registers(mma, tSrS, queries_of, k.at(stage * T::kStageBytes));
    [[maybe_unused]] auto& of_tile = storage.kv[stage][team];
    if constexpr (C.widens_cache()) descaling.scale_scores(scores, of_tile.k_descale + first_column);
    if (f.rules.alibi == nullptr) {  // a branch in apply_rules() alone would cost registers
      mod.apply<false>(scores);
    } else {
      apply_rules<false>(
          scores, mod, true, [&](int r) { return slope[r]; },
          [&](int r) { return float(query[r] + seq.shift() - column); });
    }
    if (!tiles.full(tile)) mask.hide_from(scores, [&](int r) { return query[r]; }, column);
    fill(factors, 1.f);
    // The first tile has no output to rescale.
    if (softmax.update_max(scores, factors) && n > split.first) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(output); ++c) output(r, c) *= factors(r, 0);
      }
    }
    if constexpr (C.widens_cache()) descaling.begin_tile(output, of_tile.v_descale + first_column, T::kKeys);
    Tensor rP = as_operand_a(tSrS);  // (MMA,MMA_M,MMA_N/2)
    auto weights = [&](int step) {
      softmax.exponentiate(scores, 4 * step, 4 * step + 4);
      if constexpr (C.widens_cache()) {
        descaling.scale_weights(scores, 4 * step, 4 * step + 4, of_tile.v_descale + first_column);
      }
      return converted<Operand>(rP(_, _, step));
    };
    gemm_registers(mma, tOrO, weights, v.at(stage * T::kStageBytes));
    before = stage;
    stage = stage == C.stages - 1 ? 0 : stage + 1;
  }

  if constexpr (C.widens_cache()) {
    CUTE_UNROLL
    for (int i = 0; i < size(output); ++i) output(i) *= descaling.of_outputs();
  }
  if constexpr (T::kTeams == 1) {
    store_rows<C>(p, split, output, softmax, at);
  } else {
    // After this none of the team still reads the last tile.
    team_sync();
    share_rows<C>(storage, before, team, rows_of(p, split, C.block_m), output, softmax, at);
  }
}

}  // namespace flash_cute::decode
