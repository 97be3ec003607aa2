// A request for a plan, as JSON: the sizes and options of a call, a GPU, and the available kernels.
#pragma once

#include <string>

#include "core/built.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

struct PlanRequest {
  Op op;
  BwdProblem bwd{};  // its fwd is the problem of Op::Fwd, and part of Op::Bwd and Op::Decode
  DecodeProblem decode{};
  Device gpu{};
  bool built_only = false;

  const FwdProblem& fwd() const { return bwd.fwd; }
  const Kernels& kernels() const { return built_only ? built_kernels() : all_kernels(); }
};

// Parses a flat JSON object; plan_request.cpp has the fields. Throws std::invalid_argument.
PlanRequest read_plan_request(const std::string& problem);

}  // namespace flash_cute
