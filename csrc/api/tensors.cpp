#include "api/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>

// Declared by torch only for code that links CUDA; weak, so that the library also loads where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace flash_cute {
namespace {

constexpr int kMaxDims = 4;

// A dimension of size 1 is never stepped along, whatever its stride says.
int64_t step(const Tensor& t, int dim) {
  return t.size(dim) > 1 ? t.stride(dim) : 0;
}

}  // namespace

Tensor allocate(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = 1;
  for (int i = static_cast<int>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes.begin()[i];
  }
  AtenTensorHandle handle = nullptr;
  const auto error = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(),
                                              torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                              aoti_torch_device_type_cuda(), like.get_device_index(), &handle);
  FC_CHECK(error == AOTI_TORCH_SUCCESS, "could not allocate ", stride, " elements on the GPU");
  return Tensor(handle);
}

Matrices matrices(const Tensor& t, const char* name) {
  const int dims = static_cast<int>(t.dim());
  FC_CHECK(dims == 3 || dims == 4, name, " has ", dims, " dimensions; expected 3 or 4");
  FC_CHECK(t.stride(dims - 1) == 1 || t.size(dims - 1) <= 1, name,
           "'s last dimension must be contiguous; its stride is ", t.stride(dims - 1));
  Matrices m{.ptr = t.data_ptr(),
             .batch = dims == 4 ? step(t, 0) : 0,
             .row = step(t, dims - 3),
             .head = step(t, dims - 2),
             .vectors = false};
  constexpr int kVector = 8;  // elements in 16 bytes
  m.vectors = reinterpret_cast<uintptr_t>(m.ptr) % 16 == 0 && m.batch % kVector == 0 && m.row % kVector == 0 &&
              m.head % kVector == 0;
  return m;
}

Statistics statistics(const Tensor& t, const char* name, const Tensor& q) {
  FC_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.get_device_index() == q.get_device_index() &&
               t.is_cuda(),
           name, " must be a contiguous fp32 tensor on q's device");
  const bool dense = q.dim() == 4;
  const int64_t rows = dense ? q.size(1) : q.size(0), heads = dense ? q.size(2) : q.size(1);
  FC_CHECK(t.numel() == rows * heads * (dense ? q.size(0) : 1), name, " has ", t.numel(),
           " elements; q asks for one a row and head");
  return {static_cast<float*>(t.data_ptr()), dense ? rows * heads : 0, rows};
}

void check_same_kind(const Tensor& t, const Tensor& q, const char* name) {
  FC_CHECK(t.scalar_type() == q.scalar_type(), name, "'s dtype differs from q's");
  FC_CHECK(t.is_cuda() && t.get_device_index() == q.get_device_index(), name, " is not on q's device");
}

void check_same_shape(const Tensor& t, const Tensor& expected, const char* name) {
  bool same = t.dim() == expected.dim();
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == expected.size(i);
  FC_CHECK(same, name, "'s shape is not the expected one");
}

const int* indices(const Tensor& t, int64_t length, const char* name, const Tensor& q) {
  FC_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.is_contiguous(), name,
           " must be a contiguous int32 vector");
  FC_CHECK(t.size(0) == length, name, " has ", t.size(0), " entries; expected ", length);
  FC_CHECK(t.is_cuda() && t.get_device_index() == q.get_device_index(), name, " is not on q's device");
  return static_cast<const int*>(t.data_ptr());
}

int checked_int(int64_t value, const char* name) {
  FC_CHECK(0 <= value && value < Band::kUnbounded, name, " is ", value, "; it must be in [0, ", Band::kUnbounded, ")");
  return static_cast<int>(value);
}

cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  FC_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
               aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
           "this torch has no CUDA stream for the tensors given");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace flash_cute
