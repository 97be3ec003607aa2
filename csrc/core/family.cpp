#include "core/family.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "core/rows.h"

namespace flash_cute {

const Family& family_of(const KernelConfig& config) {
  for (const Family* family : families()) {
    if (family->owns(config)) return *family;
  }
  throw std::logic_error("flash_cute: no family of kernels has " + config.id());
}

bool takes_clusters(int capability) {
  auto in_clusters = [](const KernelConfig& row) { return row.cluster > 1; };
  return std::ranges::any_of(families(), [&](const Family* family) {
    return family->runs_on(capability) && std::ranges::any_of(family->rows, in_clusters);
  });
}

const std::vector<Row>& rows_of_configs() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    for (const Family* family : families()) {
      for (const KernelConfig& config : family->rows) all.push_back({config});
    }
    auto place = [](const Row& row) {
      return std::tuple(row.config.op == Op::Decode, row.config.fp32(), row.config.op);
    };
    std::ranges::stable_sort(all, {}, place);
    return all;
  }();
  return rows;
}

}  // namespace flash_cute
