// From an op's arguments to the problem that kernels are given.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

// Checks the inputs and fills everything but the results.
FwdProblem make_problem(const FwdArguments& a);

// Statistics of each row, [b, h, s] or [h, rows], uninitialised.
Tensor allocate_statistics(const View& q);

}  // namespace flash_cute
