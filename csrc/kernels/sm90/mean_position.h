// Keeps the CTAs of Hopper's sparse backward near each other, for L2.
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Where the CTAs are in their walks over lists, on average. A walk starts there and ends where it started: CTAs that run
// at once then read the same queries, and L2 has them for all but the first. No CTA waits for another.
class MeanPosition {
  static constexpr uint32_t kParts = 16;  // of a walk

 public:
  CUTE_DEVICE explicit MeanPosition(const BackwardParams& params) : params_(params) {}

  // The place at which a walk of `count` places starts.
  CUTE_DEVICE uint32_t start(uint32_t count) const {
    if (!params_.p.shares_l2) return 0;
    uint32_t all;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(all) : "l"(all_parts()) : "memory");
    const uint32_t parts = kParts * gridDim.x;
    return all % parts * count / parts;
  }

  // Called by a warp whose walk goes on from place `from` to `to`, of `count`.
  CUTE_DEVICE void move(uint32_t from, uint32_t to, uint32_t count) const {
    if (!params_.p.shares_l2) return;
    const uint32_t parts = to * kParts / count - from * kParts / count;
    if (threadIdx.x % 32 != 0 || parts == 0) return;
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(all_parts()), "r"(parts) : "memory");
  }

 private:
  CUTE_DEVICE int* all_parts() const { return params_.p.dq_semaphores; }  // that all CTAs have passed

  const BackwardParams& params_;
};

}  // namespace flash_cute::sm90
