# libtorch through its stable ABI alone: headers, and libtorch.so by name. find_package(Torch) would pull in Caffe2's
# flags and demand that a CUDA torch be built against the CUDA of this machine.

find_package(Python REQUIRED COMPONENTS Interpreter)
# First the torch of the environment, which -I shows in pip's isolated builds too; then what PYTHONPATH adds; then what
# tools/build_backend.py took out of torch's wheel.
foreach(flags "-I" "-s")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" ${flags} -c "
import importlib.metadata, importlib.util
found = importlib.metadata.version('torch')
assert tuple(map(int, found.split('.')[:2])) >= (2, 10), f'torch is {found}'
print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE FLASH_CUTE_TORCH ERROR_VARIABLE why OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(NOT failed)
    break()
  endif()
endforeach()
if(failed AND EXISTS "${CMAKE_SOURCE_DIR}/build/torch/lib/libtorch.so")
  set(FLASH_CUTE_TORCH "${CMAKE_SOURCE_DIR}/build/torch")
elseif(failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch >= 2.10, whose headers are needed: ${why}")
endif()

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE "${FLASH_CUTE_TORCH}/include")
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=0x020a000000000000)  # runs on torch >= 2.10
target_link_directories(torch_stable INTERFACE "${FLASH_CUTE_TORCH}/lib")
target_link_options(torch_stable INTERFACE -Wl,--no-as-needed)
target_link_libraries(torch_stable INTERFACE torch)
