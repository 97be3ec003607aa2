#include "kernels/passes/sink_grad.h"

#include "kernels/common/score_mod.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 512;

// One CTA a head. Rows of no sequence have lse -inf, and give nothing.
__global__ void __launch_bounds__(kThreads) sink_gradient(const __grid_constant__ BwdProblem p) {
  const FwdProblem& f = p.fwd;
  const int head = blockIdx.x;
  const bool dense = f.dense();
  const int64_t rows = dense ? f.seqlen_q : f.total_q;
  const float sink = sink_of(f.sink, head);
  float total = 0.f;
  for (int b = 0; b < (dense ? f.batch : 1); ++b) {
    const float* lse = f.lse.ptr + b * f.lse.batch + head * f.lse.head;
    const float* softmax_d = p.softmax_d.ptr + b * p.softmax_d.batch + head * p.softmax_d.head;
    for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
      if (lse[row] != -INFINITY) total -= expf(sink - lse[row]) * softmax_d[row];
    }
  }

  __shared__ float totals[kThreads];
  totals[threadIdx.x] = total;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    // After this barrier the sums of twice as many threads are there.
    __syncthreads();
    if (threadIdx.x < half) totals[threadIdx.x] += totals[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.dsink[head] = totals[0];
}

}  // namespace

cudaError_t sink_gradient_pass(const BwdProblem& p, cudaStream_t stream) {
  return launch_kernel<sink_gradient>(p.fwd.heads, kThreads, 0, stream, p);
}

}  // namespace flash_cute
