// Scales and rounds the sums of dQ, after Hopper's backward.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/sm90/backward_2cta_traits.h"
#include "kernels/sm90/unrounded.h"

namespace flash_cute::sm90 {

template <KernelConfig C>
using TraitsOf = std::conditional_t<two_cta(C), TwoCtaTraits<C>, BackwardTraits<C>>;

template <KernelConfig C>
constexpr int kPostprocessThreads = 128 * TraitsOf<C>::kDqGroups;

// dQ = softmax_scale * sums, rounded; one query tile a CTA.
template <KernelConfig C>
__global__ void __launch_bounds__(kPostprocessThreads<C>)
    backward_postprocess(const __grid_constant__ BackwardParams params) {
  using T = TraitsOf<C>;
  using Element = typename T::Element;
  __shared__ alignas(1024) Element shared[C.block_m * C.head_dim];
  const BwdParams& p = params.p;
  const PassTile<C> tile(p, gridDim.x - 1 - blockIdx.x);
  if (threadIdx.x == 0 && !p.fp32_gradients) params.dq.prefetch();
  // After this wait all sums are complete.
  wait_on_dependent_grids();
  if (!tile.exists()) return;
  const int thread = threadIdx.x;
  typename T::MmaQ mma;
  Tensor tQrdQ = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
  auto sums = [&](int i) {
    return *reinterpret_cast<const float4*>(T::dq_sums(p, tile.padded_row, thread / 128) + dq_place<C>(i, thread));
  };
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); i += 4) *reinterpret_cast<float4*>(&tQrdQ(i)) = sums(i);
  const float scale = p.fwd.softmax_scale * p.fwd.rules.gradient_scale();
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); ++i) tQrdQ(i) *= scale;
  if (p.fp32_gradients) {
    Tensor at = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.head_dim>>{}));
    store_unrounded(tQrdQ, at, p.dq, tile.span, tile.row, tile.head, tile.batch, 0, p.fwd.head_dim);
    return;
  }
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto thread_out = copy_out.get_thread_slice(thread);
  Tensor out = make_tensor(make_smem_ptr(shared), typename T::LayoutQ{});  // (query,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<Element>(tQrdQ)), thread_out.partition_D(out));
  tma_store_fence();
  // After this barrier the tile is in shared memory, visible to the TMA.
  __syncthreads();
  if (thread != 0) return;
  params.dq.template store<C.block_m, C.head_dim>(shared, tile.span, tile.row, tile.head, tile.batch);
  tma_store_arrive();
  tma_store_wait<0>();
}

}  // namespace flash_cute::sm90
