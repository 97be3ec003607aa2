#include "kernels/passes/pad_rows.h"

#include <algorithm>

#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostPaddingCtas = 1 << 20;

__global__ void __launch_bounds__(kThreads) pad(const __grid_constant__ TensorView from, int64_t rows, int heads,
                                                int dim, uint8_t* to, int padded, int64_t numbers) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < numbers; i += int64_t(gridDim.x) * kThreads) {
    const int64_t vector = i / padded, row = vector / heads;
    const int col = static_cast<int>(i % padded), head = static_cast<int>(vector % heads);
    const uint8_t* const at = static_cast<const uint8_t*>(from.ptr) + row / rows * from.batch + row % rows * from.row +
                              head * from.head + col;
    to[i] = col < dim ? *at : 0;
  }
}

}  // namespace

cudaError_t pad_rows(const TensorView& from, int batches, int64_t rows, int heads, int dim, uint8_t* to, int padded,
                     cudaStream_t stream) {
  const int64_t numbers = batches * rows * heads * padded;
  const int64_t ctas = std::min((numbers + kThreads - 1) / kThreads, kMostPaddingCtas);
  return launch_kernel<pad>(ctas, kThreads, 0, stream, from, rows, heads, dim, to, padded, numbers);
}

}  // namespace flash_cute
