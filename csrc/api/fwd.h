// Forward, once its problem is described, results included, and its route is chosen: allocate what it works in, launch.
#pragma once

#include "api/tensors.h"
#include "core/problem.h"
#include "core/route.h"

namespace flash_cute {

// Runs the steps of a route over keys that are not paged. Of q and v the shapes count.
void run_forward(const Route& route, FwdProblem p, const View& q, const View& v);

// Runs the whole route where keys and values of packed sequences lie in pages.
void attend_pages(const Route& route, const FwdProblem& p, const View& q, const View& k, const View& v);

}  // namespace flash_cute
