// Forward, once its problem is described, results included: select a kernel, allocate what it works in, launch.
#pragma once

#include "api/tensors.h"
#include "core/problem.h"

namespace flash_cute {

// Of q and v the shapes count: over a cache keys have been laid out anew.
void run_forward(FwdProblem p, const View& q, const View& v, bool over_cache = false);

// The same where keys and values of packed sequences lie in pages.
void attend_pages(const FwdProblem& p, const View& q, const View& k, const View& v);

}  // namespace flash_cute
