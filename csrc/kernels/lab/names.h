// The laboratory's kernels of this build: none in a CPU-only build.
#pragma once

#include <string>

namespace flash_cute::lab {

// Names of all kernels, one a line.
std::string names();

}  // namespace flash_cute::lab
