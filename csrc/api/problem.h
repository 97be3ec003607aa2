// From an op's arguments to the problem that kernels are given.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

// Checks the inputs and fills everything but the results.
FwdProblem make_problem(const FwdArguments& a);

// Refuses what the CUDA kernels do not do yet.
void check_supported(const FwdArguments& a);

}  // namespace flash_cute
