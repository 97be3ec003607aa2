// Attention backward for sm_80 and later: one CTA owns a tile of keys of one kv head, and walks over the query tiles of
// every query head that reads it. dK and dV therefore stay in registers from start to end, without atomics also for
// grouped queries; dQ is summed over CTAs in fp32 global memory. Scores are computed transposed, keys by queries, so that
// P and dS are already in the registers that the products for dV and dK take them from.
#pragma once

#include "core/registry.h"
#include "kernels/common/mask.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/launch.h"
#include "kernels/passes/gaps.h"
#include "kernels/sm80/backward_passes.h"
#include "kernels/sm80/mma.h"
#include "kernels/sm80/tile_io.h"

namespace flash_cute::sm80 {

template <KernelConfig C>
struct BackwardTraits {
  using Element = typename Mma16816<C.dtype>::Element;
  using MmaKeys = WarpMma<C.dtype, C.warps, 1>;  // S^T, dP^T, dK, dV: every warp owns 16 keys
  using MmaDq = typename DqTraits<C>::Mma;
  using LayoutQ = SharedLayout<Element, C.block_m, C.head_dim>;  // Q and dO
  using LayoutKV = SharedLayout<Element, C.block_n, C.head_dim>;  // K and V
  using LayoutDs = SharedLayout<Element, C.block_n, C.block_m>;  // dS^T
  using LayoutQt = TransposedLayout<Element, C.block_m, C.head_dim>;
  using LayoutKt = TransposedLayout<Element, C.block_n, C.head_dim>;
  using LayoutDsT = TransposedLayout<Element, C.block_n, C.block_m>;
  struct Storage {
    alignas(128) Element k[cosize_v<LayoutKV>];  // dK on the way out
    alignas(128) Element v[cosize_v<LayoutKV>];  // dV on the way out
    alignas(128) Element q[C.stages][cosize_v<LayoutQ>];
    alignas(128) Element dout[C.stages][cosize_v<LayoutQ>];
    alignas(128) Element ds[cosize_v<LayoutDs>];
    alignas(128) float lse_log2[C.stages][C.block_m];
    alignas(128) float row_dot[C.stages][C.block_m];
  };
  static_assert(C.block_n == 16 * C.warps, "every warp owns 16 keys");
  static_assert(C.stages >= 2, "a step is loaded while the one before it is worked on");
  static_assert(sizeof(Storage) == C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

// The tile's place in the problem.
struct KeyTile {
  int row, head, batch;

  CUTE_DEVICE KeyTile(const FwdProblem& p, int block_n) {
    const int tiles = ceil_div(p.seqlen_k, block_n);
    row = blockIdx.x % tiles * block_n;  // early keys first: under a causal mask they have the most queries
    head = blockIdx.x / tiles % p.heads_k;
    batch = blockIdx.x / tiles / p.heads_k;
  }
};

// A step is one query head of the group and one query tile.
struct Step {
  int head, m;

  CUTE_DEVICE Step next(const TileRange& range) const {
    return m + 1 < range.end ? Step{head, m + 1} : Step{head + 1, range.begin};
  }
};

// Scores become P = exp(S - lse), and dP becomes dS = P (dP - rowsum(dO O)). Both lie transposed, (key, query).
template <class Scores, class Coordinates>
CUTE_DEVICE void scores_to_gradients(Scores& s, Scores& dp, const Coordinates& at, float scale_log2,
                                     const float* lse_log2, const float* row_dot) {
  CUTE_UNROLL
  for (int i = 0; i < size(s); ++i) {
    const int query = get<1>(at(i));
    s(i) = exp2_approx(s(i) * scale_log2 - lse_log2[query]);
    dp(i) = s(i) * (dp(i) - row_dot[query]);
  }
}

// Hidden elements of P and dS are selected away: hidden keys and values may hold anything.
template <class Scores, class Coordinates>
CUTE_DEVICE void mask_gradients(Scores& p, Scores& ds, const Coordinates& at, const BandMask& mask, int key,
                                int query) {
  CUTE_UNROLL
  for (int i = 0; i < size(p); ++i) {
    if (!mask.visible(query + get<1>(at(i)), key + get<0>(at(i)))) p(i) = ds(i) = 0.f;
  }
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) backward(const __grid_constant__ BwdProblem p) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  constexpr int kThreads = C.threads();
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int thread = threadIdx.x;

  const KeyTile tile(p.fwd, C.block_n);
  const SeqInfo seq(p.fwd, tile.batch);
  if (tile.row >= seq.k.length) return;
  const int group = p.fwd.heads / p.fwd.heads_k;
  const int head_dim = p.fwd.head_dim;
  const TileRange range = query_tiles(seq, p.fwd.band, tile.row, C.block_n, C.block_m);
  const int64_t padded_row = PaddedRows{C.block_m}.first_row(seq.q.offset, p.fwd.sequences.cu_q ? tile.batch : 0);

  Tensor sK = make_tensor(make_smem_ptr(storage.k), typename T::LayoutKV{});  // (BLK_N,D)
  Tensor sKt = make_tensor(make_smem_ptr(storage.k), typename T::LayoutKt{});  // (D,BLK_N)
  Tensor sV = make_tensor(make_smem_ptr(storage.v), typename T::LayoutKV{});  // (BLK_N,D)
  Tensor sDs = make_tensor(make_smem_ptr(storage.ds), typename T::LayoutDs{});  // (BLK_N,BLK_M)
  Tensor sDsT = make_tensor(make_smem_ptr(storage.ds), typename T::LayoutDsT{});  // (BLK_M,BLK_N)

  const RowSpan keys = visible_keys(seq, p.fwd.band, 0, seq.q.length);
  const RowSpan queries = seeing_queries(seq, p.fwd.band, tile.row, C.block_n);
  auto key_tile = [&](const Matrices& m, RowSpan span) {
    return global_tile<Element>(m, tile.batch, tile.head, seq.k.offset, tile.row, span, head_dim);
  };
  // Loads the step's Q, dO and row statistics; a step past the last leaves an empty group.
  auto load_step = [&](int head, int m, int stage) {
    if (head < group) {
      const int head_q = tile.head * group + head;
      auto load = [&](const Matrices& from, Element* to) {
        load_tile<kThreads>(
            global_tile<const Element>(from, tile.batch, head_q, seq.q.offset, m * C.block_m, queries, head_dim),
            make_tensor(make_smem_ptr(to), typename T::LayoutQ{}), thread);
      };
      load(p.fwd.q, storage.q[stage]);
      load(p.dout, storage.dout[stage]);
      constexpr int kVectors = C.block_m / 4;
      if (thread < 2 * kVectors) {
        const Statistics& from = thread < kVectors ? p.lse_log2 : p.row_dot;
        float* to = thread < kVectors ? storage.lse_log2[stage] : storage.row_dot[stage];
        const int i = thread % kVectors * 4;
        cp_async_16(to + i, from.ptr + tile.batch * from.batch + head_q * from.head + padded_row + m * C.block_m + i,
                    16);
      }
    }
    cp_async_fence();
  };

  typename T::MmaKeys mma;
  auto thread_mma = mma.get_slice(thread);
  Tensor tKrdK = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.head_dim>>{});  // (MMA,MMA_N,MMA_D)
  Tensor tVrdV = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.head_dim>>{});  // (MMA,MMA_N,MMA_D)
  clear(tKrdK);
  clear(tVrdV);
  Tensor tScS =
      thread_mma.partition_C(make_identity_tensor(Shape<Int<C.block_n>, Int<C.block_m>>{}));  // (MMA,MMA_N,MMA_M)
  const BandMask mask(seq, p.fwd.band);
  const float scale_log2 = p.fwd.softmax_scale * kLog2e;

