#include "kernels/passes/combine_splits.h"

#include <algorithm>

#include "kernels/common/element.h"
#include "kernels/common/merge.h"
#include "kernels/common/pdl.h"
#include "kernels/common/query_tile.h"
#include "kernels/common/score_mod.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kColumns = 4;  // of a lane

// A row of a head, as a tile: of packed queries `number` counts those of all sequences. Negative if there is none.
CUTE_DEVICE QueryTile tile_of_row(const FwdProblem& p, int64_t number) {
  const int64_t all = p.all_rows(), row = number % all;
  const int head = static_cast<int>(number / all);
  const QueryTile none{-1, 0, 0};
  if (head >= p.heads) return none;
  if (p.dense()) return {static_cast<int>(row % p.seqlen_q), head, static_cast<int>(row / p.seqlen_q)};
  auto span_of = [&](int b) { return seq_span(p.varlen.cu_q, p.varlen.used_q, b, p.seqlen_q, p.total_q); };
  const int sequence = last_sequence(p.batch, [&](int b) {
    const SeqSpan span = span_of(b);
    return span.offset <= row && row < span.offset + span.length;
  });
  if (sequence < 0) return none;
  return {static_cast<int>(row - span_of(sequence).offset), head, sequence};
}

// A CTA has kRows rows, and kWarps warps each of them, which read kTogether splits at once.
template <class Element, int kRows, int kWarps, int kTogether>
__global__ void __launch_bounds__(32 * kRows * kWarps, 1) merge_rows(const __grid_constant__ FwdParams p) {
  static_assert(kRows == 1 || kWarps == 1);
  using Values = cutlass::AlignedArray<float, kColumns>;
  // Offsets are final before the wait: forward has waited for all before it, and lets nobody start early.
  const QueryTile tile = tile_of_row(p, int64_t(blockIdx.x) * kRows + threadIdx.x / (32 * kWarps));
  // After this wait the results of all splits are there.
  wait_on_dependent_grids();
  const int row = tile.row;
  if (row < 0) return;
  const SeqInfo seq(p, tile.batch);
  const float sink = sink_of(p.sink, tile.head);
  const int64_t head_step = p.split_lse.head * p.heads;  // from one split to the next
  const int64_t first = first_of(p.split_lse, tile, seq), first_lse = first_of(p.lse, tile, seq);
  Element* const out = static_cast<Element*>(p.out.ptr) + tile.batch * p.out.batch + tile.head * p.out.head +
                       (seq.q.offset + row) * p.out.row;
  const float lse = merge_row<kColumns, kTogether, kWarps>(
      p.num_splits, [&](int i) { return p.split_lse.ptr[first + row + i * head_step]; },
      [&](int i, int column) {
        return *reinterpret_cast<const Values*>(p.split_out + (first + row + i * head_step) * p.split_columns + column);
      },
      p.head_dim_v, sink,
      [&](int column, const auto& values) {
        for (int i = 0; i < kColumns && column + i < p.head_dim_v; ++i) out[column + i] = Element(values[i]);
      });
  if (threadIdx.x % (32 * kWarps) != 0) return;
  p.lse.ptr[first_lse + row] = lse;
  if (p.row_max.ptr == nullptr) return;
  float top = -INFINITY;  // or NaN, if that of a split is
  for (int i = 0; i < p.num_splits; ++i) {
    const float of_split = p.split_row_max.ptr[first + row + i * head_step];
    top = of_split > top || isnan(of_split) ? of_split : top;
  }
  p.row_max.ptr[first_of(p.row_max, tile, seq) + row] = top;
}

template <class Element>
cudaError_t launch(FwdParams p, cudaStream_t stream) {
  constexpr int kRows = 4, kWarps = 4, kFewSplits = 4, kManySplits = 16;
  constexpr int kManyRows = 1024;  // fill all SMs of a Hopper GPU with CTAs that read many splits at once
  const int64_t rows = p.batch == 0 ? 0 : p.all_rows() * p.heads, ctas = cute::ceil_div(rows, kRows);
  if (rows == 0) return cudaSuccess;
  if (p.num_splits <= kFewSplits || (p.num_splits <= kManySplits && rows > kManyRows)) {
    return launch_with_pdl<merge_rows<Element, kRows, 1, kFewSplits>>({ctas, 32 * kRows, 0}, stream, p);
  }
  if (p.num_splits <= kManySplits) {
    return launch_with_pdl<merge_rows<Element, kRows, 1, kManySplits>>({ctas, 32 * kRows, 0}, stream, p);
  }
  return launch_with_pdl<merge_rows<Element, 1, kWarps, kManySplits>>({rows, 32 * kWarps, 0}, stream, p);
}

}  // namespace

cudaError_t combine_splits(const FwdParams& p, cudaStream_t stream) {
  return with_element(p.dtype, [&](auto element) { return launch<decltype(element)>(p, stream); });
}

}  // namespace flash_cute
