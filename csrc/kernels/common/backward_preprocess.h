// The padded rows of backward's workspaces, and the preprocess pass that fills them.
#pragma once

#include <cutlass/array.h>

#include "core/workspace.h"
#include "kernels/common/element.h"
#include "kernels/common/gap_fill.h"
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

// A tile of query rows of one head, by its number, for the passes around backward. CTAs take them from last to first: the
// main kernel ends with the last heads and starts with the first, whose numbers are then still in L2.
template <KernelConfig C>
struct PassTile {
  int row, head, batch;
  SeqSpan span;
  int64_t padded_row;

  // In all threads of a CTA. A tile of packed queries that no sequence has, as offsets say, has padded rows alone.
  CUTE_DEVICE PassTile(const BwdParams& p, int number) : row(-1), batch(0), span{} {
    const FwdProblem& f = p.fwd;
    const int tiles = static_cast<int>(of_head(f)), tile = number % tiles;
    head = number / tiles % f.heads;
    if (f.dense()) {
      batch = number / tiles / f.heads;
      row = tile * C.block_m;
      span = seq_span(nullptr, f.varlen.used_q, batch, f.seqlen_q, f.total_q);
      padded_row = first_padded_row(p, C.block_m, batch, head, 0) + row;
      return;
    }
    padded_row = head * p.lse_log2.head + int64_t(tile) * C.block_m;
    auto span_of = [&](int b) { return seq_span(f.varlen.cu_q, f.varlen.used_q, b, f.seqlen_q, f.total_q); };
    auto row_in = [&](const SeqSpan& span, int b) {
      return int64_t(tile) * C.block_m - PaddedRows{C.block_m}.first_row(span.offset, b);
    };
    const int sequence = last_sequence(f.batch, [&](int b) {
      const SeqSpan span = span_of(b);
      return 0 <= row_in(span, b) && row_in(span, b) < span.length;
    });
    if (sequence < 0) return;
    batch = sequence;
    span = span_of(batch);
    row = static_cast<int>(row_in(span, batch));
  }

  CUTE_DEVICE bool exists() const { return row >= 0 && row < span.length; }

  static int64_t count(const FwdProblem& f) {
    if (f.batch == 0) return 0;
    return of_head(f) * f.heads * (f.dense() ? f.batch : 1);
  }

 private:
  // Of a head; of packed queries those of all sequences.
  CUTE_HOST_DEVICE static int64_t of_head(const FwdProblem& f) {
    const PaddedRows rows{C.block_m};
    return (f.dense() ? rows.dense(f.seqlen_q) : rows.packed(f.total_q, f.batch)) / C.block_m;
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
// minus it is 0); dQ semaphores and dQ sums to 0 (all, or those that no key tile starts). CTAs behind those of the tiles
// fill the rows of no packed sequence.
template <KernelConfig C>
__global__ void __launch_bounds__(32 * C.warps, 1)
    backward_preprocess(const __grid_constant__ BwdParams p, const __grid_constant__ GapFills<Op::Bwd> gaps, int tiles,
                        bool all_zeros) {
  using Element = ElementOf<C.dtype>;
  constexpr int kThreads = 32 * C.warps, kThreadsPerRow = C.head_dim_v % 64 == 0 ? 8 : 4;
  constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  // After this wait the kernel before has ended: its results may be read, and its inputs overwritten.
  wait_on_dependent_grids();
  launch_dependent_grids();
  const int filler = static_cast<int>(blockIdx.x) - tiles;
  if (filler >= 0) return gaps.fill(threadIdx.x / 32, C.warps, filler, gridDim.x - tiles);
  const PassTile<C> tile(p, tiles - 1 - blockIdx.x);
  // Of all padded rows: no offsets may leave one without, for which others would wait.
  if (threadIdx.x < C.warps) p.dq_semaphores[tile.padded_row / C.block_m * C.warps + threadIdx.x] = 0;
  if (!tile.exists()) return;
  if (all_zeros || !QueryTilesOf<C>::any_adds(p.fwd, SeqInfo(p.fwd, tile.batch), {tile.row, tile.head, tile.batch})) {
    float* const sums = p.dq_accum + tile.padded_row * C.head_dim;
    CUTE_UNROLL
    for (int i = 4 * threadIdx.x; i < C.block_m * C.head_dim; i += 4 * kThreads) {
      *reinterpret_cast<float4*>(sums + i) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

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
