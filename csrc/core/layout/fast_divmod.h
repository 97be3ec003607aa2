// Division by a runtime constant as a multiplication; the device would take about 30 instructions.
#pragma once

#include <cstdint>

namespace flash_cute {

// With 2^shift / value rounded up, the error of a quotient stays below 1 / value for every n from 0 to 2^31 - 1.
struct FastDivmod {
  int value = 1;
  uint32_t multiplier = uint32_t{1} << 31;
  int shift = 31;

  constexpr FastDivmod() = default;
  constexpr explicit FastDivmod(int divisor) : value(divisor) {
    while ((int64_t{1} << (shift - 31)) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  constexpr int div(int n) const {
    return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >> shift);
  }
  constexpr int mod(int n) const { return n - div(n) * value; }
};

}  // namespace flash_cute
