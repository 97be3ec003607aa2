// Converts the library's exceptions to errors of libtorch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <exception>
#include <string>

namespace flash_cute {

using BoxedOp = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

// Runs an op; returns the text of its exception, or null.
template <BoxedOp kOp>
__attribute__((noinline)) const char* error_of(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  thread_local std::string message;
  try {
    kOp(stack, num_arguments, num_results);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "unknown error in flash_cute";
  }
  return message.c_str();
}

// An op as libtorch calls it: libtorch throws its errors, since an exception of this library would end the process if a
// C++ runtime is linked into it. Nothing here may need destruction when libtorch throws.
template <BoxedOp kOp>
void guarded(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  const char* error = error_of<kOp>(stack, num_arguments, num_results);
  if (error != nullptr) aoti_torch_check(false, "", "", 0, error);
}

}  // namespace flash_cute
