// The two passes around backward: row statistics before, dQ from its fp32 sums after.
#pragma once

#include "kernels/common/seq.h"
#include "kernels/common/softmax.h"
#include "kernels/sm80/mma.h"
#include "kernels/sm80/tile_io.h"

namespace flash_cute::sm80 {

template <KernelConfig C>
struct DqTraits {
  static constexpr int kWarpsM = C.block_m / 16 < C.warps ? C.block_m / 16 : C.warps;
  using Element = typename Mma16816<C.dtype>::Element;
  using Mma = WarpMma<C.dtype, kWarpsM, C.warps / kWarpsM>;
  using Layout = SharedLayout<Element, C.block_m, C.head_dim>;
  static constexpr int kSmemBytes = C.block_m * C.head_dim * sizeof(Element);
};

// One tile of query rows of one head, in the sequence and in the padded rows of the workspaces.
template <KernelConfig C>
struct PassTile {
  int row, head, batch;
  SeqSpan span;
  int64_t padded_row;

  CUTE_DEVICE explicit PassTile(const FwdProblem& p) {
    const int tiles = ceil_div(p.seqlen_q, C.block_m);
    row = blockIdx.x % tiles * C.block_m;
    head = blockIdx.x / tiles % p.heads;
    batch = blockIdx.x / tiles / p.heads;
    span = seq_span(p.sequences.cu_q, p.sequences.used_q, batch, p.seqlen_q, p.total_q);
    padded_row = PaddedRows{C.block_m}.first_row(span.offset, p.sequences.cu_q ? batch : 0) + row;
  }
};

// The sums of dQ for block_m padded rows from `padded_row` on: element i of thread t at i * threads + t, so that atomics
// and loads of a warp fall on consecutive addresses.
template <KernelConfig C>
CUTE_DEVICE float* dq_block(const BwdProblem& p, int batch, int head, int64_t padded_row) {
  return p.dq_accum + (batch * p.lse_log2.batch + head * p.lse_log2.head + padded_row) * C.head_dim;
}

// softmax_d = rowsum(dout * out) - dlse, lse / ln 2 with +inf where a row does not exist or sees no key (exp2 of anything
// minus it is 0), and zero sums of dQ.
template <KernelConfig C>
__global__ void __launch_bounds__(C.threads()) backward_prepare(const __grid_constant__ BwdProblem p) {
  using Element = typename Mma16816<C.dtype>::Element;
  constexpr int kThreadsPerRow = C.head_dim / 8;
  constexpr int kRowsAtOnce = C.threads() / kThreadsPerRow;
  const PassTile<C> tile(p.fwd);
  if (tile.row >= tile.span.length) return;

  auto* accum = reinterpret_cast<float4*>(dq_block<C>(p, tile.batch, tile.head, tile.padded_row));
  for (int i = threadIdx.x; i < C.block_m * C.head_dim / 4; i += C.threads()) {
    accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  auto matrix = [&](const Matrices& m) {
    return global_tile<const Element>(m, tile.batch, tile.head, tile.span.offset, tile.row, {0, tile.span.length},
                                      p.fwd.head_dim);
  };
  const auto dout = matrix(p.dout), out = matrix(p.fwd.out);
  const int col = threadIdx.x % kThreadsPerRow * 8;
  auto read = [&](const GlobalTile<const Element>& m, int row) {
    cutlass::Array<Element, 8> values;
    const Element* from = m.ptr + row * m.row_stride + col;
    if (m.vectors && row < m.last_row && col + 8 <= m.cols) {
      values = *reinterpret_cast<const cutlass::Array<Element, 8>*>(from);
    } else {
      for (int i = 0; i < 8; ++i) values[i] = row < m.last_row && col + i < m.cols ? from[i] : Element(0.f);
    }
    return values;
  };
  for (int row = threadIdx.x / kThreadsPerRow; row < C.block_m; row += kRowsAtOnce) {
    const auto a = read(dout, row), b = read(out, row);
    float dot = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) dot += float(a[i]) * float(b[i]);
    CUTE_UNROLL
    for (int lane = kThreadsPerRow / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(0xffffffff, dot, lane);
    if (col != 0) continue;
    auto at = [&](const Statistics& s, int64_t first) {
      return s.ptr + tile.batch * s.batch + tile.head * s.head + first + row;
    };
    const int64_t first = tile.span.offset + tile.row;
    const bool exists = row < out.last_row;
    const float lse = exists ? *at(p.fwd.lse, first) : -INFINITY;
    if (exists && p.dlse.ptr != nullptr) dot -= *at(p.dlse, first);
    if (exists) *at(p.softmax_d, first) = dot;
    *at(p.lse_log2, tile.padded_row) = lse == -INFINITY ? INFINITY : lse * kLog2e;
    *at(p.row_dot, tile.padded_row) = exists ? dot : 0.f;
  }
}

// dQ = softmax_scale * sums, rounded.
template <KernelConfig C>
__global__ void __launch_bounds__(C.threads()) backward_finish(const __grid_constant__ BwdProblem p) {
  using T = DqTraits<C>;
  using Element = typename T::Element;
  extern __shared__ __align__(128) char smem[];
  const PassTile<C> tile(p.fwd);
  if (tile.row >= tile.span.length) return;
  Tensor sdQ = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem)), typename T::Layout{});  // (BLK_M,D)
  typename T::Mma mma;
  Tensor tQrdQ = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,MMA_D)
  const float* accum = dq_block<C>(p, tile.batch, tile.head, tile.padded_row);
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); ++i) {
    tQrdQ(i) = accum[i * C.threads() + threadIdx.x] * p.fwd.softmax_scale;
  }
  store_accumulator<Element>(mma, tQrdQ, sdQ, threadIdx.x);
  // After this barrier all of dQ's tile is in shared memory.
  __syncthreads();
  store_tile<C.threads()>(global_tile<Element>(p.dq, tile.batch, tile.head, tile.span.offset, tile.row,
                                               {0, tile.span.length}, p.fwd.head_dim),
                          sdQ, threadIdx.x);
}

}  // namespace flash_cute::sm80
