#include "core/registry.h"

#include "core/built.h"

namespace flash_cute {

// kernels_built.def holds the rows of the families that this build compiles.
#define KERNEL_CONFIG(op, arch, dtype, tier, ...)             \
  KernelConfig {                                              \
    Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__ \
  }
#define KERNEL_ENTRY(...) {KERNEL_CONFIG(__VA_ARGS__), &launch<KERNEL_CONFIG(__VA_ARGS__)>},
#define FWD_KERNEL_Fwd(...) KERNEL_ENTRY(__VA_ARGS__)
#define FWD_KERNEL_Bwd(...)
#define FWD_KERNEL_Decode(...)
#define BWD_KERNEL_Fwd(...)
#define BWD_KERNEL_Bwd(...) KERNEL_ENTRY(__VA_ARGS__)
#define BWD_KERNEL_Decode(...)
#define DECODE_KERNEL_Fwd(...)
#define DECODE_KERNEL_Bwd(...)
#define DECODE_KERNEL_Decode(...) KERNEL_ENTRY(__VA_ARGS__)

const std::vector<Kernel<Op::Fwd>>& fwd_kernels() {
  static const std::vector<Kernel<Op::Fwd>> kernels = {
#define KERNEL(op, ...) FWD_KERNEL_##op(op, __VA_ARGS__)
#include "kernels_built.def"
#undef KERNEL
  };
  return kernels;
}

const std::vector<Kernel<Op::Bwd>>& bwd_kernels() {
  static const std::vector<Kernel<Op::Bwd>> kernels = {
#define KERNEL(op, ...) BWD_KERNEL_##op(op, __VA_ARGS__)
#include "kernels_built.def"
#undef KERNEL
  };
  return kernels;
}

const std::vector<Kernel<Op::Decode>>& decode_kernels() {
  static const std::vector<Kernel<Op::Decode>> kernels = {
#define KERNEL(op, ...) DECODE_KERNEL_##op(op, __VA_ARGS__)
#include "kernels_built.def"
#undef KERNEL
  };
  return kernels;
}

template <Op op>
static std::vector<const KernelConfig*> configs_of(const std::vector<Kernel<op>>& kernels) {
  std::vector<const KernelConfig*> configs;
  for (const Kernel<op>& kernel : kernels) configs.push_back(&kernel.config);
  return configs;
}

const Kernels& built_kernels() {
  static const Kernels built{configs_of(fwd_kernels()), configs_of(bwd_kernels()), configs_of(decode_kernels())};
  return built;
}

}  // namespace flash_cute
