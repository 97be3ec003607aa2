// The family of fp32 for Ampere and later, whose products are of TF32.
#pragma once

#include "kernels/sm80/family.h"

namespace flash_cute::sm80::fp32 {

// As that of 16 bits in all that core asks, but for memory: sums of dQ stay in registers. It has no rows of decode.
class Fp32Family final : public Sm80Family {
 public:
  constexpr explicit Fp32Family(std::span<const KernelConfig> rows) : Sm80Family(rows, 4) {}

  int smem_bytes(const KernelConfig& config) const override;
  int dq_columns(const KernelConfig&) const override { return 0; }
};

}  // namespace flash_cute::sm80::fp32
