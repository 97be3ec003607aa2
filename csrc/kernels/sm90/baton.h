// The turns of warpgroups at the tensor cores.
#pragma once

#include <cute/config.hpp>
#include <cutlass/arch/barrier.h>

namespace flash_cute::sm90 {

// The right to issue products, which goes round among the warpgroups: while one issues, the others are at their
// exponentials. Each has a named barrier for its turn, from kBarrier on. Nobody has the first one until it is given.
template <int kGroups, int kBarrier>
struct Baton {
  static constexpr int kTwoGroups = 2 * 128;  // threads: who passes, and who takes

  int group;

  // After this barrier the turn is this warpgroup's.
  CUTE_DEVICE void take() const { cutlass::arch::NamedBarrier::sync(kTwoGroups, kBarrier + group); }
  CUTE_DEVICE void pass() const { give_to((group + 1) % kGroups); }
  CUTE_DEVICE void give_to(int other) const { cutlass::arch::NamedBarrier::arrive(kTwoGroups, kBarrier + other); }
};

}  // namespace flash_cute::sm90
