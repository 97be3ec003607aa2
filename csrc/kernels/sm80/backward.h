// Attention backward for sm_80 and later: one CTA owns a tile of keys of one kv head, and walks over the query tiles of
// every query head that reads it. dK and dV therefore stay in registers from start to end, without atomics even for
// grouped queries; dQ is summed over CTAs in fp32 global memory. Scores are computed transposed, keys by queries.
//
// Warps share the work in one of two ways, see whole_keys(). If a warp has all columns of 32 keys, P and dS are already
// in the registers that the products for dV and dK read. For wide heads the accumulators of 32 keys are too many
// registers for one warp: then warps split products in two dimensions, and P and dS pass through shared memory. That
// costs less than 16 keys a warp, with which operands are read twice as often.
#pragma once

#include <cutlass/cutlass.h>

#include "kernels/common/backward_preprocess.h"
#include "kernels/common/backward_scores.h"
#include "kernels/common/mask.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tile_kinds.h"
#include "kernels/launch.h"
#include "kernels/sm80/backward_dq.h"
#include "kernels/sm80/backward_products.h"
#include "kernels/sm80/resources.h"
#include "kernels/sm80/warp_coords.h"
#include "kernels/ampere/mma.h"
#include "kernels/ampere/tile_io.h"

namespace flash_cute::sm80 {

using namespace ampere;

template <KernelConfig C>
struct BackwardTraits {
  using Element = ElementOf<C.dtype>;
  using Dq = DqTraits<C>;
  static constexpr bool kWholeKeys = whole_keys(C);
  static constexpr int kSubM = kWholeKeys ? 32 : C.block_m;  // queries whose scores are in registers at once
  static constexpr int kDown = kWholeKeys ? C.warps : warps_down(C.block_n, C.block_m, C.warps);  // along keys
  static constexpr int kAcross = C.warps / kDown;  // along queries, or along the dims of dK and dV
  static constexpr int kTilesPerSemaphore = C.block_n / 32;  // query tiles per semaphore, by measurement
  using Tiles = QueryTilesOf<C, kTilesPerSemaphore>;
  static constexpr int kSteps = kSubM / (16 * kAcross);  // of the products for dV and dK that a warp has scores for
  // Registers of a thread: the accumulators of one sub of S or dP, those of dQ, and what those of dK and dV leave for
  // others and for operands, found by trying.
  static constexpr int kScores = C.block_n * kSubM / C.threads();
  static constexpr int kDq = C.block_m * C.head_dim / C.threads();
  static constexpr int kRoom = (kWholeKeys ? 200 : 216) - C.block_n * (C.head_dim + C.head_dim_v) / C.threads();

  template <int kCols>  // of a result whose rows are keys
  CUTE_DEVICE static auto accumulator() {
    return make_accumulator<C.block_n, kCols, kDown, kAcross>();  // (MMA,MMA_N,columns)
  }
  // S^T = K Q^T and dP^T = V dO^T.
  using OperandK = StagedOperand<Side::A, false, Element, C.block_n, C.head_dim, kDown>;
  using OperandV = StagedOperand<Side::A, false, Element, C.block_n, C.head_dim_v, kDown>;
  using OperandQ = StagedOperand<Side::B, false, Element, kSubM, C.head_dim, kAcross>;
  using OperandDout = StagedOperand<Side::B, false, Element, kSubM, C.head_dim_v, kAcross>;
  using Coords = WarpCoords<C.block_n, kSubM, kDown, kAcross>;
  using ResultS = SharedResult<Element, C.block_n, C.block_m, kDown, kAcross>;
  // dK = dS^T Q and dV = P^T dO.
  using OperandP = StagedOperand<Side::A, false, Element, C.block_n, C.block_m, kDown>;  // and dS
  using OperandQt = StagedOperand<Side::B, true, Element, kSubM, C.head_dim, kAcross>;
  using OperandDoutT = StagedOperand<Side::B, true, Element, kSubM, C.head_dim_v, kAcross>;
  using ResultK = SharedResult<Element, C.block_n, C.head_dim, kDown, kAcross>;
  using ResultV = SharedResult<Element, C.block_n, C.head_dim_v, kDown, kAcross>;
  // dQ = dS K.
  using OperandDsT = StagedOperand<Side::A, true, Element, C.block_n, C.block_m, Dq::kDown>;
  using OperandKt = StagedOperand<Side::B, true, Element, C.block_n, C.head_dim, Dq::kAcross>;

