// Plan, allocate, launch: what every op does once its problem is described and its kernel is chosen.
#pragma once

#include "api/tensors.h"
#include "core/calibration.h"
#include "core/registry.h"

namespace flash_cute {

// Enqueues the kernel on the current stream of q's GPU. Its workspace is freed in stream order.
template <Op op>
void run(const Kernel<op>& kernel, const Problem<op>& problem, const Plan<op>& plan, const View& q) {
  Arena size;
  lay_out(size, kernel.config, problem, plan);
  Tensor memory;
  if (size.numbers() > 0) memory = allocate(q, {size.numbers()}, ScalarType::Float);
  Arena arena(size.numbers() > 0 ? static_cast<float*>(memory.data_ptr()) : nullptr);
  const Workspace<op> workspace = lay_out(arena, kernel.config, problem, plan);
  const cudaError_t error = kernel.launch({problem, plan, workspace}, current_stream(q));
  if (error != cudaSuccess) check_cuda(kernel.config.id().c_str(), error);
}

// The same with the plan of a call of this thread.
template <Op op>
void run(const Kernel<op>& kernel, const Problem<op>& problem, const View& q) {
  run(kernel, problem, plan_of_call<op>(kernel.config, problem, device(q.device)), q);
}

}  // namespace flash_cute
