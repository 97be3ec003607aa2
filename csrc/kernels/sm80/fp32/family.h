// The family of fp32 kernels for Ampere and later, with TF32 products.
#pragma once

#include "kernels/sm80/family.h"

namespace flash_cute::sm80::fp32 {

// It differs from the 16-bit family only in shared memory: sums of dQ stay in registers. It has no decode.
class Fp32Family final : public Sm80Family {
 public:
  constexpr explicit Fp32Family(std::span<const KernelConfig> rows) : Sm80Family(rows, 4) {}

  int smem_bytes(const KernelConfig& config) const override;
};

}  // namespace flash_cute::sm80::fp32
