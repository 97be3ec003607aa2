#include "kernels/sm80/family.h"

#include <algorithm>

#include "kernels/sm80/resources.h"

namespace flash_cute::sm80 {

constexpr KernelConfig kRows[] = {
#define KERNEL(op, arch, dtype, tier, ...) {Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__},
#include "kernels/sm80/rows.def"
#undef KERNEL
};
constexpr Sm80Family kFamily(kRows);
static_assert(kFamily.owns_its_rows());

const Family& family() {
  return kFamily;
}

int Sm80Family::smem_bytes(const KernelConfig& config) const {
  return sm80::smem_bytes(config);
}

void Sm80Family::refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const {
  refusal.pages = problem.pages.ids != nullptr;
  refusal.dropout = problem.rules.rng != nullptr && !config.rich();
}

void Sm80Family::refuse(Refusal& refusal, const KernelConfig& config, const BwdProblem& problem) const {
  refusal.dropout = problem.fwd.rules.rng != nullptr && !config.rich();
  refusal.fp32_gradients = problem.fp32_gradients;
}

void Sm80Family::refuse(Refusal& refusal, const KernelConfig&, const DecodeProblem& problem) const {
  refusal.dropout = problem.fwd.rules.rng != nullptr;
}

// One set of all tiles; the tiles of so many heads alternate that they have a certain number of tiles together.
static KeyOrder key_order(const KernelConfig& config, const BwdProblem& p) {
  if (p.fwd.seqlen_k == 0 || p.fwd.heads == 0) return {};  // no tiles
  const int tiles = (p.fwd.seqlen_k + config.block_n - 1) / config.block_n;
  // With deterministic sums, tiles that start together wait for each other, and more heads are worth their L2 misses.
  const int heads =
      p.deterministic ? config.block_n / 2 : std::max(1, kCard.backward.alternating_tiles / std::max(1, tiles));
  return {.sets = HeadSets::of(heads, int64_t(p.fwd.heads_k) * p.fwd.batch)};
}

BwdPlan Sm80Family::backward_plan(const KernelConfig& config, const BwdProblem& p, const Device&) const {
  return {.splits = {},
          .sums_of_splits = p.fp32_gradients,
          .dq_accumulate = p.deterministic ? DqAccumulate::Serialized : DqAccumulate::Atomic,
          .order = key_order(config, p)};
}

}  // namespace flash_cute::sm80
