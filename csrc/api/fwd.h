// Runs the route of a forward problem: allocates its workspace, and launches its steps.
#pragma once

#include "api/tensors.h"
#include "core/problem.h"
#include "core/route.h"

namespace flash_cute {

// Runs the steps of a route without pages, on the GPU of q.
void run_forward(const Route& route, FwdProblem p, const View& q);

// Runs the route of packed sequences with paged keys and values.
void attend_pages(const Route& route, const FwdProblem& p, const View& q, const View& k, const View& v);

}  // namespace flash_cute
