#include "core/counter.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <utility>

namespace flash_cute {
namespace {

constexpr int kAllocation = 32768;  // counters
constexpr int kSector = 8;          // counters in a sector of 32 bytes, which streams do not share

// Allocates zeros on the current device, also while a stream is being captured. They are never freed: graphs keep using
// them.
cudaError_t allocate_zeros(unsigned*& memory, int count) {
  const size_t bytes = sizeof(unsigned) * count;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (cudaError_t e = cudaThreadExchangeStreamCaptureMode(&mode)) return e;
  void* allocated = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaMalloc(&allocated, bytes);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemsetAsync(allocated, 0, bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) {
    cudaFree(allocated);
    return error;
  }
  memory = static_cast<unsigned*>(allocated);
  return cudaSuccess;
}

struct Pool {
  unsigned* next = nullptr;
  int left = 0;
  std::map<std::pair<unsigned long long, int>, unsigned*> of_streams;  // by stream and number of counters

  cudaError_t take(unsigned*& counters, int count) {
    count = (count + kSector - 1) / kSector * kSector;
    if (left < count) {
      const int allocated = std::max(kAllocation, count);
      if (cudaError_t e = allocate_zeros(next, allocated)) return e;
      left = allocated;
    }
    counters = next;
    next += count;
    left -= count;
    return cudaSuccess;
  }
};

}  // namespace

cudaError_t zeroed_counters(unsigned*& counters, int count, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<int, Pool> pools;
  int device = 0;
  cudaStreamCaptureStatus capture;
  unsigned long long id = 0;
  count = static_cast<int>(std::bit_ceil(static_cast<unsigned>(count)));  // few sizes, so that counters are reused
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaStreamIsCapturing(stream, &capture)) return e;
  const std::lock_guard<std::mutex> lock(mutex);
  Pool& pool = pools[device];
  if (capture != cudaStreamCaptureStatusNone) return pool.take(counters, count);
  if (cudaError_t e = cudaStreamGetId(stream, &id)) return e;
  const auto [known, is_new] = pool.of_streams.try_emplace({id, count}, nullptr);
  if (is_new) {
    if (cudaError_t e = pool.take(known->second, count)) {
      pool.of_streams.erase(known);
      return e;
    }
  }
  counters = known->second;
  return cudaSuccess;
}

}  // namespace flash_cute
