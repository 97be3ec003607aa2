#include "core/introspect.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/built.h"
#include "core/calibration.h"
#include "core/family.h"
#include "core/json.h"
#include "core/limit.h"
#include "core/verdicts.h"
#include "core/workspace.h"

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
      .integer("smem_bytes", family_of(config).smem_bytes(config));
}

std::string array(const std::vector<std::string>& items) {
  std::string all;
  for (const std::string& item : items) all += (all.empty() ? "" : ",\n") + item;
  return "[" + all + "]";
}

template <class P, class PlanOf>
int64_t workspace_bytes(const KernelConfig& config, const P& problem, const PlanOf& plan) {
  Arena size;
  lay_out(size, config, problem, plan);
  return size.numbers() * static_cast<int64_t>(sizeof(float));
}

JsonObject describe(const FwdPlan& plan) {
  JsonObject all;
  all.integer("num_splits", plan.num_splits).integer("pack_gqa", plan.pack_gqa);
  if (plan.resident > 0) all.integer("heads_together", plan.heads_together);
  return all;
}

JsonObject describe(const KeyOrder& order) {
  return JsonObject()
      .integer("tiles_of_set", order.tiles_of_set)
      .integer("heads_together", order.heads_together)
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
  if (plan.resident > 0) all.flag("l2_throttle", plan.l2_throttle).raw("key_order", describe(plan.order).str());
  return all;
}

JsonObject describe(const DecodePlan& plan) {
  return JsonObject()
      .integer("ctas", plan.ctas())
      .integer("cluster", plan.clusters.ctas.value)
      .number("l2_fraction", plan.l2_fraction);
}

template <Op op>
std::string planned(const KernelConfig& config, const Problem<op>& problem, const Plan<op>& plan) {
  return describe(plan)
      .raw("kernel", describe(config).str())
      .integer("workspace_bytes", workspace_bytes(config, problem, plan))
      .str();
}

void add_verdicts(std::vector<std::string>& to, const Choice& choice) {
  for (const Verdict& v : choice.verdicts) {
    const bool chosen = v.row == choice.chosen, fits = v.refused.empty();
    to.push_back(JsonObject()
                     .text("id", v.row->config.id())
                     .text("verdict", chosen ? "chosen"
                                      : fits ? "fits"
                                             : "refused")
                     .text("reason", fits ? v.passed_over : v.refused)
                     .str());
  }
}

}  // namespace

std::string describe_kernels() {
  const std::string built = kernels();
  std::vector<std::string> rows;
  for (const Row& row : rows_of_configs()) {
    rows.push_back(describe(row.config).flag("built", is_listed(built, row.config.id())).str());
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

// Of a call of the op itself.
template <Op op>
static std::string planned(const Asked& asked, const Problem<op>& problem) {
  const KernelConfig& config = choose<op>(asked, problem).config();
  return planned<op>(config, problem, plan_of_call<op>(config, problem, asked.gpu));
}

std::string plan(std::string problem) {
  const Asked asked = read(problem);
  if (asked.op == "fwd") return planned<Op::Fwd>(asked, asked.bwd.fwd);
  if (asked.op == "bwd") return planned<Op::Bwd>(asked, asked.bwd);
  const CacheChoice choice = choose_for_cache(asked);
  if (choice.forward.chosen != nullptr) {
    const KernelConfig& forward = choice.forward.config();
    return planned<Op::Fwd>(forward, asked.decode.fwd, plan_over_cache(forward, asked.decode.fwd, asked.gpu));
  }
  const KernelConfig& decode = choice.decode.config();
  return planned<Op::Decode>(decode, asked.decode, plan_of_call<Op::Decode>(decode, asked.decode, asked.gpu));
}

std::string explain(std::string problem) {
  const Asked asked = read(problem);
  std::vector<std::string> rows;
  if (asked.op == "fwd") {
    add_verdicts(rows, choose<Op::Fwd>(asked, asked.bwd.fwd));
  } else if (asked.op == "bwd") {
    add_verdicts(rows, choose<Op::Bwd>(asked, asked.bwd));
  } else {
    const CacheChoice choice = choose_for_cache(asked);
    add_verdicts(rows, choice.decode);
    add_verdicts(rows, choice.forward);
  }
  return array(rows);
}

}  // namespace flash_cute
