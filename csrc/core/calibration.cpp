#include "core/calibration.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "core/plan_request.h"
#include "core/route.h"
#include "core/family.h"
#include "core/rows.h"

namespace flash_cute {
namespace {

struct Entry {
  const KernelConfig* kernel = nullptr;
  FwdOverrides overrides;
};

struct Table {
  std::string lines;
  std::map<std::string, Entry> entries;  // by bucket
};

struct Current {
  std::atomic<bool> is_set = false;  // without a table calls read only this
  std::mutex mutex;
  std::shared_ptr<const Table> table = std::make_shared<Table>();
};

Current& current() {
  static Current the_one;
  return the_one;
}

constexpr const char* kSeparator = " = ";
constexpr const char* kRest = " | ";

const KernelConfig* kernel_named(const std::string& id) {
  for (const Row& row : rows_of_configs()) {
    if (row.config.id() == id) return &row.config;
  }
  throw std::invalid_argument("flash_cute: " + id + " is no kernel's id; kernels() lists them");
}

// "ID", or "ID num_splits=2 pack_gqa=1".
Entry read_entry(const std::string& text) {
  std::stringstream words(text);
  std::string word;
  words >> word;
  Entry entry{kernel_named(word), {}};
  while (words >> word) {
    if (!parse_override(entry.overrides, word)) {
      throw std::invalid_argument("flash_cute: expected num_splits=N or pack_gqa=N after a kernel's id, got " + word);
    }
  }
  if (entry.overrides.any() && (entry.kernel->op != Op::Fwd || !family_of(*entry.kernel).facts.takes_overrides)) {
    throw std::invalid_argument("flash_cute: only Hopper's forward has num_splits and pack_gqa, not " +
                                entry.kernel->id());
  }
  return entry;
}

// The largest power of two that is not above `size`, as text: "2^12"; "0" for 0.
std::string power(int64_t size) {
  int exponent = -1;
  for (; size > 0; size /= 2) ++exponent;
  return exponent < 0 ? "0" : std::string("2^").append(std::to_string(exponent));
}

template <Op op>
bool is_deterministic(const Problem<op>& problem) {
  if constexpr (op == Op::Bwd) return problem.deterministic;
  return false;
}

// The dtype of a cache that is not the problem's.
template <Op op>
const char* dtype_of_cache(const Problem<op>& problem) {
  if constexpr (op == Op::Decode) return problem.cache.eight_bits ? name(problem.cache.dtype) : nullptr;
  return nullptr;
}

template <Op op>
std::string bucket(const Problem<op>& problem, const Device& gpu) {
  const FwdProblem& p = forward_of(problem);
  auto mean = [&](bool packed, int longest, int64_t total) {
    return packed && p.batch > 0 ? std::min<int64_t>(longest, total / p.batch) : longest;
  };
  const bool sees_all_before = p.band.left == Band::kUnbounded, sees_all_after = p.band.right == Band::kUnbounded;
  std::string line = "sm";
  auto add = [&](const char* before, const std::string& value) { line.append(before).append(value); };
  add("", std::to_string(gpu.capability));
  add(" SMs", std::to_string(gpu.sms));
  add(" GB/s", std::to_string(gpu.memory_gb_s));
  add(" ", name(op));
  add(" ", name(p.dtype));
  if (const char* const stored = dtype_of_cache<op>(problem)) add("/", stored);
  add(" d", std::to_string(p.head_dim));
  add("/", std::to_string(p.head_dim_v));
  line += sees_all_before && sees_all_after ? " full" : sees_all_before && p.band.right == 0 ? " causal" : " window";
  line += p.pages.ids != nullptr ? " pages" : p.dense() ? " dense" : " packed";
  if (p.tier() == Tier::Rich) line += " rich";
  if (p.rules.rng != nullptr) line += " dropout";
  if (is_deterministic<op>(problem)) line += " deterministic";
  add(" q", power(mean(!p.dense(), p.seqlen_q, p.total_q)));
  add(kRest, "");
  add("k", power(mean(!p.dense_keys(), p.seqlen_k, p.total_k)));
  add(" heads", power(int64_t(p.batch) * p.heads));
  add(" group", power(p.heads_k > 0 ? p.heads / p.heads_k : 0));
  return line;
}

template <Op op>
bool splits_are_given(const Problem<op>& problem) {
  if constexpr (op == Op::Decode) return !problem.even_splits();
  return false;
}

}  // namespace

std::string set_calibration(std::string lines) {
  auto table = std::make_shared<Table>();
  std::stringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    if (line.empty()) continue;
    const size_t at = line.find(kSeparator);
    if (at == std::string::npos) {
      throw std::invalid_argument("flash_cute: expected a bucket, \" = \" and a kernel's id, got " + line);
    }
    table->entries[line.substr(0, at)] = read_entry(line.substr(at + std::strlen(kSeparator)));
  }
  table->lines = std::move(lines);
  const bool any = !table->entries.empty();
  Current& now = current();
  const std::lock_guard lock(now.mutex);
  const std::shared_ptr<const Table> before = std::exchange(now.table, std::move(table));
  now.is_set.store(any, std::memory_order_relaxed);
  return before->lines;
}

