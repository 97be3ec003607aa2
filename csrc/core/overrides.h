// Numbers of forward's plan that replace estimates: a thread's (limit.h), or measured ones (calibration.h).
#pragma once

#include <string>

namespace flash_cute {

struct FwdOverrides {
  int num_splits = 0;  // 0: the estimate
  int pack_gqa = 0;    // 0: the estimate

  constexpr bool any() const { return num_splits > 0 || pack_gqa > 0; }
};

// Parses "num_splits=N" or "pack_gqa=N". Returns false for a word without "="; throws std::invalid_argument for another
// name, and for an N that is not an integer >= 1.
bool parse_override(FwdOverrides& overrides, const std::string& word);

}  // namespace flash_cute
