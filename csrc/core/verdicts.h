// The verdicts on all kernels of a call's ops: why one does not support the call, or why another is chosen.
#pragma once

#include <string>
#include <vector>

#include "core/plan_request.h"
#include "core/rows.h"

namespace flash_cute {

struct Verdict {
  const KernelConfig* kernel;
  bool chosen;
  std::string refused;      // reasons; empty if it fits
  std::string passed_over;  // if it fits and another one is chosen
};

std::vector<Verdict> verdicts(const PlanRequest& request);

}  // namespace flash_cute
