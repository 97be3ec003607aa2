// Kernels of each op, in the order of their rows: those of this build, or all.
#pragma once

#include <string>
#include <vector>

#include "core/config.h"

namespace flash_cute {

struct Kernels {
  std::vector<const KernelConfig*> fwd, bwd, decode;

  template <Op op>
  const std::vector<const KernelConfig*>& of() const {
    return op == Op::Fwd ? fwd : op == Op::Bwd ? bwd : decode;
  }
};

const Kernels& built_kernels();  // none in a CPU-only build
const Kernels& all_kernels();

bool is_built(const KernelConfig& config);

// The ids of the kernels in this build, one a line.
std::string kernels();

}  // namespace flash_cute
