#include "core/route.h"

#include <algorithm>

#include "core/calibration.h"
#include "core/family.h"
#include "core/heuristics.h"
#include "core/limit.h"
#include "core/refusal.h"

namespace flash_cute {
namespace {

// A pass will write the lengths: until then only this pointer's not being null counts.
constexpr int kPlaceholderLengths = 0;

// The inputs of choose_route(): kernels, a GPU, and the call if it is one over a cache.
struct RouteChooser {
  const Kernels& kernels;
  const Device& gpu;
  const DecodeProblem* cached = nullptr;

  template <Op op>
  const KernelConfig& kernel(const Problem<op>& problem, bool measured) const {
    if (const KernelConfig* kernel = find_kernel<op>(kernels, problem, gpu, measured)) return *kernel;
    raise<op>(problem);
  }

  template <Op op>
  [[noreturn]] void raise(const Problem<op>& problem) const {
    NoKernel none;
    if (cached != nullptr) add_reasons<Op::Decode>(none, *cached);
    if (op != Op::Decode || cached == nullptr) add_reasons<op>(none, problem);
    none.raise();
  }

  template <Op op>
  void add_reasons(NoKernel& none, const Problem<op>& problem) const {
    for (const KernelConfig* kernel : kernels.of<op>()) {
      none.add(*kernel, explain<op>(refusal<op>(*kernel, problem, gpu), *kernel, problem, gpu),
               beyond_limit<op>(*kernel, problem, gpu));
    }
  }

  Step<Op::Fwd> forward(const KernelConfig& kernel, const FwdProblem& problem, bool measured) const {
    const FwdOverrides& of_limit = overrides_of_limit();
    const bool given = of_limit.any() || !measured;
    const FwdPlan plan = make_plan(kernel, problem, gpu, given ? of_limit : calibrated_overrides(kernel, problem, gpu));
    return {&kernel,
            plan,
            {.zero_fill = !problem.dense() && !family_of(kernel).fills_gaps(kernel, problem),
             .transpose_values = kernel.dtype == DType::E4M3,
             .combine_splits = plan.num_splits > 1,
             .probabilities = problem.softmax != nullptr}};
  }

  // Steps of a kernel of forward over keys that are not paged.
  void add_forward(Route& route, FwdProblem problem, bool measured) const {
    if (problem.row_max.ptr != nullptr && problem.rules.element.on()) {
      FwdProblem first = problem;
      first.softmax = nullptr;
      route.row_max = forward(kernel<Op::Fwd>(first, measured), first, measured);
      if (route.over_cache() && problem.softmax == nullptr) return;  // the route is complete
      problem.row_max = {};
    }
    route.forward = forward(kernel<Op::Fwd>(problem, measured), problem, measured);
  }

  void add_gathered(Route& route, const FwdProblem& problem, int rows) const {
    route.gather = true;
    route.gathered_rows = rows;
    add_forward(route, over_gathered(problem, rows), false);
  }

