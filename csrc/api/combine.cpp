// torch.ops.flash_cute.combine: one result from partial results over splits of the keys.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/arguments.h"
#include "api/tensors.h"
#include "kernels/passes/combine.h"

namespace flash_cute {

void combine(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const View out_partial = in.view(), lse_partial = in.view();
  const ScalarType dtype = in.take<std::optional<ScalarType>>().value_or(ScalarType::Float);
  FC_CHECK(out_partial.dims >= 2 && out_partial.dims == lse_partial.dims + 1, "out_partial has ", out_partial.dims,
           " dimensions, lse_partial ", lse_partial.dims, "; expected (parts, .., dim) and (parts, ..)");
  FC_CHECK(out_partial.size(0) > 0, "out_partial holds no part; there must be at least one");
  FC_CHECK(out_partial.size(out_partial.dims - 1) > 0, "out_partial has a head dim of 0; there must be columns");
  for (int i = 0; i < lse_partial.dims; ++i) {
    FC_CHECK(out_partial.size(i) == lse_partial.size(i), "out_partial and lse_partial differ in dimension ", i);
  }
  for (const View* t : {&out_partial, &lse_partial}) {
    FC_CHECK(t->device >= 0 && t->device == out_partial.device, "out_partial and lse_partial are on different devices");
    FC_CHECK(t->dtype == ScalarType::Float && is_contiguous(*t),
             "out_partial and lse_partial must be contiguous float32");
  }
  FC_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
           "the result's dtype is not supported; supported: float16, bfloat16, float32");
  const torch::stable::accelerator::DeviceGuard guard(out_partial.device);
  const Tensor out = allocate(out_partial, out_partial.sizes + 1, out_partial.dims - 1, dtype);
  const Tensor lse = allocate(lse_partial, lse_partial.sizes + 1, lse_partial.dims - 1, ScalarType::Float);
  Partials p{};
  p.out = static_cast<const float*>(out_partial.ptr);
  p.lse = static_cast<const float*>(lse_partial.ptr);
  p.result = out.data_ptr();
  p.result_lse = static_cast<float*>(lse.data_ptr());
  p.splits = checked_int(out_partial.size(0), "parts");
  p.dim = checked_int(out_partial.size(out_partial.dims - 1), "head dim");
  p.rows = lse_partial.numel() / p.splits;
  p.element = dtype == ScalarType::Half       ? Partials::Element::FP16
              : dtype == ScalarType::BFloat16 ? Partials::Element::BF16
                                              : Partials::Element::FP32;
  const cudaError_t error = combine(p, current_stream(out_partial));
  check_cuda("combine", error);
  in.put(out, lse);
}

}  // namespace flash_cute
