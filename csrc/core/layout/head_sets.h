// Sets of heads whose tiles alternate, so that L2 serves them all.
#pragma once

#include <cstdint>

#include "core/layout/tiles.h"

namespace flash_cute {

// All sets have `heads` heads but the last one, which has what is left from head `last` on.
struct HeadSets {
  struct Set {
    int first, heads;
  };
  int heads = 1;
  int last = 0;

  // `least_of_last`: the last set gets as many heads, if there are.
  static HeadSets of(int heads, int64_t all_heads, int64_t least_of_last = 1) {
    const int64_t before = all_heads - least_of_last;
    return {heads, before < 0 ? 0 : static_cast<int>(before / heads * heads)};
  }

  // The set of tile `number`, if each head has `tiles`.
  FC_HOST_DEVICE Set of_tile(int number, int tiles, int all_heads) const {
    const int first = detail::at_most(number / (tiles * heads) * heads, last);
    return {first, first < last ? heads : all_heads - first};
  }
};

// Within a set the longest tiles come first. With some for each of the `resident` CTAs the last set's longest tiles do not
// begin when nothing is left to run beside them: `longest` as long as the mean. A head has `tiles`.
inline int64_t least_heads_of_last_set(int tiles_of_cta, int resident, int tiles, double longest = 1) {
  return static_cast<int64_t>(tiles_of_cta * longest * resident) / detail::at_least(1, tiles) + 1;
}

}  // namespace flash_cute
