#include "core/counter.h"

#include <map>
#include <mutex>
#include <utility>

namespace flash_cute {
namespace {

constexpr int kCountersAtOnce = 4096;
constexpr int kApart = 8;  // 32 bytes: counters of different streams do not share a sector

// Memory of zeros on the current device. Allowed while a stream is being captured, and never given back: graphs keep
// using it.
cudaError_t allocate_zeros(unsigned*& memory) {
  const size_t bytes = sizeof(unsigned) * kApart * kCountersAtOnce;
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
    cudaGetLastError();  // reported here: the next call must not see it
    return error;
  }
  memory = static_cast<unsigned*>(allocated);
  return cudaSuccess;
}

struct Pool {
  unsigned* next = nullptr;
  int left = 0;
  std::map<unsigned long long, unsigned*> of_streams;

  cudaError_t take(unsigned*& counter) {
    if (left == 0) {
      if (cudaError_t e = allocate_zeros(next)) return e;
      left = kCountersAtOnce;
    }
    counter = next;
    next += kApart;
    --left;
    return cudaSuccess;
  }
};

}  // namespace

cudaError_t tile_counter(unsigned*& counter, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<int, Pool> pools;
  int device = 0;
  cudaStreamCaptureStatus capture;
  unsigned long long id = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaStreamIsCapturing(stream, &capture)) return e;
  const std::lock_guard<std::mutex> lock(mutex);
  Pool& pool = pools[device];
  if (capture != cudaStreamCaptureStatusNone) return pool.take(counter);
  if (cudaError_t e = cudaStreamGetId(stream, &id)) return e;
  const auto [known, is_new] = pool.of_streams.try_emplace(id, nullptr);
  if (is_new) {
    if (cudaError_t e = pool.take(known->second)) {
      pool.of_streams.erase(known);
      return e;
    }
  }
  counter = known->second;
  return cudaSuccess;
}

}  // namespace flash_cute
