#include "core/plan.h"

#include <algorithm>

#include "core/card.h"
#include "core/family.h"
#include "core/heuristics.h"

namespace flash_cute {
namespace {

// Sets of heads whose keys and values fit into L2.
HeadSets sets_of_heads(const KernelConfig& config, const FwdProblem& p, const FwdPlan& plan, const Device& gpu) {
  const auto cached = static_cast<int64_t>(kCard.l2_kept * gpu.l2_bytes);
  const int64_t bytes =
      std::max<int64_t>(1, int64_t(p.seqlen_k) * (p.head_dim + p.head_dim_v) * element_bytes(p.dtype));
  const int64_t heads = std::max<int64_t>(1, cached / bytes) * (p.heads / std::max(1, p.heads_k) / plan.pack_gqa);
  const int64_t all = int64_t(p.heads / plan.pack_gqa) * (p.dense() ? p.batch : 1);
  const int tiles = detail::ceil_div(p.seqlen_q, queries_of_tile(config, p)) * plan.num_splits;
  return HeadSets::of(static_cast<int>(std::clamp<int64_t>(heads, 1, std::max<int64_t>(1, all))), all,
                      p.band.is_open() ? 1 : least_heads_of_last_set(plan.resident, tiles));
}

}  // namespace

FwdPlan make_plan(const KernelConfig& config, const FwdProblem& p, const Device& gpu, const FwdOverrides& overrides) {
  const int heads = packed_heads(config, p, overrides);
  FwdPlan plan{.num_splits = cheapest_splits(config, p, heads, gpu.sms, overrides.num_splits).num_splits,
               .pack_gqa = heads,
               .resident = family_of(config).resident(config, gpu)};
  plan.sets = sets_of_heads(config, p, plan, gpu);
  return plan;
}

BwdPlan make_plan(const KernelConfig& config, const BwdProblem& p, const Device& gpu) {
  return family_of(config).backward_plan(config, p, gpu);
}

}  // namespace flash_cute
