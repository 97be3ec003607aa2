// Buffers in shared memory that producers fill and consumers empty, in turns: one thread by TMA, or warps.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::sm90 {

// The compiler may not move reads and writes of shared memory past CUTLASS's barriers and fences, which do not tell it
// so.
CUTE_DEVICE void keep_order() {
  asm volatile("" ::: "memory");
}

// Which buffer is next, and in which round of the ring: odd or even.
template <int kStages>
struct Cursor {
  uint32_t count = 0;  // of buffers before

  CUTE_DEVICE uint32_t stage() const { return count % kStages; }
  CUTE_DEVICE uint32_t phase() const { return count / kStages % 2; }
  CUTE_DEVICE void advance() { ++count; }
};

// With kCluster > 1 each buffer is empty when consumers of all of a cluster's CTAs have read theirs. Who waits for a
// barrier has to be counted at it or behind it: else it may go on by two phases, which have one parity, before he has
// looked.
template <int kStages, int kCluster = 1>
struct Ring {
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  // By one thread that calls expect(), or by warps that publish().
  CUTE_DEVICE void init(int consumer_warps, int producers = 1) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(producers);
      empty[i].init(consumer_warps * kCluster);
    }
  }

  // Whether the next wait() or wait_empty() is over. Who asks ahead, and says so then, need not wait for the answer.
  CUTE_DEVICE bool is_full(const Cursor<kStages>& at) const { return full[at.stage()].test_wait(at.phase()); }
  CUTE_DEVICE bool is_empty(const Cursor<kStages>& at) const { return empty[at.stage()].test_wait(at.phase() ^ 1); }

  // Producer: waits until the buffer is empty.
  CUTE_DEVICE void wait_empty(const Cursor<kStages>& at, bool is_empty = false) {
    if (!is_empty) empty[at.stage()].wait(at.phase() ^ 1);
    keep_order();
  }

  // Producer: all is said, and `bytes` will come. The result is the barrier to count them at.
  CUTE_DEVICE uint64_t* expect(const Cursor<kStages>& at, uint32_t bytes) {
    keep_order();
    full[at.stage()].arrive_and_expect_tx(bytes);
    return reinterpret_cast<uint64_t*>(&full[at.stage()]);
  }

  // Producers: this warp has written its part of the buffer.
  CUTE_DEVICE void publish(const Cursor<kStages>& at) {
    keep_order();
    __syncwarp();
    if (threadIdx.x % 32 == 0) full[at.stage()].arrive();
  }

  // Consumers: wait until the buffer is full.
  CUTE_DEVICE void wait(const Cursor<kStages>& at, bool is_full = false) {
    if (!is_full) full[at.stage()].wait(at.phase());
    keep_order();
  }

  // Consumers: this warp has read the buffer.
  CUTE_DEVICE void release(const Cursor<kStages>& at) {
    keep_order();
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kCluster == 1) {
      if (lane == 0) empty[at.stage()].arrive();
    } else {
      if (lane < kCluster) empty[at.stage()].arrive(lane);
    }
  }
};

// Copies shared memory to another CTA of the cluster, where the bytes are counted at the barrier that is there what
// `barrier` is here.
CUTE_DEVICE void send_to_cta(int rank, void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), rank)),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes),
               "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), rank))
               : "memory");
}

}  // namespace flash_cute::sm90
