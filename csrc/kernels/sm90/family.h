// The family for Hopper. Its kernels only run on sm_90.
#pragma once

#include "core/family.h"

namespace flash_cute::sm90 {

class Sm90Family final : public Family {
 public:
  constexpr explicit Sm90Family(std::span<const KernelConfig> rows)
      : Family({.arch = Arch::Sm90, .element_bytes = 2, .takes_overrides = true, .reads_caches = true}, rows) {}

  int smem_bytes(const KernelConfig& config) const override;
  int threads(const KernelConfig& config) const override;

  void refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const override;
  void refuse(Refusal& refusal, const KernelConfig& config, const BwdProblem& problem) const override;
  void refuse(Refusal& refusal, const KernelConfig& config, const DecodeProblem& problem) const override;

  ForwardSpeed forward_speed(const KernelConfig& config) const override;
  int max_pack_gqa(const KernelConfig& config) const override;
  int resident(const KernelConfig& config, const Device& gpu) const override;
  bool fills_gaps(const KernelConfig& config, const FwdProblem& problem) const override;

  BwdPlan backward_plan(const KernelConfig& config, const BwdProblem& problem, const Device& gpu) const override;

  double decode_cost(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu) const override;
  void plan_decode(DecodeParams& p, const KernelConfig& config, const Device& gpu) const override;
};

// CTAs of the cluster of a work tile, if the GPU can run all clusters at once: the fewest that minimise a CTA's blocks.
// 1 if it cannot.
int ctas_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu);

}  // namespace flash_cute::sm90
