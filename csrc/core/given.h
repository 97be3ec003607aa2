// What is asked of forward's plan in place of estimates: by a thread (limit.h), or because it was measured
// (calibration.h).
#pragma once

#include <string>

namespace flash_cute {

struct FwdGiven {
  int num_splits = 0;  // 0: the estimate
  int pack_gqa = 0;    // likewise

  constexpr bool any() const { return num_splits > 0 || pack_gqa > 0; }
};

// Takes "num_splits=N" or "pack_gqa=N". Returns false for a word without "="; throws std::invalid_argument for another
// name, and for an N that is no whole number from 1 on.
bool take(FwdGiven& given, const std::string& word);

}  // namespace flash_cute
