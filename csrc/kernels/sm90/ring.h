// Buffers in shared memory that one producer fills by TMA and several warps empty, in turns.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

// Which buffer is next, and in which round of the ring.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t phase = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <int kStages>
struct Ring {
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  CUTE_DEVICE void init(int consumer_warps) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(consumer_warps);
    }
  }

  // Producer: waits until the buffer is empty.
  CUTE_DEVICE void wait_empty(const Cursor<kStages>& at) { empty[at.stage].wait(at.phase ^ 1); }

  // Producer: all is said, and `bytes` will come. The result is the barrier to count them at.
  CUTE_DEVICE uint64_t* expect(const Cursor<kStages>& at, uint32_t bytes) {
    full[at.stage].arrive_and_expect_tx(bytes);
    return reinterpret_cast<uint64_t*>(&full[at.stage]);
  }

  // Consumers: wait until the buffer is full.
  CUTE_DEVICE void wait(const Cursor<kStages>& at) { full[at.stage].wait(at.phase); }

  // Consumers: this warp has read the buffer.
  CUTE_DEVICE void release(const Cursor<kStages>& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[at.stage].arrive();
  }
};

}  // namespace flash_cute::sm90
