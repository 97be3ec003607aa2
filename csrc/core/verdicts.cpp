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
  const Asked& asked;
  const Problem<op>& problem;
  bool measured;  // whether the calibration of the op applies
  const KernelConfig* best = nullptr;

  Candidates(const Asked& asked, const Problem<op>& problem, bool measured)
      : asked(asked),
        problem(problem),
        measured(measured),
        best(find_kernel<op>(asked.kernels(), problem, asked.gpu, measured)) {}

  // Adds the verdict of each; the best one is passed over if a reason is given.
  void judge(std::vector<Verdict>& all, const std::string& best_is_not_taken) const {
    const KernelConfig* const fastest = measured ? calibrated<op>(problem, asked.gpu) : nullptr;
    for (const KernelConfig* kernel : all_kernels().of<op>()) {
      std::string refused = explain(refusal<op>(*kernel, problem, asked.gpu), *kernel, forward_of(problem), asked.gpu);
      if (asked.built_only && !is_built(*kernel)) add_reason(refused, kNotBuilt);
      add_reason(refused, beyond_limit<op>(*kernel, problem, asked.gpu));
      if (!refused.empty() && fastest != nullptr && same_kernel(*kernel, *fastest)) {
        add_reason(refused, "the calibration names it in vain");
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
    const auto& to_rank = weighed(problem);
    const FwdOverrides& of_limit = overrides_of_limit();
    const double least = cost(*best, to_rank, asked.gpu, of_limit), more = cost(other, to_rank, asked.gpu, of_limit);
    return std::isfinite(more) && least > 0
               ? "estimated to take " + three_digits(more / least) + " times as long as " + best->id()
               : "not for such sizes, by the estimate that prefers " + best->id();
  }
};

// Forward over gathered keys: neither the alignment nor the pages of the cache matter to it.
void judge_gathered(std::vector<Verdict>& all, const Asked& asked, const FwdProblem& problem, int rows) {
  const FwdProblem gathered = over_gathered(problem, rows);
  Candidates<Op::Fwd>(asked, gathered, false).judge(all, "");
}

void judge_over_cache(std::vector<Verdict>& all, const Asked& asked, const DecodeProblem& p) {
  const CacheKernels found = find_cache_kernels(asked.kernels(), p, asked.gpu);
  const Candidates<Op::Decode> decode(asked, p, true);
  decode.judge(all, found.forward_is_taken ? "estimated to take longer than " + found.forward->id() : "");
  if (found.decode == nullptr || !may_be_forward(p)) return;
  const Candidates<Op::Fwd> forward(asked, p.fwd, false);
  forward.judge(all, found.forward_is_taken ? "" : "over a cache " + found.decode->id() + " is preferred");
}

}  // namespace

std::vector<Verdict> verdicts(const Asked& asked) {
  std::vector<Verdict> all;
  if (asked.op == Op::Bwd) {
    Candidates<Op::Bwd>(asked, asked.bwd, true).judge(all, "");
  } else if (asked.op == Op::Decode) {
    judge_over_cache(all, asked, asked.decode);
    if (!asked.decode.whole_vectors()) judge_gathered(all, asked, asked.decode.fwd, asked.decode.fwd.seqlen_k);
  } else if (asked.fwd().pages.ids == nullptr) {
    Candidates<Op::Fwd>(asked, asked.fwd(), true).judge(all, "");
  } else {
    int lengths = 0;
    const DecodeProblem p = over_pages(asked.fwd(), &lengths);
    const bool in_place = reads_pages_in_place(p),
               gathers = asked.fwd().row_max.ptr != nullptr || asked.fwd().softmax != nullptr;
    if (in_place) judge_over_cache(all, asked, p);
    if (!in_place || gathers) judge_gathered(all, asked, p.fwd, gathered_rows(asked.fwd()));
  }
  return all;
}

}  // namespace flash_cute
