// A CPU-only build: no kernels, and no device.
#include <stdexcept>

#include "core/built.h"
#include "core/device.h"

namespace flash_cute {

const Kernels& built_kernels() {
  static const Kernels none;
  return none;
}

const Device& device(int) {
  throw std::invalid_argument("flash_cute: this build of flash_cute holds no CUDA kernels, and cannot query a GPU");
}

namespace lab {
std::string names() {
  return "";
}
}  // namespace lab

}  // namespace flash_cute
