#include "kernels/passes/pooled_softmax.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numbers>

#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 256;  // of a block of queries at once

template <int kTogether>
struct alignas(kTogether * sizeof(float)) Scores {
  float of[kTogether];
};

// The softmax of a row: the share of a score is weight * exp2(scale * score - most). Apart, as log2 of a sum would be
// rounded at the size of the scores.
struct RowSoftmax {
  float most, weight;

  __device__ float share(float scaled) const { return weight * exp2f(scaled - most); }
};

// Over the first `seen` scores of a row, by a warp; the weight is 0 if it sees none.
template <int kTogether>
__device__ RowSoftmax softmax_of_row(const float* row, int seen, float scale) {
  float most = -FLT_MAX, sum = 0.f;
  for (int first = threadIdx.x % 32 * kTogether; first < seen; first += 32 * kTogether) {
    auto scores = *reinterpret_cast<const Scores<kTogether>*>(row + first);
    float before = most;
    for (int i = 0; i < kTogether; ++i) {
      scores.of[i] = first + i < seen ? __fmul_rn(scale, scores.of[i]) : -INFINITY;
      most = fmaxf(most, scores.of[i]);
    }
    sum *= exp2f(before - most);
    for (int i = 0; i < kTogether; ++i) sum += exp2f(scores.of[i] - most);
  }
  float all_most = most;
  for (int lanes = 16; lanes > 0; lanes /= 2) all_most = fmaxf(all_most, __shfl_xor_sync(~0u, all_most, lanes));
  sum *= exp2f(most - all_most);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return {all_most, seen > 0 ? 1 / sum : 0.f};
}

// One CTA for each block of queries. Its warps sum rows, then each thread has a block of keys, and adds rows in their
// order: results repeat bitwise.
template <int kTogether>
__global__ void __launch_bounds__(kThreads) pool(const __grid_constant__ PooledSoftmax p) {
  __shared__ RowSoftmax softmaxes[kRows];
  __shared__ int counts[kRows];
  const int64_t table = blockIdx.x / p.blocks;
  const int block = static_cast<int>(blockIdx.x % p.blocks), columns = p.blocks_k * p.keys;
  const int rows = p.group * p.queries;  // of the block
  const int* const seen = p.seen + table / p.heads * p.seen_step + int64_t(block) * p.queries;
  auto row_of = [&](int row) {
    const int64_t of_table = int64_t(row / p.queries) * p.blocks * p.queries + int64_t(block) * p.queries;
    return p.scores + (table * p.group * p.blocks * p.queries + of_table + row % p.queries) * columns;
  };
  float* const result = p.result + (table * p.blocks + block) * p.blocks_k;
  int with_keys = 0;  // rows
  for (int i = 0; i < p.queries; ++i) with_keys += seen[i] > 0;
  const float share = 1.f / static_cast<float>(max(1, p.group * with_keys));
  for (int first = 0; first < rows; first += kRows) {
    const int past = min(rows, first + kRows);
    for (int row = first + threadIdx.x / 32; row < past; row += kWarps) {
      const int count = min(columns, seen[row % p.queries]);
      const RowSoftmax of_row = softmax_of_row<kTogether>(row_of(row), count, p.scale);
      if (threadIdx.x % 32 != 0) continue;
      softmaxes[row - first] = of_row;
      counts[row - first] = count;
    }
    // After this barrier the sums of these rows are there.
    __syncthreads();
    for (int block_k = threadIdx.x; block_k < p.blocks_k; block_k += kThreads) {
      float sum = 0.f;
      for (int row = first; row < past; ++row) {
        const float* const scores = row_of(row);
        const RowSoftmax softmax = softmaxes[row - first];
        const int begin = block_k * p.keys, end = min(begin + p.keys, counts[row - first]);
        for (int key = begin; key < end; key += kTogether) {
          const auto some = *reinterpret_cast<const Scores<kTogether>*>(scores + key);
          for (int i = 0; i < kTogether; ++i) {
            if (key + i < end) sum += softmax.share(__fmul_rn(p.scale, some.of[i]));
          }
        }
      }
      result[block_k] = (first == 0 ? 0.f : result[block_k]) + share * sum;
    }
    // After this barrier all have read the sums.
    __syncthreads();
  }
}

}  // namespace

cudaError_t pooled_softmax(const PooledSoftmax& given, cudaStream_t stream) {
  PooledSoftmax p = given;
  p.scale *= std::numbers::log2e_v<float>;
  const int64_t ctas = p.tables * p.blocks;
  const bool aligned = p.keys % 4 == 0 && reinterpret_cast<uintptr_t>(p.scores) % 16 == 0;
  return aligned ? launch_kernel<pool<4>>(ctas, kThreads, 0, stream, p)
                 : launch_kernel<pool<1>>(ctas, kThreads, 0, stream, p);
}

}  // namespace flash_cute
