// The steps of one call, in order. Only choose_route() chooses them; api/ allocates and launches them, introspect.h
// prints them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/built.h"
#include "core/config.h"
#include "core/device.h"
#include "core/e4m3.h"
#include "core/plan.h"
#include "core/problem.h"

namespace flash_cute {

// Passes before and after a kernel, in one launch each.
struct Passes {
  bool zero_fill =
      false;  // of rows that belong to no packed sequence, if the kernel or its first pass does not fill them
  bool transpose_values = false;  // of e4m3
  bool combine_splits = false;  // decode's kernels launch theirs themselves
  bool probabilities = false, sink_gradient = false;
};

// A kernel with its plan. Without a kernel the step is left out.
template <Op op>
struct Step {
  const KernelConfig* kernel = nullptr;
  Plan<op> plan{};
  Passes passes;

  explicit operator bool() const { return kernel != nullptr; }
};

// The route of forward. Steps run in the order of the fields.
struct Route {
  bool count_keys = false;  // of packed sequences over pages
  bool append = false;      // new keys join the cache, queries are rotated
  Step<Op::Decode> decode;  // a decode kernel reads the cache in place,
  Step<Op::Fwd> in_pages;   // or a forward kernel does
  bool gather = false;      // keys are copied out of the cache, for the next steps
  int gathered_rows = 0;    // of each sequence
  Fp8Copies copies;         // of e4m3 inputs, whose gather is the one above
  // Row maxima under an element-wise rule need a launch of their own: a kernel that computes them rounds differently,
  // and out and lse must not depend on optional results.
  Step<Op::Fwd> row_max;
  Step<Op::Fwd> forward;  // over keys that are dense, packed or gathered, or e4m3 in pages

  bool over_cache() const { return decode || in_pages; }
  // Whether the steps after the cache's kernel compute the call again, for row maxima or probabilities. Their out and
  // lse are discarded.
  bool repeats() const { return over_cache() && gather; }
};

// The route of a call with these kernels, under this thread's limit (limit.h). Throws an error if none supports it.
Route choose_route(const Kernels& kernels, const FwdProblem& problem, const Device& gpu);
Route choose_route(const Kernels& kernels, const DecodeProblem& problem, const Device& gpu);
Step<Op::Bwd> choose_route(const Kernels& kernels, const BwdProblem& problem, const Device& gpu);

// The preferred kernel of an op for a problem: with `measured` that of the calibration (calibration.h), if it has one,
// else the one that heuristics.h prefers; null if none supports the problem.
template <Op op>
const KernelConfig* find_kernel(const Kernels& kernels, const Problem<op>& problem, const Device& gpu, bool measured);

// The kernel that reads a cache: of decode, or of forward if that is estimated to be faster, as for chunks of prompts.
struct CacheKernels {
  const KernelConfig *decode = nullptr, *forward = nullptr;
  bool forward_is_taken = false;
};
CacheKernels find_cache_kernels(const Kernels& kernels, const DecodeProblem& problem, const Device& gpu);

// Whether a kernel of forward may read the cache. If the caller gives num_splits or split_size only decode may: results
// must not depend on the batch. Nor does forward read 8 bits.
bool may_be_forward(const DecodeProblem& problem);

// Whether kernels over a cache can read packed sequences over pages in place.
bool reads_pages_in_place(const DecodeProblem& problem);

// Packed sequences over pages as a problem over a cache, with their lengths at `lengths`.
DecodeProblem over_pages(const FwdProblem& problem, const int* lengths);
// The same problem before the lengths are allocated.
DecodeProblem over_pages(const FwdProblem& problem);

// The problem over keys that were gathered in contiguous tensors k and v, with their lengths at `lengths`.
FwdProblem over_gathered(const FwdProblem& problem, int rows, const TensorView& k, const TensorView& v,
                         const int* lengths);
// The same problem before the tensors are allocated.
FwdProblem over_gathered(const FwdProblem& problem, int rows);
// Contiguous (batch, rows, heads, dim) that is not allocated yet.
TensorView contiguous(const FwdProblem& problem, int64_t rows, int heads, int dim);
// Rows per sequence of packed sequences over pages: probabilities have a column for each possible key.
int gathered_rows(const FwdProblem& problem);

// The problem of a kernel of forward over a cache; lengths include the new keys.
FwdProblem in_pages(const DecodeProblem& problem);

// Names in the order of launches: passes by their functions, kernels by their ids.
std::vector<std::string> launches(const Route& route);
std::vector<std::string> launches(const Step<Op::Bwd>& step);

// Bytes that a call needs at once besides its results.
int64_t workspace_bytes(const Route& route, const FwdProblem& problem);
int64_t workspace_bytes(const Route& route, const DecodeProblem& problem);
int64_t workspace_bytes(const Step<Op::Bwd>& step, const BwdProblem& problem);

}  // namespace flash_cute
