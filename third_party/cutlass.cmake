# CUTLASS's headers, from the nvidia-cutlass wheel or from the checkout that FLASH_CUTE_CUTLASS_DIR names.

set(FLASH_CUTE_CUTLASS_VERSION 4.2)
if(NOT FLASH_CUTE_CUTLASS_DIR)
  set(FLASH_CUTE_CUTLASS_DIR "$ENV{FLASH_CUTE_CUTLASS_DIR}")
endif()
if(NOT FLASH_CUTE_CUTLASS_DIR)
  foreach(flags "-I" "-s")  # as torch.cmake
    execute_process(
      COMMAND "${Python_EXECUTABLE}" ${flags} -c
        "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed)
      break()
    endif()
  endforeach()
  if(failed)
    message(FATAL_ERROR
      "CUTLASS was not found: `pip install --no-deps nvidia-cutlass==4.2.0.0`, or set FLASH_CUTE_CUTLASS_DIR")
  endif()
  set(FLASH_CUTE_CUTLASS_DIR "${wheel}/source")
endif()

set(version_file "${FLASH_CUTE_CUTLASS_DIR}/include/cutlass/version.h")
if(NOT EXISTS "${version_file}")
  message(FATAL_ERROR "${version_file} does not exist; FLASH_CUTE_CUTLASS_DIR must hold include/cutlass")
endif()
file(STRINGS "${version_file}" lines REGEX "#define CUTLASS_(MAJOR|MINOR) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" version "${lines}")
if(version VERSION_LESS FLASH_CUTE_CUTLASS_VERSION)
  message(FATAL_ERROR "CUTLASS ${version} in ${FLASH_CUTE_CUTLASS_DIR} is older than ${FLASH_CUTE_CUTLASS_VERSION}")
endif()

add_library(cutlass INTERFACE)
target_include_directories(cutlass SYSTEM INTERFACE "${FLASH_CUTE_CUTLASS_DIR}/include")
