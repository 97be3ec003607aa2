// The padded rows of backward's workspaces, and the preprocess pass that fills them.
#pragma once

#include <cutlass/array.h>

#include "core/workspace.h"
#include "kernels/common/element.h"
#include "kernels/common/pdl.h"
#include "kernels/common/query_tile.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tile_kinds.h"

namespace flash_cute {

using namespace cute;

// A head's first row among the padded rows of all heads.
CUTE_DEVICE int64_t first_padded_row(const BwdParams& p, int block_m, int batch, int head, int64_t offset) {
  return batch * p.lse_log2.batch + head * p.lse_log2.head +
         PaddedRows{block_m}.first_row(offset, p.fwd.varlen.cu_q ? batch : 0);
}

// A tile of query rows of one head for the passes around backward. Tiles run from last to first: the main kernel ends
// with the last heads and starts with the first, whose numbers are then still in L2.
template <KernelConfig C>
struct PassTile {
  int row, head, batch;
  SeqSpan span;
  int64_t padded_row;

  // In all threads of a CTA.
  CUTE_DEVICE explicit PassTile(const BwdParams& p) {
    const FwdProblem& f = p.fwd;
    const int tiles = static_cast<int>(of_head(f)), number = gridDim.x - 1 - blockIdx.x, tile = number % tiles;
    head = number / tiles % f.heads;
    batch = f.dense() ? number / tiles / f.heads : sequence_of(f, tile);
    span = seq_span(f.varlen.cu_q, f.varlen.used_q, batch, f.seqlen_q, f.total_q);
    const int64_t first = f.dense() ? 0 : PaddedRows{C.block_m}.first_row(span.offset, batch);
    row = static_cast<int>(int64_t(tile) * C.block_m - first);
    padded_row = first_padded_row(p, C.block_m, batch, head, span.offset) + row;
  }

  CUTE_DEVICE bool exists() const { return row >= 0 && row < span.length; }

  static int64_t count(const FwdProblem& f) { return of_head(f) * f.heads * (f.dense() ? f.batch : 1); }

 private:
  // Of a head; of packed queries those of all sequences.
  CUTE_HOST_DEVICE static int64_t of_head(const FwdProblem& f) {
    const PaddedRows rows{C.block_m};
    return (f.dense() ? rows.dense(f.seqlen_q) : rows.packed(f.total_q, f.batch)) / C.block_m;
  }

  // The sequence whose padded rows have the tile: the last that starts there or before.
  CUTE_DEVICE static int sequence_of(const FwdProblem& f, int tile) {
    return last_of_sequences(f.batch, [&](int sequence) {
      const SeqSpan span = seq_span(f.varlen.cu_q, nullptr, sequence, f.seqlen_q, f.total_q);
      return PaddedRows{C.block_m}.first_row(span.offset, sequence) <= int64_t(tile) * C.block_m;
    });
  }
};

constexpr int kTogether = 8;  // elements in 16 bytes

// A thread's share of the dot product of two rows: vectors kStride apart, from `col` on.
template <class Element, int kCols, int kStride>
CUTE_DEVICE float partial_dot(const Element* a, bool vectors_a, const Element* b, bool vectors_b, int col, int cols) {
  using Vector = cutlass::AlignedArray<Element, kTogether>;
  auto read = [&](const Element* from, bool vectors, int c) {
    Vector values;
    if (vectors && c + kTogether <= cols) return *reinterpret_cast<const Vector*>(from + c);
    for (int i = 0; i < kTogether; ++i) values[i] = c + i < cols ? from[c + i] : Element(0.f);
    return values;
  };
  float dot = 0.f;
  CUTE_UNROLL
  for (int c = 0; c < kCols; c += kStride) {
    const Vector x = read(a, vectors_a, col + c), y = read(b, vectors_b, col + c);
    CUTE_UNROLL
    for (int i = 0; i < kTogether; ++i) dot += float(x[i]) * float(y[i]);
  }
  return dot;
}

// softmax_d = rowsum(dout * out) - dlse; lse / ln 2, +inf where a row does not exist or sees no key (exp2 of anything
// minus it is 0); dQ semaphores and dQ sums to 0 (all, or those that no key tile starts), kDqColumns a row.
template <KernelConfig C, int kDqColumns = C.head_dim>
__global__ void __launch_bounds__(32 * C.warps)
    backward_preprocess(const __grid_constant__ BwdParams p, bool all_zeros) {
  using Element = ElementOf<C.dtype>;
  constexpr int kThreads = 32 * C.warps, kThreadsPerRow = C.head_dim_v % 64 == 0 ? 8 : 4;
  constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  // After this wait the kernel before has ended: its results may be read, and its inputs overwritten.
  wait_on_dependent_grids();
  const PassTile<C> tile(p);
  launch_dependent_grids();
  if (!tile.exists()) return;
  if (all_zeros || !QueryTilesOf<C>::any_adds(p.fwd, SeqInfo(p.fwd, tile.batch), {tile.row, tile.head, tile.batch})) {
    float* const sums = p.dq_accum + tile.padded_row * kDqColumns;
    CUTE_UNROLL
    for (int i = 4 * threadIdx.x; i < C.block_m * kDqColumns; i += 4 * kThreads) {
      *reinterpret_cast<float4*>(sums + i) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  if (threadIdx.x < C.warps) p.dq_semaphores[tile.padded_row / C.block_m * C.warps + threadIdx.x] = 0;

  const int first_col = threadIdx.x % kThreadsPerRow * kTogether;
  auto row_of = [&](const TensorView& m, int row) {
    return static_cast<const Element*>(m.ptr) + tile.batch * m.batch + tile.head * m.head +
           (tile.span.offset + tile.row + row) * m.row;
  };
  CUTE_UNROLL
  for (int row = threadIdx.x / kThreadsPerRow; row < C.block_m; row += kRowsAtOnce) {
    const bool exists = tile.row + row < tile.span.length;
    float dot = 0.f;
    if (exists) {
      dot = partial_dot<Element, C.head_dim_v, kThreadsPerRow * kTogether>(
          row_of(p.dout, row), p.dout.vectors, row_of(p.fwd.out, row), p.fwd.out.vectors, first_col, p.fwd.head_dim_v);
    }
    CUTE_UNROLL
    for (int lane = kThreadsPerRow / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(0xffffffff, dot, lane);
    if (first_col != 0) continue;
    auto at = [&](const RowStats& s) {
      return s.ptr + tile.batch * s.batch + tile.head * s.head + tile.span.offset + tile.row + row;
    };
    const float lse = exists ? *at(p.fwd.lse) : -INFINITY;
    if (exists && p.dlse.ptr != nullptr) dot -= *at(p.dlse);
    if (exists) *at(p.softmax_d) = dot;
    p.lse_log2.ptr[tile.padded_row + row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
    p.row_dot.ptr[tile.padded_row + row] = dot / p.fwd.rules.gradient_scale();
  }
}

}  // namespace flash_cute
