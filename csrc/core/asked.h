// A request for a plan, as JSON: the sizes and options of a call, a GPU, and the available kernels.
#pragma once

#include <string>

#include "core/built.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

struct Asked {
  Op op;
  BwdProblem bwd{};  // whose fwd is that of every op
  DecodeProblem decode{};
  Device gpu{};
  bool built_only = false;

  const FwdProblem& fwd() const { return bwd.fwd; }
  const Kernels& kernels() const { return built_only ? built_kernels() : all_kernels(); }
};

// Reads a flat object, whose fields are those of read_problem() and read_gpu(). Throws std::invalid_argument.
Asked read(const std::string& problem);

}  // namespace flash_cute
