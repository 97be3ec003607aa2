#include "core/family.h"

namespace flash_cute {

#define FAMILY(name, ...) \
  namespace name {        \
  const Family& family(); \
  }
#include "kernels/families.def"
#undef FAMILY

std::span<const Family* const> families() {
  static const Family* const all[] = {
#define FAMILY(name, ...) &name::family(),
#include "kernels/families.def"
#undef FAMILY
  };
  return all;
}

}  // namespace flash_cute
