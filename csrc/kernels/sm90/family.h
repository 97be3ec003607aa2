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

// The clusters of a work tile, each with a split of its keys, and the CTAs of a cluster.
struct TileShares {
  int splits, ctas;
  constexpr int parts() const { return splits * ctas; }
};

// The fastest that the GPU runs at once; of equals the fewest CTAs. If there is none, or no work, a CTA.
TileShares shares_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu);

}  // namespace flash_cute::sm90
