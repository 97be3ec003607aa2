#include "core/built.h"

#include <algorithm>

#include "core/rows.h"

namespace flash_cute {

const Kernels& all_kernels() {
  static const Kernels all = [] {
    Kernels kernels;
    for (const Row& row : rows_of_configs()) {
      auto& same_op = row.config.op == Op::Fwd ? kernels.fwd : row.config.op == Op::Bwd ? kernels.bwd : kernels.decode;
      same_op.push_back(&row.config);
    }
    return kernels;
  }();
  return all;
}

bool is_built(const KernelConfig& config) {
  const Kernels& built = built_kernels();
  return std::ranges::any_of(built.fwd, [&](auto* kernel) { return *kernel == config; }) ||
         std::ranges::any_of(built.bwd, [&](auto* kernel) { return *kernel == config; }) ||
         std::ranges::any_of(built.decode, [&](auto* kernel) { return *kernel == config; });
}

std::string kernels() {
  const Kernels& built = built_kernels();
  std::string ids;
  for (const auto* same_op : {&built.fwd, &built.bwd, &built.decode}) {
    for (const KernelConfig* kernel : *same_op) ids += kernel->id() + "\n";
  }
  return ids;
}

}  // namespace flash_cute
