// Why a kernel does not support a problem: one list of reasons, for the choice, for errors and for explanations.
#pragma once

#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

struct Refusal {
  bool dtype = false, tier = false, head_dim = false, head_dim_v = false, gpu = false, shared_memory = false,
       tensor_map = false, empty_columns = false, pages = false, dropout = false, splits = false,
       fp32_gradients = false, vectors = false, tiles = false, lists = false, group = false, cache = false;

  bool any() const {
    return dtype || tier || head_dim || head_dim_v || gpu || shared_memory || tensor_map || empty_columns || pages ||
           dropout || splits || fp32_gradients || vectors || tiles || lists || group || cache;
  }
};

template <Op op>
Refusal refusal(const KernelConfig& config, const Problem<op>& problem, const Device& device);

// Whether there is no reason. Faster than refusal(): sizes and the GPU already refuse most kernels.
template <Op op>
bool fits(const KernelConfig& config, const Problem<op>& problem, const Device& device);

// The reasons as text, with what the kernel needs and what the problem has. Empty if there is none.
template <Op op>
std::string explain(const Refusal& refusal, const KernelConfig& config, const Problem<op>& problem,
                    const Device& device);

// The reason of a kernel that is not in this build, for any problem.
constexpr const char* kNotBuilt = "not in this build of the library";

void add_reason(std::string& reasons, const std::string& reason);

// The problem whose costs rank kernels: with num_splits or split_size of batch 1, since results must not depend on the
// batch.
template <class P>
const FwdProblem& problem_to_rank(const P& p) {
  return forward_of(p);
}

inline DecodeProblem problem_to_rank(const DecodeProblem& p) {
  DecodeProblem one = p;
  if (!p.even_splits()) one.fwd.batch = 1;
  return one;
}

}  // namespace flash_cute
