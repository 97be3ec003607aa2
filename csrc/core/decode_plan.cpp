#include <algorithm>
#include <stdexcept>

#include "core/card.h"
#include "core/family.h"

namespace flash_cute {

// Whether L2 has room for all keys and values of full caches.
static bool fits_l2(const DecodeProblem& p, const Device& gpu) {
  const FwdProblem& f = p.fwd;
  const double numbers = double(f.batch) * f.heads_k * f.seqlen_k * (f.head_dim + f.head_dim_v);
  return numbers * element_bytes(p.cache_dtype()) <= kCard.decode.l2_room * gpu.l2_bytes;
}

// Fraction of K/V loads with evict_normal; the rest use evict_first. If the cache fits into L2 the next call may hit
// it, so most loads are evict_normal.
static float l2_fraction_of(const DecodeParams& p, const KernelConfig& config, const Device& gpu) {
  if (int64_t(p.fwd.seqlen_q) * p.group.value > config.block_m) return 1.f;  // several query tiles read it
  return fits_l2(p, gpu) ? kCard.decode.l2_share : 0.f;
}

DecodePlan make_plan(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu) {
  DecodeParams p{problem, {}, {}};  // the plan is filled in below
  const FwdProblem& f = p.fwd;
  p.heads_k = FastDivmod(std::max(1, f.heads_k));
  p.group = FastDivmod(std::max(1, f.heads / std::max(1, f.heads_k)));
  p.page_size = FastDivmod(std::max(1, f.pages.size));
  p.l2_fraction = l2_fraction_of(p, config, gpu);
  p.resident_ctas = gpu.sms * config.ctas;
  p.ctas_per_head = std::max(1, p.resident_ctas / std::max(1, f.heads_k));
  p.by_ctas_per_head = FastDivmod(p.ctas_per_head);
  p.cluster_ctas = f.heads_k % 2 == 0 ? 2 : 1;
  p.quantum_blocks = 1;
  p.slots = 0;
  const int64_t tiles = (int64_t(f.seqlen_q) * p.group.value + config.block_m - 1) / config.block_m;
  if (static_cast<double>(tiles) * std::max(1, f.heads_k) * std::max(1, f.batch) >= kMostParts) {
    throw std::runtime_error("flash_cute: the call has 2^30 tiles of queries or more; give fewer sequences or queries");
  }
  family_of(config).plan_decode(p, config, gpu);
  return p;
}

}  // namespace flash_cute
