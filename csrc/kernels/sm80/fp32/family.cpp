#include "kernels/sm80/fp32/family.h"

#include "kernels/sm80/fp32/resources.h"

namespace flash_cute::sm80::fp32 {

constexpr KernelConfig kRows[] = {
#define KERNEL(op, arch, dtype, tier, ...) {Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__},
#include "kernels/sm80/fp32/rows.def"
#undef KERNEL
};
constexpr Fp32Family kFamily(kRows);
static_assert(kFamily.owns_its_rows());

const Family& family() {
  return kFamily;
}

int Fp32Family::smem_bytes(const KernelConfig& config) const {
  return fp32::smem_bytes(config);
}

}  // namespace flash_cute::sm80::fp32
