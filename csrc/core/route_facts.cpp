// Facts about a route: its launches in order, and its memory.
#include <algorithm>

#include "core/route.h"
#include "core/workspace.h"

namespace flash_cute {
namespace {

template <Op op>
void add_launches(std::vector<std::string>& names, const Step<op>& step, bool append = false) {
  if (!step) return;
  auto add = [&](bool runs, const char* pass) {
    if (runs) names.push_back(pass);
  };
  add(step.passes.zero_fill, "zero_fill");
  add(append, "append_keys");
  add(step.passes.transpose_values, "transpose_values");
  names.push_back(step.kernel->id());
  add(step.passes.combine_splits, "combine_splits");
  add(step.passes.probabilities, "probabilities");
  add(step.passes.sink_gradient, "sink_gradient");
}

template <Op op>
int64_t bytes_of(const Step<op>& step, const Problem<op>& problem) {
  if (!step) return 0;
  Arena size;
  lay_out(size, *step.kernel, problem, step.plan);
  return size.numbers() * static_cast<int64_t>(sizeof(float));
}

int64_t bytes_of_rows(const FwdProblem& p, int64_t rows, int heads, int dims) {
  return rows * heads * dims * element_bytes(p.dtype);
}

// The bytes of out and lse that are discarded.
int64_t bytes_of_results(const FwdProblem& p) {
  return bytes_of_rows(p, p.all_rows(), p.heads, p.head_dim_v) +
         p.all_rows() * p.heads * static_cast<int64_t>(sizeof(float));
}

int64_t bytes_of_lengths(const FwdProblem& p) {
  return p.batch * static_cast<int64_t>(sizeof(int));
}

// The bytes of a kernel over a cache, if there is one.
int64_t bytes_of_cached(const Route& route, const DecodeProblem& p) {
  const int64_t lengths = route.in_pages && p.added.total > 0 ? bytes_of_lengths(p.fwd) : 0;
  return lengths + bytes_of(route.decode, p) + bytes_of(route.in_pages, p.fwd);
}

// The bytes of the steps after it.
int64_t bytes_of_forward(const Route& route, FwdProblem p) {
  int64_t kept = 0;
  if (route.gather) {
    p = over_gathered(p, route.gathered_rows, {}, {}, nullptr);
    kept += bytes_of_rows(p, p.total_k, p.heads_k, p.head_dim + p.head_dim_v) + bytes_of_lengths(p);
  }
  if (route.repeats()) kept += bytes_of_results(p);
  FwdProblem last = p;
  if (route.row_max) last.row_max = {};
  return kept + std::max(bytes_of(route.row_max, p), bytes_of(route.forward, last));
}

}  // namespace

std::vector<std::string> launches(const Route& route) {
  std::vector<std::string> names;
  if (route.count_keys) names.push_back("count_paged_keys");
  add_launches(names, route.decode, route.append);
  if (route.append && !route.decode) names.push_back("append_keys");
  add_launches(names, route.in_pages);
  if (route.gather) names.push_back("gather_pages");
  for (const bool copied : {route.copies.q, route.copies.k}) {
    if (copied) names.push_back("pad_rows");
  }
  add_launches(names, route.row_max);
  add_launches(names, route.forward);
  return names;
}

std::vector<std::string> launches(const Step<Op::Bwd>& step) {
  std::vector<std::string> names;
  add_launches(names, step);
  return names;
}

int64_t workspace_bytes(const Route& route, const FwdProblem& problem) {
  if (problem.dtype == DType::E4M3) return bytes_of_copies(problem) + bytes_of(route.forward, over_copies(problem));
  if (problem.pages.ids == nullptr) return bytes_of_forward(route, problem);
  DecodeProblem p = over_pages(problem);
  const int64_t cached = bytes_of_cached(route, p);
  p.fwd.row_max = problem.row_max;
  return bytes_of_lengths(problem) + std::max(cached, bytes_of_forward(route, p.fwd));
}

int64_t workspace_bytes(const Route& route, const DecodeProblem& p) {
  const FwdProblem& f = p.fwd;
  const int64_t rotated = p.rotary.cos == nullptr ? 0 : bytes_of_rows(f, f.all_rows(), f.heads, f.head_dim);
  return rotated + std::max(bytes_of_cached(route, p), bytes_of_forward(route, f));
}

int64_t workspace_bytes(const Step<Op::Bwd>& step, const BwdProblem& problem) {
  return bytes_of(step, problem);
}

}  // namespace flash_cute
