#include "core/introspect.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "core/backward_order.h"
#include "core/decode_plan.h"
#include "core/heuristics.h"
#include "core/json.h"
#include "core/limit.h"
#include "core/refusal.h"
#include "core/rows.h"
#ifdef FLASH_CUTE_CUDA
#include "core/registry.h"
#else
namespace flash_cute {
static std::string kernels() {
  return "";
}
static bool set_aside(const std::string&) {
  return false;
}
const Device& device(int) {
  throw std::invalid_argument("flash_cute: this build has no CUDA, and knows no device");
}
}  // namespace flash_cute
#endif

namespace flash_cute {
namespace {

constexpr int64_t kMost = Band::kUnbounded - 1;  // of sizes, as for calls
constexpr int kSomewhere = 0;                    // what pointers point to that only have to be there
constexpr int64_t kSomeState = 0;
constexpr float kSomeSlope = 0.f;

// A call in sizes, and the GPU and the kernels that it would have.
struct Asked {
  std::string op;
  BwdProblem bwd{};  // whose fwd is that of every op
  DecodeProblem decode{};
  Device gpu{};
  bool built_only = false;
  std::string built;  // ids, one a line
};

bool is_built(const Asked& asked, const KernelConfig& config) {
  return !asked.built_only || is_listed(asked.built, config.id());
}

DType dtype_named(const std::string& given) {
  for (const DType dtype : {DType::FP16, DType::BF16, DType::TF32, DType::TF32x3}) {
    if (given == name(dtype)) return dtype;
  }
  throw std::invalid_argument("flash_cute: dtype is " + given + "; expected fp16, bf16, tf32 or tf32x3");
}

Device read_gpu(JsonFields& in) {
  if (in.has("device")) return device(static_cast<int>(in.integer("device", 0, 0, INT32_MAX)));
  Device gpu{};
  gpu.capability = static_cast<int>(in.integer("gpu_capability", 90, 1, 999));
  gpu.smem_optin = static_cast<int>(in.integer("gpu_smem_optin", KernelConfig::kMostSharedMemory, 1, INT32_MAX));
  gpu.sms = static_cast<int>(in.integer("gpu_sms", 132, 1, 1 << 20));
  gpu.memory_gb_s = static_cast<int>(in.integer("gpu_memory_gb_s", 3352, 1, INT32_MAX));
  if (gpu.capability == 90) gpu.clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15};  // an H100's
  return gpu;
}

// Contiguous (batch, rows, heads, dim).
Matrices contiguous(int64_t rows, int heads, int dim, bool dense, bool aligned) {
  const int64_t row = int64_t(heads) * dim;
  return {nullptr, dense ? rows * row : 0, row, dim, aligned && dim % 8 == 0};
}

FwdProblem read_problem(JsonFields& in) {
  auto size = [&](const char* name, int64_t otherwise, int64_t least = 0) {
    return static_cast<int>(in.integer(name, otherwise, least, kMost));
  };
  auto window = [&](const char* name) {
    const int64_t bound = in.integer(name, -1, -1, INT64_MAX / 2);
    return bound < 0 || bound > Band::kUnbounded ? Band::kUnbounded : static_cast<int>(bound);
  };
  FwdProblem p{};
  p.dtype = dtype_named(in.text("dtype", "bf16"));
  p.batch = size("batch", 1);
  p.heads = size("heads", 1);
  p.heads_k = size("heads_k", p.heads, 1);
  if (p.heads % p.heads_k != 0) throw std::invalid_argument("flash_cute: heads must be a multiple of heads_k");
  p.head_dim = size("head_dim", 128, 1);
  p.head_dim_v = size("head_dim_v", p.head_dim, 1);
  p.seqlen_q = size("seqlen_q", 1);
  p.seqlen_k = size("seqlen_k", p.seqlen_q);
  p.total_q = in.integer("total_q", int64_t(p.batch) * p.seqlen_q, 0, INT64_MAX / 2);
  p.total_k = in.integer("total_k", int64_t(p.batch) * p.seqlen_k, 0, INT64_MAX / 2);
  p.band = {window("window_size_left"), window("window_size_right")};
  p.softmax_scale = static_cast<float>(in.number("softmax_scale", 1));
  if (in.flag("softcap")) p.rules.softcap = 1.f;
  if (in.flag("alibi")) p.rules.alibi = &kSomeSlope;
  if (in.flag("dropout")) {
    p.rules.rng = &kSomeState;
    p.rules.keep_scale = 2.f;
  }
  if (in.flag("varlen")) p.sequences.cu_q = p.sequences.cu_k = &kSomewhere;
  const bool aligned = !in.flag("unaligned");
  p.q = contiguous(p.seqlen_q, p.heads, p.head_dim, p.dense(), aligned);
  p.out = contiguous(p.seqlen_q, p.heads, p.head_dim_v, p.dense(), aligned);
  p.k = contiguous(p.seqlen_k, p.heads_k, p.head_dim, p.dense(), aligned);
  p.v = contiguous(p.seqlen_k, p.heads_k, p.head_dim_v, p.dense(), aligned);
  return p;
}

Asked read(const std::string& problem) {
  JsonFields in(problem);
  Asked asked;
  asked.op = in.text("op", "fwd");
  if (asked.op != "fwd" && asked.op != "bwd" && asked.op != "decode") {
    throw std::invalid_argument("flash_cute: op is " + asked.op + "; expected fwd, bwd or decode");
  }
  asked.gpu = read_gpu(in);
  asked.built_only = in.flag("built_only");
  asked.built = kernels();
  FwdProblem p = read_problem(in);
  if (asked.op == "bwd") {
    asked.bwd.deterministic = in.flag("deterministic");
    asked.bwd.dout = p.out;
    asked.bwd.dq = p.q;
    asked.bwd.dk = p.k;
    asked.bwd.dv = p.v;
  } else if (asked.op == "decode") {
    DecodeProblem& d = asked.decode;
    p.pages.size = static_cast<int>(in.integer("page_size", 0, 0, kMost));
    if (p.pages.size > 0) {
      p.pages.of_sequence = (p.seqlen_k + p.pages.size - 1) / p.pages.size;
      p.pages.count = static_cast<int>(std::min<int64_t>(kMost, int64_t(p.batch) * p.pages.of_sequence));
      p.pages.ids = &kSomewhere;
    }
    p.sequences.cu_k = nullptr;
    if (in.flag("lengths")) d.cache.lengths = &kSomewhere;
    if (in.flag("leftpad")) d.cache.leftpad = &kSomewhere;
    d.num_splits = static_cast<int>(in.integer("num_splits", 0, 0, kMost));
    d.split_size = static_cast<int>(in.integer("split_size", 0, 0, kMost));
    d.fwd = p;
  }
  asked.bwd.fwd = p;
  in.end();
  return asked;
}

// A kernel of an op, and what became of it.
struct Verdict {
  const Row* row;
  std::string refused;  // reasons; empty if it fits
  std::string passed_over;  // if it fits and another one is chosen
};

struct Choice {
  std::vector<Verdict> verdicts;
  const Row* chosen = nullptr;

