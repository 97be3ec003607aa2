#include "api/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

// torch declares it only for code that links CUDA; weak, so that the library also loads with a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace flash_cute {
namespace {

constexpr int kMaxDims = 5;

// The stride of a dimension of size 1 does not matter.
int64_t step(const View& t, int dim) {
  return t.size(dim) > 1 ? t.stride(dim) : 0;
}

int element_bytes(const View& t) {
  switch (t.dtype) {
    case ScalarType::Float:
      return 4;
    case ScalarType::Char:
    case ScalarType::Float8_e4m3fn:
      return 1;
    default:
      return 2;
  }
}

std::string shape(const int64_t* sizes, int dims) {
  std::string text;
  for (int i = 0; i < dims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return "(" + text + ")";
}

}  // namespace

View::View(Tensor t)
    : tensor(std::move(t)),
      dims(static_cast<int>(tensor.dim())),
      sizes(tensor.sizes().data()),
      strides(tensor.strides().data()),
      dtype(tensor.scalar_type()),
      device(tensor.is_cuda() ? tensor.get_device_index() : -1),
      ptr(tensor.data_ptr()) {}

int64_t View::numel() const {
  int64_t count = 1;
  for (int dim = 0; dim < dims; ++dim) count *= sizes[dim];
  return count;
}

bool is_contiguous(const View& t) {
  if (t.numel() == 0) return true;
  int64_t expected = 1;
  for (int dim = t.dims - 1; dim >= 0; --dim) {
    if (t.size(dim) > 1 && t.stride(dim) != expected) return false;
    expected *= t.size(dim);
  }
  return true;
}

bool is_last_contiguous(const View& t) {
  return t.size(t.dims - 1) <= 1 || t.stride(t.dims - 1) == 1 || t.numel() == 0;
}

Tensor allocate(const View& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return allocate(like, sizes.begin(), static_cast<int>(sizes.size()), dtype);
}

Tensor allocate(const View& like, const int64_t* sizes, int dims, ScalarType dtype) {
  FC_CHECK(dims <= kMaxDims, "a result has ", dims, " dimensions; ", kMaxDims, " are supported");
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = 1;
  for (int i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  AtenTensorHandle handle = nullptr;
  const auto error = aoti_torch_empty_strided(dims, sizes, strides.data(),
                                              torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                              aoti_torch_device_type_cuda(), like.device, &handle);
  FC_CHECK(error == AOTI_TORCH_SUCCESS, "could not allocate ", stride, " elements on the GPU");
  return Tensor(handle);
}

TensorView tensor_view(const View& t, const char* name) {
  const int dims = t.dims;
  FC_CHECK(dims == 3 || dims == 4, name, " has ", dims, " dimensions; expected 3 or 4");
  FC_CHECK(is_last_contiguous(t), name, "'s last dimension has stride ", t.stride(dims - 1),
           "; it must be contiguous (stride 1): call ", name, ".contiguous()");
  TensorView m{.ptr = t.ptr,
               .batch = dims == 4 ? step(t, 0) : 0,
               .row = step(t, dims - 3),
               .head = step(t, dims - 2),
               .vectors = false};
  const int vector = 16 / element_bytes(t);  // elements in 16 bytes
  m.vectors = reinterpret_cast<uintptr_t>(m.ptr) % 16 == 0 && m.batch % vector == 0 && m.row % vector == 0 &&
              m.head % vector == 0;
  return m;
}

RowStats row_stats(const View& t, const char* name, const View& q) {
  FC_CHECK(t.dtype == ScalarType::Float && t.device == q.device && is_contiguous(t), name,
           " must be a contiguous float32 tensor on q's device");
  const bool dense = q.dims == 4;
  const int64_t rows = dense ? q.size(1) : q.size(0), heads = dense ? q.size(2) : q.size(1);
  const int64_t expected[] = {q.size(0), heads, rows};
  check_shape(t, dense ? expected : expected + 1, dense ? 3 : 2, name);
  return {static_cast<float*>(t.ptr), dense ? rows * heads : 0, rows};
}

void check_device(const View& t, const View& q, const char* name) {
  FC_CHECK(t.device >= 0 && t.device == q.device, name, " is not on q's device");
}

void check_same_kind(const View& t, const View& q, const char* name) {
  FC_CHECK(t.dtype == q.dtype, name, "'s dtype differs from q's");
  check_device(t, q, name);
}

void check_shape(const View& t, const int64_t* expected, int dims, const char* name) {
  FC_CHECK(t.dims == dims && std::equal(expected, expected + dims, t.sizes), name, " has shape ",
           shape(t.sizes, t.dims), "; expected ", shape(expected, dims));
}

void check_like_out(const View& t, const View& q, const View& v, const char* name) {
  check_same_kind(t, q, name);
  std::array<int64_t, kMaxDims> expected{};
  *std::copy_n(q.sizes, q.dims - 1, expected.begin()) = v.size(v.dims - 1);
  check_shape(t, expected.data(), q.dims, name);
}

void check_outputs(NamedViews outputs, NamedViews inputs) {
  auto has_elements = [](const View* t) { return t != nullptr && t->numel() > 0; };
  for (const auto* output = outputs.begin(); output != outputs.end(); ++output) {
    const auto& [t, name] = *output;
    if (!has_elements(t)) continue;
    for (int dim = 0; dim < t->dims; ++dim) {
      FC_CHECK(t->size(dim) <= 1 || t->stride(dim) != 0, name, " has elements that share memory: dimension ", dim,
               " has stride 0");
    }
    auto check_no_aliasing = [&, t = t, name = name](const auto& other) {
      FC_CHECK(!has_elements(other.first) || other.first->ptr != t->ptr, name, " shares memory with ", other.second,
               "; give each its own");
    };
    std::for_each(outputs.begin(), output, check_no_aliasing);
    std::for_each(inputs.begin(), inputs.end(), check_no_aliasing);
  }
}

const int* indices(const View& t, int64_t length, const char* name, const View& q) {
  FC_CHECK(t.dtype == ScalarType::Int && t.dims == 1 && is_contiguous(t), name, " must be a contiguous int32 vector");
  FC_CHECK(t.size(0) == length, name, " has ", t.size(0), " entries; expected ", length);
  check_device(t, q, name);
  return static_cast<const int*>(t.ptr);
}

int checked_int(int64_t value, const char* name) {
  FC_CHECK(0 <= value && value < Band::kUnbounded, name, " is ", value, "; it must be in [0, ", Band::kUnbounded, ")");
  return static_cast<int>(value);
}

cudaStream_t current_stream(const View& t) {
  void* stream = nullptr;
  FC_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
               aoti_torch_get_current_cuda_stream(t.device, &stream) == AOTI_TORCH_SUCCESS,
           "this torch was built without CUDA, and has no stream for the tensors");
  return static_cast<cudaStream_t>(stream);
}

void check_cuda(const char* what, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA error in flash_cute, ", what, ": ", cudaGetErrorString(error));
}

}  // namespace flash_cute
