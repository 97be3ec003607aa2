// The threads of Hopper's backward for wide heads that load tiles by TMA, and those that give turns to add to dQ.
#pragma once

#include "kernels/sm90/backward_pair_traits.h"
#include "kernels/sm90/backward_producers.h"

namespace flash_cute::sm90 {

// Zeros in place of the first rows of a tile that has landed.
template <int kAtoms, class Element>
CUTE_DEVICE void clear_rows(Element* tile, int rows) {
  constexpr int kAtom = 64, kVector = 16 / sizeof(Element);
  CUTE_NO_UNROLL
  for (int atom = 0; atom < kAtoms; ++atom) {
    CUTE_NO_UNROLL
    for (int i = 0; i < min(rows, kAtom) * kAtom; i += kVector) {
      *reinterpret_cast<uint4*>(tile + atom * kAtom * kAtom + i) = uint4{};
    }
  }
  cutlass::arch::fence_view_async_shared();
}

// The CTA's K and V, and of the other CTA's K what its share of dQ needs. Keys that nobody sees become zeros, as dS, which
// is 0 there, meets them.
template <KernelConfig C>
CUTE_DEVICE void load_keys(const BackwardParams& params, typename PairTraits<C>::Storage& storage, int rank) {
  using T = PairTraits<C>;
  using Element = typename T::Element;
  const BackwardWork& work = storage.work;
  if (work.range.empty()) return;
  const RowSpan keys = visible_keys(work.seq, params.p.fwd.band, 0, work.seq.q.length);
  const SeqSpan span{work.seq.k.offset, keys.last};
  auto load = [&](auto atoms, const RaggedMap& map, Element* to, uint64_t* barrier, int row, int first_atom) {
    CUTE_NO_UNROLL
    for (int atom = 0; atom < decltype(atoms)::value; ++atom) {
      map.load_atom(to + atom * T::kTile, barrier, TMA::CacheHintSm90::EVICT_FIRST, span, row,
                    (first_atom + atom) * T::kAtom, work.tile.head, work.tile.batch);
    }
  };
  const int row = work.tile.row, row_of_other = rank == 0 ? row + C.block_n : row - C.block_n;
  storage.landed_k.arrive_and_expect_tx((T::kAtoms + T::kAtomsOfOther) * T::kTile * sizeof(Element));
  uint64_t* const landed = reinterpret_cast<uint64_t*>(&storage.landed_k);
  load(Int<T::kAtoms>{}, params.k, storage.k, landed, row, 0);
  load(Int<T::kAtomsOfOther>{}, params.k, storage.k_of_other, landed, row_of_other, rank * 2);
  load(Int<C.head_dim_v / T::kAtom>{}, params.v, storage.v,
       storage.ring_v.expect(Cursor<1>{}, C.block_n * C.head_dim_v * sizeof(Element)), row, 0);
  storage.landed_k.wait(0);
  auto hidden = [&](int row) { return row < keys.last ? keys.first - row : C.block_n; };
  clear_rows<T::kAtoms>(storage.k, hidden(row));
  clear_rows<T::kAtomsOfOther>(storage.k_of_other, hidden(row_of_other));
  storage.ring_k.expect(Cursor<1>{}, 0);
}

// One of two threads that load Q and the LSE of each step, or dO and its row sums: of every second atom of columns, for
// both CTAs. Rows in front of those that see anything arrive as zeros: whatever they hold, it meets no product.
template <KernelConfig C, bool kValues>
CUTE_DEVICE void produce_queries(const BackwardParams& params, typename PairTraits<C>::Storage& storage, int rank) {
  using T = PairTraits<C>;
  const BackwardWork& work = storage.work;
  constexpr int kDims = kValues ? C.head_dim_v : C.head_dim;
  constexpr uint32_t kBytes = C.block_m * kDims * sizeof(typename T::Element), kStatistic = C.block_m * sizeof(float);
  const BwdProblem& p = params.p;
  auto& ring = pick<kValues>(storage.ring_q, storage.ring_dout);
  const int first_query = seeing_queries(work.seq, p.fwd.band, 0, work.seq.k.length).first;
  // After this wait the LSE and row sums of all queries are there, and sums of dQ are 0.
  wait_for_kernel_before();
  uint32_t phases = 0;  // of landed, a bit each
  Cursor<C.stages> at;
  for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), at.advance()) {
    const int head = work.first_head + step.head, row = step.m * C.block_m, stage = at.stage();
    auto* const to = pick<kValues>(storage.q, storage.dout)[stage];
    auto& landed = storage.landed[kValues][stage];
    const bool clears = row < first_query;
    // After this wait both CTAs have read the buffer.
    ring.wait_empty(at);
    storage.steps[kValues][stage] = {row, head, work.range.full(step.m)};
    if (clears) landed.arrive_and_expect_tx(kBytes);
    uint64_t* const barrier = clears ? reinterpret_cast<uint64_t*>(&landed) : ring.expect(at, kBytes + kStatistic);
    CUTE_NO_UNROLL
    for (int atom = (rank + kValues) % 2; atom < kDims / T::kAtom; atom += 2) {
      (kValues ? params.dout : params.q)
          .template load_atom<C.cluster>(to + atom * T::kTile, barrier, TMA::CacheHintSm90::EVICT_LAST, work.seq.q, row,
                                         atom * T::kAtom, head, work.tile.batch);
    }
    if (clears) {
      landed.wait(phases >> stage & 1);
      phases ^= 1 << stage;
      clear_rows<kDims / T::kAtom>(to, first_query - row);
      ring.expect(at, kStatistic);
    }
    const int64_t padded_row = first_padded_row(p, C.block_m, work.tile.batch, head, work.seq.q.offset) + row;
    SM90_BULK_COPY_G2S::copy((kValues ? p.row_dot : p.lse_log2).ptr + padded_row,
                             reinterpret_cast<uint64_t*>(&ring.full[stage]),
                             pick<kValues>(storage.lse_log2, storage.row_dot)[stage], kStatistic);
  }
}

// One thread for each atom of dQ that the CTA sums up. Where sums are deterministic, it says when they may be added.
template <KernelConfig C>
CUTE_DEVICE void give_turns(const BackwardParams& params, typename PairTraits<C>::Storage& storage, int rank,
                            bool inner) {
  using T = PairTraits<C>;
  const BackwardWork& work = storage.work;
  auto& ring = storage.ring_turn[inner];
  auto turn_of = [&](QueryStep step) { return Turn<C>(params.p, work, step, T::dq_place(rank, inner)); };
  // After this wait no turn has been taken but those of this kernel.
  wait_for_kernel_before();
  Cursor<2> at, done;
  auto give = [&](QueryStep step) {
    if (!turn_of(step).has_come()) return false;
    ring.expect(at, 0);
    at.advance();
    return true;
  };
  bool given = false;
  for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step)) {
    while (!given) given = give(step);
    // If the next step's turn has come too, nobody waits for the end of this one.
    const QueryStep ahead = work.after(step);
    given = ahead.head < work.heads && give(ahead);
    // After this wait the warpgroup has added.
    done.advance();
    ring.wait_empty({done.count + 1});
    turn_of(step).end();
  }
}

}  // namespace flash_cute::sm90
