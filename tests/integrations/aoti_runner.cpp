// Runs a package of AOTInductor without Python: aoti_runner LIBRARY PACKAGE DEVICE, where LIBRARY is libflash_cute.so.
// Prints the sum of the output for q = k = v = 0, 1, ... / 1000 of shape (2, 24, 4, 16).
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

int main(int count, char** arguments) {
  if (count != 4 || dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", count == 4 ? dlerror() : "expected LIBRARY PACKAGE DEVICE");
    return 2;
  }
  try {
    torch::NoGradGuard no_grad;
    const torch::Device device(arguments[3]);
    const auto dtype = device.is_cuda() ? torch::kBFloat16 : torch::kFloat32;
    const auto x = (torch::arange(2 * 24 * 4 * 16, torch::kFloat32) / 1000).view({2, 24, 4, 16}).to(device, dtype);
    torch::inductor::AOTIModelPackageLoader loader(arguments[2]);
    const auto results = loader.run({x, x, x});
    std::printf("%.3f\n", results.at(0).to(torch::kFloat64).sum().item<double>());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
