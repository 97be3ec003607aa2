// The resources of a kernel for Hopper, by its config: threads, buffers, shared memory; for kernels and family.h.
#pragma once

#include <algorithm>

#include "core/config.h"

namespace flash_cute::sm90 {

constexpr int kMostSharedMemory = 227 * 1024;  // bytes of a CTA
constexpr int kBookkeeping = 1024;             // bytes of barriers and work descriptions
constexpr int kSwizzled = 1024;                // alignment of swizzled tiles
constexpr int kListedSteps = 1024;             // bytes of the steps of a sparse backward
constexpr int kDecodeBookkeeping = 3072;       // bytes of split descriptions, of row sums and of queries' factors

// Forward: an extra warpgroup generates the dropout mask. Only with two consumer warpgroups: a third leaves no
// registers, and O must take fewer than the 128 registers of kernel start.
constexpr bool has_mask_warpgroup(const KernelConfig& c) {
  return c.op == Op::Fwd && c.rich() && c.warps == 8 && c.head_dim_v < 256;
}

constexpr bool has_dropout(const KernelConfig& c) {
  return c.rich() && (c.op == Op::Bwd || has_mask_warpgroup(c));
}

// Threads of the warps that issue MMA, of the producer warpgroup, and of the mask warpgroup.
constexpr int threads(const KernelConfig& c) {
  const int serving_warps = c.op == Op::Decode ? 0 : has_mask_warpgroup(c) ? 8 : 4;
  return (c.warps + serving_warps) * 32;
}

// Forward: ping-pong, one warpgroup's exponentials under another's products. Wide heads have too few exponentials to
// gain.
constexpr bool ping_pong(const KernelConfig& c) {
  return c.head_dim <= 128;
}

// Forward: query heads that may share a tile of queries (pack_gqa); each has at least a warp's 16 rows.
constexpr int max_pack_gqa(const KernelConfig& c) {
  return c.op == Op::Fwd && c.block_m == 128 && c.cluster == 1 && c.tiles == TileKind::Interval ? 8 : 1;
}

// Forward: whether a warp of each CTA fills the rows of no packed sequence: one that does not load pages, and goes over
// few sequences.
constexpr bool fills_gaps(const KernelConfig& c, bool in_pages, int sequences) {
  return c.cluster == 1 && !in_pages && 0 < sequences && sequences <= 128;
}

// Backward: 2-CTA clusters with half a tile of keys each (backward_2cta.h).
constexpr bool two_cta(const KernelConfig& c) {
  return c.cluster > 1;
}

// Backward: one of the two warpgroups computes all columns of dQ, in turn, as half of them are no whole swizzle atoms.
constexpr bool alternates_dq(const KernelConfig& c) {
  return !two_cta(c) && c.head_dim % 64 != 0;
}

// Bytes of a tile of K and one of V.
constexpr int bytes_of_keys(const KernelConfig& c) {
  return c.block_n * (c.head_dim + c.head_dim_v) * element_bytes(c.cache);
}

// Decode: bytes of the descales of a tile's keys and values.
constexpr int bytes_of_descales(const KernelConfig& c) {
  return c.widens_cache() ? 2 * c.block_n * static_cast<int>(sizeof(float)) : 0;
}

constexpr int forward_bytes(const KernelConfig& c, int buffers_q, bool room_for_output) {
  const int rows_of_q = c.block_m * c.head_dim * buffers_q, output = room_for_output ? c.block_m * c.head_dim_v : 0;
  const int keep_mask = has_mask_warpgroup(c) ? 16 * c.block_m : 0;  // bits of the dropout mask
  return element_bytes(c.dtype) * (rows_of_q + output) + c.stages * bytes_of_keys(c) + keep_mask + kBookkeeping;
}

// Forward: buffers of Q (two if O leaves room), and whether O has its own shared memory or takes V's.
constexpr int stages_q(const KernelConfig& c) {
  return forward_bytes(c, 2, true) <= kMostSharedMemory ? 2 : 1;
}
constexpr bool own_output(const KernelConfig& c) {
  return forward_bytes(c, stages_q(c), true) <= kMostSharedMemory;
}

constexpr int decode_bytes(const KernelConfig& c) {
  const int q = c.block_m * c.head_dim * element_bytes(c.dtype);
  const int outputs = 2 * c.block_m * c.head_dim_v * static_cast<int>(sizeof(float));
  return q + outputs + c.stages * (bytes_of_keys(c) + bytes_of_descales(c)) + kDecodeBookkeeping;
}

constexpr int backward_bytes(const KernelConfig& c) {
  const int element = element_bytes(c.dtype), row_statistics = 2 * c.block_m * static_cast<int>(sizeof(float));
  const int queries = c.stages * (c.block_m * (c.head_dim + c.head_dim_v) * element + row_statistics);  // and dO
  const int ds = 2 * c.block_m * c.block_n * element;
  const int common = bytes_of_keys(c) + queries + ds + kBookkeeping;
  if (two_cta(c)) {
    const int k_of_other = c.block_n * 128 * element;  // two atoms of columns
    return (common + k_of_other + kSwizzled - 1) / kSwizzled * kSwizzled;
  }
  const int next_k = c.block_n * c.head_dim * element, steps = c.walks_lists() ? kListedSteps : 0;
  const int dq = c.block_m * c.head_dim * static_cast<int>(sizeof(float)) * (alternates_dq(c) ? 2 : 1);
  return common + next_k + dq + steps;
}

// Bytes of shared memory of a CTA; kernels assert that their storage is no larger.
constexpr int smem_bytes(const KernelConfig& c) {
  switch (c.op) {
    case Op::Fwd:
      return forward_bytes(c, stages_q(c), own_output(c));
    case Op::Bwd:
      return backward_bytes(c);
    case Op::Decode:
      return decode_bytes(c);
  }
  return 0;
}

}  // namespace flash_cute::sm90
