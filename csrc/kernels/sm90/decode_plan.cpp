// Decode by clusters, one per work tile: when, and of how many CTAs.
#include <algorithm>

#include "core/layout/tiles.h"
#include "core/waves.h"
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

double Sm90Family::decode_cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) const {
  const Card::Decode& card = kCard.decode;
  const FwdProblem& f = p.fwd;
  const int64_t rows = int64_t(f.seqlen_q) * (f.heads / std::max(1, f.heads_k));
  const auto tiles = static_cast<double>((rows + config.block_m - 1) / config.block_m * f.heads_k * f.batch);
  const int ctas = ctas_of_tile(p, config, gpu);
  const double all_waves = std::max(1.0, tiles * ctas / gpu.sms), waves = ceil_to(all_waves, 1);
  const double keys = expected_keys(p, waves == 1), blocks = ceil_to(keys / config.block_n, 1);
  const double time_of_blocks = waves * ceil_to(blocks / ctas, 1) * card.cluster_block_us;
  const bool wide = config.head_dim > 128;  // half the warps
  const double later = (all_waves - 1) * (wide ? card.cluster_wave_us_wide : card.cluster_wave_us);
  const double reading = reading_us(f, tiles * expected_keys(p, false) / gpu.sms, gpu.sms, gpu);
  return (wide ? card.cluster_us_wide : card.cluster_us) + std::max(time_of_blocks + later, reading);
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
