#include "core/plan.h"

#include <algorithm>

#include "core/backward_order.h"
#include "core/card.h"
#include "core/heuristics.h"

namespace flash_cute {
namespace {

// CTAs, or clusters, of a persistent kernel: Hopper's have one CTA an SM.
int resident(const KernelConfig& config, const Device& gpu) {
  return config.arch == Arch::Sm90 ? gpu.sms / config.cluster : 0;
}

// As many heads as L2 holds the keys and values of.
int heads_of_l2(const FwdProblem& p, int pack_gqa, const Device& gpu) {
  const auto cached = static_cast<int64_t>(kCard.l2_kept * gpu.l2_bytes);
  const int64_t bytes =
      std::max<int64_t>(1, int64_t(p.seqlen_k) * (p.head_dim + p.head_dim_v) * element_bytes(p.dtype));
  const int64_t heads = std::max<int64_t>(1, cached / bytes) * (p.heads / std::max(1, p.heads_k) / pack_gqa);
  return static_cast<int>(std::min<int64_t>(heads, int64_t(p.heads / pack_gqa) * p.batch));
}

}  // namespace

FwdPlan make_plan(const KernelConfig& config, const FwdProblem& p, const Device& gpu, const FwdOverrides& overrides) {
  const int heads = may_pack(config, p, overrides.pack_gqa) ? overrides.pack_gqa : pack_gqa(config, p);
  const bool may_split = overrides.num_splits >= 1 && overrides.num_splits <= most_splits(config, p, heads, gpu.sms);
  return {.num_splits = may_split ? overrides.num_splits : cheapest_splits(config, p, heads, gpu.sms).num_splits,
          .pack_gqa = heads,
          .heads_together = heads_of_l2(p, heads, gpu),
          .resident = resident(config, gpu)};
}

BwdPlan make_plan(const KernelConfig& config, const BwdProblem& p, const Device& gpu) {
  QuerySplits splits = cheapest_query_splits(config, p.fwd, gpu.sms);
  if (p.fp32_gradients && splits.whole_tiles > 0) splits = {};  // all tiles go the same way
  const bool l2_throttle = needs_l2_throttle(config, p, gpu);
  const DqAccumulate order = dq_accumulate(config, p, l2_throttle);
  return {.splits = splits,
          .sums_of_splits = splits.count() > 1 || p.fp32_gradients,
          .dq_accumulate = order,
          .order = key_order(config, p, splits, order, gpu),
          .l2_throttle = l2_throttle,
          .resident = resident(config, gpu)};
}

}  // namespace flash_cute
