#include "kernels/passes/combine.h"

#include "kernels/common/merge.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kWarps = 4;

// One warp a row.
template <class Element>
__global__ void __launch_bounds__(32 * kWarps) combine_rows(const __grid_constant__ Partials p) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  Element* result = static_cast<Element*>(p.result) + row * p.dim;
  using Value = cutlass::Array<float, 1>;
  const float lse = merge_row<1, 16>(
      p.splits, [&](int i) { return p.lse[i * p.rows + row]; },
      [&](int i, int column) { return Value{p.out[(i * p.rows + row) * p.dim + column]}; }, p.dim, -INFINITY,
      [&](int column, const Value& x) { result[column] = Element(x[0]); });
  if (threadIdx.x % 32 == 0) p.result_lse[row] = lse;
}

template <class Element>
cudaError_t launch(const Partials& p, cudaStream_t stream) {
  return launch_kernel<combine_rows<Element>>((p.rows + kWarps - 1) / kWarps, 32 * kWarps, 0, stream, p);
}

}  // namespace

cudaError_t combine(const Partials& p, cudaStream_t stream) {
  switch (p.element) {
    case Partials::Element::FP16:
      return launch<cutlass::half_t>(p, stream);
    case Partials::Element::BF16:
      return launch<cutlass::bfloat16_t>(p, stream);
    default:
      return launch<float>(p, stream);
  }
}

}  // namespace flash_cute
