// Keeps the CTAs of Hopper's backward near each other, for L2.
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Keeps CTAs near each other on long walks through the queries, so that what one loads into L2 is still there for the
// others; unthrottled, CTAs drift apart until each reads from memory. A CTA that is ahead of the mean step waits for a
// bounded time: the others may not be resident. After kPatience futile waits it stops waiting.
class L2Throttle {
  static constexpr uint32_t kInterval = 16, kAhead = 16;  // steps
  static constexpr uint32_t kEnd = 1 << 23;  // steps that raise the mean so far that no CTA waits any more
  static constexpr int kPolls = 8;  // of a wait, about 1 us each
  static constexpr int kPatience = 16;  // futile waits in a row

 public:
  CUTE_DEVICE explicit L2Throttle(const BackwardParams& params)
      : all_steps_(params.p.shares_l2 ? params.p.dq_semaphores : nullptr) {}

  // Called after each step of this CTA.
  CUTE_DEVICE void step(uint32_t steps) {
    if (all_steps_ == nullptr || steps % kInterval != 0 || steps == 0) return;
    count(kInterval);
    if (futile_ == kPatience) return;
    ++futile_;
    CUTE_NO_UNROLL
    for (int i = 0; i < kPolls; ++i) {
      uint32_t all;
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(all) : "l"(all_steps_) : "memory");
      if (static_cast<int>(steps * gridDim.x - all) > static_cast<int>(kAhead * gridDim.x)) continue;
      futile_ = 0;
      return;
    }
  }

  // Called by a CTA that has no more tiles.
  CUTE_DEVICE void finish() const {
    if (all_steps_ != nullptr) count(kEnd);
  }

 private:
  CUTE_DEVICE void count(uint32_t steps) const {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(all_steps_), "r"(steps) : "memory");
  }

  int* all_steps_;  // of all CTAs; null: no throttle
  int futile_ = 0;
};

}  // namespace flash_cute::sm90
