#include "core/verdicts.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

#include "core/built.h"
#include "core/calibration.h"
#include "core/heuristics.h"
#include "core/refusal.h"

namespace flash_cute {

static std::string three_digits(double value) {
  std::ostringstream digits;
  digits.imbue(std::locale::classic());
  digits << std::fixed << std::setprecision(3) << value;
  return digits.str();
}

const KernelConfig& Choice::config() const {
  if (chosen == nullptr) none.raise();
  return chosen->config;
}

void Choice::pass_over(const std::string& reason) {
  for (Verdict& v : verdicts) {
    if (v.row == chosen) v.passed_over = reason;
  }
  chosen = nullptr;
}

template <Op op>
Choice choose(const Asked& asked, const Problem<op>& problem, bool over_cache) {
  Choice choice;
  const std::string built = kernels();
  for (const Row& row : rows_of_configs()) {
    const KernelConfig& config = row.config;
    if (config.op != op) continue;
    std::string refused = explain(refusal<op>(config, problem, asked.gpu), config, forward_of(problem), asked.gpu);
    if (asked.built_only && !is_listed(built, config.id())) add_reason(refused, kNotBuilt);
    const std::string beyond = beyond_limit<op>(config, problem, asked.gpu);
    choice.none.add(config, refused, beyond);
    add_reason(refused, beyond);
    choice.verdicts.push_back({&row, refused, ""});
  }
  auto fits = [&](const Row& row) {
    return std::any_of(choice.verdicts.begin(), choice.verdicts.end(),
                       [&](const Verdict& v) { return v.row == &row && v.refused.empty(); });
  };
  const auto& weighed_problem = weighed(problem);
  choice.chosen = over_cache ? preferred(rows_of_configs(), fits, weighed_problem, asked.gpu)
                             : best<op>(rows_of_configs(), fits, problem, asked.gpu);
  const KernelConfig* const measured = over_cache ? nullptr : calibrated<op>(problem, asked.gpu);
  for (Verdict& v : choice.verdicts) {
    if (measured != nullptr && same_kernel(v.row->config, *measured) && !v.refused.empty()) {
      add_reason(v.refused, "the calibration names it in vain");
    }
    if (v.row == choice.chosen || !v.refused.empty()) continue;
    const KernelConfig &taken = choice.chosen->config, &other = v.row->config;
    if (measured != nullptr && same_kernel(taken, *measured)) {
      v.passed_over = "slower than " + taken.id() + " by the calibration in use";
      continue;
    }
    if (!alternatives(taken, other)) {
      v.passed_over = "comes after " + taken.id() + " in order of preference";
      continue;
    }
    const double least = cost(taken, weighed_problem, asked.gpu), more = cost(other, weighed_problem, asked.gpu);
    v.passed_over = std::isfinite(more) && least > 0
                        ? "estimated to take " + three_digits(more / least) + " times as long as " + taken.id()
                        : "not for such sizes, by the estimate that prefers " + taken.id();
  }
  return choice;
}

template Choice choose<Op::Fwd>(const Asked&, const FwdProblem&, bool);
template Choice choose<Op::Bwd>(const Asked&, const BwdProblem&, bool);
template Choice choose<Op::Decode>(const Asked&, const DecodeProblem&, bool);

CacheChoice choose_for_cache(const Asked& asked) {
  const DecodeProblem& p = asked.decode;
  CacheChoice choice{choose<Op::Decode>(asked, p), {}};
  if (!p.whole_vectors()) {
    FwdProblem gathered = p.fwd;
    gathered.pages = {};
    choice.forward = choose<Op::Fwd>(asked, gathered, true);
    choice.decode.none.add(choice.forward.none);  // the error if no kernel of either kind can do it
    return choice;
  }
  if (choice.decode.chosen == nullptr || p.cache.leftpad != nullptr || !p.even_splits()) return choice;
  choice.forward = choose<Op::Fwd>(asked, p.fwd, true);
  Choice& forward = choice.forward;
  if (forward.chosen == nullptr) return choice;
  const KernelConfig &of_forward = forward.chosen->config, &of_decode = choice.decode.chosen->config;
  const KernelConfig* const measured = calibrated<Op::Decode>(p, asked.gpu);
  const bool decode_measured = measured != nullptr && same_kernel(*measured, of_decode);
  if (!decode_measured && forward_is_cheaper(of_forward, of_decode, p, asked.gpu)) {
    choice.decode.pass_over("estimated to take longer than " + of_forward.id());
  } else {
    forward.pass_over("over a cache " + of_decode.id() + " is preferred");
  }
  return choice;
}

}  // namespace flash_cute
