// Tensors as the kernels see them, and the checks that keep every access inside them.
//
// flash_cute/validate.py has already given a caller of the public functions a typed error with advice; what is checked
// here protects direct calls of the ops.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "core/problem.h"

namespace flash_cute {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define FC_CHECK(condition, ...) STD_TORCH_CHECK(condition, "flash_cute: ", __VA_ARGS__)

// An uninitialised contiguous tensor on the device of `like`.
Tensor allocate(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype);

// (b, s, h, d), or (rows, h, d) of all sequences. The last dimension must be contiguous.
Matrices matrices(const Tensor& t, const char* name);

// [b, h, s], or [h, rows], contiguous fp32 on the device of q.
Statistics statistics(const Tensor& t, const char* name, const Tensor& q);

void check_same_shape(const Tensor& t, const Tensor& expected, const char* name);
void check_same_kind(const Tensor& t, const Tensor& q, const char* name);

// An int32 vector of `length` entries on the device of q.
const int* indices(const Tensor& t, int64_t length, const char* name, const Tensor& q);

int checked_int(int64_t value, const char* name);

cudaStream_t current_stream(const Tensor& t);

}  // namespace flash_cute
