// The resources of a kernel for Ampere and later, by its config; for kernels and family.h.
#pragma once

#include <algorithm>

#include "core/config.h"

namespace flash_cute::sm80 {

constexpr int kDecodeBookkeeping = 3072;  // bytes of split descriptions, of row sums and of queries' factors

// Backward: a warp owns 32 keys and all columns of their dK and dV; else warps share every product.
constexpr bool whole_keys(const KernelConfig& c) {
  return c.block_n == 32 * c.warps;
}

// Bytes of shared memory of a CTA; kernels assert that their storage is no larger.
constexpr int smem_bytes(const KernelConfig& c) {
  const int element = element_bytes(c.dtype);
  const int keys = c.block_n * (c.head_dim + c.head_dim_v) * element_bytes(c.cache);  // of a tile, and values
  const int descales = c.widens_cache() ? 2 * c.block_n * static_cast<int>(sizeof(float)) : 0;  // of both
  switch (c.op) {
    case Op::Fwd:
      return c.block_m * std::max(c.head_dim, c.head_dim_v) * element + c.stages * keys;
    case Op::Bwd: {
      const int row_statistics = 2 * c.block_m * static_cast<int>(sizeof(float));
      const int score_tiles = whole_keys(c) ? 1 : 2;  // dS, and P unless it stays in registers
      const int queries = c.block_m * (c.head_dim + c.head_dim_v) * element + row_statistics;  // and dO
      return keys + c.stages * queries + score_tiles * c.block_m * c.block_n * element;
    }
    case Op::Decode:
      return 2 * c.block_m * c.head_dim * element + c.stages * (keys + descales) + kDecodeBookkeeping;
  }
  return 0;
}

}  // namespace flash_cute::sm80
