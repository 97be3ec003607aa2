// The resources of an fp32 kernel, by its config; for kernels and family.h.
#pragma once

#include <algorithm>

#include "core/config.h"

namespace flash_cute::sm80::fp32 {

// Bytes of shared memory of a CTA; kernels assert that their storage is no larger.
constexpr int smem_bytes(const KernelConfig& c) {
  const int element = element_bytes(c.dtype);
  const int keys = c.block_n * (c.head_dim + c.head_dim_v) * element;  // of a tile, and values
  if (c.op == Op::Bwd) return keys + c.stages * c.block_m * (c.head_dim + c.head_dim_v) * element;
  return c.block_m * std::max(c.head_dim, c.head_dim_v) * element + c.stages * keys;
}

}  // namespace flash_cute::sm80::fp32
