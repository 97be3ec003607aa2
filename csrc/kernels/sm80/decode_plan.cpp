// Decode with even splits of all keys: its cost, and its chunks of work.
#include <algorithm>
#include <stdexcept>

#include "core/layout/decode_scheduler.h"
#include "core/waves.h"
#include "kernels/sm80/family.h"
#include "kernels/sm80/resources.h"

namespace flash_cute::sm80 {
namespace {

// Whether an SM has shared memory for config.ctas CTAs, with what it reserves for each.
bool fit_at_once(const KernelConfig& config, const Device& gpu) {
  constexpr int kKept = 1024;
  return config.ctas * (smem_bytes(config) + kKept) <= gpu.smem_optin + kKept;
}

// `pairs`: two CTAs an SM, of kernels that exist with one, too.
const DecodeSpeed& speed_of(const KernelConfig& config, bool pairs) {
  const Card::Decode& card = kCard.decode;
  if (config.head_dim > 128) return config.block_m == 16 ? card.wide_16 : card.wide_64;
  const bool narrow = config.head_dim == 64;
  if (config.block_m == 64) return narrow ? card.narrow_64 : card.middle_64;
  if (config.block_m == 32) return narrow ? card.narrow_32 : card.middle_32;
  if (pairs) return narrow ? card.narrow_16_pairs : card.middle_16_pairs;
  return narrow ? card.narrow_16 : card.middle_16;
}

// Moves a share of large chunks to tail CTAs with small chunks, which start on SMs that finish early.
void add_tail_ctas(DecodeParams& p, int per_head) {
  const Card::Decode& card = kCard.decode;
  const int chunk = detail::ceil_div(per_head, p.ctas_per_head);
  if (chunk < card.large_chunk) return;
  const int rest = chunk - chunk / card.tail_share, left = per_head - p.ctas_per_head * rest;
  const int tail_ctas = detail::ceil_div(left, chunk / card.tail_parts);
  p.uniform.chunk = FastDivmod(rest);
  p.uniform.tail_chunk = FastDivmod(detail::ceil_div(left, tail_ctas));
  p.ctas_per_head += tail_ctas;
}

// Gives each work tile a CTA, and those of the last wave two each, so that SMs finish at about the same time.
void one_cta_per_tile(DecodeParams& p, int work_tiles, int per_tile) {
  constexpr int kSplits = 2;
  const int last = per_tile % kSplits == 0 ? detail::ceil_div(p.resident_ctas, p.fwd.heads_k) : 0;
  p.uniform.chunk = FastDivmod(per_tile);
  p.uniform.tail_chunk = FastDivmod(per_tile / kSplits);
  p.uniform.full_ctas = work_tiles - last;
  p.ctas_per_head = work_tiles - last + kSplits * last;
  if (p.fwd.heads_k % 4 == 0) p.cluster_ctas = 4;
}

// Plans the chunks of a uniform batch.
void plan_uniform(DecodeParams& p, const KernelConfig& config) {
  const Quanta quanta(p, cached_seq(p, 0), config.block_m, config.block_n);
  const int per_head = p.fwd.batch * quanta.per_head, work_tiles = p.fwd.batch * quanta.tiles;
  // With several CTAs an SM one loads while another starts: work tiles may have a CTA each.
  const bool own_ctas = p.even_splits() && config.ctas > 1 && quanta.per_tile >= kCard.decode.own_cta_quanta &&
                        int64_t(work_tiles) * p.fwd.heads_k >= int64_t(kCard.decode.own_cta_waves) * p.resident_ctas;
  p.uniform.known = true;
  p.uniform.per_tile = FastDivmod(quanta.per_tile);
  p.uniform.per_sequence = FastDivmod(std::max(1, quanta.per_head));
  if (own_ctas) return one_cta_per_tile(p, work_tiles, quanta.per_tile);
  p.uniform.chunk = FastDivmod(CtaChunks::of(p, per_head, quanta.per_tile, true).size);
  p.uniform.full_ctas = p.ctas_per_head;
  if (p.even_splits()) add_tail_ctas(p, per_head);
}

}  // namespace

double Sm80Family::decode_cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) const {
  const FwdProblem& problem = p.fwd;
  const int64_t rows = int64_t(problem.seqlen_q) * (problem.heads / std::max(1, problem.heads_k));
  const auto tiles =
      static_cast<double>((rows + config.block_m - 1) / config.block_m * problem.heads_k * problem.batch);
  const DecodeSpeed& speed = speed_of(config, config.ctas > 1 && fit_at_once(config, gpu));
  const double keys = tiles * expected_keys(p, false);
  const double reading = speed.read * reading_us(problem, p.cache_dtype(), keys / gpu.sms, gpu.sms, gpu);
  const double products = products_us(config, config.block_m, keys, speed.rate) / gpu.sms;
  const double known = p.is_uniform() ? kCard.decode.scheduling_us : 0;
  const double merging = kCard.decode.many_splits * tiles <= gpu.sms ? kCard.decode.many_splits_us : 0;
  return speed.start_us - known + speed.tile_us * tiles / gpu.sms + std::max(reading, products) + merging;
}

void Sm80Family::plan_decode(DecodeParams& p, const KernelConfig& config, const Device&) const {
  const FwdProblem& f = p.fwd;
  const bool even = p.even_splits();
  const int64_t tiles = (int64_t(f.seqlen_q) * p.group.value + config.block_m - 1) / config.block_m;
  const int64_t work_tiles = int64_t(f.batch) * f.heads_k * tiles;
  const int64_t blocks = (int64_t(f.seqlen_k) + config.block_n - 1) / config.block_n;
  int64_t splits = blocks;
  if (p.num_splits > 0) splits = std::min<int64_t>(blocks, p.num_splits);
  if (p.split_size > 0) {
    const int64_t size = (p.split_size + config.block_n - 1) / config.block_n;
    splits = (blocks + size - 1) / size;
  }
  if (!even && work_tiles * splits >= kMostParts) {
    throw std::runtime_error(
        "flash_cute: num_splits or split_size make 2^30 splits or more; give fewer or larger ones");
  }
  if (even) p.quantum_blocks += static_cast<int>(work_tiles * blocks / kMostParts);
  if (p.is_uniform()) plan_uniform(p, config);
  auto whole_units = [&](const FastDivmod& chunk) { return chunk.value % p.uniform.per_tile.value == 0; };
  const bool late = p.uniform.full_ctas < p.ctas_per_head;
  const bool whole =
      even && p.uniform.known && whole_units(p.uniform.chunk) && (!late || whole_units(p.uniform.tail_chunk));
  if (splits > 1 && !whole) p.slots = static_cast<int>(even ? 2 * int64_t(p.ctas()) : work_tiles * splits);
}

}  // namespace flash_cute::sm80
