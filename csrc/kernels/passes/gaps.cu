#include "kernels/passes/gaps.h"

#include "kernels/common/seq.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerGap = 8;

// Gap b lies between the end of sequence b - 1 and the start of sequence b.
__global__ void __launch_bounds__(kThreads) fill(const __grid_constant__ GapFill g) {
  const int b = blockIdx.x / kCtasPerGap;
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
    const int head = int(i % row_elements) / g.head_dim, col = int(i % g.head_dim);
    const int64_t at = row * g.matrices.row + head * g.matrices.head + col;
    if (g.element_bytes == 2) {
      static_cast<uint16_t*>(g.matrices.ptr)[at] = 0;
    } else {
      static_cast<uint32_t*>(g.matrices.ptr)[at] = 0;
    }
  }
  for (int64_t i = begin * g.heads + first; i < end * g.heads; i += kCtasPerGap * kThreads) {
    const int64_t row = i / g.heads;
    const int head = int(i % g.heads);
    if (g.first.ptr != nullptr) g.first.ptr[head * g.first.head + row] = g.statistic;
    if (g.second.ptr != nullptr) g.second.ptr[head * g.second.head + row] = g.statistic;
  }
}

}  // namespace

cudaError_t fill_gaps(const GapFill& gaps, cudaStream_t stream) {
  return launch_kernel<fill>(int64_t(gaps.batch + 1) * kCtasPerGap, kThreads, 0, stream, gaps);
}

}  // namespace flash_cute
