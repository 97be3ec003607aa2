// Tensors as the kernels see them, and the checks that keep every access inside them.
//
// Callers of the public functions already got typed errors with advice from flash_cute/call/validate/; these checks
// protect direct calls of the ops.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "core/problem.h"

namespace flash_cute {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define FC_CHECK(condition, ...) STD_TORCH_CHECK(condition, "flash_cute: ", __VA_ARGS__)

// A tensor and its properties, read once: each access to a stable Tensor is a call into libtorch.
struct View {
  explicit View(Tensor t);

  int64_t size(int dim) const { return sizes[dim]; }
  int64_t stride(int dim) const { return strides[dim]; }
  int64_t numel() const;

  Tensor tensor;
  int dims;
  const int64_t* sizes;
  const int64_t* strides;
  ScalarType dtype;
  int device;  // index of the GPU, or -1
  void* ptr;
};

inline std::optional<View> view_of(const std::optional<Tensor>& t) {
  return t ? std::optional<View>(*t) : std::nullopt;
}

// An uninitialised contiguous tensor on the GPU of `like`.
Tensor allocate(const View& like, std::initializer_list<int64_t> sizes, ScalarType dtype);
Tensor allocate(const View& like, const int64_t* sizes, int dims, ScalarType dtype);

// Whether the tensor, and whether its last dimension, is contiguous. Strides of empty tensors, and of dimensions of
// size 1, are ignored.
bool is_contiguous(const View& t);
bool is_last_contiguous(const View& t);

// (b, s, h, d), or (rows, h, d) of all sequences. The last dimension must be contiguous.
TensorView tensor_view(const View& t, const char* name);

// [b, h, s], or [h, rows], contiguous fp32 on the device of q.
RowStats row_stats(const View& t, const char* name, const View& q);

// The shape of q with the head dim of v, and q's dtype and device.
void check_like_out(const View& t, const View& q, const View& v, const char* name);
void check_shape(const View& t, const int64_t* expected, int dims, const char* name);
void check_same_kind(const View& t, const View& q, const char* name);
using NamedView = std::pair<const View*, const char*>;  // null: not given
using NamedViews = std::initializer_list<NamedView>;
inline NamedView named(const View& t, const char* name) {
  return {&t, name};
}
inline NamedView named(const std::optional<View>& t, const char* name) {
  return {t ? &*t : nullptr, name};
}
// Checks tensors for results: their elements must not overlap, and none may start at the address of another tensor that
// is written or read.
void check_outputs(NamedViews outputs, NamedViews inputs);
void check_device(const View& t, const View& q, const char* name);

// An int32 vector of `length` entries on the device of q.
const int* indices(const View& t, int64_t length, const char* name, const View& q);

int checked_int(int64_t value, const char* name);

cudaStream_t current_stream(const View& t);

// Throws an error that names the CUDA call. It does not begin with "flash_cute: ", as refusals do, which Python
// rewords.
void check_cuda(const char* what, cudaError_t error);

}  // namespace flash_cute
