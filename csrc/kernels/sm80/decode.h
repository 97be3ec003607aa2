// Attention of few queries over a key/value cache, for sm_80 and later: CTAs share the keys of all sequences out among
// each other (flash decoding), and query heads of a group fill the rows of a tile, so that the cache is read once.
// Teams of warps work on different keys at their own pace, each with its own ring of tiles; keys of the next part enter
// it while those of the one before are computed.
#pragma once

#include "core/counter.h"
#include "core/registry.h"
#include "kernels/common/mask.h"
#include "kernels/common/overlap.h"
#include "kernels/launch.h"
#include "kernels/passes/append.h"
#include "kernels/passes/gaps.h"
#include "kernels/sm80/decode_feed.h"
#include "kernels/sm80/decode_merge.h"

namespace flash_cute::sm80 {

// Starts the copy of the rows of Q of a part's unit.
template <KernelConfig C>
CUTE_DEVICE void load_queries(const DecodeProblem& p, const Part& part, typename DecodeTraits<C>::Element* shared) {
  using Element = typename DecodeTraits<C>::Element;
  const Matrices& q = p.fwd.q;
  constexpr int kAcross = C.head_dim / kVector;
  if (part.grains == 0) return;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < C.block_m * kAcross; i += C.threads()) {
    const int col = i % kAcross * kVector;
    const Row row(p, part, i / kAcross);
    const bool there = row.query < part.seq.q.length && col < p.fwd.head_dim;
    const Element* from = static_cast<const Element*>(q.ptr);
    if (there) from += part.b * q.batch + (part.seq.q.offset + row.query) * q.row + row.head * q.head + col;
    const auto to = shared + SharedLayout<C.block_m, C.head_dim>{}(i / kAcross, col);
    cp_async_16(cast_smem_ptr_to_uint(to), from, there ? 16 : 0);
  }
}

// A team's attention over its tiles of a part's keys, the first of which is in `stage`.
template <KernelConfig C>
CUTE_DEVICE void attend(const DecodeProblem& p, const Part& part, typename DecodeTraits<C>::Storage& storage,
                        KeyFeed<C>& feed, const typename DecodeTraits<C>::Element* shared_q, int team, int thread,
                        int& stage) {
  using T = DecodeTraits<C>;
  using Element = typename T::Element;
  const FwdProblem& f = p.fwd;
  const SeqInfo& seq = part.seq;
  auto team_sync = [&] {
    if constexpr (T::kRowWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(T::kTeamThreads) : "memory");
    }
  };

  typename T::Mma mma;
  const typename T::OperandQ q(shared_q, thread / 32);
  const typename T::OperandK k(storage.ring[0][team].k, 0);
  const typename T::OperandV v(storage.ring[0][team].v, 0);
  Tensor tOrO = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,MMA_M,MMA_DV)
  clear(tOrO);
  Tensor output = rows_and_columns(tOrO);  // (rows,dims)
  Tensor tScS = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<T::kKeys>>{}));
  Tensor at = rows_and_columns(tScS);  // (rows,columns) -> (row, column) of the tile
  constexpr int kRows = decltype(size<0>(at))::value;
  const int first_column = get<1>(at(0, 0));
  OnlineSoftmax<kRows> softmax(rule_scale_log2(f.rules.softcap, f.softmax_scale, f.rules.alibi != nullptr));
  const BandMask mask(seq, f.band);
  const RowSpan queries = queries_of(p, part, C.block_m);
  const TileRange tiles = key_tiles(seq, f.band, queries.first, queries.last - queries.first, T::kKeys);
  int query[kRows];
  float slope[kRows];
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Row row(p, part, get<0>(at(r, 0)));
    query[r] = row.query;
    slope[r] = slope_of(f.rules, part.b, row.head);
  }

  Tensor rQ = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<T::kSlots>>{});  // (MMA,MMA_M,slot)
  auto read_q = [&](int step) { q.load(&recast<uint32_t>(rQ)(0, 0, step % T::kSlots), step, 0); };
  CUTE_UNROLL
  for (int step = 0; T::kKeepsQ && step < T::kSteps; ++step) read_q(step);

  int before = stage == 0 ? C.stages - 1 : stage - 1;
  CUTE_NO_UNROLL
  for (int n = part.first, last = part.last; n < last; ++n) {
    // After this the team's tile of block n is visible to all of it, and none of it still reads the one before.
    cp_async_wait<C.stages - 2>();
    team_sync();
    feed.load(before);
    cp_async_fence();

    Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<T::kKeys>>{});  // (MMA,MMA_M,MMA_N)
    Tensor scores = rows_and_columns(tSrS);  // (rows,columns)
    clear(tSrS);
    const int tile = n * T::kTeams + team, column = tile * T::kKeys + first_column;
    if constexpr (!T::kKeepsQ) read_q(0);
    auto queries_of = [&](int step) {
      if (!T::kKeepsQ && step + 1 < T::kSteps) read_q(step + 1);
      return rQ(_, _, step % T::kSlots);
    };
    gemm_registers(mma, tSrS, queries_of, k.at(stage * T::kStageBytes));
    apply_rules<false>(
        scores, f.rules.softcap, f.softmax_scale, f.rules.alibi != nullptr, [&](int r) { return slope[r]; },
        [&](int r) { return float(query[r] + seq.shift() - column); });
    if (!tiles.full(tile)) mask.hide_from(scores, [&](int r) { return query[r]; }, column);
    softmax.raise(scores, output);
    Tensor rP = as_operand_a(tSrS);  // (MMA,MMA_M,MMA_N/2)
    auto weights = [&](int step) {
      softmax.weigh(scores, 4 * step, 4 * step + 4);
      return converted<Element>(rP(_, _, step));
    };
    gemm_registers(mma, tOrO, weights, v.at(stage * T::kStageBytes));
    before = stage;
    stage = stage == C.stages - 1 ? 0 : stage + 1;
  }

  const auto lse = softmax.finish(output, -INFINITY, 1.f);
  if constexpr (T::kTeams == 1) {
    store_rows<C>(p, part, output, lse, at);
  } else {
    // After this none of the team still reads the last tile.
    team_sync();
    share_rows<C>(storage, before, team, rows_of(p, part, C.block_m), output, lse, at);
  }
}

