// The rows of all families as values, whether this build has their kernels or not.
#pragma once

#include <vector>

#include "core/config.h"

namespace flash_cute {

struct Row {
  KernelConfig config;
};

// Forward and backward of 16 bits and of e4m3, then of fp32, then decode; each op family by family, in the order of rows.def.
const std::vector<Row>& rows_of_configs();

}  // namespace flash_cute
