// Allocates the workspaces of a route, and launches its steps.
#pragma once

#include <algorithm>
#include <limits>

#include "api/tensors.h"
#include "core/layout/tiles.h"
#include "core/registry.h"
#include "core/route.h"
#include "kernels/passes/combine_splits.h"
#include "kernels/passes/probabilities.h"
#include "kernels/passes/sink_grad.h"
#include "kernels/passes/transpose_values.h"
#include "kernels/passes/zero_fill.h"

namespace flash_cute {

inline cudaError_t zero_fill(const DecodeProblem& p, cudaStream_t stream) {
  return zero_fill(p.fwd, stream);
}

// The most CTAs of a kernel with one for each tile of queries, or in backward of keys.
inline int64_t most_tiles(const KernelConfig& config, const FwdProblem& p) {
  return int64_t(detail::ceil_div(p.seqlen_q, config.block_m)) * p.heads * p.batch;
}
inline int64_t most_tiles(const KernelConfig&, const DecodeProblem&) {
  return 0;  // its CTAs are as many as its plan says
}
inline int64_t most_tiles(const KernelConfig& config, const BwdProblem& p) {
  const int64_t of_keys = int64_t(detail::ceil_div(p.fwd.seqlen_k, config.block_n)) * p.fwd.heads_k * p.fwd.batch;
  return std::max(most_tiles(config, p.fwd), of_keys);
}

// Enqueues a step, if there is one, on the current stream of q's GPU. Its workspace is freed in stream order.
template <Op op>
void run(const Step<op>& step, const Problem<op>& problem, const View& q) {
  if (!step) return;
  const KernelConfig& config = *step.kernel;
  Arena size;
  lay_out(size, config, problem, step.plan);
  Tensor memory;
  if (size.numbers() > 0) memory = allocate(q, {size.numbers()}, ScalarType::Float);
  Arena arena(size.numbers() > 0 ? static_cast<float*>(memory.data_ptr()) : nullptr);
  const Params<op> params{problem, step.plan, lay_out(arena, config, problem, step.plan)};
  const cudaStream_t stream = current_stream(q);
  // What CUDA would refuse to launch is refused before anything is written.
  if (most_tiles(config, problem) > std::numeric_limits<int>::max())
    check_cuda(config.id().c_str(), cudaErrorInvalidConfiguration);
  if constexpr (op != Op::Bwd) {
    if (step.passes.zero_fill) check_cuda("zero_fill", zero_fill(problem, stream));
  }
  if constexpr (op == Op::Fwd) {
    if (step.passes.transpose_values) check_cuda("transpose_values", transpose_values(params, stream));
  }
  const cudaError_t error = kernel_of<op>(step.kernel).launch(params, stream);
  if (error != cudaSuccess) check_cuda(config.id().c_str(), error);
  if constexpr (op == Op::Fwd) {
    if (step.passes.combine_splits) check_cuda("combine_splits", combine_splits(params, stream));
    if (step.passes.probabilities) check_cuda("probabilities", write_probabilities(params, stream));
  }
  if constexpr (op == Op::Bwd) {
    if (step.passes.sink_gradient) check_cuda("sink_gradient", sink_gradient_pass(params, stream));
  }
}

}  // namespace flash_cute