// Whether the first tile of a part lies before the rows that the append writes: then it need not wait for the append,
// which lets this kernel start when all before it has ended.
template <KernelConfig C>
CUTE_DEVICE bool was_in_cache(const DecodeProblem& p, const Part& part) {
  if (!p.appends() || part.grains == 0) return false;
  return (part.first + 1) * C.block_n <= part.seq.k.length - new_rows(p.added, part.b).length;
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) decode(const __grid_constant__ DecodeProblem p) {
  using T = DecodeTraits<C>;
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int team = threadIdx.x / T::kTeamThreads, thread = threadIdx.x % T::kTeamThreads;
  constexpr int kDescriber = C.threads() - 32;  // a thread
  let_next_kernel_start();
  // After this lengths can be read. The append leaves them alone, and lets this kernel start when all before has ended.
  if (!p.alike.known && !p.appends()) wait_for_kernel_before();
  if (threadIdx.x >= kDescriber) {
    const PartsOf<C> parts = parts_of_cta<C>(p);
    if (threadIdx.x == kDescriber) storage.more_parts = parts;
  }
  auto describe = [&](int i) {
    if (threadIdx.x != kDescriber) return;
    PartsOf<C> parts = storage.more_parts;
    const Part part = parts.next(p);
    storage.more_parts = parts;
    storage.parts[i] = part.grains > 0 ? seen_of<C>(p, part) : FedPart{part, {}};
  };
  KeyFeed<C> feed(p, storage, team, thread);
  describe(0);
  // After this barrier the first part is described.
  __syncthreads();
  // CTAs that come late start when the kernel before has long ended.
  if (blockIdx.x < p.at_once) expect_keys<C>(p, storage.parts[0]);
  // After this the first tile's keys can be read, and the table of pages.
  if (!was_in_cache<C>(p, storage.parts[0].part)) wait_for_kernel_before();
  feed.load(0);
  // After this new keys have joined the cache, and queries are rotated.
  wait_for_kernel_before();
  load_queries<C>(p, storage.parts[0].part, storage.q[0]);
  cp_async_fence();
  CUTE_NO_UNROLL
  for (int i = 1; i < T::kDescribed - 1; ++i) describe(i);
  // After this barrier so are those that follow.
  __syncthreads();
  CUTE_NO_UNROLL
  for (int i = 1; i < C.stages - 1; ++i) {
    feed.load(i);
    cp_async_fence();
  }
  cp_async_wait<C.stages - 2>();
  int stage = 0;
  for (unsigned n = 0;; ++n) {
    // After this barrier Q of the part is visible to all, nobody still reads that of the one before, or its results,
    // and one more part is described.
    __syncthreads();
    const Part& part = storage.parts[n % T::kDescribed].part;
    if (part.grains == 0) return;
    load_queries<C>(p, storage.parts[(n + 1) % T::kDescribed].part, storage.q[(n + 1) % 2]);
    describe((n + T::kDescribed - 1) % T::kDescribed);
    attend<C>(p, part, storage, feed, storage.q[n % 2], team, thread, stage);
    // Q of the next part came with the first tile that was asked for in this one. In a short part nobody has waited for
    // that tile yet.
    if (part.last - part.first < C.stages) cp_async_wait<0>();
    if constexpr (T::kTeams > 1) {
      const TeamMerge<C> merge(p, part);
      // After this barrier the results of all teams are there.
      __syncthreads();
      merge(storage, stage == 0 ? C.stages - 1 : stage - 1);
    }
    if (part.all.count > 1 && arrives_last(p, part.all, storage.last)) merge_parts<C>(p, part);
  }
}

}  // namespace flash_cute::sm80

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  if (cudaError_t e = fill_gaps(p.fwd, stream)) return e;
  DecodeProblem decode = p;
  if (p.arrived != nullptr) {
    if (cudaError_t e = cudaMemsetAsync(p.arrived, 0, p.slots * sizeof(*p.arrived), stream)) return e;
  } else if (p.slots > 0) {
    if (cudaError_t e = zeroed_counters(decode.arrived, p.ctas(), stream)) return e;
  }
  if (p.appends()) {
    if (cudaError_t e = append_keys(p, stream)) return e;
  }
  if (p.fwd.total_q == 0 || p.fwd.batch == 0 || p.fwd.heads == 0) return cudaSuccess;
  return launch_overlapping<sm80::decode<C>>({p.ctas(), C.threads(), C.smem_bytes(), p.neighbours}, stream, decode);
}

}  // namespace flash_cute