  Step step{range.empty() ? group : 0, range.begin};
  load_tile<kThreads>(key_tile(p.fwd.k, keys), sK, thread);
  load_tile<kThreads>(key_tile(p.fwd.v, keys), sV, thread);
  load_step(step.head, step.m, 0);  // commits K and V too

  int stage = 0;
  CUTE_NO_UNROLL
  for (; step.head < group; step = step.next(range), stage = (stage + 1) % C.stages) {
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[stage]), typename T::LayoutQ{});  // (BLK_M,D)
    Tensor sQt = make_tensor(make_smem_ptr(storage.q[stage]), typename T::LayoutQt{});  // (D,BLK_M)
    Tensor sdO = make_tensor(make_smem_ptr(storage.dout[stage]), typename T::LayoutQ{});  // (BLK_M,D)
    Tensor sdOt = make_tensor(make_smem_ptr(storage.dout[stage]), typename T::LayoutQt{});  // (D,BLK_M)
    Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,MMA_N,MMA_M)
    Tensor tSrdP = partition_fragment_C(mma, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,MMA_N,MMA_M)
    clear(tSrS);
    clear(tSrdP);

    // After this barrier the step's Q and dO are visible to all, and nobody still reads the buffers of the last step.
    cp_async_wait<0>();
    __syncthreads();
    const Step ahead = step.next(range);
    load_step(ahead.head, ahead.m, (stage + 1) % C.stages);

    gemm(mma, tSrS, operand_a<LoadMatrix<Element>>(mma, sK, thread), operand_b<LoadMatrix<Element>>(mma, sQ, thread),
         thread);
    gemm(mma, tSrdP, operand_a<LoadMatrix<Element>>(mma, sV, thread), operand_b<LoadMatrix<Element>>(mma, sdO, thread),
         thread);

    scores_to_gradients(tSrS, tSrdP, tScS, scale_log2, storage.lse_log2[stage], storage.row_dot[stage]);
    if (!range.full(step.m)) mask_gradients(tSrS, tSrdP, tScS, mask, tile.row, step.m * C.block_m);
    Tensor rP = converted<Element>(tSrS);  // (MMA,MMA_N,MMA_M)
    Tensor rdS = converted<Element>(tSrdP);  // (MMA,MMA_N,MMA_M)
    gemm_registers(mma, tVrdV, as_operand_a(rP), operand_b<LoadMatrixTransposed<Element>>(mma, sdOt, thread), thread);
    store_accumulator<Element>(mma, rdS, sDs, thread);
    gemm_registers(mma, tKrdK, as_operand_a(rdS), operand_b<LoadMatrixTransposed<Element>>(mma, sQt, thread), thread);

    // After this barrier all of dS is in shared memory.
    __syncthreads();
    typename T::MmaDq mma_dq;
    Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,MMA_D)
    clear(tQrdQ);
    gemm(mma_dq, tQrdQ, operand_a<LoadMatrixTransposed<Element>>(mma_dq, sDsT, thread),
         operand_b<LoadMatrixTransposed<Element>>(mma_dq, sKt, thread), thread);
    float* accum = dq_block<C>(p, tile.batch, tile.head * group + step.head, padded_row + step.m * C.block_m);
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); ++i) atomicAdd(accum + i * kThreads + thread, tQrdQ(i));
  }

  CUTE_UNROLL
  for (int i = 0; i < size(tKrdK); ++i) tKrdK(i) *= p.fwd.softmax_scale;
  // After this barrier nobody still reads K and V.
  cp_async_wait<0>();
  __syncthreads();
  store_accumulator<Element>(mma, tKrdK, sK, thread);
  store_accumulator<Element>(mma, tVrdV, sV, thread);
  // After this barrier all of dK and dV is in shared memory.
  __syncthreads();
  store_tile<kThreads>(key_tile(p.dk, {0, seq.k.length}), sK, thread);
  store_tile<kThreads>(key_tile(p.dv, {0, seq.k.length}), sV, thread);
}

}  // namespace flash_cute::sm80

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  const int64_t query_tiles = int64_t(cute::ceil_div(f.seqlen_q, C.block_m)) * f.heads * f.batch;
  const int64_t key_tiles = int64_t(cute::ceil_div(f.seqlen_k, C.block_n)) * f.heads_k * f.batch;
  if (f.sequences.cu_q != nullptr) {
    if (cudaError_t e = fill_gaps(query_gaps(f, p.dq, p.softmax_d, {}, 0.f), stream)) return e;
    if (cudaError_t e = fill_gaps(key_gaps(f, p.dk), stream)) return e;
    if (cudaError_t e = fill_gaps(key_gaps(f, p.dv), stream)) return e;
  }
  if (cudaError_t e = launch_kernel<sm80::backward_prepare<C>>(query_tiles, C.threads(), 0, stream, p)) return e;
  if (cudaError_t e = launch_kernel<sm80::backward<C>>(key_tiles, C.threads(), C.smem_bytes(), stream, p)) return e;
  return launch_kernel<sm80::backward_finish<C>>(query_tiles, C.threads(), sm80::DqTraits<C>::kSmemBytes, stream, p);
}

}  // namespace flash_cute
