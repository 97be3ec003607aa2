#include "core/registry.h"

#include <stdexcept>

namespace flash_cute {

// kernels_built.def holds the rows of configs.def whose arch this build compiles.
#define KERNEL_CONFIG(op, arch, dtype, tier, ...)             \
  KernelConfig {                                              \
    Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__ \
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

Refusal refusal(const KernelConfig& config, const FwdProblem& problem, const Device& device) {
  return {
      .dtype = config.dtype != problem.dtype,
      .tier = !config.rich() && problem.rules.tier() == Tier::Rich,
      .head_dim = problem.head_dim > config.head_dim,
      .head_dim_v = problem.head_dim_v > config.head_dim_v,
      .gpu = static_cast<int>(config.arch) > device.capability,
      .shared_memory = config.smem_bytes() > device.smem_optin,
  };
}

std::string explain(const Refusal& refusal) {
  std::string reasons;
  auto add = [&](bool holds, const char* reason) {
    if (holds) reasons += (reasons.empty() ? "" : ", ") + std::string(reason);
  };
  add(refusal.dtype, "another dtype");
  add(refusal.tier, "another tier");
  add(refusal.head_dim, "a smaller head dim");
  add(refusal.head_dim_v, "a smaller head dim of v");
  add(refusal.gpu, "for newer GPUs");
  add(refusal.shared_memory, "needs more shared memory than the GPU has");
  return reasons;
}

template <Op op>
const Kernel<op>& select(const std::vector<Kernel<op>>& kernels, const FwdProblem& problem, const Device& device) {
  for (const Kernel<op>& kernel : kernels) {
    if (!refusal(kernel.config, problem, device).any()) return kernel;
  }
  std::string message = "flash_cute: no kernel for this call";
  for (const Kernel<op>& kernel : kernels) {
    message += "\n  " + kernel.config.id() + ": " + explain(refusal(kernel.config, problem, device));
  }
  throw std::runtime_error(message);
}

template const Kernel<Op::Fwd>& select(const std::vector<Kernel<Op::Fwd>>&, const FwdProblem&, const Device&);
template const Kernel<Op::Bwd>& select(const std::vector<Kernel<Op::Bwd>>&, const FwdProblem&, const Device&);

}  // namespace flash_cute
