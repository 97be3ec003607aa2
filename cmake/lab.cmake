# The laboratory's kernels, listed by flash_cute/lab/kernel_configs.py, in translation units of one (dtype, d_head, B_r).
# After units.cmake, whose target and flags it takes.

set(FLASH_CUTE_LAB "progression" CACHE STRING "the laboratory's kernels: progression, all, or none")
set(lab_list "${CMAKE_SOURCE_DIR}/flash_cute/lab/kernel_configs.py")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${lab_list}")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -I "${lab_list}" "${FLASH_CUTE_LAB}"
  OUTPUT_VARIABLE lab_built OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "FLASH_CUTE_LAB is '${FLASH_CUTE_LAB}'; expected progression, all or none")
endif()
file(CONFIGURE OUTPUT "${FLASH_CUTE_GENERATED}/lab_built.def" CONTENT "@lab_built@\n" @ONLY)

set(lab_units "")
string(REPLACE "\n" ";" lab_rows "${lab_built}")
foreach(row IN LISTS lab_rows)
  string(REGEX MATCH "DType::([A-Z0-9]+), ([0-9]+), ([0-9]+)" parsed "${row}")
  string(TOLOWER "lab_${CMAKE_MATCH_1}_d${CMAKE_MATCH_2}_r${CMAKE_MATCH_3}" unit)
  list(APPEND lab_units "${unit}")
  list(APPEND ${unit}_rows "${row}")
endforeach()
list(REMOVE_DUPLICATES lab_units)
foreach(unit IN LISTS lab_units)
  list(JOIN ${unit}_rows "\n" rows)
  configure_file("${CMAKE_SOURCE_DIR}/cmake/lab_unit.cu.in" "${FLASH_CUTE_GENERATED}/${unit}.cu" @ONLY)
  target_sources(kernels PRIVATE "${FLASH_CUTE_GENERATED}/${unit}.cu")
  set_source_files_properties("${FLASH_CUTE_GENERATED}/${unit}.cu" PROPERTIES COMPILE_OPTIONS "${later_flags}")
endforeach()
