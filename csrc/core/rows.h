// The rows of configs.def as values, whether this build has their kernels or not.
#pragma once

#include <vector>

#include "core/config.h"

namespace flash_cute {

struct Row {
  KernelConfig config;
};

inline const std::vector<Row>& rows_of_configs() {
  static const std::vector<Row> rows = {
#define KERNEL(op, arch, dtype, tier, ...) {{Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__}},
#include "configs.def"
#undef KERNEL
  };
  return rows;
}

}  // namespace flash_cute
