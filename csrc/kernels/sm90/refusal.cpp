// Why Hopper's kernels do not support a problem.
#include "core/layout/addressable.h"
#include "kernels/sm90/family.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {
namespace {

bool addressable(const BwdProblem& p) {
  if (p.fp32_gradients) return flash_cute::addressable(p.fwd, {p.fwd.q, p.dout}, {p.fwd.k, p.fwd.v});
  return flash_cute::addressable(p.fwd, {p.fwd.q, p.dout, p.dq}, {p.fwd.k, p.fwd.v, p.dk, p.dv});
}

bool has_empty_columns(const KernelConfig& config, const FwdProblem& p) {
  return flash_cute::has_empty_columns(config.dtype, config.head_dim, p.head_dim) ||
         flash_cute::has_empty_columns(config.dtype, config.head_dim_v, p.head_dim_v);
}

}  // namespace

void Sm90Family::refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const {
  // Dropout bits are generated for tiles counted from the first visible key. A bounded left window may start anywhere
  // inside the 32 keys that share a Philox call.
  const bool keys_shifted = problem.band.left < problem.seqlen_k - 1;
  // TMA loads contiguous rows in whole swizzle atoms; pages must hold whole ones.
  const bool reads_pages = config.cluster == 1 && !keys_shifted && problem.pages.together(config.block_n) % 8 == 0;
  refusal.tensor_map = !addressable(problem, {problem.q, problem.out}, {problem.k, problem.v});
  refusal.empty_columns = has_empty_columns(config, problem);
  refusal.pages = problem.pages.ids != nullptr && !reads_pages;
  refusal.dropout = problem.rules.rng != nullptr && (!has_dropout(config) || keys_shifted);
}

void Sm90Family::refuse(Refusal& refusal, const KernelConfig& config, const BwdProblem& problem) const {
  refusal.tensor_map = !addressable(problem);
  refusal.empty_columns = has_empty_columns(config, problem.fwd);
  refusal.dropout = problem.fwd.rules.rng != nullptr && !has_dropout(config);
  // Ranks also count tiles of keys that a window on the left hides. No CTA processes these, so later tiles would wait
  // forever.
  const bool turns_known = problem.fwd.lists.ranks != nullptr && problem.fwd.band.left >= problem.fwd.seqlen_k - 1;
  refusal.lists = problem.fwd.lists.on() && problem.deterministic && !turns_known;
}

void Sm90Family::refuse(Refusal& refusal, const KernelConfig&, const DecodeProblem& problem) const {
  refusal.dropout = problem.fwd.rules.rng != nullptr;
  refusal.splits = !problem.even_splits();
}

}  // namespace flash_cute::sm90
