// Lists kernels, plans calls, and explains the choice, as JSON. It needs only sizes, launches nothing, and needs no
// GPU.
#pragma once

#include <cstdint>
#include <string>

namespace flash_cute {

// An array: every row of the families, its bytes of shared memory, and whether this build has the kernel.
std::string describe_kernels();

// The properties of the GPU with this index that plans depend on. Throws std::runtime_error if there is none.
std::string describe_gpu(int64_t index);

// The plan of a problem: kernel, launches, splits, workspace. plan_request.cpp has the problem's fields. Throws
// std::runtime_error with the reasons of each kernel if none can do it, std::invalid_argument for a bad problem.
std::string plan(std::string problem);

// An array: every kernel of the ops that may do the problem, with a verdict, "chosen", "fits" or "refused", and the
// reason in words.
std::string explain(std::string problem);

}  // namespace flash_cute
