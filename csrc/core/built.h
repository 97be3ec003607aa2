// The kernels of this build by their ids: none in a build for the CPU alone.
#pragma once

#include <string>

namespace flash_cute {

// Their ids, one a line.
std::string kernels();

}  // namespace flash_cute
