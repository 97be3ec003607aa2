// Dropout in Hopper's forward: an extra warpgroup generates the keep mask as bits in shared memory while the others
// compute. A wgmma thread owns 2 of the 4 rows that share a Philox call; here each call serves all its 16 elements.
#pragma once

#include "kernels/common/dropout.h"
#include "kernels/sm90/forward_traits.h"

namespace flash_cute::sm90 {

constexpr int kMaskWarps = 4;

// Compares two 16-bit random numbers with the threshold at once.
class KeepTest {
 public:
  CUTE_DEVICE explicit KeepTest(int drop_below /* not 0 */) : last_dropped_(drop_below - 1) {}

  // Keep bits of key octets 1 and 3, in bits 0 and 16; for octets 0 and 2 rotate `word` left by a byte.
  CUTE_DEVICE uint32_t operator()(uint32_t word) const {
    const uint32_t both = last_dropped_ * 0x10001, minus_both = (-last_dropped_ & 0xffff) * 0x10001;
    uint32_t most;
    asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(word), "r"(both));
    return __viaddmin_u16x2(most, minus_both, 0x10001);
  }

 private:
  uint32_t last_dropped_;  // a 16-bit number up to this one drops
};

// Layout of a keep word (one row of one thread): bytes 0 and 1 hold even and odd columns of key octets 0 and 1, bytes 2
// and 3 those of octets 2 and 3, two bits per 32 keys from the top bit down. prmt turns top bits into masks.

// The mask warpgroup: each warp generates the bits of 32 queries, those of two consumer warps.
template <KernelConfig C>
CUTE_DEVICE void generate_keep_mask(const ForwardParams& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  static_assert(C.warps == 2 * kMaskWarps);
  const FwdProblem& p = params.p;
  if (p.rules.rng == nullptr) return;
  const int warp = threadIdx.x / 32 % kMaskWarps, lane = threadIdx.x % 32;
  PipelineState<1> at;
  for (PipelineState<T::kStagesQ> at_q;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    const auto& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) return;
    const Dropout dropout(p.rules, int64_t(work.tile.batch) * p.heads + work.tile.head);
    const KeepTest keeps(p.rules.drop_below);
    const int query = work.tile.row + 32 * warp + lane / 4;
    CUTE_NO_UNROLL
    for (int n = work.tiles.count - 1; n >= 0; --n, at.advance()) {
      const int key = work.tiles.first_key(n) + lane % 4 * 2;
      uint32_t keep[4] = {};  // of the rows 8 apart from `query` on
      CUTE_NO_UNROLL
      for (int c = 0; c < C.block_n / 4; c += 8) {  // 32 keys
        CUTE_UNROLL
        for (int parity = 0; parity < 2; ++parity) {
          const uint4 bits = dropout.bits(query, key + column_offset(c + parity));
          const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
          CUTE_UNROLL
          for (int y = 0; y < 4; ++y) {
            const uint32_t even = keeps(__funnelshift_l(words[y], words[y], 8)), odd = keeps(words[y]);
            keep[y] |= ((even << (8 * parity + 7)) + (odd << (8 * parity + 6))) >> c / 4;
          }
        }
      }
      storage.pipeline_mask.producer_acquire(at);
      CUTE_UNROLL
      for (int y = 0; y < 4; ++y) storage.keep_mask[2 * warp + y / 2][y % 2][lane] = keep[y];
      storage.pipeline_mask.producer_commit(at);
    }
    storage.pipeline_q.consumer_release(at_q);
  }
}

// Sets dropped elements of this thread's weights (MMA=(2,2,N/8),1,1), 16 bits each, to 0.
template <class Weights>
CUTE_DEVICE void apply_keep_mask(Weights& weights, const uint32_t (&keep_of_rows)[2][32], int lane) {
  Tensor pairs = recast<uint32_t>(weights);  // ((1,2,N/8),1,1): two neighbouring columns each
  CUTE_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    const int row = i % 2, octet = i / 2 % 4;
    const uint32_t bits = keep_of_rows[row][lane] << (i / 8 * 2 + octet % 2);
    uint32_t mask;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(bits), "r"(octet < 2 ? 0x9988 : 0xbbaa));
    pairs(i) &= mask;
  }
}

}  // namespace flash_cute::sm90
