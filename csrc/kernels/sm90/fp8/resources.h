// The resources of a kernel of e4m3 inputs, by its config; for kernels and family.h.
#pragma once

#include "core/config.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90::fp8 {

constexpr int kOnes = 8;        // rows of ones behind V's dims, the least that wgmma takes
constexpr int kQueryTiles = 2;  // buffers of Q

// Threads of the warps that issue MMA, and of the producer warpgroup.
constexpr int threads(const KernelConfig& c) {
  return c.threads() + 128;
}

// Dims of a product P V: as many as leave registers for the sums.
constexpr int part_dims(const KernelConfig& c) {
  return std::min(c.head_dim_v, 128);
}

// Bytes of shared memory of a CTA; kernels assert that their storage is no larger.
constexpr int smem_bytes(const KernelConfig& c) {
  const int tile_bytes = c.block_n * (c.head_dim + c.head_dim_v + kOnes);
  return kQueryTiles * c.block_m * c.head_dim + c.stages * tile_bytes + 2 * kBookkeeping;
}

}  // namespace flash_cute::sm90::fp8
