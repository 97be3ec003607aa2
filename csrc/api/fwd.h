// Forward, once its problem is described, results included, and its route is chosen: allocate what it works in, launch.
#pragma once

#include "api/tensors.h"
#include "core/problem.h"
#include "core/route.h"

namespace flash_cute {

// Runs the steps of a route over keys that are not paged, on the GPU of q.
void run_forward(const Route& route, FwdProblem p, const View& q);

// Runs the whole route where keys and values of packed sequences lie in pages.
void attend_pages(const Route& route, const FwdProblem& p, const View& q, const View& k, const View& v);

}  // namespace flash_cute
