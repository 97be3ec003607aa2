// Softmax of rows of scores, summed by blocks of keys and meaned by blocks of queries, in one pass over the scores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_cute {

struct PooledSoftmax {
  const float* scores;  // [batch * heads, group, blocks * queries, blocks_k * keys]
  const int* seen;  // [batch or 1, blocks * queries]: keys that a row sees, from the first on; 0: it takes no part
  float* result;  // [batch * heads, blocks, blocks_k]
  float scale;  // of scores
  int64_t tables;  // batch * heads
  int heads, group, blocks, queries, blocks_k, keys;
  int seen_step;  // from one batch to the next
};
cudaError_t pooled_softmax(const PooledSoftmax& p, cudaStream_t stream);

}  // namespace flash_cute