  void add_cached(Route& route, const DecodeProblem& p) const {
    const CacheKernels found = find_cache_kernels(kernels, p, gpu);
    if (found.decode == nullptr && !found.forward_is_taken) raise<Op::Decode>(p);
    if (found.forward_is_taken) {
      FwdProblem problem = in_pages(p);
      if (p.added.total > 0) problem.varlen.used_k = &kPlaceholderLengths;
      route.in_pages = forward(*found.forward, problem, false);
    } else {
      const DecodePlan plan = make_plan(*found.decode, p, gpu);
      route.decode = {found.decode, plan, {.zero_fill = !p.fwd.dense(), .combine_splits = plan.slots > 0}};
    }
  }
};

}  // namespace

template <Op op>
const KernelConfig* find_kernel(const Kernels& kernels, const Problem<op>& problem, const Device& gpu, bool measured) {
  auto may_run = [&](const KernelConfig& kernel) {
    return fits<op>(kernel, problem, gpu) && beyond_limit<op>(kernel, problem, gpu).empty();
  };
  if (const KernelConfig* const fastest = measured ? calibrated<op>(problem, gpu) : nullptr) {
    for (const KernelConfig* kernel : kernels.of<op>()) {
      if (same_kernel(*kernel, *fastest) && may_run(*kernel)) return kernel;
    }
  }
  return preferred(kernels.of<op>(), may_run, problem_to_rank(problem), gpu, overrides_of_limit());
}

template const KernelConfig* find_kernel<Op::Fwd>(const Kernels&, const FwdProblem&, const Device&, bool);
template const KernelConfig* find_kernel<Op::Bwd>(const Kernels&, const BwdProblem&, const Device&, bool);
template const KernelConfig* find_kernel<Op::Decode>(const Kernels&, const DecodeProblem&, const Device&, bool);

bool may_be_forward(const DecodeProblem& p) {
  return p.cache.leftpad == nullptr && p.even_splits() && !p.cache.eight_bits;
}

CacheKernels find_cache_kernels(const Kernels& kernels, const DecodeProblem& p, const Device& gpu) {
  CacheKernels found{find_kernel<Op::Decode>(kernels, p, gpu, true)};
  if (!may_be_forward(p)) return found;
  const KernelConfig* const measured = calibrated<Op::Decode>(p, gpu);
  if (measured != nullptr && found.decode != nullptr && same_kernel(*measured, *found.decode)) return found;
  found.forward = find_kernel<Op::Fwd>(kernels, p.fwd, gpu, false);
  if (found.forward == nullptr || !family_of(*found.forward).facts.reads_caches) return found;
  found.forward_is_taken =
      found.decode == nullptr || forward_is_cheaper(*found.forward, *found.decode, p, gpu, overrides_of_limit());
  return found;
}

bool reads_pages_in_place(const DecodeProblem& p) {
  return element_bytes(p.fwd.dtype) == 2 && p.fwd.rules.rng == nullptr && p.fwd.varlen.used_q == nullptr &&
         p.has_vectors();
}

Route choose_route(const Kernels& kernels, const FwdProblem& problem, const Device& gpu) {
  const RouteChooser chooser{kernels, gpu};
  Route route;
  route.count_keys = problem.pages.ids != nullptr;
  if (problem.dtype == DType::E4M3) {
    route.copies = copies_of(problem);
    route.gather = route.copies.gather;
    route.gathered_rows = route.copies.gathered_rows;
    chooser.add_forward(route, over_copies(problem), true);
    return route;
  }
  if (!route.count_keys) {
    chooser.add_forward(route, problem, true);
    return route;
  }
  DecodeProblem p = over_pages(problem);
  if (reads_pages_in_place(p)) {
    chooser.add_cached(route, p);
    if (problem.row_max.ptr == nullptr && problem.softmax == nullptr) return route;
  }
  if (route.over_cache()) p.fwd.out = contiguous(p.fwd, p.fwd.seqlen_q, p.fwd.heads, p.fwd.head_dim_v);
  p.fwd.row_max = problem.row_max;
  p.fwd.softmax = problem.softmax;
  chooser.add_gathered(route, p.fwd, gathered_rows(problem));
  return route;
}

Route choose_route(const Kernels& kernels, const DecodeProblem& problem, const Device& gpu) {
  const RouteChooser chooser{kernels, gpu, &problem};
  Route route;
  route.append = problem.appends();
  if (problem.whole_vectors() || problem.cache.eight_bits) {
    chooser.add_cached(route, problem);
  } else {
    chooser.add_gathered(route, problem.fwd, problem.fwd.seqlen_k);
  }
  return route;
}

Step<Op::Bwd> choose_route(const Kernels& kernels, const BwdProblem& problem, const Device& gpu) {
  const KernelConfig& kernel = RouteChooser{kernels, gpu}.kernel<Op::Bwd>(problem, true);
  return {&kernel, make_plan(kernel, problem, gpu), {.sink_gradient = problem.dsink != nullptr}};
}

DecodeProblem over_pages(const FwdProblem& problem, const int* lengths) {
  DecodeProblem p{};
  p.fwd = problem;
  p.fwd.varlen.cu_k = p.fwd.varlen.used_k = nullptr;
  p.fwd.seqlen_k = static_cast<int>(problem.pages.capacity());
  p.fwd.total_k = int64_t(problem.batch) * p.fwd.seqlen_k;
  p.fwd.row_max = {};
  p.fwd.softmax = nullptr;
  p.cache.lengths = lengths;
  p.unrotated_q = problem.q;
  return p;
}

DecodeProblem over_pages(const FwdProblem& problem) {
  return over_pages(problem, &kPlaceholderLengths);
}

FwdProblem over_gathered(const FwdProblem& problem, int rows, const TensorView& k, const TensorView& v,
                         const int* lengths) {
  FwdProblem p = problem;
  p.k = k;
  p.v = v;
  p.pages = {};
  p.seqlen_k = rows;
  p.total_k = int64_t(p.batch) * rows;
  p.varlen.used_k = lengths;
  return p;
}

FwdProblem over_gathered(const FwdProblem& problem, int rows) {
  auto view = [&](int dim) {
    TensorView keys = contiguous(problem, rows, problem.heads_k, dim);
    keys.batch = rows * keys.row;
    return keys;
  };
  return over_gathered(problem, rows, view(problem.head_dim), view(problem.head_dim_v), &kPlaceholderLengths);
}

TensorView contiguous(const FwdProblem& problem, int64_t rows, int heads, int dim) {
  const int64_t row = int64_t(heads) * dim;
  return {nullptr, problem.dense() ? rows * row : 0, row, dim, dim * element_bytes(problem.dtype) % 16 == 0};
}

int gathered_rows(const FwdProblem& problem) {
  const auto capacity = static_cast<int>(problem.pages.capacity());
  return problem.softmax == nullptr ? std::min(problem.seqlen_k, capacity) : problem.seqlen_k;
}

FwdProblem in_pages(const DecodeProblem& problem) {
  FwdProblem p = problem.fwd;
  p.varlen.used_k = problem.added.total > 0 ? problem.added.lengths : problem.cache.lengths;
  return p;
}

}  // namespace flash_cute
