// Numbers of forward's plan in place of estimates: what a thread asks for (limit.h), or what was measured
// (calibration.h).
#pragma once

#include <string>

namespace flash_cute {

struct FwdOverrides {
  int num_splits = 0;  // 0: the estimate
  int pack_gqa = 0;    // likewise

  constexpr bool any() const { return num_splits > 0 || pack_gqa > 0; }
};

// Parses "num_splits=N" or "pack_gqa=N". Returns false for a word without "="; throws std::invalid_argument for another
// name, and for an N that is no whole number from 1 on.
bool parse_override(FwdOverrides& overrides, const std::string& word);

}  // namespace flash_cute
