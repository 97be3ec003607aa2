#include "kernels/passes/zero_fill.h"

#include "kernels/common/gap_fill.h"
#include "kernels/common/pdl.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) fill_gaps(const __grid_constant__ GapFills<Op::Fwd> gaps) {
  // After this wait the kernel before has ended: it may read what is filled here.
  wait_on_dependent_grids();
  launch_dependent_grids();
  gaps.fill(threadIdx.x / 32, kThreads / 32, blockIdx.x, gridDim.x);
}

}  // namespace

cudaError_t zero_fill(const FwdProblem& p, cudaStream_t stream) {
  if (p.dense()) return cudaSuccess;
  using Fills = GapFills<Op::Fwd>;
  return launch_with_pdl<fill_gaps>({Fills::kCtas, kThreads, 0}, stream, Fills::of_outputs(p));
}

}  // namespace flash_cute
