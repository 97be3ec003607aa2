#include "core/introspect.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/built.h"
#include "core/family.h"
#include "core/json.h"
#include "core/route.h"
#include "core/rows.h"
#include "core/verdicts.h"

namespace flash_cute {
namespace {

JsonObject describe(const KernelConfig& config) {
  return JsonObject()
      .text("id", config.id())
      .text("op", name(config.op))
      .integer("arch", static_cast<int>(config.arch))
      .text("dtype", name(config.dtype))
      .text("tier", config.rich() ? "rich" : "plain")
      .integer("head_dim", config.head_dim)
      .integer("head_dim_v", config.head_dim_v)
      .integer("block_m", config.block_m)
      .integer("block_n", config.block_n)
      .integer("stages", config.stages)
      .integer("warps", config.warps)
      .integer("threads", family_of(config).threads(config))
      .integer("ctas", config.ctas)
      .integer("cluster", config.cluster)
      .text("tiles", config.walks_lists()    ? "list"
                     : config.packs_tokens() ? "tokens"
                                             : "interval")
      .text("cache", name(config.cache))
      .integer("smem_bytes", family_of(config).smem_bytes(config));
}

std::string array(const std::vector<std::string>& items) {
  std::string all;
  for (const std::string& item : items) all += (all.empty() ? "" : ",\n") + item;
  return "[" + all + "]";
}

JsonObject& add_sets(JsonObject& all, const HeadSets& sets) {
  return all.integer("heads_together", sets.heads).integer("last_set", sets.last);
}

JsonObject describe(const FwdPlan& plan) {
  JsonObject all;
  all.integer("num_splits", plan.num_splits).integer("pack_gqa", plan.pack_gqa);
  if (plan.resident > 0) add_sets(all, plan.sets).flag("by_level", plan.by_level);
  return all;
}

JsonObject describe(const KeyOrder& order) {
  JsonObject all;
  all.integer("tiles_of_set", order.tiles_of_set);
  return add_sets(all, order.sets)
      .flag("late_first", order.late_first)
      .flag("heads_inside", order.heads_inside)
      .flag("down_and_up", order.down_and_up);
}

JsonObject describe(const BwdPlan& plan) {
  const DqAccumulate order = plan.dq_accumulate;
  JsonObject all;
  all.integer("num_splits", plan.splits.count())
      .integer("splits_of_heads", plan.splits.heads)
      .integer("splits_of_queries", plan.splits.queries)
      .integer("whole_tiles", plan.splits.whole_tiles)
      .text("dq_accumulate", order == DqAccumulate::Atomic        ? "atomic"
                             : order == DqAccumulate::FirstStores ? "first_stores"
                                                                  : "serialized");
  if (plan.resident > 0)
    all.flag("shares_l2", plan.shares_l2)
        .flag("by_level", plan.order.by_level)
        .raw("key_order", describe(plan.order).str());
  return all;
}

JsonObject describe(const DecodePlan& plan) {
  return JsonObject()
      .integer("ctas", plan.ctas())
      .integer("cluster", plan.clusters.ctas.value)
      .integer("num_splits", std::max(1, plan.clusters.splits))
      .number("l2_fraction", plan.l2_fraction);
}

std::string names(const std::vector<std::string>& launches) {
  std::string all;
  for (const std::string& name : launches) all += (all.empty() ? "" : " ") + name;
  return all;
}

// The plan of a step, and facts about the call's other steps.
template <Op op>
std::string planned(const Step<op>& step, const std::vector<std::string>& launches, int64_t workspace_bytes) {
  return describe(step.plan)
      .raw("kernel", describe(*step.kernel).str())
      .text("launches", names(launches))
      .integer("workspace_bytes", workspace_bytes)
      .str();
}

// The plan of the kernel that computes out and lse.
template <class P>
std::string planned(const Route& route, const P& problem) {
  const int64_t bytes = workspace_bytes(route, problem);
  if (route.decode) return planned(route.decode, launches(route), bytes);
  return planned(route.in_pages ? route.in_pages : route.forward, launches(route), bytes);
}

std::string planned(const Step<Op::Bwd>& step, const BwdProblem& problem) {
  return planned(step, launches(step), workspace_bytes(step, problem));
}

}  // namespace

std::string describe_kernels() {
  std::vector<std::string> rows;
  for (const Row& row : rows_of_configs()) {
    rows.push_back(describe(row.config).flag("built", is_built(row.config)).str());
  }
  return array(rows);
}

std::string describe_gpu(int64_t index) {
  if (index < 0 || index > INT32_MAX)
    throw std::invalid_argument("flash_cute: there is no GPU " + std::to_string(index));
  const Device& gpu = device(static_cast<int>(index));
  return JsonObject()
      .integer("capability", gpu.capability)
      .integer("smem_optin", gpu.smem_optin)
      .integer("sms", gpu.sms)
      .integer("memory_gb_s", gpu.memory_gb_s)
      .integer("l2_bytes", gpu.l2_bytes)
      .str();
}

std::string plan(std::string problem) {
  const PlanRequest request = read_plan_request(problem);
  auto planned_of = [&](const auto& p) { return planned(choose_route(request.kernels(), p, request.gpu), p); };
  return request.op == Op::Fwd   ? planned_of(request.fwd())
         : request.op == Op::Bwd ? planned_of(request.bwd)
                                 : planned_of(request.decode);
}

std::string explain(std::string problem) {
  std::vector<std::string> rows;
  for (const Verdict& v : verdicts(read_plan_request(problem))) {
    const bool fits = v.refused.empty();
    rows.push_back(JsonObject()
                       .text("id", v.kernel->id())
                       .text("verdict", v.chosen ? "chosen"
                                        : fits   ? "fits"
                                                 : "refused")
                       .text("reason", fits ? v.passed_over : v.refused)
                       .str());
  }
  return array(rows);
}

}  // namespace flash_cute
