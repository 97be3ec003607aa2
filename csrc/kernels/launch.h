// Launching a kernel: its shared memory allowed once a device, its grid one-dimensional, errors returned.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flash_cute {

// CTAs that a one-dimensional grid can have.
constexpr int64_t kMaxCtas = (int64_t{1} << 31) - 1;

template <auto kKernel, class... Params>
cudaError_t launch_kernel(int64_t ctas, int threads, int smem_bytes, cudaStream_t stream, const Params&... params) {
  if (ctas == 0) return cudaSuccess;
  if (ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
  static std::atomic<uint64_t> allowed{0};  // devices on which the kernel may have its shared memory
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (smem_bytes > 48 * 1024 && !(allowed.load(std::memory_order_relaxed) & bit)) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes)) {
      return e;
    }
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  kKernel<<<static_cast<unsigned>(ctas), threads, smem_bytes, stream>>>(params...);
  return cudaGetLastError();
}

}  // namespace flash_cute
