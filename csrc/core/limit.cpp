#include "core/limit.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/rows.h"

namespace flash_cute {
namespace {

struct Limit {
  std::string ids;
  std::vector<KernelConfig> kernels;  // with these ids
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

std::string limit_kernels(std::string ids) {
  std::vector<KernelConfig> kernels;
  if (!ids.empty()) {
    for (const Row& row : rows_of_configs()) {
      if (is_listed(ids, row.config.id())) kernels.push_back(row.config);
    }
  }
  limit().kernels = std::move(kernels);
  return std::exchange(limit().ids, std::move(ids));
}

bool within_limit(const KernelConfig& config) {
  const Limit& here = limit();
  return here.ids.empty() || std::find(here.kernels.begin(), here.kernels.end(), config) != here.kernels.end();
}

}  // namespace flash_cute