  struct Storage {
    alignas(128) Element k[C.block_n * C.head_dim];  // dK on the way out
    alignas(128) Element v[C.block_n * C.head_dim_v];  // dV on the way out
    alignas(128) Element q[C.stages][C.block_m * C.head_dim];
    alignas(128) Element dout[C.stages][C.block_m * C.head_dim_v];
    alignas(128) Element scores[kWholeKeys ? 1 : 2][C.block_n * C.block_m];  // dS^T, then P^T
    alignas(16) float lse_log2[C.stages][C.block_m];
    alignas(16) float row_dot[C.stages][C.block_m];
  };
  static_assert(!kWholeKeys || std::max(C.head_dim, C.head_dim_v) <= 64, "sub-tiles have no second column of atoms");
  static_assert(kWholeKeys || C.block_m <= 64, "StagedOperand::from() of P and dS");
  static_assert(C.stages <= 2, "a step is loaded at most one step ahead");
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

// Loads the Q, dO and row statistics of steps. Addresses are computed anew for each step, when registers are free.
template <KernelConfig C>
class StepLoader {
 public:
  using Element = ElementOf<C.dtype>;
  using Tiles = typename BackwardTraits<C>::Tiles;

  CUTE_DEVICE StepLoader(const BwdParams& p, const KeyTile& tile, const SeqInfo& seq, int group)
      : p_(p),
        tile_(tile),
        group_(group),
        offset_(seq.q.offset),
        queries_(seeing_queries(seq, p.fwd.band, tile.row, C.block_n)) {
    if (p.fwd.q.vectors && p.dout.vectors && p.fwd.head_dim == C.head_dim && p.fwd.head_dim_v == C.head_dim_v) {
      whole_begin_ = detail::ceil_div(queries_.first, C.block_m);
      whole_end_ = detail::floor_div(queries_.last, C.block_m);
    }
  }

  // Starts to load a step into a stage. One past the last leaves an empty group.
  template <class Storage>
  CUTE_DEVICE void load(QueryStep step, const Tiles& queries, Storage& storage, int stage) const {
    if (step.head < group_) {
      const int head = tile_.head * group_ + step.head, m = queries.index(step.m), row = queries.first_query(step.m);
      const bool whole = (whole_begin_ <= m) & (m < whole_end_);
      copy<C.head_dim>(storage.q[stage], p_.fwd.q, head, row, p_.fwd.head_dim, whole);
      copy<C.head_dim_v>(storage.dout[stage], p_.dout, head, row, p_.fwd.head_dim_v, whole);
      if (threadIdx.x < 2 * kVectors) {
        const bool first = threadIdx.x < kVectors;
        const int vector = threadIdx.x % kVectors * 4;
        const float* from = (first ? p_.lse_log2 : p_.row_dot).ptr +
                            first_padded_row(p_, C.block_m, tile_.batch, head, offset_) + row + vector;
        cp_async_16(cast_smem_ptr_to_uint((first ? storage.lse_log2 : storage.row_dot)[stage] + vector), from, 16);
      }
    }
    cp_async_fence();
  }

 private:
  static constexpr int kVectors = C.block_m / 4;
  static_assert(2 * kVectors <= C.threads());

