// From the arguments of fwd_kvcache to the problem that kernels are given.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

// Whether rows of queries are few enough for the kernels over a cache.
void check_cached_queries(const FwdProblem& f);

// Checks the arguments and fills everything but the results.
DecodeProblem make_problem(const KvcacheArguments& a);

}  // namespace flash_cute
