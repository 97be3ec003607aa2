#include "core/plan.h"

#include <algorithm>

#include "core/card.h"
#include "core/family.h"
#include "core/heuristics.h"

namespace flash_cute {
namespace {

// The number of heads whose keys and values fit into L2.
int heads_of_l2(const FwdProblem& p, int pack_gqa, const Device& gpu) {
  const auto cached = static_cast<int64_t>(kCard.l2_kept * gpu.l2_bytes);
  const int64_t bytes =
      std::max<int64_t>(1, int64_t(p.seqlen_k) * (p.head_dim + p.head_dim_v) * element_bytes(p.dtype));
  const int64_t heads = std::max<int64_t>(1, cached / bytes) * (p.heads / std::max(1, p.heads_k) / pack_gqa);
  return static_cast<int>(std::min<int64_t>(heads, int64_t(p.heads / pack_gqa) * p.batch));
}

}  // namespace

FwdPlan make_plan(const KernelConfig& config, const FwdProblem& p, const Device& gpu, const FwdOverrides& overrides) {
  const int heads = packed_heads(config, p, overrides);
  return {.num_splits = cheapest_splits(config, p, heads, gpu.sms, overrides.num_splits).num_splits,
          .pack_gqa = heads,
          .heads_together = heads_of_l2(p, heads, gpu),
          .resident = family_of(config).resident(config, gpu)};
}

BwdPlan make_plan(const KernelConfig& config, const BwdProblem& p, const Device& gpu) {
  return family_of(config).backward_plan(config, p, gpu);
}

}  // namespace flash_cute
