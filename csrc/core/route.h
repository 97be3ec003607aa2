// What one call runs, in order: choose_route() decides it, api/ allocates and launches what it lists, introspect.h
// prints it. Nothing else chooses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/built.h"
#include "core/config.h"
#include "core/device.h"
#include "core/plan.h"
#include "core/problem.h"

namespace flash_cute {

// Passes before and after a kernel, in one launch each but for backward's zero_fill, which has one for each gradient.
struct Passes {
  bool zero_fill = false;  // of rows that belong to no packed sequence
  bool combine_splits = false, probabilities = false, sink_gradient = false;
};

// A kernel with its plan. Without a kernel the step is left out.
template <Op op>
struct Step {
  const KernelConfig* kernel = nullptr;
  Plan<op> plan{};
  Passes passes;

  explicit operator bool() const { return kernel != nullptr; }
};

// Of forward: steps run in the order of the fields.
struct Route {
  bool count_keys = false;  // of packed sequences over pages
  bool append = false;      // new keys join the cache, queries are rotated
  Step<Op::Decode> decode;  // reads the cache,
  Step<Op::Fwd> in_pages;   // or a kernel of forward does
  bool gather = false;      // keys are laid out anew, for what follows
  int gathered_rows = 0;    // of each sequence
  // Row maxima under an element-wise rule cost a launch of their own: a kernel that has to know them rounds differently,
  // and out and lse must not depend on what else is returned.
  Step<Op::Fwd> row_max;
  Step<Op::Fwd> forward;  // over keys that are dense, packed or gathered

  bool over_cache() const { return decode || in_pages; }
  // Whether what follows the cache's kernel gives row maxima or probabilities alone: its out and lse are thrown away.
  bool repeats() const { return over_cache() && gather; }
};

// The route of a call among such kernels, and what this thread is limited to (limit.h). Throws NoKernel's error if none
// can do it.
Route choose_route(const Kernels& kernels, const FwdProblem& problem, const Device& gpu);
Route choose_route(const Kernels& kernels, const DecodeProblem& problem, const Device& gpu);
Step<Op::Bwd> choose_route(const Kernels& kernels, const BwdProblem& problem, const Device& gpu);

// The kernel of an op that a problem prefers: the one that was measured (calibration.h), which counts for calls of the
// op itself alone, else the one that heuristics.h prefers; null if none can do it.
template <Op op>
const KernelConfig* find_kernel(const Kernels& kernels, const Problem<op>& problem, const Device& gpu, bool measured);

// What reads a cache: a kernel of decoding, or of forward, for prompts in chunks, if that is estimated to take less time.
struct CacheKernels {
  const KernelConfig *decode = nullptr, *forward = nullptr;
  bool forward_is_taken = false;
};
CacheKernels find_cache_kernels(const Kernels& kernels, const DecodeProblem& problem, const Device& gpu);

// Whether a kernel of forward may. Where the caller says how keys are parted, it is always decoding: results must not
// depend on the batch.
bool may_be_forward(const DecodeProblem& problem);

// Whether kernels over a cache can read packed sequences over pages where they lie.
bool reads_pages_in_place(const DecodeProblem& problem);

// The problem over a cache that packed sequences over pages are, with their lengths at `lengths`.
DecodeProblem over_pages(const FwdProblem& problem, int* lengths);

// The problem over keys that are laid out anew, in contiguous tensors at k and v, with their lengths at `lengths`.
FwdProblem over_gathered(const FwdProblem& problem, int rows, const TensorView& k, const TensorView& v,
                         const int* lengths);
// The same before these are allocated.
FwdProblem over_gathered(const FwdProblem& problem, int rows);
// Contiguous (batch, rows, heads, dim) that is not allocated yet.
TensorView contiguous(const FwdProblem& problem, int64_t rows, int heads, int dim);
// Rows a sequence of packed sequences over pages: probabilities have a column for each key that there might be.
int gathered_rows(const FwdProblem& problem);

// The problem of a kernel of forward over a cache: lengths are those with the new keys.
FwdProblem in_pages(const DecodeProblem& problem);

// Names in the order of launches: passes by their functions, kernels by their ids.
std::vector<std::string> launches(const Route& route);
std::vector<std::string> launches(const Step<Op::Bwd>& step);

// Bytes that a call needs at once besides its results.
int64_t workspace_bytes(const Route& route, const FwdProblem& problem);
int64_t workspace_bytes(const Route& route, const DecodeProblem& problem);
int64_t workspace_bytes(const Step<Op::Bwd>& step, const BwdProblem& problem);

}  // namespace flash_cute
