#include "core/limit.h"

#include <utility>

namespace flash_cute {

static std::string& limit() {
  thread_local std::string ids;
  return ids;
}

bool is_listed(const std::string& lines, const std::string& id) {
  auto ends_line = [&](size_t at) { return at >= lines.size() || lines[at] == '\n'; };
  for (size_t at = lines.find(id); at != std::string::npos; at = lines.find(id, at + 1)) {
    if ((at == 0 || lines[at - 1] == '\n') && ends_line(at + id.size())) return true;
  }
  return false;
}

std::string limit_kernels(std::string ids) {
  return std::exchange(limit(), std::move(ids));
}

bool within_limit(const KernelConfig& config) {
  return limit().empty() || is_listed(limit(), config.id());
}

}  // namespace flash_cute
