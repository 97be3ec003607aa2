// Makes a kernel's problem from the arguments of fwd_kvcache.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

// Whether there are few enough query rows for decode kernels.
void check_cached_queries(const FwdProblem& f);

// Checks the arguments and fills everything but the results.
DecodeProblem make_problem(const KvcacheArguments& a);

}  // namespace flash_cute
