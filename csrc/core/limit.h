// Which kernels a thread's calls may take.
#pragma once

#include <string>

#include "core/config.h"

namespace flash_cute {

// Whether a kernel's id is one of the lines.
bool is_listed(const std::string& lines, const std::string& id);

// From now on calls of this thread take only kernels with these ids, one a line; any kernel if there is none. Returns
// the ids that held until now. Other threads have limits of their own: flash_cute/limits.py
// carries a limit into autograd's.
std::string limit_kernels(std::string ids);

// Whether this thread's calls may take the kernel.
bool within_limit(const KernelConfig& config);

}  // namespace flash_cute
