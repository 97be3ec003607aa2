#include "kernels/passes/zero_fill.h"

#include "core/layout/seq.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerGap = 8;

struct GapFill {
  const int* cu;    // [batch + 1]
  const int* used;  // [batch], may be null
  int batch, longest;
  int64_t total;
  int heads, head_dim;
  int element_bytes;         // 2 or 4
  TensorView tensor_view;         // set to 0
  RowStats first, second;  // set to `statistic`; may be null
  float statistic;
};

constexpr int kMostFills = 3;

struct GapFills {
  GapFill of[kMostFills];
};

// Gap b lies between the end of sequence b - 1 and the start of sequence b.
__global__ void __launch_bounds__(kThreads) fill(const __grid_constant__ GapFills fills) {
  const int gaps = fills.of[0].batch + 1, number = blockIdx.x / kCtasPerGap, b = number % gaps;
  const GapFill& g = fills.of[number / gaps];
  auto span = [&](int i) { return seq_span(g.cu, g.used, i, g.longest, g.total); };
  int64_t begin = 0, end = g.total;
  if (b > 0) {
    const SeqSpan before = span(b - 1);
    begin = before.offset + before.length;
  }
  if (b < g.batch) end = span(b).offset;

  const int64_t first = int64_t(blockIdx.x % kCtasPerGap) * kThreads + threadIdx.x;
  const int64_t row_elements = int64_t(g.heads) * g.head_dim;
  for (int64_t i = begin * row_elements + first; i < end * row_elements; i += kCtasPerGap * kThreads) {
    const int64_t row = i / row_elements;
    const int head = static_cast<int>(i % row_elements / g.head_dim), col = static_cast<int>(i % g.head_dim);
    const int64_t at = row * g.tensor_view.row + head * g.tensor_view.head + col;
    if (g.element_bytes == 2) {
      static_cast<uint16_t*>(g.tensor_view.ptr)[at] = 0;
    } else {
      static_cast<uint32_t*>(g.tensor_view.ptr)[at] = 0;
    }
  }
  for (int64_t i = begin * g.heads + first; i < end * g.heads; i += kCtasPerGap * kThreads) {
    const int64_t row = i / g.heads;
    const int head = int(i % g.heads);
    if (g.first.ptr != nullptr) g.first.ptr[head * g.first.head + row] = g.statistic;
    if (g.second.ptr != nullptr) g.second.ptr[head * g.second.head + row] = g.statistic;
  }
}

cudaError_t launch(const GapFills& fills, int count, cudaStream_t stream) {
  const int64_t gaps = int64_t(fills.of[0].batch) + 1;
  return launch_kernel<fill>(count * gaps * kCtasPerGap, kThreads, 0, stream, fills);
}

GapFill of_queries(const FwdProblem& p, const TensorView& m, int head_dim, int bytes, const RowStats& first,
                   const RowStats& second, float statistic) {
  return {p.varlen.cu_q, p.varlen.used_q, p.batch, p.seqlen_q, p.total_q, p.heads,
          head_dim,      bytes,           m,       first,      second,    statistic};
}

GapFill of_keys(const FwdProblem& p, const TensorView& m, int head_dim, int bytes) {
  return {p.varlen.cu_k, p.varlen.used_k, p.batch, p.seqlen_k, p.total_k, p.heads_k, head_dim, bytes, m, {}, {}, 0.f};
}

}  // namespace

cudaError_t zero_fill(const FwdProblem& p, cudaStream_t stream) {
  if (p.dense()) return cudaSuccess;
  return launch({{of_queries(p, p.out, p.head_dim_v, element_bytes(p.dtype), p.lse, p.row_max, -INFINITY)}}, 1, stream);
}

cudaError_t zero_fill(const BwdProblem& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  if (f.dense()) return cudaSuccess;
  const int bytes = p.fp32_gradients ? sizeof(float) : element_bytes(f.dtype);
  return launch({{of_queries(f, p.dq, f.head_dim, bytes, p.softmax_d, {}, 0.f), of_keys(f, p.dk, f.head_dim, bytes),
                  of_keys(f, p.dv, f.head_dim_v, bytes)}},
                kMostFills, stream);
}

}  // namespace flash_cute
