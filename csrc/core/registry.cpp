#include "core/registry.h"

#include "core/calibration.h"
#include "core/limit.h"
#include "core/refusal.h"

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
static bool can_do(const KernelConfig& config, const Problem<op>& problem, const Device& device) {
  return fits<op>(config, problem, device) && beyond_limit<op>(config, problem, device).empty();
}

template <Op op>
[[noreturn]] static void raise_no_kernel(const std::vector<Kernel<op>>& kernels, const Problem<op>& problem,
                                         const Device& device) {
  NoKernel none;
  for (const Kernel<op>& kernel : kernels) {
    const KernelConfig& config = kernel.config;
    none.add(config, explain(refusal<op>(config, problem, device), config, forward_of(problem), device),
             beyond_limit<op>(config, problem, device));
  }
  none.raise();
}

const Kernel<Op::Fwd>* find_over_cache(const FwdProblem& problem, const Device& device) {
  auto fits = [&](const Kernel<Op::Fwd>& kernel) { return can_do<Op::Fwd>(kernel.config, problem, device); };
  return preferred(fwd_kernels(), fits, problem, device);
}

const Kernel<Op::Fwd>& select_over_cache(const FwdProblem& problem, const Device& device) {
  if (const Kernel<Op::Fwd>* kernel = find_over_cache(problem, device)) return *kernel;
  raise_no_kernel(fwd_kernels(), problem, device);
}

template <Op op>
const Kernel<op>& select(const std::vector<Kernel<op>>& kernels, const Problem<op>& problem, const Device& device) {
  auto fits = [&](const Kernel<op>& kernel) { return can_do<op>(kernel.config, problem, device); };
  if (const Kernel<op>* kernel = best<op>(kernels, fits, problem, device)) return *kernel;
  raise_no_kernel(kernels, problem, device);
}

template const Kernel<Op::Fwd>& select(const std::vector<Kernel<Op::Fwd>>&, const FwdProblem&, const Device&);
template const Kernel<Op::Bwd>& select(const std::vector<Kernel<Op::Bwd>>&, const BwdProblem&, const Device&);
template const Kernel<Op::Decode>& select(const std::vector<Kernel<Op::Decode>>&, const DecodeProblem&, const Device&);

std::string kernels() {
  std::string ids;
  for (const auto& kernel : fwd_kernels()) ids += kernel.config.id() + "\n";
  for (const auto& kernel : bwd_kernels()) ids += kernel.config.id() + "\n";
  for (const auto& kernel : decode_kernels()) ids += kernel.config.id() + "\n";
  return ids;
}

}  // namespace flash_cute
