// In which order Hopper's backward takes tiles of keys and adds to the sums of dQ: arithmetic on sizes alone.
#pragma once

#include "core/config.h"
#include "core/problem.h"

namespace flash_cute {

// In which order tiles of keys add to the sums of dQ, and what they find there.
enum class DqAccumulate {
  Atomic,  // as they come, to zeros that a pass before writes
  FirstStores,  // as they come, to what the first one has stored
  Serialized,  // one after the other, so that sums are deterministic, to what the first one has stored
};

constexpr bool uses_semaphore(DqAccumulate order) {
  return order != DqAccumulate::Atomic;
}

// Zeros take a pass at the memory's speed, whatever a query sees. Where it sees few keys, sums are opened: the more it
// sees, the more it costs that all tiles go at the first one's pace, with grouped heads under a mask and in windows
// earlier. What has a pace of its own does not wait, too: both count in BwdProblem::turns.
DqAccumulate dq_accumulate(const KernelConfig& config, const BwdProblem& p);

// Whether CTAs of Hopper's backward are kept near each other: where all tiles of keys have the same way to go, through
// more queries than the L2 cache holds, with their dO and sums of dQ. Pairs of CTAs do not gain by it, nor, in another
// way, do sums in turns.
bool needs_l2_throttle(const KernelConfig& config, const BwdProblem& p);

// In which order tiles of keys are taken, and which way each of them goes through its queries: see BackwardWork.
struct KeyOrder {
  int tiles_of_set = 1;  // that start together
  int heads_together = 1;  // kv heads whose tiles alternate
  bool late_first = false;  // late keys
  bool heads_inside = false;  // a tile goes through the query heads of a query tile, then to the next query tile
  bool down_and_up = false;  // sets by turns begin with the last queries, and with the first ones

  static KeyOrder of(const KernelConfig& config, const BwdProblem& p);
};

}  // namespace flash_cute