std::string calibration_bucket(std::string problem) {
  const PlanRequest request = read_plan_request(problem);
  const bool in_fp8 = request.op == Op::Fwd && request.fwd().dtype == DType::E4M3;
  if (in_fp8) return bucket<Op::Fwd>(over_copies(request.fwd()), request.gpu);
  if (request.op == Op::Fwd && request.fwd().pages.ids != nullptr) {
    const DecodeProblem p = over_pages(request.fwd());
    if (reads_pages_in_place(p)) return bucket<Op::Decode>(p, request.gpu);
    throw std::invalid_argument(
        "flash_cute: this call copies its keys out of their pages; the calibration does not apply to it");
  }
  if (request.op == Op::Fwd) return bucket<Op::Fwd>(request.fwd(), request.gpu);
  if (request.op == Op::Bwd) return bucket<Op::Bwd>(request.bwd, request.gpu);
  return bucket<Op::Decode>(request.decode, request.gpu);
}

// The table's entry for a problem; without a kernel if there is none.
template <Op op>
static Entry entry_of(const Problem<op>& problem, const Device& gpu) {
  Current& now = current();
  if (!now.is_set.load(std::memory_order_relaxed) || splits_are_given<op>(problem)) return {};
  std::shared_ptr<const Table> table;
  {
    const std::lock_guard lock(now.mutex);
    table = now.table;
  }
  const std::string all = bucket<op>(problem, gpu);
  auto found = table->entries.find(all);
  if (found == table->entries.end()) found = table->entries.find(all.substr(0, all.find(kRest)));
  return found == table->entries.end() ? Entry{} : found->second;
}

template <Op op>
const KernelConfig* calibrated(const Problem<op>& problem, const Device& gpu) {
  return entry_of<op>(problem, gpu).kernel;
}

template const KernelConfig* calibrated<Op::Fwd>(const FwdProblem&, const Device&);
template const KernelConfig* calibrated<Op::Bwd>(const BwdProblem&, const Device&);
template const KernelConfig* calibrated<Op::Decode>(const DecodeProblem&, const Device&);

FwdOverrides calibrated_overrides(const KernelConfig& config, const FwdProblem& problem, const Device& gpu) {
  if (!family_of(config).facts.takes_overrides) return {};
  const Entry entry = entry_of<Op::Fwd>(problem, gpu);
  return entry.kernel != nullptr && same_kernel(*entry.kernel, config) ? entry.overrides : FwdOverrides{};
}

bool same_kernel(const KernelConfig& a, const KernelConfig& b) {
  static_assert(std::has_unique_object_representations_v<KernelConfig>);
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace flash_cute
