#include "kernels/sm90/family.h"

#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {

constexpr KernelConfig kRows[] = {
#define KERNEL(op, arch, dtype, tier, ...) {Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__},
#include "kernels/sm90/rows.def"
#undef KERNEL
};
constexpr Sm90Family kFamily(kRows);
static_assert(kFamily.owns_its_rows());

const Family& family() {
  return kFamily;
}

int Sm90Family::smem_bytes(const KernelConfig& config) const {
  return sm90::smem_bytes(config);
}

int Sm90Family::threads(const KernelConfig& config) const {
  return sm90::threads(config);
}

static ForwardSpeed speed_of(const KernelConfig& config) {
  const Card::Forward& card = kCard.forward;
  if (config.head_dim == 64) return config.block_m == 192 ? card.narrow_192 : card.narrow_128;
  if (config.head_dim > 128) return config.cluster == 2 ? card.wide_pairs : card.wide;
  if (config.head_dim == 96 && !config.packs_tokens()) return config.block_m == 192 ? card.d96_192 : card.d96_128;
  if (config.block_m == 192) return config.cluster == 2 ? card.middle_192_pairs : card.middle_192;
  return config.cluster == 2 ? card.middle_128_pairs : card.middle_128;
}

ForwardSpeed Sm90Family::forward_speed(const KernelConfig& config) const {
  const ForwardSpeed speed = speed_of(config);
  const Card::Forward& card = kCard.forward;
  return config.packs_tokens() ? ForwardSpeed{speed.rate * card.token_rows, speed.tile_keys} : speed;
}

int Sm90Family::max_pack_gqa(const KernelConfig& config) const {
  return sm90::max_pack_gqa(config);
}

bool Sm90Family::fills_gaps(const KernelConfig& config, const FwdProblem& p) const {
  return sm90::fills_gaps(config, p.pages.ids != nullptr, p.batch);
}

// One CTA an SM.
int Sm90Family::resident(const KernelConfig& config, const Device& gpu) const {
  return gpu.sms / config.cluster;
}

}  // namespace flash_cute::sm90