  // A TileCopy that already knows which tiles are whole.
  template <int kCols>
  CUTE_DEVICE void copy(Element* shared, const TensorView& m, int head, int row, int cols, bool whole) const {
    using T = TileThreads<C.threads(), C.block_m, kCols>;
    const int my_row = T::row(threadIdx.x), my_col = T::col(threadIdx.x);
    const uint32_t to = cast_smem_ptr_to_uint(shared + SharedLayout<C.block_m, kCols>{}(my_row, my_col));
    const Element* from = static_cast<const Element*>(m.ptr) + tile_.batch * m.batch + head * m.head +
                          (offset_ + row + my_row) * m.row + my_col;
    if (!whole) {
      load_ragged<Element, C.threads(), C.block_m, kCols>(to, from, m.row, m.vectors, row, queries_, cols, threadIdx.x);
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < C.block_m / T::kDown; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kCols / T::kAtom; ++j) {
        cp_async_16(to + T::distance(i, j) * int(sizeof(Element)), from + j * T::kAtom, 16);
      }
      from += T::kDown * m.row;
    }
  }

  const BwdParams& p_;
  const KeyTile& tile_;
  int group_;
  int64_t offset_;
  RowSpan queries_;
  int whole_begin_ = 0, whole_end_ = 0;  // query tiles that are there whole, with all columns
};

// dQ semaphores of the deterministic backward: key tiles add in ascending order. A semaphore covers a warp's share of
// kTilesPerSemaphore query tiles: releasing one fences all the warp's memory traffic, but the more tiles it covers, the
// longer queries must stay in L2. Each warp waits only for the same warp of CTAs with smaller index, which were
// launched before: one of them always progresses.
class DqSemaphore {
 public:
  // Moves on to the semaphore with this counter, and releases the previous one.
  CUTE_DEVICE void select(int* counter) {
    if (counter == counter_) return;
    release();
    counter_ = counter;
    poll();
  }

  // Waits until `tiles_before` key tiles have released it. Nothing they wrote is read, and reductions follow a branch
  // on the counter, so no acquire is needed.
  CUTE_DEVICE void wait(int tiles_before) {
    while (done_ < tiles_before) poll();
  }

