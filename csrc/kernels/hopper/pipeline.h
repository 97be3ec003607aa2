// Buffers in shared memory that producers fill, by TMA or as warps, and consumers empty.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

namespace flash_cute::hopper {

// CUTLASS's barriers and fences do not tell the compiler that reads and writes of shared memory may not move past them.
CUTE_DEVICE void compiler_fence() {
  asm volatile("" ::: "memory");
}

// The next buffer, and the phase of its barriers.
template <int kStages>
struct PipelineState {
  uint32_t count = 0;  // of buffers before

  CUTE_DEVICE uint32_t stage() const { return count % kStages; }
  CUTE_DEVICE uint32_t phase() const { return count / kStages % 2; }
  CUTE_DEVICE void advance() { ++count; }
};

// With kCluster > 1 consumers of all CTAs of the cluster release a buffer. A waiter must also arrive on this barrier or
// on a later one: an mbarrier has one phase bit, so a waiter that falls two phases behind would never see its phase.
template <int kStages, int kCluster = 1>
struct Pipeline {
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];

  // Producers are one thread that calls producer_expect_tx(), or warps that call producer_commit().
  CUTE_DEVICE void init(int consumer_warps, int producers = 1) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(producers);
      empty[i].init(consumer_warps * kCluster);
    }
  }

  // Whether the next wait would return at once. An early test hides its latency.
  CUTE_DEVICE bool consumer_test_wait(const PipelineState<kStages>& at) const {
    return full[at.stage()].test_wait(at.phase());
  }
  CUTE_DEVICE bool producer_test_acquire(const PipelineState<kStages>& at) const {
    return empty[at.stage()].test_wait(at.phase() ^ 1);
  }

  // Producer: waits until the buffer is empty.
  CUTE_DEVICE void producer_acquire(const PipelineState<kStages>& at, bool is_empty = false) {
    if (!is_empty) empty[at.stage()].wait(at.phase() ^ 1);
    compiler_fence();
  }

  // Producer: `bytes` will arrive; nothing else is to be written. Returns the barrier that counts them.
  CUTE_DEVICE uint64_t* producer_expect_tx(const PipelineState<kStages>& at, uint32_t bytes) {
    compiler_fence();
    full[at.stage()].arrive_and_expect_tx(bytes);
    return reinterpret_cast<uint64_t*>(&full[at.stage()]);
  }

  // Producers: this warp has written its rows of the buffer.
  CUTE_DEVICE void producer_commit(const PipelineState<kStages>& at) {
    compiler_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) full[at.stage()].arrive();
  }

  // Consumers: waits until the buffer is full.
  CUTE_DEVICE void consumer_wait(const PipelineState<kStages>& at, bool is_full = false) {
    if (!is_full) full[at.stage()].wait(at.phase());
    compiler_fence();
  }

  // Consumers: this warp has read the buffer.
  CUTE_DEVICE void consumer_release(const PipelineState<kStages>& at) {
    compiler_fence();
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kCluster == 1) {
      if (lane == 0) empty[at.stage()].arrive();
    } else {
      if (lane < kCluster) empty[at.stage()].arrive(lane);
    }
  }
};

// Copies shared memory to another CTA of the cluster, which counts the bytes at its own copy of `barrier`.
CUTE_DEVICE void send_to_cta(int rank, void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), rank)),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes),
               "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), rank))
               : "memory");
}

}  // namespace flash_cute::hopper
