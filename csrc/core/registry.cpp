#include "core/registry.h"

#include <stdexcept>

namespace flash_cute {

// kernels_built.def holds the rows of configs.def whose arch this build compiles.
#define KERNEL_CONFIG(op, arch, dtype, ...)       \
  KernelConfig {                                  \
    Op::op, Arch::arch, DType::dtype, __VA_ARGS__ \
  }
#define KERNEL_ENTRY(...) {KERNEL_CONFIG(__VA_ARGS__), &launch<KERNEL_CONFIG(__VA_ARGS__)>},
#define FWD_KERNEL_Fwd(...) KERNEL_ENTRY(__VA_ARGS__)
#define FWD_KERNEL_Bwd(...)
#define BWD_KERNEL_Fwd(...)
#define BWD_KERNEL_Bwd(...) KERNEL_ENTRY(__VA_ARGS__)

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

std::string refusal(const KernelConfig& config, DType dtype, int head_dim, const Device& device) {
  std::string reasons;
  auto add = [&](const std::string& reason) { reasons += (reasons.empty() ? "" : "; ") + reason; };
  if (config.dtype != dtype) add("another dtype");
  if (head_dim > config.head_dim) {
    add("head dim " + std::to_string(head_dim) + " > " + std::to_string(config.head_dim));
  }
  const int arch = static_cast<int>(config.arch);
  if (device.capability < arch) {
    add("needs sm_" + std::to_string(arch) + ", the GPU is sm_" + std::to_string(device.capability));
  }
  if (config.smem_bytes() > device.smem_optin) {
    add("needs " + std::to_string(config.smem_bytes()) + " bytes of shared memory, the GPU has " +
        std::to_string(device.smem_optin));
  }
  return reasons;
}

template <Op op>
const Kernel<op>& select(const std::vector<Kernel<op>>& kernels, DType dtype, int head_dim, const Device& device) {
  for (const Kernel<op>& kernel : kernels) {
    if (refusal(kernel.config, dtype, head_dim, device).empty()) return kernel;
  }
  std::string message = "flash_cute: no kernel for this call";
  for (const Kernel<op>& kernel : kernels) {
    message += "\n  " + kernel.config.id() + ": " + refusal(kernel.config, dtype, head_dim, device);
  }
  throw std::runtime_error(message);
}

template const Kernel<Op::Fwd>& select(const std::vector<Kernel<Op::Fwd>>&, DType, int, const Device&);
template const Kernel<Op::Bwd>& select(const std::vector<Kernel<Op::Bwd>>&, DType, int, const Device&);

}  // namespace flash_cute
