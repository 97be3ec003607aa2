#include "core/overrides.h"

#include <charconv>
#include <stdexcept>

namespace flash_cute {

bool parse_override(FwdOverrides& overrides, const std::string& word) {
  const size_t at = word.find('=');
  if (at == std::string::npos) return false;
  const std::string name = word.substr(0, at);
  const char *const first = word.data() + at + 1, *const end = word.data() + word.size();
  int number = 0;
  const auto [last, error] = std::from_chars(first, end, number);
  const bool is_number = error == std::errc() && last == end && number >= 1;
  if (!is_number || (name != "num_splits" && name != "pack_gqa")) {
    throw std::invalid_argument("flash_cute: expected num_splits=N or pack_gqa=N, N a whole number from 1 on, got " +
                                word);
  }
  (name == "num_splits" ? overrides.num_splits : overrides.pack_gqa) = number;
  return true;
}

}  // namespace flash_cute
