// The kernels of this build by their ids: none in a build for the CPU alone.
#pragma once

#include <string>

namespace flash_cute {

// Their ids, one a line.
std::string kernels();

// From now on only kernels with these ids, one a line, are selected; all if there is none. For tests and measurements:
// must not run beside other calls.
void use_kernels(std::string ids);

// Whether use_kernels() left the kernel with this id out.
bool set_aside(const std::string& id);

}  // namespace flash_cute
