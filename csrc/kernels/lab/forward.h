// The laboratory's forward, FlashAttention-2 (arXiv 2307.08691) on mma.sync: one kernel, in which every field of its
// config is one technique that can be left out.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/softmax.h"
#include "kernels/lab/fragments.h"
#include "kernels/lab/registry.h"
#include "kernels/lab/softmax.h"
#include "kernels/launch.h"

namespace flash_cute::lab {

template <FlashForwardKernelConfig C>
struct ForwardTraits {
  static_assert(check_config<C>());
  using Atom = typename ampere::Mma16816<C.dtype>::Atom;
  using Element = ElementOf<C.dtype>;
  static constexpr int kRowsOfWarp = C.B_r / C.n_warps;
  template <int kRows>
  using Copy = BlockCopy<Element, C.threads(), kRows, C.d_head, C.swizzled, C.async_copy>;
  template <Side kSide, bool kTransposed, int kRows>
  using Operand = BlockOperand<kSide, kTransposed, Element, kRows, C.d_head, C.swizzled>;
  using OperandQ = Operand<Side::A, false, kRowsOfWarp>;
  using OperandK = Operand<Side::B, false, C.B_c>;
  using OperandV = Operand<Side::B, true, C.B_c>;
  using FragmentsQ = FragmentsA<OperandQ, C.Q_mma_load_K_tiles, C.mma_double_buffer_loads>;
  using FragmentsK = FragmentsB<OperandK, C.K_mma_load_K_tiles, C.mma_double_buffer_loads>;
  using FragmentsV = FragmentsB<OperandV, C.V_mma_load_K_tiles, C.mma_double_buffer_loads>;
  static constexpr int kRowsOfThread = kRowsOfWarp / 8;
  struct Storage {
    Element q[C.B_r * C.d_head];  // O on the way out
    Element k[C.B_c * C.d_head];
    Element v[C.B_c * C.d_head];
  };
  static_assert(sizeof(Storage) == C.smem_bytes());
};

template <FlashForwardKernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas()) forward(const __grid_constant__ ForwardKernelArgs p) {
  using T = ForwardTraits<C>;
  using Element = typename T::Element;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);

  // CTAs of one head are neighbours, so that its K and V come from the L2 cache.
  const int query_blocks = p.seq_len / C.B_r, head_of_all = blockIdx.x / query_blocks;
  const int batch = head_of_all / p.heads, head = head_of_all % p.heads;
  const int first_row = blockIdx.x % query_blocks * C.B_r, warp_row = threadIdx.x / 32 * T::kRowsOfWarp;

  typename T::template Copy<C.B_r> copy_q(p.q, batch, head, first_row, storage.q);
  typename T::template Copy<C.B_c> copy_k(p.k, batch, head, 0, storage.k);
  typename T::template Copy<C.B_c> copy_v(p.v, batch, head, 0, storage.v);
  copy_q.load();
  if constexpr (C.eager_load_blocks) copy_k.load();

  typename T::FragmentsQ q{typename T::OperandQ(storage.q, warp_row)};
  typename T::FragmentsK k{typename T::OperandK(storage.k, 0)};
  typename T::FragmentsV v{typename T::OperandV(storage.v, 0)};
  Tensor tOrO = ampere::make_accumulator<C.B_r, C.d_head, C.n_warps, 1>();  // (MMA,MMA_M,MMA_D)
  clear(tOrO);
  Tensor output = rows_and_columns(tOrO);  // (rows,dims)
  using Softmax =
      std::conditional_t<C.optimized_softmax, OnlineSoftmax<T::kRowsOfThread>, PlainSoftmax<T::kRowsOfThread>>;
  Softmax softmax(p.softmax_scale * (C.optimized_softmax ? kLog2e : 1.f));

  // After it Q is visible to all, with eager loads K(0) too.
  arrive<C.async_copy>();
  q.begin();

  CUTE_NO_UNROLL
  for (int n = 0; n < p.seq_len / C.B_c; ++n) {
    // After arriving K(n) is visible to all, and nobody still reads V(n - 1).
    if constexpr (!C.eager_load_blocks) copy_k.load();
    if (!C.eager_load_blocks || n > 0) arrive<C.async_copy>();
    if constexpr (C.eager_load_blocks) copy_v.load();

    Tensor tSrS = ampere::make_accumulator<C.B_r, C.B_c, C.n_warps, 1>();  // (MMA,MMA_M,MMA_N)
    clear(tSrS);
    Tensor scores = rows_and_columns(tSrS);  // (rows,columns)
    product<typename T::Atom>(tSrS, q, k);
    if constexpr (C.optimized_softmax) {
      softmax.update_max(scores, output);
    } else {
      softmax.exponentiate(scores, output);
    }

    // After arriving V(n) is visible to all, and nobody still reads K(n).
    if constexpr (!C.eager_load_blocks) copy_v.load();
    arrive<C.async_copy>();
    if (C.eager_load_blocks && n + 1 < p.seq_len / C.B_c) copy_k.load();

    Tensor rP = as_operand_a(tSrS);  // (MMA,MMA_M,MMA_N/2)
    auto weights = [&](int step) {  // of 16 keys; optimized, their exponentials run under the products before
      if constexpr (C.optimized_softmax) softmax.exponentiate(scores, 4 * step, 4 * step + 4);
      return converted<Element>(rP(_, _, step));
    };
    product<typename T::Atom>(tOrO, ComputedA{weights}, v);
  }

  if constexpr (C.optimized_softmax) {
    softmax.finish(output, -INFINITY, 1.f);
  } else {
    softmax.finish(output);
  }
  store_rows<Element, C.d_head, C.swizzled>(tOrO, storage.q, p.o, batch, head, first_row);
}

template <FlashForwardKernelConfig C>
cudaError_t launch(const ForwardKernelArgs& args, cudaStream_t stream) {
  const int64_t ctas = int64_t(args.batch) * args.heads * (args.seq_len / C.B_r);
  return launch_kernel<forward<C>>(ctas, C.threads(), C.smem_bytes(), stream, args);
}

template <FlashForwardKernelConfig C>
cudaError_t usage(Usage& result) {
  if (cudaError_t e = allow_shared_memory<forward<C>>(C.smem_bytes())) return e;
  cudaFuncAttributes attributes;
  if (cudaError_t e = cudaFuncGetAttributes(&attributes, forward<C>)) return e;
  result.registers = attributes.numRegs;
  result.local_bytes = static_cast<int>(attributes.localSizeBytes);
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&result.ctas_per_sm, forward<C>, C.threads(), C.smem_bytes());
}

}  // namespace flash_cute::lab
