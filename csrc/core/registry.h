// The kernels in this library and the choice among them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "core/built.h"
#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace flash_cute {

// Enqueues the kernel C and its passes on a stream. Defined in the units that cmake/units.cmake makes of the rows, where
// it is the launch of the row's family.
template <KernelConfig C>
cudaError_t launch(const Params<C.op>& params, cudaStream_t stream);

template <Op op>
struct Kernel {
  KernelConfig config;
  cudaError_t (*launch)(const Params<op>&, cudaStream_t);
};

// Kernels of this build, family by family, in the order of rows.def.
const std::vector<Kernel<Op::Fwd>>& fwd_kernels();
const std::vector<Kernel<Op::Bwd>>& bwd_kernels();
const std::vector<Kernel<Op::Decode>>& decode_kernels();

// Of forward's kernels that can do a problem over a cache the one that heuristics.h prefers; null if none can. What was
// measured of calls of forward (calibration.h) does not count.
const Kernel<Op::Fwd>* find_over_cache(const FwdProblem& problem, const Device& device);

// The same where no other kernel would do: throws NoKernel's error (limit.h) if none can.
const Kernel<Op::Fwd>& select_over_cache(const FwdProblem& problem, const Device& device);

// Of the kernels that can do a call the calibrated one (calibration.h), else the one that heuristics.h prefers. Throws
// NoKernel's error (limit.h) if none can.
template <Op op>
const Kernel<op>& select(const std::vector<Kernel<op>>& kernels, const Problem<op>& problem, const Device& device);

}  // namespace flash_cute
