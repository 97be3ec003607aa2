// The order of Hopper's backward: of key tiles, and of their adds to dQ. Arithmetic on sizes alone.
#pragma once

#include "core/config.h"
#include "core/problem.h"

namespace flash_cute {

// How key tiles add to dQ.
enum class DqAccumulate {
  Atomic,  // in any order, to zeros that the preprocess pass writes
  FirstStores,  // in any order, after the first tile has stored
  Serialized,  // in a fixed order, after the first tile has stored: deterministic
};

constexpr bool uses_semaphore(DqAccumulate order) {
  return order != DqAccumulate::Atomic;
}

// Zeros cost a pass at memory speed. FirstStores saves it where queries see few keys; with many keys all tiles would go
// at the first one's pace (sooner so with GQA under a mask, and in windows). The L2 throttle excludes semaphores: both
// use BwdProblem::dq_semaphores.
DqAccumulate dq_accumulate(const KernelConfig& config, const BwdProblem& p);

// Whether CTAs are throttled to stay near each other: tiles of equal length that walk through more queries, dO and dQ
// than L2 holds. The 2-CTA backward and serialized sums do not gain by it.
bool needs_l2_throttle(const KernelConfig& config, const BwdProblem& p);

// The order of key tiles, and the direction of their walk: docs/kernels/backward_order.md.
struct KeyOrder {
  int tiles_of_set = 1;  // tiles that start together
  int heads_together = 1;  // kv heads whose tiles alternate
  bool late_first = false;  // late keys first
  bool heads_inside = false;  // all query heads of a query tile, then the next query tile
  bool down_and_up = false;  // sets alternate between starting at the last and at the first queries

  static KeyOrder of(const KernelConfig& config, const BwdProblem& p);
};

}  // namespace flash_cute
