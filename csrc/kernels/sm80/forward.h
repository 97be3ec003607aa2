// Attention forward for sm_80 and later: one CTA computes one tile of query rows of one head (FlashAttention-2, arXiv
// 2307.08691).
#pragma once

#include "core/registry.h"
#include "kernels/common/mask.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/launch.h"
#include "kernels/passes/gaps.h"
#include "kernels/sm80/mma.h"
#include "kernels/sm80/tile_io.h"

namespace flash_cute::sm80 {

template <KernelConfig C>
struct ForwardTraits {
  using Element = typename Mma16816<C.dtype>::Element;
  using Mma = WarpMma<C.dtype, C.warps, 1>;
  using LayoutQ = SharedLayout<Element, C.block_m, C.head_dim>;
  using LayoutKV = SharedLayout<Element, C.block_n, C.head_dim>;
  using LayoutVt = TransposedLayout<Element, C.block_n, C.head_dim>;
  struct Storage {
    alignas(128) Element q[cosize_v<LayoutQ>];  // O on the way out
    alignas(128) Element k[C.stages][cosize_v<LayoutKV>];
    alignas(128) Element v[C.stages][cosize_v<LayoutKV>];
  };
  static_assert(C.block_m % (16 * C.warps) == 0, "every warp owns whole 16-row MMA tiles");
  static_assert(sizeof(Storage) == C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

// The tile's place in the problem.
struct QueryTile {
  int row, head, batch;

  CUTE_DEVICE QueryTile(const FwdProblem& p, int block_m) {
    const int tiles = ceil_div(p.seqlen_q, block_m);
    row = (tiles - 1 - blockIdx.x % tiles) * block_m;  // late rows first: under a causal mask they are the longest
    head = blockIdx.x / tiles % p.heads;
    batch = blockIdx.x / tiles / p.heads;
  }
};

// Scores that the band hides become -inf. Selected, not added: hidden keys may hold anything.
template <class Scores, class Coordinates>
CUTE_DEVICE void mask_scores(Scores& scores, const Coordinates& at, const BandMask& mask, int row, int col) {
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) {
    if (!mask.visible(row + get<0>(at(i)), col + get<1>(at(i)))) scores(i) = -INFINITY;
  }
}

// Writes the natural-log LSE of each row, and the maximum where asked for.
template <class Softmax, class Coordinates>
CUTE_DEVICE void store_statistics(const FwdProblem& p, const SeqInfo& seq, const QueryTile& tile,
                                  const Softmax& softmax, const Coordinates& at) {
  auto rows = rows_and_columns(at);  // (rows,columns) -> (row, column)
  if (get<1>(rows(0, 0)) != 0) return;  // one thread of the quad writes
  const int64_t lse_base = tile.batch * p.lse.batch + tile.head * p.lse.head + seq.q.offset;
  const int64_t max_base = tile.batch * p.row_max.batch + tile.head * p.row_max.head + seq.q.offset;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(rows); ++r) {
    const int row = tile.row + get<0>(rows(r, 0));
    if (row >= seq.q.length) continue;
    p.lse.ptr[lse_base + row] = softmax.lse(r);
    if (p.row_max.ptr != nullptr) {
      p.row_max.ptr[max_base + row] = softmax.natural_max(r);
    }
  }
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) forward(const __grid_constant__ FwdProblem p) {
  using T = ForwardTraits<C>;
  using Element = typename T::Element;
  constexpr int kThreads = C.threads();
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const int thread = threadIdx.x;

  const QueryTile tile(p, C.block_m);
  const SeqInfo seq(p, tile.batch);
  if (tile.row >= seq.q.length) return;
  const int head_k = tile.head / (p.heads / p.heads_k);
  const TileRange range = key_tiles(seq, p.band, tile.row, C.block_m, C.block_n);
  const RowSpan keys = visible_keys(seq, p.band, tile.row, C.block_m);

  Tensor sQ = make_tensor(make_smem_ptr(storage.q), typename T::LayoutQ{});  // (BLK_M,D)
  auto load_kv = [&](const Matrices& m, Element* stage, int n) {
    const auto global =
        global_tile<const Element>(m, tile.batch, head_k, seq.k.offset, n * C.block_n, keys, p.head_dim);
    load_tile<kThreads>(global, make_tensor(make_smem_ptr(stage), typename T::LayoutKV{}), thread);
  };
  // Copies are committed in the order K, V, K, V, ... from the last tile down; an empty group stands for a tile that
  // does not exist, so that counting groups always tells what has landed.
  auto load_k = [&](int n) {
    if (n >= range.begin) load_kv(p.k, storage.k[(range.end - 1 - n) % C.stages], n);
    cp_async_fence();
  };
  auto load_v = [&](int n) {
    if (n >= range.begin) load_kv(p.v, storage.v[(range.end - 1 - n) % C.stages], n);
    cp_async_fence();
  };
  constexpr int kGroupsAhead = 2 * C.stages - 2;

  if (!range.empty()) {
    load_tile<kThreads>(
        global_tile<const Element>(p.q, tile.batch, tile.head, seq.q.offset, tile.row, {0, seq.q.length}, p.head_dim),
        sQ, thread);
  }
  load_k(range.end - 1);  // commits Q too
  CUTE_UNROLL
  for (int s = 1; s < C.stages; ++s) {
    load_v(range.end - s);
    load_k(range.end - 1 - s);
  }

  typename T::Mma mma;
  auto thread_mma = mma.get_slice(thread);
  Tensor tOrO = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,MMA_D)
  clear(tOrO);
  Tensor tScS =
      thread_mma.partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{}));  // (MMA,MMA_M,MMA_N)
  OnlineSoftmax<2 * decltype(size<1>(tScS))::value> softmax(positive_scale_log2(p.softmax_scale));
  const BandMask mask(seq, p.band);

  CUTE_NO_UNROLL
  for (int n = range.end - 1; n >= range.begin; --n) {
    const int stage = (range.end - 1 - n) % C.stages;
    Tensor sK = make_tensor(make_smem_ptr(storage.k[stage]), typename T::LayoutKV{});   // (BLK_N,D)
    Tensor sVt = make_tensor(make_smem_ptr(storage.v[stage]), typename T::LayoutVt{});  // (D,BLK_N)
    Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.block_n>>{});   // (MMA,MMA_M,MMA_N)
    clear(tSrS);

    // After this barrier K(n) is visible to all, and nobody still reads V(n + 1).
    cp_async_wait<kGroupsAhead>();
    __syncthreads();
    load_v(n - C.stages + 1);
    gemm(mma, tSrS, operand_a<LoadMatrix<Element>>(mma, sQ, thread), operand_b<LoadMatrix<Element>>(mma, sK, thread),
         thread);
    if (p.softmax_scale < 0.f) transform(tSrS, [](float s) { return -s; });
    if (!range.full(n)) mask_scores(tSrS, tScS, mask, tile.row, n * C.block_n);
    softmax.step(rows_and_columns(tSrS), rows_and_columns(tOrO));

    // After this barrier V(n) is visible to all, and nobody still reads K(n).
    cp_async_wait<kGroupsAhead>();
    __syncthreads();
    load_k(n - C.stages);
    gemm_registers(mma, tOrO, as_operand_a(converted<Element>(tSrS)),
                   operand_b<LoadMatrixTransposed<Element>>(mma, sVt, thread), thread);
  }

  softmax.finish(rows_and_columns(tOrO));
  store_statistics(p, seq, tile, softmax, tScS);
  // Each warp overwrites the rows of Q that it alone has read.
  store_accumulator<Element>(mma, tOrO, sQ, thread);
  // After this barrier all of O is in shared memory.
  __syncthreads();
  store_tile<kThreads>(
      global_tile<Element>(p.out, tile.batch, tile.head, seq.q.offset, tile.row, {0, seq.q.length}, p.head_dim), sQ,
      thread);
}

}  // namespace flash_cute::sm80

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  if (p.sequences.cu_q != nullptr) {
    if (cudaError_t e = fill_gaps(query_gaps(p, p.out, p.lse, p.row_max, -INFINITY), stream)) return e;
  }
  const int64_t tiles = int64_t(cute::ceil_div(p.seqlen_q, C.block_m)) * p.heads * p.batch;
  return launch_kernel<sm80::forward<C>>(tiles, C.threads(), C.smem_bytes(), stream, p);
}

}  // namespace flash_cute
