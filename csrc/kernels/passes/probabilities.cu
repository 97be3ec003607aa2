#include "kernels/passes/probabilities.h"

#include "kernels/common/dropout.h"
#include "kernels/common/element.h"
#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 128;

// One CTA for each row of probabilities.
template <class Element>
__global__ void __launch_bounds__(kThreads) probabilities(const __grid_constant__ FwdProblem p) {
  extern __shared__ float query[];  // [head_dim]
  const int row = blockIdx.x % p.seqlen_q;
  const int head = blockIdx.x / p.seqlen_q % p.heads, batch = blockIdx.x / p.seqlen_q / p.heads;
  const SeqInfo seq(p, batch);
  const BandMask mask(seq, p.band);
  const Dropout dropout(p.rules, int64_t(batch) * p.heads + head);
  const ScoreMod mod(p);
  const float slope = slope_of(p.rules, batch, head);
  const bool exists = row < seq.q.length;
  auto vector = [&](const TensorView& m, int at_head, int64_t at_row) {
    return static_cast<const Element*>(m.ptr) + batch * m.batch + at_head * m.head + at_row * m.row;
  };
  for (int i = threadIdx.x; exists && i < p.head_dim; i += kThreads) {
    query[i] = float(vector(p.q, head, seq.q.offset + row)[i]);
  }
  // After this barrier all of the query is in shared memory.
  __syncthreads();
  const float lse = exists ? p.lse.ptr[batch * p.lse.batch + head * p.lse.head + seq.q.offset + row] : -INFINITY;
  Element* to = static_cast<Element*>(p.softmax) + int64_t(blockIdx.x) * p.seqlen_k;
  for (int key = threadIdx.x; key < p.seqlen_k; key += kThreads) {
    float weight = 0.f;
    if (exists && lse != -INFINITY && mask.visible(row, key)) {
      const Element* from = vector(p.k, head / (p.heads / p.heads_k), seq.k.offset + key);
      float score = 0.f;
      for (int i = 0; i < p.head_dim; ++i) score += query[i] * float(from[i]);
      mod.apply_fp32(make_tensor(&score, Int<1>{}));
      weight = expf(Alibi::value(score, slope, float(abs(row + seq.shift() - key))) - lse);
      if (p.rules.rng != nullptr && !dropout.keeps(dropout.bits(row, key), row / 8 % 4, key / 8 % 4)) weight = -weight;
    }
    to[key] = Element(weight);
  }
}

}  // namespace

cudaError_t write_probabilities(const FwdProblem& p, cudaStream_t stream) {
  const int64_t rows = int64_t(p.batch) * p.heads * p.seqlen_q;
  const int smem = p.head_dim * static_cast<int>(sizeof(float));
  auto launch = [&](auto element) {
    return launch_kernel<probabilities<decltype(element)>>(rows, kThreads, smem, stream, p);
  };
  return element_bytes(p.dtype) == 4 ? launch(float{}) : with_element(p.dtype, launch);
}

}  // namespace flash_cute
