// Every kernel of a call's ops, with what became of it in words: why it cannot do the call, or why another is taken.
#pragma once

#include <string>
#include <vector>

#include "core/asked.h"
#include "core/rows.h"

namespace flash_cute {

struct Verdict {
  const KernelConfig* kernel;
  bool chosen;
  std::string refused;      // reasons; empty if it fits
  std::string passed_over;  // if it fits and another one is chosen
};

std::vector<Verdict> verdicts(const Asked& asked);

}  // namespace flash_cute
