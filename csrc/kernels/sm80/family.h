// The family for Ampere and later.
#pragma once

#include "core/family.h"

namespace flash_cute::sm80 {

class Sm80Family : public Family {
 public:
  constexpr explicit Sm80Family(std::span<const KernelConfig> rows, int element_bytes = 2)
      : Family(
            {.arch = Arch::Sm80, .element_bytes = element_bytes, .runs_on_later = true, .sums_dq = element_bytes == 2},
            rows) {}

  int smem_bytes(const KernelConfig& config) const override;

  void refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const override;
  void refuse(Refusal& refusal, const KernelConfig& config, const BwdProblem& problem) const override;
  void refuse(Refusal& refusal, const KernelConfig& config, const DecodeProblem& problem) const override;

  BwdPlan backward_plan(const KernelConfig& config, const BwdProblem& problem, const Device& gpu) const override;

  double decode_cost(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu) const override;
  void plan_decode(DecodeParams& p, const KernelConfig& config, const Device& gpu) const override;
};

}  // namespace flash_cute::sm80
