#include "core/picks.h"

#include <algorithm>
#include <stdexcept>

#include "core/backward_order.h"
#include "core/decode_plan.h"
#include "core/heuristics.h"
#include "core/rows.h"

namespace flash_cute {
namespace {

Device hopper(int64_t sms, int64_t memory_gb_s = 0, int64_t smem_optin = KernelConfig::kMostSharedMemory) {
  if (sms < 1) throw std::invalid_argument("flash_cute: sms must be at least 1");
  return {.capability = 90,
          .smem_optin = static_cast<int>(smem_optin),
          .sms = static_cast<int>(sms),
          .memory_gb_s = static_cast<int>(memory_gb_s),
          .clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15}};  // an H100's
}

// The kernel of bf16 on Hopper for a problem, or null. Decoding has one tier, and a family for all GPUs beside Hopper's.
template <class P>
const KernelConfig* hopper_kernel(Op op, const P& problem, const Device& gpu) {
  const FwdProblem& p = forward_of(problem);
  const Tier tier = op == Op::Decode ? Tier::Rich : p.tier();
  auto fits = [&](const Row& row) {
    const KernelConfig& c = row.config;
    return c.op == op && (c.arch == Arch::Sm90 || op == Op::Decode) && c.dtype == DType::BF16 && c.tier == tier &&
           p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim_v;
  };
  const Row* const row = preferred(rows_of_configs(), fits, problem, gpu);
  return row == nullptr ? nullptr : &row->config;
}

constexpr int kSomewhere = 0;
constexpr int kSms = 132;

FwdProblem problem_of(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q, int64_t seqlen_k,
                      int64_t head_dim, int64_t head_dim_v, int64_t window_size_left, int64_t window_size_right,
                      bool varlen) {
  static constexpr int64_t kUnbounded = Band::kUnbounded;
  // Sizes that calls refuse would divide by 0 here.
  const bool sized = std::min({batch, heads, heads_k, seqlen_q, seqlen_k}) >= 0 && std::min(head_dim, head_dim_v) > 0;
  if (!sized || (heads_k == 0 ? heads > 0 : heads % heads_k != 0)) {
    throw std::invalid_argument(
        "flash_cute: sizes must not be negative, head dims positive, heads a multiple of heads_k");
  }
  auto bound = [](int64_t window) { return static_cast<int>(window < 0 ? kUnbounded : std::min(window, kUnbounded)); };
  FwdProblem p{};
  p.dtype = DType::BF16;
  p.batch = static_cast<int>(batch);
  p.heads = static_cast<int>(heads);
  p.heads_k = static_cast<int>(heads_k);
  p.head_dim = static_cast<int>(head_dim);
  p.head_dim_v = static_cast<int>(head_dim_v);
  p.seqlen_q = static_cast<int>(seqlen_q);
  p.seqlen_k = static_cast<int>(seqlen_k);
  p.total_q = batch * seqlen_q;
  p.total_k = batch * seqlen_k;
  if (varlen) p.sequences.cu_q = p.sequences.cu_k = &kSomewhere;
  p.band = {bound(window_size_left), bound(window_size_right)};
  return p;
}

// A problem of backward in as many parts as it would have, and its kernel, or null.
struct Backward {
  BwdProblem problem;
  const KernelConfig* config;

  Backward(FwdProblem forward, int sms, bool deterministic = false) : problem{} {
    problem.fwd = forward;
    problem.deterministic = deterministic;
    config = hopper_kernel(Op::Bwd, forward, hopper(sms));
    if (config != nullptr) problem.parts = backward_parts(*config, forward, sms);
  }
};

}  // namespace

std::tuple<std::string, int64_t, int64_t> preferred_forward(int64_t batch, int64_t heads, int64_t seqlen_q,
                                                            int64_t seqlen_k, int64_t head_dim,
                                                            int64_t window_size_left, int64_t window_size_right,
                                                            bool varlen, int64_t sms, int64_t heads_k, bool rules) {
  FwdProblem p = problem_of(batch, heads, heads_k == 0 ? heads : heads_k, seqlen_q, seqlen_k, head_dim, head_dim,
                            window_size_left, window_size_right, varlen);
  if (rules) p.rules.softcap = 1.f;
  const KernelConfig* const config = hopper_kernel(Op::Fwd, p, hopper(sms));
  if (config == nullptr) return {"", 0, 0};
  return {config->id(), plan_forward(*config, p, static_cast<int>(sms)).parts, heads_in_tile(*config, p)};
}

std::string preferred_kvcache(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q, int64_t seqlen_k,
                              int64_t head_dim, bool lengths, bool pages, int64_t sms, int64_t memory_gb_s,
                              int64_t smem_optin) {
  DecodeProblem p{};
  p.fwd = problem_of(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim, -1, -1, false);
  if (lengths) p.cache.lengths = &kSomewhere;
  if (pages) p.fwd.pages.ids = &kSomewhere;
  const Device gpu = hopper(sms, memory_gb_s, smem_optin);
  const KernelConfig* const decode = hopper_kernel(Op::Decode, p, gpu);
  const KernelConfig* const forward = hopper_kernel(Op::Fwd, p.fwd, gpu);
  if (decode == nullptr || forward == nullptr) return "";
  return (forward_is_cheaper(*forward, *decode, p, gpu) ? forward : decode)->id();
}

int64_t preferred_decode_cluster(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q, int64_t seqlen_k,
                                 int64_t head_dim) {
  DecodeProblem p{};
  p.fwd = problem_of(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim, -1, -1, false);
  const Device gpu = hopper(kSms);
  const KernelConfig* const config = hopper_kernel(Op::Decode, p, gpu);
  return config == nullptr ? 0 : ctas_of_unit(p, *config, gpu);
}

std::tuple<int64_t, int64_t, int64_t> preferred_parts(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q,
                                                      int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v,
                                                      int64_t window_size_left, int64_t window_size_right, bool varlen,
                                                      int64_t sms) {
  const Backward backward(problem_of(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v, window_size_left,
                                     window_size_right, varlen),
                          static_cast<int>(sms));
  const QueryParts& parts = backward.problem.parts;
  return {parts.heads, parts.queries, parts.whole_tiles};
}

std::tuple<std::string, bool> preferred_dq_order(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q,
                                                 int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v,
                                                 int64_t window_size_left, int64_t window_size_right, bool varlen,
                                                 bool deterministic) {
  const Backward backward(problem_of(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v, window_size_left,
                                     window_size_right, varlen),
                          kSms, deterministic);
  if (backward.config == nullptr) return {"", false};
  const DqOrder order = dq_order(*backward.config, backward.problem);
  const char* const name = order == DqOrder::Added ? "added" : order == DqOrder::Opened ? "opened" : "in turns";
  return {name, needs_pace(*backward.config, backward.problem)};
}

std::tuple<int64_t, int64_t, bool, bool, bool> preferred_key_order(int64_t batch, int64_t heads, int64_t heads_k,
                                                                   int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim,
                                                                   int64_t head_dim_v, int64_t window_size_left,
                                                                   int64_t window_size_right, bool varlen,
                                                                   bool deterministic) {
  const Backward backward(problem_of(batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v, window_size_left,
                                     window_size_right, varlen),
                          kSms, deterministic);
  if (backward.config == nullptr) return {};
  const KeyOrder order = KeyOrder::of(*backward.config, backward.problem);
  return {order.tiles_of_set, order.heads_together, order.late_first, order.heads_inside, order.down_and_up};
}

}  // namespace flash_cute
