#include "core/introspect.h"

#include <vector>

#include "core/backward_order.h"
#include "core/built.h"
#include "core/decode_plan.h"
#include "core/heuristics.h"
#include "core/json.h"
#include "core/limit.h"
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
      .integer("threads", config.threads())
      .integer("ctas", config.ctas)
      .integer("cluster", config.cluster)
      .integer("smem_bytes", config.smem_bytes());
}

std::string array(const std::vector<std::string>& items) {
  std::string all;
  for (const std::string& item : items) all += (all.empty() ? "" : ",\n") + item;
  return "[" + all + "]";
}

JsonObject plan_of_forward(const KernelConfig& config, const FwdProblem& p, const Device& gpu) {
  const int num_splits = plan_forward(config, p, gpu.sms).num_splits, heads = pack_gqa(config, p);
  const int64_t results = num_splits == 1 ? 0 : int64_t(num_splits) * p.heads * p.all_rows();
  return JsonObject()
      .raw("kernel", describe(config).str())
      .integer("num_splits", num_splits)
      .integer("pack_gqa", heads)
      .integer("workspace_bytes", results * (config.head_dim_v + 1) * static_cast<int64_t>(sizeof(float)));
}

JsonObject describe(const KeyOrder& order) {
  return JsonObject()
      .integer("tiles_of_set", order.tiles_of_set)
      .integer("heads_together", order.heads_together)
      .flag("late_first", order.late_first)
      .flag("heads_inside", order.heads_inside)
      .flag("down_and_up", order.down_and_up);
}

JsonObject plan_of_backward(const KernelConfig& config, BwdProblem p, const Device& gpu) {
  p.splits = plan_query_splits(config, p.fwd, gpu.sms);
  const bool hopper = config.arch == Arch::Sm90;
  const DqAccumulate order = hopper            ? dq_accumulate(config, p)
                             : p.deterministic ? DqAccumulate::Serialized
                                               : DqAccumulate::Atomic;
  JsonObject plan;
  plan.raw("kernel", describe(config).str())
      .integer("num_splits", p.splits.count())
      .integer("splits_of_heads", p.splits.heads)
      .integer("splits_of_queries", p.splits.queries)
      .integer("whole_tiles", p.splits.whole_tiles)
      .text("dq_accumulate", order == DqAccumulate::Atomic        ? "atomic"
                             : order == DqAccumulate::FirstStores ? "first_stores"
                                                                  : "serialized");
  if (hopper)
    plan.flag("l2_throttle", needs_l2_throttle(config, p)).raw("key_order", describe(KeyOrder::of(config, p)).str());
  return plan;
}

JsonObject plan_of_decode(const KernelConfig& config, DecodeProblem p, const Device& gpu) {
  plan_decode(p, config, gpu);
  const int64_t rows = int64_t(p.slots) * config.block_m;
  return JsonObject()
      .raw("kernel", describe(config).str())
      .integer("ctas", p.ctas())
      .integer("cluster", p.clusters.ctas.value)
      .integer("workspace_bytes", rows * (config.head_dim_v + 1) * static_cast<int64_t>(sizeof(float)));
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
  const Device& gpu = device(static_cast<int>(index));
  return JsonObject()
      .integer("capability", gpu.capability)
      .integer("smem_optin", gpu.smem_optin)
      .integer("sms", gpu.sms)
      .integer("memory_gb_s", gpu.memory_gb_s)
      .str();
}

std::string plan(std::string problem) {
  const Asked asked = read(problem);
  if (asked.op == "fwd") {
    return plan_of_forward(choose<Op::Fwd>(asked, asked.bwd.fwd).config(), asked.bwd.fwd, asked.gpu).str();
  }
  if (asked.op == "bwd")
    return plan_of_backward(choose<Op::Bwd>(asked, asked.bwd).config(), asked.bwd, asked.gpu).str();
  const CacheChoice choice = choose_for_cache(asked);
  if (choice.forward.chosen != nullptr) {
    return plan_of_forward(choice.forward.config(), asked.decode.fwd, asked.gpu).str();
  }
  return plan_of_decode(choice.decode.config(), asked.decode, asked.gpu).str();
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