  const KernelConfig& config() const {
    if (chosen != nullptr) return chosen->config;
    std::string message = "flash_cute: no kernel for this call";
    for (const Verdict& v : verdicts) message += "\n  " + v.row->config.id() + ": " + v.refused;
    throw std::runtime_error(message);
  }

  void pass_over(const std::string& reason) {
    for (Verdict& v : verdicts) {
      if (v.row == chosen) v.passed_over = reason;
    }
    chosen = nullptr;
  }
};

std::string three_digits(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.3f", value);
  return digits;
}

// As find() of core/registry.h, but over all rows, and with the reasons.
template <Op op>
Choice choose(const Asked& asked, const Problem<op>& problem) {
  Choice choice;
  for (const Row& row : rows_of_configs()) {
    const KernelConfig& config = row.config;
    if (config.op != op) continue;
    std::string refused = explain(refusal<op>(config, problem, asked.gpu), config, forward_of(problem), asked.gpu);
    if (!is_built(asked, config)) add_reason(refused, kNotBuilt);
    if (set_aside(config.id())) add_reason(refused, kSetAside);
    if (!within_limit(config)) add_reason(refused, kBeyondLimit);
    choice.verdicts.push_back({&row, refused, ""});
  }
  auto fits = [&](const Row& row) {
    return std::any_of(choice.verdicts.begin(), choice.verdicts.end(),
                       [&](const Verdict& v) { return v.row == &row && v.refused.empty(); });
  };
  const auto& weighed_problem = weighed(problem);
  choice.chosen = preferred(rows_of_configs(), fits, weighed_problem, asked.gpu);
  for (Verdict& v : choice.verdicts) {
    if (v.row == choice.chosen || !v.refused.empty()) continue;
    const KernelConfig &best = choice.chosen->config, &other = v.row->config;
    if (!alternatives(best, other)) {
      v.passed_over = "comes after " + best.id() + " in order of preference";
      continue;
    }
    const double least = cost(best, weighed_problem, asked.gpu), more = cost(other, weighed_problem, asked.gpu);
    v.passed_over = std::isfinite(more) && least > 0
                        ? "estimated to take " + three_digits(more / least) + " times as long as " + best.id()
                        : "not for such sizes, by the estimate that prefers " + best.id();
  }
  return choice;
}

// A cache is read by decoding's kernels, or by those of Hopper's forward where these take less time.
struct CacheChoice {
  Choice decode, forward;
};

CacheChoice choose_for_cache(const Asked& asked) {
  const DecodeProblem& p = asked.decode;
  CacheChoice choice{choose<Op::Decode>(asked, p), {}};
  if (choice.decode.chosen == nullptr || p.cache.leftpad != nullptr || !p.even_shares()) return choice;
  choice.forward = choose<Op::Fwd>(asked, p.fwd);
  Choice& forward = choice.forward;
  if (forward.chosen == nullptr) return choice;
  const KernelConfig &of_forward = forward.chosen->config, &of_decode = choice.decode.chosen->config;
  if (of_forward.arch == Arch::Sm90 && forward_is_cheaper(of_forward, of_decode, p, asked.gpu)) {
    choice.decode.pass_over("estimated to take longer than " + of_forward.id());
  } else {
    forward.pass_over("over a cache " + of_decode.id() + " is preferred");
  }
  return choice;
}

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
  const int parts = plan_forward(config, p, gpu.sms).parts, heads = heads_in_tile(config, p);
  const int64_t results = parts == 1 ? 0 : int64_t(parts) * p.heads * p.all_rows();
  return JsonObject()
      .raw("kernel", describe(config).str())
      .integer("parts", parts)
      .integer("heads_in_tile", heads)
      .integer("workspace_bytes", results * (config.head_dim_v + 1) * static_cast<int64_t>(sizeof(float)));
}

JsonObject plan_of_backward(const KernelConfig& config, BwdProblem p, const Device& gpu) {
  p.parts = backward_parts(config, p.fwd, gpu.sms);
  const bool hopper = config.arch == Arch::Sm90;
  const DqOrder order = hopper ? dq_order(config, p) : p.deterministic ? DqOrder::InTurns : DqOrder::Added;
  return JsonObject()
      .raw("kernel", describe(config).str())
      .integer("parts", p.parts.count())
      .integer("parts_of_heads", p.parts.heads)
      .integer("parts_of_queries", p.parts.queries)
      .integer("whole_tiles", p.parts.whole_tiles)
      .text("dq_order", order == DqOrder::Added    ? "added"
                        : order == DqOrder::Opened ? "opened"
                                                   : "in turns");
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
