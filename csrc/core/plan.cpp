#include "core/plan.h"

#include <algorithm>

#include "core/card.h"
#include "core/family.h"
#include "core/heuristics.h"
#include "core/waves.h"

namespace flash_cute {
namespace {

// Sets of heads whose keys and values fit into L2: those of a sequence, or of all that are visited by turns (by_level).
void plan_order(const KernelConfig& config, const FwdProblem& p, const Device& gpu, FwdPlan& plan) {
  const auto cached = static_cast<int64_t>(kCard.l2_kept * gpu.l2_bytes);
  const int64_t of_key = (p.head_dim + p.head_dim_v) * element_bytes(p.dtype);
  plan.by_level = is_causal_packed(p) && p.total_k * of_key <= cached;
  const int64_t bytes = std::max<int64_t>(1, (plan.by_level ? p.total_k : p.seqlen_k) * of_key);
  const int64_t heads = std::max<int64_t>(1, cached / bytes) * (p.heads / std::max(1, p.heads_k) / plan.pack_gqa);
  const int64_t all = int64_t(p.heads / plan.pack_gqa) * (p.dense() ? p.batch : 1);
  const int queries = queries_of_tile(config, p);
  const int tiles = p.dense() ? detail::ceil_div(p.seqlen_q, queries) : packed_tiles(p.total_q, p.batch, queries);
  const bool alike = p.dense() && p.band.is_open();
  const double longest = p.dense() ? 1 : longest_to_mean(p.seqlen_k, p.total_k, p.batch);
  plan.sets = HeadSets::of(static_cast<int>(std::clamp<int64_t>(heads, 1, std::max<int64_t>(1, all))), all,
                           alike ? 1 : least_heads_of_last_set(2, plan.resident, tiles * plan.num_splits, longest));
}

}  // namespace

FwdPlan make_plan(const KernelConfig& config, const FwdProblem& p, const Device& gpu, const FwdOverrides& overrides) {
  const int heads = packed_heads(config, p, overrides);
  FwdPlan plan{.num_splits = cheapest_splits(config, p, heads, gpu, overrides.num_splits).num_splits,
               .pack_gqa = heads,
               .sets = {},
               .resident = family_of(config).resident(config, gpu)};
  // Of a cache the host knows the capacity alone. If most sequences are shorter, the longest gets more splits.
  if (p.varlen.used_k != nullptr && p.batch > 1 && plan.num_splits > 1 && overrides.num_splits == 0) {
    plan.num_splits =
        std::max(plan.num_splits, std::min(3 * plan.num_splits / 2, most_splits(config, p, heads, gpu.sms)));
  }
  plan_order(config, p, gpu, plan);
  return plan;
}

BwdPlan make_plan(const KernelConfig& config, const BwdProblem& p, const Device& gpu) {
  return family_of(config).backward_plan(config, p, gpu);
}

}  // namespace flash_cute
