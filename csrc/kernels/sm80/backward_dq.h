// The sums of dQ in fp32 global memory, and the pass after backward that rounds them.
#pragma once

#include "kernels/common/backward_preprocess.h"
#include "kernels/ampere/mma.h"
#include "kernels/ampere/tile_io.h"

namespace flash_cute::sm80 {

using namespace ampere;

// Warps along the rows of a result: those whose shares are the closest to squares, so that they read the least.
constexpr int warps_down(int rows, int cols, int warps) {
  int best = 0;
  for (int down = 1; down <= warps; down *= 2) {
    const int across = warps / down;
    if (rows % (16 * down) != 0 || cols % (16 * across) != 0) continue;
    if (best == 0 || rows / down + cols / across < rows / best + cols * best / warps) best = down;
  }
  return best;
}

template <KernelConfig C>
struct DqTraits {
  static constexpr int kDown = warps_down(C.block_m, C.head_dim, C.warps);
  static constexpr int kAcross = C.warps / kDown;
  using Element = ElementOf<C.dtype>;
  using Result = SharedResult<Element, C.block_m, C.head_dim, kDown, kAcross>;
  static constexpr int kSmemBytes = C.block_m * C.head_dim * sizeof(Element);

  CUTE_DEVICE static auto accumulator() {
    return make_accumulator<C.block_m, C.head_dim, kDown, kAcross>();  // (MMA,MMA_M,MMA_D)
  }
};

// The fp32 sums of one tile of dQ, in an order in which the additions and loads of a warp fall on consecutive
// addresses: as many numbers of a thread lie together as one reduction adds, then come those of the next thread.
template <KernelConfig C>
class DqSums {
 public:
  // The sums of the tile whose first row is `row`, among the padded rows of all heads.
  CUTE_DEVICE DqSums(const BwdParams& p, int64_t row)
      : mine_(p.dq_accum + row * C.head_dim + threadIdx.x * kTogether) {}

  template <class Accumulator>
  CUTE_DEVICE void add(const Accumulator& acc) const {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += kTogether) {
#if __CUDA_ARCH__ >= 900
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(mine_ + i * C.threads()), "f"(acc(i)),
                   "f"(acc(i + 1)), "f"(acc(i + 2)), "f"(acc(i + 3))
                   : "memory");
#else
      atomicAdd(mine_ + i * C.threads(), acc(i));
#endif
    }
  }

  template <class Accumulator>
  CUTE_DEVICE void load(Accumulator& acc) const {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += kTogether) {
      if constexpr (kTogether == 4) {
        *reinterpret_cast<float4*>(&acc(i)) = *reinterpret_cast<const float4*>(mine_ + i * C.threads());
      } else {
        acc(i) = mine_[i * C.threads()];
      }
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  static constexpr int kTogether = 4;  // numbers that one reduction adds
#else
  static constexpr int kTogether = 1;
#endif

  float* mine_;  // this thread's first
};

// dQ = softmax_scale * sums, rounded.
template <KernelConfig C>
__global__ void __launch_bounds__(C.threads()) backward_postprocess(const __grid_constant__ BwdParams p) {
  using T = DqTraits<C>;
  using Element = typename T::Element;
  extern __shared__ __align__(128) char smem[];
  auto* shared = reinterpret_cast<Element*>(smem);
  const PassTile<C> tile(p, gridDim.x - 1 - blockIdx.x);
  if (!tile.exists()) return;
  auto tQrdQ = T::accumulator();  // (MMA,MMA_M,MMA_D)
  DqSums<C>(p, tile.padded_row).load(tQrdQ);
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); ++i) tQrdQ(i) *= p.fwd.softmax_scale * p.fwd.rules.gradient_scale();
  typename T::Result(shared, threadIdx.x / 32).store(tQrdQ);
  // After this barrier all of dQ's tile is in shared memory.
  __syncthreads();
  TileCopy<Element, C.threads(), C.block_m, C.head_dim>(p.dq, tile.batch, tile.head, tile.span.offset, tile.row,
                                                        {0, tile.span.length}, p.fwd.head_dim, shared, threadIdx.x)
      .store();
}

}  // namespace flash_cute::sm80
