#include "kernels/sm90/fp8/family.h"

#include "core/layout/addressable.h"
#include "kernels/sm90/fp8/resources.h"

namespace flash_cute::sm90::fp8 {

constexpr KernelConfig kRows[] = {
#define KERNEL(op, arch, dtype, tier, ...) {Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__},
#include "kernels/sm90/fp8/rows.def"
#undef KERNEL
};
constexpr Fp8Family kFamily(kRows);
static_assert(kFamily.owns_its_rows());

const Family& family() {
  return kFamily;
}

int Fp8Family::smem_bytes(const KernelConfig& config) const {
  return fp8::smem_bytes(config);
}

int Fp8Family::threads(const KernelConfig& config) const {
  return fp8::threads(config);
}

// V is read by a pass, without TMA.
void Fp8Family::refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const {
  const bool reads = problem.batch > 0 && problem.all_rows() > 0;
  refusal.tensor_map = reads && !addressable(problem, {problem.q}, {problem.k});
  refusal.empty_columns = has_empty_columns(config.dtype, config.head_dim, problem.head_dim);
  refusal.pages = problem.pages.ids != nullptr && problem.pages.together(config.block_n) % 8 != 0;
  refusal.dropout = problem.rules.rng != nullptr;
}

// One CTA an SM.
int Fp8Family::resident(const KernelConfig&, const Device& gpu) const {
  return gpu.sms;
}

bool Fp8Family::fills_gaps(const KernelConfig& config, const FwdProblem& p) const {
  return sm90::fills_gaps(config, p.pages.ids != nullptr, p.batch);
}

}  // namespace flash_cute::sm90::fp8
