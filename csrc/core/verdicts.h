// The kernel that a call of some sizes would take, and why no other.
#pragma once

#include <string>
#include <vector>

#include "core/asked.h"
#include "core/limit.h"
#include "core/rows.h"

namespace flash_cute {

// A kernel of an op, and what became of it.
struct Verdict {
  const Row* row;
  std::string refused;  // reasons; empty if it fits
  std::string passed_over;  // if it fits and another one is chosen
};

struct Choice {
  std::vector<Verdict> verdicts;
  const Row* chosen = nullptr;
  NoKernel none;  // the error if none was chosen

  // Throws NoKernel's error if none was chosen.
  const KernelConfig& config() const;
  // The chosen one fits, but is not taken, for this reason.
  void pass_over(const std::string& reason);
};

// As select() of core/registry.h, or with over_cache find_over_cache(), but of all rows, and with the reasons.
template <Op op>
Choice choose(const Asked& asked, const Problem<op>& problem, bool over_cache = false);

// A cache is read by decoding's kernels, or by those of Hopper's forward where these take less time.
struct CacheChoice {
  Choice decode, forward;
};

CacheChoice choose_for_cache(const Asked& asked);

}  // namespace flash_cute
