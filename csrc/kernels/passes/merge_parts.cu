#include "kernels/passes/merge_parts.h"

#include <algorithm>

#include "kernels/common/merge.h"
#include "kernels/common/overlap.h"
#include "kernels/common/rows.h"
#include "kernels/common/score.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kWarps = 4, kRows = 8;  // of a CTA: one warp a row
constexpr int kTogether = 4;  // columns of a lane, and parts read at once

template <class Element>
__global__ void __launch_bounds__(32 * kWarps) merge_rows(const __grid_constant__ FwdProblem p) {
  using Values = cutlass::AlignedArray<float, kTogether>;
  const QueryTile tile = QueryTile::of_block(p, kRows);
  const SeqInfo seq(p, tile.batch);
  const float sink = sink_of(p.sink, tile.head);
  const int64_t head_step = p.parts.lse.head * p.heads;  // from one part to the next
  const int64_t first = first_of(p.parts.lse, tile, seq), first_lse = first_of(p.lse, tile, seq);
  // After this wait the results of all parts are there.
  wait_for_kernel_before();
  for (int row = tile.row + threadIdx.x / 32; row < min(tile.row + kRows, seq.q.length); row += kWarps) {
    Element* const out = static_cast<Element*>(p.out.ptr) + tile.batch * p.out.batch + tile.head * p.out.head +
                         (seq.q.offset + row) * p.out.row;
    const float lse = merge_row<kTogether, kTogether>(
        p.parts.count, [&](int i) { return p.parts.lse.ptr[first + row + i * head_step]; },
        [&](int i, int column) {
          return *reinterpret_cast<const Values*>(p.parts.out + (first + row + i * head_step) * p.parts.columns +
                                                  column);
        },
        p.head_dim_v, sink,
        [&](int column, const auto& values) {
          for (int i = 0; i < kTogether && column + i < p.head_dim_v; ++i) out[column + i] = Element(values[i]);
        });
    if (threadIdx.x % 32 != 0) continue;
    p.lse.ptr[first_lse + row] = lse;
    if (p.row_max.ptr == nullptr) continue;
    float top = -INFINITY;  // or NaN, if that of a part is
    for (int i = 0; i < p.parts.count; ++i) {
      const float of_part = p.parts.row_max(p.heads).ptr[first + row + i * head_step];
      top = of_part > top || isnan(of_part) ? of_part : top;
    }
    p.row_max.ptr[first_of(p.row_max, tile, seq) + row] = top;
  }
}

template <class Element>
cudaError_t launch(FwdProblem p, cudaStream_t stream) {
  if (!p.dense()) p.seqlen_q = static_cast<int>(std::min<int64_t>(p.seqlen_q, p.total_q));  // it may be any bound
  const int64_t ctas = int64_t(cute::ceil_div(p.seqlen_q, kRows)) * p.heads * p.batch;
  return launch_overlapping<merge_rows<Element>>({ctas, 32 * kWarps, 0}, stream, p);
}

}  // namespace

cudaError_t merge_parts(const FwdProblem& p, cudaStream_t stream) {
  return p.dtype == DType::FP16 ? launch<cutlass::half_t>(p, stream) : launch<cutlass::bfloat16_t>(p, stream);
}

}  // namespace flash_cute