  // Lets the next key tile add. Best some time after the last add, which it waits for.
  CUTE_DEVICE void release() const {
    __syncwarp();
    if (counter_ != nullptr && threadIdx.x % 32 == 0) {
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter_) : "memory");
    }
  }

 private:
  CUTE_DEVICE void poll() {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(done_) : "l"(counter_) : "memory");
  }

  int* counter_ = nullptr;
  int done_ = 0;
};

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) backward(const __grid_constant__ BwdParams p) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  constexpr int kThreads = C.threads();
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int thread = threadIdx.x;
  const uint32_t warp = cutlass::canonical_warp_idx_sync();

  const KeyTile tile(p.fwd, C.block_n, p.order.sets, false, blockIdx.x);
  const SeqInfo seq(p.fwd, tile.batch);
  if (tile.row >= seq.k.length) return;
  const int group = p.fwd.heads / p.fwd.heads_k;
  const auto queries = T::Tiles::of(p.fwd, seq, tile);
  const int64_t padded_row = first_padded_row(p, C.block_m, tile.batch, tile.head * group, seq.q.offset);

  const RowSpan keys = visible_keys(seq, p.fwd.band, 0, seq.q.length);
  TileCopy<Element, kThreads, C.block_n, C.head_dim>(p.fwd.k, tile.batch, tile.head, seq.k.offset, tile.row, keys,
                                                     p.fwd.head_dim, storage.k, thread)
      .load();
  TileCopy<Element, kThreads, C.block_n, C.head_dim_v>(p.fwd.v, tile.batch, tile.head, seq.k.offset, tile.row, keys,
                                                       p.fwd.head_dim_v, storage.v, thread)
      .load();
  const StepLoader<C> loader(p, tile, seq, group);
  auto load_step = [&](QueryStep step, int stage) { loader.load(step, queries, storage, stage); };
  QueryStep step{queries.empty() ? group : 0, queries.end - 1};
  load_step(step, 0);  // commits K and V too

  const typename Mma16816<C.dtype>::Atom mma;
  const uint32_t down = warp % T::kDown, across = warp / T::kDown;
  const typename T::OperandK k(storage.k, down);
  const typename T::OperandV v(storage.v, down);
  const typename T::OperandQ q(storage.q[0], across);
  const typename T::OperandDout dout(storage.dout[0], across);
  const typename T::ResultS ds_out(storage.scores[0], warp);
  const typename T::OperandP ds(storage.scores[0], down);
  const typename T::OperandQt qt(storage.q[0], across);
  const typename T::OperandDoutT dout_t(storage.dout[0], across);
  const typename T::OperandDsT ds_t(storage.scores[0], warp % T::Dq::kDown);
  const typename T::OperandKt kt(storage.k, warp / T::Dq::kDown);
  constexpr int kPBytes = sizeof(storage.scores[0]);  // from dS to P
  auto tKrdK = T::template accumulator<C.head_dim>();  // (MMA,MMA_N,MMA_D)
  auto tVrdV = T::template accumulator<C.head_dim_v>();  // (MMA,MMA_N,MMA_DV)
  clear(tKrdK);
  clear(tVrdV);
  const ScoreGradients<C, typename T::Coords> gradients(p.fwd, seq, tile.batch, tile.row, typename T::Coords(warp));
  DqSemaphore semaphore;

  int stage = 0;
  CUTE_NO_UNROLL
  for (; step.head < group; step = step.next(queries), stage = (stage + 1) % C.stages) {
    const int head = tile.head * group + step.head;
    const int q_bytes = stage * int(sizeof(storage.q[0])), dout_bytes = stage * int(sizeof(storage.dout[0]));

    // After this barrier the step's Q and dO are visible to all, and nobody still reads the scores or the stage of the
    // step before.
    cp_async_wait<0>();
    __syncthreads();
    const int first_query = queries.first_query(step.m);
    const int64_t dq_row = padded_row + step.head * p.lse_log2.head + first_query;
    const auto turn = queries.turn(step.m);
    auto select_semaphore = [&] {
      if (p.deterministic)
        semaphore.select(p.dq_semaphores + (dq_row / C.block_m - queries.index(step.m) + turn.semaphore) * C.warps +
                         warp);
    };
    if constexpr (T::kWholeKeys) select_semaphore();
    if constexpr (C.stages == 2) load_step(step.next(queries), 1 - stage);

    CUTE_UNROLL
    for (int sub = 0; sub < C.block_m; sub += T::kSubM) {
      const int q_sub = q_bytes + sub * C.head_dim * int(sizeof(Element));
      const int dout_sub = dout_bytes + sub * C.head_dim_v * int(sizeof(Element));
      auto tSrS = T::template accumulator<T::kSubM>();  // (MMA,MMA_N,MMA_M)
      auto tSrdP = T::template accumulator<T::kSubM>();  // (MMA,MMA_N,MMA_M)
      clear(tSrS);
      clear(tSrdP);
      product<T::kRoom - T::kScores>(mma, tSrS, k, q.at(q_sub));
      product<T::kRoom - 2 * T::kScores>(mma, tSrdP, v, dout.at(dout_sub));
      gradients(rows_and_columns(tSrS), rows_and_columns(tSrdP), storage.lse_log2[stage] + sub,
                storage.row_dot[stage] + sub, head, first_query + sub, queries.full(step.m), [] {});
      Tensor rP = converted<Element>(tSrS);  // (MMA,MMA_N,MMA_M)
      Tensor rdS = converted<Element>(tSrdP);  // (MMA,MMA_N,MMA_M)
      if constexpr (!T::kWholeKeys) ds_out.at(kPBytes).write(rP, 0);
      ds_out.write(rdS, sub);
      Tensor aP = as_operand_a(rP), adS = as_operand_a(rdS);  // (MMA,MMA_N,steps)
      const uint32_t first = across * T::kSteps;
      product<T::kRoom - T::kScores, T::kAcross>(mma, tVrdV, RegisterOperand{aP}, dout_t.at(dout_sub).from(first));
      product<T::kRoom - T::kScores, T::kAcross>(mma, tKrdK, RegisterOperand{adS}, qt.at(q_sub).from(first));
    }

    if constexpr (!T::kWholeKeys) select_semaphore();
    // After this barrier all of dS and P is in shared memory.
    __syncthreads();
    auto tQrdQ = T::Dq::accumulator();  // (MMA,MMA_M,MMA_D)
    clear(tQrdQ);
    product<T::kRoom - T::kDq>(mma, tQrdQ, ds_t, kt);
    if (p.deterministic) {
      semaphore.wait(turn.rank(p.fwd, seq, tile));
    }
    DqSums<C>(p, dq_row).add(tQrdQ);
    // The contributions of other warps' P and dS to dV and dK.
    CUTE_UNROLL
    for (int i = 1; i < T::kAcross; ++i) {
      const uint32_t first = (across + i) % T::kAcross * T::kSteps;
      product<T::kRoom, T::kAcross>(mma, tVrdV, ds.at(kPBytes).from(first), dout_t.at(dout_bytes).from(first));
      product<T::kRoom, T::kAcross>(mma, tKrdK, ds.from(first), qt.at(q_bytes).from(first));
    }
    if constexpr (C.stages == 1) {
      // After this barrier nobody still reads the step's Q and dO.
      __syncthreads();
      load_step(step.next(queries), 0);
    }
  }

  CUTE_UNROLL
  for (int i = 0; i < size(tKrdK); ++i) tKrdK(i) *= p.fwd.softmax_scale;
  if constexpr (C.rich()) {
    CUTE_UNROLL
    for (int i = 0; i < size(tVrdV); ++i) tVrdV(i) *= p.fwd.rules.keep_scale;
    CUTE_UNROLL
    for (int i = 0; i < size(tKrdK); ++i) tKrdK(i) *= p.fwd.rules.gradient_scale();
  }
  // After this barrier nobody still reads K and V.
  cp_async_wait<0>();
  __syncthreads();
  if (p.deterministic) semaphore.release();
  typename T::ResultK(storage.k, warp).store(tKrdK);
  typename T::ResultV(storage.v, warp).store(tVrdV);
  // After this barrier all of dK and dV is in shared memory.
  __syncthreads();
  const RowSpan all{0, seq.k.length};
  TileCopy<Element, kThreads, C.block_n, C.head_dim>(p.dk, tile.batch, tile.head, seq.k.offset, tile.row, all,
                                                     p.fwd.head_dim, storage.k, thread)
      .store();
  TileCopy<Element, kThreads, C.block_n, C.head_dim_v>(p.dv, tile.batch, tile.head, seq.k.offset, tile.row, all,
                                                       p.fwd.head_dim_v, storage.v, thread)
      .store();
}

template <KernelConfig C>
cudaError_t launch_backward(const BwdParams& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  const int64_t query_tiles = PassTile<C>::count(f);
  const int64_t key_tiles = int64_t(cute::ceil_div(f.seqlen_k, C.block_n)) * f.heads_k * f.batch;
  using Gaps = GapFills<Op::Bwd>;
  const int fillers = f.dense() ? 0 : Gaps::kCtas;
  if (cudaError_t e = launch_kernel<backward_preprocess<C>>(query_tiles + fillers, C.threads(), 0, stream, p,
                                                            Gaps::of_outputs(p), static_cast<int>(query_tiles), true))
    return e;
  if (cudaError_t e = launch_kernel<backward<C>>(key_tiles, C.threads(), smem_bytes(C), stream, p)) return e;
  return launch_kernel<backward_postprocess<C>>(query_tiles, C.threads(), DqTraits<C>::kSmemBytes, stream, p);
}

}  // namespace flash_cute::sm80
