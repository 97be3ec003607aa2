#include "kernels/lab/registry.h"
#include "kernels/lab/names.h"

#include <stdexcept>

namespace flash_cute::lab {

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = {
#define LAB_KERNEL(...)                                                                        \
  {FlashForwardKernelConfig{__VA_ARGS__}, &lab::launch<FlashForwardKernelConfig{__VA_ARGS__}>, \
   &lab::usage<FlashForwardKernelConfig{__VA_ARGS__}>},
#include "lab_built.def"
#undef LAB_KERNEL
  };
  return all;
}

const Kernel& find(const std::string& name) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.config.name() == name) return kernel;
  }
  throw std::runtime_error("flash_cute: the laboratory has no kernel " + name +
                           " in this build; lab_kernels() lists them");
}

std::string names() {
  std::string all;
  for (const Kernel& kernel : kernels()) all += kernel.config.name() + "\n";
  return all;
}

}  // namespace flash_cute::lab
