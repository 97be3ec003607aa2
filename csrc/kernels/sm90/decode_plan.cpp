// Decode by clusters, one per work tile: when, and of how many CTAs.
#include <algorithm>
#include <limits>

#include "core/layout/tiles.h"
#include "kernels/sm90/family.h"

namespace flash_cute::sm90 {

int ctas_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu) {
  const FwdProblem& f = p.fwd;
  const int64_t rows = int64_t(f.seqlen_q) * (f.heads / std::max(1, f.heads_k));
  const int64_t work_tiles = (rows + config.block_m - 1) / config.block_m * f.heads_k * f.batch;
  const int blocks = detail::ceil_div(f.seqlen_k, config.block_n);
  int best = 1;
  for (int ctas = 2; ctas <= config.cluster; ++ctas) {
    if (work_tiles <= gpu.clusters[ctas] && detail::ceil_div(blocks, ctas) < detail::ceil_div(blocks, best))
      best = ctas;
  }
  return best;
}

// Whether clusters beat even splits: all clusters must run at once, and a CTA has few blocks, or nearly all SMs have a
// CTA. With lengths on the device some CTAs may get all the work, but even splits take longer to schedule; a single
// sequence never waits for others.
static bool clusters_suit(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) {
  const Card::Decode& card = kCard.decode;
  const FwdProblem& f = p.fwd;
  const int64_t rows = int64_t(f.seqlen_q) * (f.heads / std::max(1, f.heads_k)),
                work_tiles = int64_t(f.heads_k) * f.batch;
  if (rows > config.block_m || work_tiles > gpu.clusters[1]) return false;
  const int ctas = ctas_of_tile(p, config, gpu);
  const int blocks_of_cta = detail::ceil_div(detail::ceil_div(f.seqlen_k, config.block_n), ctas);
  const double busy = double(work_tiles) * ctas / gpu.sms;
  const bool wide = config.head_dim > 128;  // the even splits have half the warps
  if (!p.is_uniform()) {
    const bool alone = f.batch == 1 && busy > card.many_sms && !wide;
    return blocks_of_cta <= (alone ? card.cluster_blocks_alone : card.cluster_blocks_unknown);
  }
  if (busy > card.all_sms) return blocks_of_cta <= card.cluster_blocks_all_sms;
  return blocks_of_cta <= (wide ? card.cluster_blocks_wide : card.cluster_blocks);
}

double Sm90Family::decode_cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) const {
  return clusters_suit(config, p, gpu) ? 0 : std::numeric_limits<double>::infinity();
}

void Sm90Family::plan_decode(DecodeParams& p, const KernelConfig& config, const Device& gpu) const {
  const int64_t tiles = (int64_t(p.fwd.seqlen_q) * p.group.value + config.block_m - 1) / config.block_m;
  const int ctas = ctas_of_tile(p, config, gpu);
  p.uniform.known = p.is_uniform();
  p.cluster_ctas = ctas;
  p.clusters.ctas = FastDivmod(ctas);
  p.clusters.tiles = FastDivmod(static_cast<int>(std::max<int64_t>(1, tiles)));
  for (p.clusters.column_bits = 0; (config.head_dim_v >> p.clusters.column_bits) > ctas;) ++p.clusters.column_bits;
  p.ctas_per_head = p.fwd.batch * p.clusters.tiles.value * ctas;
}

}  // namespace flash_cute::sm90
