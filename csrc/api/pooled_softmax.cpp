// torch.ops.flash_cute.pooled_softmax: how much of its attention a block of queries gives to each block of keys.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "api/api.h"
#include "api/arguments.h"
#include "api/tensors.h"
#include "kernels/passes/pooled_softmax.h"

namespace flash_cute {

void pooled_softmax(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const View scores = in.view(), seen = in.view();
  const auto scale = in.take<double>();
  const auto queries = in.take<int64_t>(), keys = in.take<int64_t>();
  FC_CHECK(scores.dims == 5 && scores.dtype == ScalarType::Float && is_contiguous(scores),
           "scores must be contiguous float32 (batch, heads, group, rows, keys)");
  FC_CHECK(queries > 0 && scores.size(3) % queries == 0, "scores have ", scores.size(3),
           " rows; queries must divide them, and is ", queries);
  FC_CHECK(keys > 0 && scores.size(4) % keys == 0, "scores have ", scores.size(4),
           " keys; keys must divide them, and is ", keys);
  FC_CHECK(seen.dims == 2 && seen.dtype == ScalarType::Int && is_contiguous(seen) && seen.size(1) == scores.size(3) &&
               (seen.size(0) == 1 || seen.size(0) == scores.size(0)),
           "seen must be contiguous int32 (batch or 1, rows)");
  check_device(seen, scores, "seen");
  const torch::stable::accelerator::DeviceGuard guard(scores.device);
  const int64_t blocks = scores.size(3) / queries, blocks_k = scores.size(4) / keys;
  const Tensor result = allocate(scores, {scores.size(0), scores.size(1), blocks, blocks_k}, ScalarType::Float);
  PooledSoftmax p{};
  p.scores = static_cast<const float*>(scores.ptr);
  p.seen = static_cast<const int*>(seen.ptr);
  p.result = static_cast<float*>(result.data_ptr());
  p.scale = static_cast<float>(scale);
  p.tables = scores.size(0) * scores.size(1);
  p.heads = checked_int(std::max<int64_t>(1, scores.size(1)), "heads");
  p.group = checked_int(scores.size(2), "group");
  p.blocks = checked_int(blocks, "blocks of queries");
  p.queries = checked_int(queries, "queries");
  p.blocks_k = checked_int(blocks_k, "blocks of keys");
  p.keys = checked_int(keys, "keys");
  p.seen_step = seen.size(0) == 1 ? 0 : checked_int(seen.size(1), "rows");
  checked_int(scores.size(4), "keys of scores");
  checked_int(scores.size(2) * queries, "rows of a block");
  if (result.numel() > 0) check_cuda("pooled_softmax", pooled_softmax(p, current_stream(scores)));
  in.put(result);
}

}  // namespace flash_cute
