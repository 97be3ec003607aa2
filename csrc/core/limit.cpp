#include "core/limit.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/heuristics.h"
#include "core/refusal.h"
#include "core/rows.h"

namespace flash_cute {
namespace {

struct Limit {
  std::string lines;
  bool of_kernels = false;  // whether a line is an id
  std::vector<KernelConfig> kernels;  // with these ids
  FwdOverrides overrides;
};

Limit& limit() {
  thread_local Limit limit;
  return limit;
}

}  // namespace

bool is_listed(const std::string& lines, const std::string& id) {
  auto ends_line = [&](size_t at) { return at >= lines.size() || lines[at] == '\n'; };
  for (size_t at = lines.find(id); at != std::string::npos; at = lines.find(id, at + 1)) {
    if ((at == 0 || lines[at - 1] == '\n') && ends_line(at + id.size())) return true;
  }
  return false;
}

std::string limit_kernels(std::string lines) {
  Limit next;
  std::stringstream in(lines);
  for (std::string line; std::getline(in, line);) next.of_kernels |= !parse_override(next.overrides, line);
  if (next.of_kernels) {
    for (const Row& row : rows_of_configs()) {
      if (is_listed(lines, row.config.id())) next.kernels.push_back(row.config);
    }
  }
  next.lines = std::move(lines);
  return std::exchange(limit(), std::move(next)).lines;
}

const FwdOverrides& overrides_of_limit() {
  return limit().overrides;
}

bool is_allowed(const KernelConfig& config) {
  const Limit& here = limit();
  return !here.of_kernels || std::find(here.kernels.begin(), here.kernels.end(), config) != here.kernels.end();
}

template <Op op>
std::string beyond_limit(const KernelConfig& config, const Problem<op>& problem, const Device& gpu) {
  std::string reasons;
  if (!is_allowed(config)) add_reason(reasons, "not one of the kernels that this thread is limited to");
  if constexpr (op == Op::Fwd) {
    auto add = [&](const char* name, int number, const char* which, int heads_or_splits) {
      add_reason(reasons, name + (" is " + std::to_string(number)) + "; it supports " + which +
                              std::to_string(heads_or_splits) + " for this call");
    };
    const auto& [num_splits, heads] = overrides_of_limit();
    if (heads > 0 && !may_pack(config, problem, heads)) {
      add("pack_gqa", heads, config.packs_tokens() ? "only " : "powers of two up to ", pack_gqa(config, problem));
    } else if (num_splits > 0) {
      const int most = most_splits(config, problem, heads > 0 ? heads : pack_gqa(config, problem), gpu.sms);
      if (num_splits > most) add("num_splits", num_splits, "up to ", most);
    }
  }
  return reasons;
}

void NoKernel::add(const KernelConfig& config, const std::string& cannot, const std::string& beyond_limit) {
  std::string reasons = cannot;
  add_reason(reasons, beyond_limit);
  const std::string line = "\n  " + config.id() + ": " + reasons;
  all_ += line;
  if (cannot.empty() && is_allowed(config)) able_ += line;
}

void NoKernel::raise() const {
  const char* const message = "flash_cute: no kernel for this call";
  if (able_.empty() || !overrides_of_limit().any()) throw std::runtime_error(message + all_);
  throw std::runtime_error(message + (" within kernels.only(); without it these could do it:" + able_));
}

template std::string beyond_limit<Op::Fwd>(const KernelConfig&, const FwdProblem&, const Device&);
template std::string beyond_limit<Op::Bwd>(const KernelConfig&, const BwdProblem&, const Device&);
template std::string beyond_limit<Op::Decode>(const KernelConfig&, const DecodeProblem&, const Device&);

}  // namespace flash_cute
