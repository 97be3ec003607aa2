// The family of kernels of e4m3 inputs for Hopper.
#pragma once

#include "core/family.h"

namespace flash_cute::sm90::fp8 {

// It has forward alone.
class Fp8Family final : public Family {
 public:
  constexpr explicit Fp8Family(std::span<const KernelConfig> rows)
      : Family({.arch = Arch::Sm90, .element_bytes = 1}, rows) {}

  int smem_bytes(const KernelConfig& config) const override;
  int threads(const KernelConfig& config) const override;

  void refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const override;
  void refuse(Refusal&, const KernelConfig&, const BwdProblem&) const override {}
  void refuse(Refusal&, const KernelConfig&, const DecodeProblem&) const override {}

  int resident(const KernelConfig& config, const Device& gpu) const override;
  bool fills_gaps(const KernelConfig& config, const FwdProblem& problem) const override;

  BwdPlan backward_plan(const KernelConfig&, const BwdProblem&, const Device&) const override { return {}; }
  double decode_cost(const KernelConfig&, const DecodeProblem&, const Device&) const override { return 0; }
  void plan_decode(DecodeParams&, const KernelConfig&, const Device&) const override {}
};

}  // namespace flash_cute::sm90::fp8
