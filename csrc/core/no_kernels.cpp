// A build for the CPU alone: no kernels, and no device.
#include <stdexcept>

#include "core/built.h"
#include "core/device.h"

namespace flash_cute {

const Kernels& built_kernels() {
  static const Kernels none;
  return none;
}

const Device& device(int) {
  throw std::invalid_argument("flash_cute: this build has no CUDA, and knows no device");
}

namespace lab {
std::string names() {
  return "";
}
}  // namespace lab

}  // namespace flash_cute
