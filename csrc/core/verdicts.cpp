#include "core/verdicts.h"

#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

#include "core/calibration.h"
#include "core/heuristics.h"
#include "core/limit.h"
#include "core/refusal.h"
#include "core/route.h"

namespace flash_cute {
namespace {

std::string three_digits(double value) {
  std::ostringstream digits;
  digits.imbue(std::locale::classic());
  digits << std::fixed << std::setprecision(3) << value;
  return digits.str();
}

// The kernels of one op, and the best of them; another op's may still be preferred.
template <Op op>
struct Candidates {
  const PlanRequest& request;
  const Problem<op>& problem;
  bool measured;  // whether the calibration of the op applies
  const KernelConfig* best = nullptr;

  Candidates(const PlanRequest& request, const Problem<op>& problem, bool measured)
      : request(request),
        problem(problem),
        measured(measured),
        best(find_kernel<op>(request.kernels(), problem, request.gpu, measured)) {}

  // Adds the verdict of each; the best one is passed over if a reason is given.
  void judge(std::vector<Verdict>& all, const std::string& best_is_not_taken) const {
    const KernelConfig* const fastest = measured ? calibrated<op>(problem, request.gpu) : nullptr;
    for (const KernelConfig* kernel : all_kernels().of<op>()) {
      std::string refused = explain<op>(refusal<op>(*kernel, problem, request.gpu), *kernel, problem, request.gpu);
      if (request.built_only && !is_built(*kernel)) add_reason(refused, kNotBuilt);
      add_reason(refused, beyond_limit<op>(*kernel, problem, request.gpu));
      if (!refused.empty() && fastest != nullptr && same_kernel(*kernel, *fastest)) {
        add_reason(refused, "the calibration in use names this kernel, but it cannot run this call");
      }
      const bool is_best = best != nullptr && same_kernel(*kernel, *best);
      const std::string passed_over = !refused.empty() ? ""
                                      : is_best        ? best_is_not_taken
                                                       : comparison(*kernel, fastest);
      all.push_back({kernel, is_best && best_is_not_taken.empty(), refused, passed_over});
    }
  }

 private:
  std::string comparison(const KernelConfig& other, const KernelConfig* fastest) const {
    if (fastest != nullptr && same_kernel(*best, *fastest)) {
      return "slower than " + best->id() + " by the calibration in use";
    }
    if (!alternatives(*best, other)) return "comes after " + best->id() + " in order of preference";
    const auto& to_rank = problem_to_rank(problem);
    const FwdOverrides& of_limit = overrides_of_limit();
    const double least = cost(*best, to_rank, request.gpu, of_limit),
                 more = cost(other, to_rank, request.gpu, of_limit);
    return std::isfinite(more) && least > 0
               ? "estimated to take " + three_digits(more / least) + " times as long as " + best->id()
               : "not for such sizes, by the estimate that prefers " + best->id();
  }
};

// Forward over gathered keys: neither the alignment nor the pages of the cache matter to it.
void judge_gathered(std::vector<Verdict>& all, const PlanRequest& request, const FwdProblem& problem, int rows) {
  const FwdProblem gathered = over_gathered(problem, rows);
  Candidates<Op::Fwd>(request, gathered, false).judge(all, "");
}

void judge_over_cache(std::vector<Verdict>& all, const PlanRequest& request, const DecodeProblem& p) {
  const CacheKernels found = find_cache_kernels(request.kernels(), p, request.gpu);
  const Candidates<Op::Decode> decode(request, p, true);
  decode.judge(all, found.forward_is_taken ? "estimated to take longer than " + found.forward->id() : "");
  if (!may_be_forward(p) || (found.decode == nullptr && !found.forward_is_taken)) return;
  const Candidates<Op::Fwd> forward(request, p.fwd, false);
  forward.judge(all, found.forward_is_taken ? "" : "over a cache " + found.decode->id() + " is preferred");
}

}  // namespace

std::vector<Verdict> verdicts(const PlanRequest& request) {
  std::vector<Verdict> all;
  if (request.op == Op::Bwd) {
    Candidates<Op::Bwd>(request, request.bwd, true).judge(all, "");
  } else if (request.op == Op::Decode) {
    judge_over_cache(all, request, request.decode);
    const bool gathers = !request.decode.whole_vectors() && !request.decode.cache.eight_bits;
    if (gathers) judge_gathered(all, request, request.decode.fwd, request.decode.fwd.seqlen_k);
  } else if (request.fwd().dtype == DType::E4M3) {
    Candidates<Op::Fwd>(request, over_copies(request.fwd()), true).judge(all, "");
  } else if (request.fwd().pages.ids == nullptr) {
    Candidates<Op::Fwd>(request, request.fwd(), true).judge(all, "");
  } else {
    const DecodeProblem p = over_pages(request.fwd());
    const bool in_place = reads_pages_in_place(p),
               gathers = request.fwd().row_max.ptr != nullptr || request.fwd().softmax != nullptr;
    if (in_place) judge_over_cache(all, request, p);
    if (!in_place || gathers) judge_gathered(all, request, p.fwd, gathered_rows(request.fwd()));
  }
  return all;
}

}  // namespace flash_cute
