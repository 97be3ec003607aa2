// torch.ops.flash_cute.quantize_e4m3 and dequantize_e4m3: a tensor rounded to e4m3 with its descales, and back.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <string>

#include "api/api.h"
#include "api/arguments.h"
#include "api/tensors.h"
#include "kernels/passes/dequantize.h"
#include "kernels/passes/quantize.h"

namespace flash_cute {
namespace {

using Scaling = QuantizeE4M3::Scaling;

Scaling scaling_of(const std::string& name) {
  constexpr const char* names[] = {"head", "tensor", "row", "channel"};
  const auto* const found = std::find(std::begin(names), std::end(names), name);
  FC_CHECK(found != std::end(names), "scaling is '", name, "'; supported: head, tensor, row, channel");
  return static_cast<Scaling>(found - std::begin(names));
}

QuantizeE4M3::Element element_of(const View& x) {
  FC_CHECK(x.dtype == ScalarType::Half || x.dtype == ScalarType::BFloat16 || x.dtype == ScalarType::Float,
           "x's dtype is not supported; supported: float16, bfloat16, float32");
  return x.dtype == ScalarType::Half       ? QuantizeE4M3::Element::FP16
         : x.dtype == ScalarType::BFloat16 ? QuantizeE4M3::Element::BF16
                                           : QuantizeE4M3::Element::FP32;
}

// x with its sizes and strides; the last three of its dimensions are rows, heads and the head dim.
QuantizeE4M3 problem_of(const View& x, const std::optional<View>& cu_seqlens) {
  const int expected = cu_seqlens ? 3 : 4;
  FC_CHECK(x.dims == expected, "x has ", x.dims, " dimensions, and cu_seqlens is ", cu_seqlens ? "given" : "None",
           "; expected ", cu_seqlens ? "(total, heads, dim)" : "(batch, seqlen, heads, dim)");
  FC_CHECK(!cu_seqlens || cu_seqlens->numel() > 0, "cu_seqlens is empty; it holds batch + 1 offsets");
  QuantizeE4M3 p{};
  p.x = x.ptr;
  p.element = element_of(x);
  const int rows = expected - 3;
  if (cu_seqlens) p.cu_seqlens = indices(*cu_seqlens, cu_seqlens->numel(), "cu_seqlens", x);
  p.batch = checked_int(cu_seqlens ? cu_seqlens->numel() - 1 : x.size(0), "batch");
  p.rows = checked_int(x.size(rows), cu_seqlens ? "total" : "seqlen");
  p.heads = checked_int(x.size(rows + 1), "heads");
  p.dim = checked_int(x.size(rows + 2), "the head dim");
  checked_int(p.columns(), "heads times the head dim");
  FC_CHECK(p.dim > 0, "x has a head dim of 0; expected 1 or more");
  auto step = [&](int dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; };
  p.batch_step = cu_seqlens ? 0 : step(0);
  p.row_step = step(rows);
  p.head_step = step(rows + 1);
  p.dim_step = step(rows + 2);
  const int vector = p.element == QuantizeE4M3::Element::FP32 ? 4 : 8;  // elements of 16 bytes
  p.vectors = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.dim_step == 1 && p.batch_step % vector == 0 &&
              p.row_step % vector == 0 && p.head_step % vector == 0;
  return p;
}

Tensor allocate_descale(const View& x, const QuantizeE4M3& p) {
  switch (p.scaling) {
    case Scaling::Tensor:
      return allocate(x, {1}, ScalarType::Float);
    case Scaling::Channel:
      return allocate(x, {p.batch, p.heads, p.dim}, ScalarType::Float);
    case Scaling::Row:
      return p.cu_seqlens == nullptr ? allocate(x, {p.batch, p.rows, p.heads, 1}, ScalarType::Float)
                                     : allocate(x, {p.rows, p.heads, 1}, ScalarType::Float);
    default:
      return allocate(x, {p.batch, p.heads_k}, ScalarType::Float);
  }
}

}  // namespace

void quantize_e4m3(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const View x = in.view();
  const std::optional<View> cu_seqlens = in.optional_view();
  const auto scaling = in.take<std::string>();
  const auto heads_k = in.take<std::optional<int64_t>>();
  const bool power_of_two = in.take<bool>(), hadamard = in.take<bool>(), subtract_mean = in.take<bool>();
  QuantizeE4M3 p = problem_of(x, cu_seqlens);
  p.scaling = scaling_of(scaling);
  const int64_t sharing = heads_k.value_or(p.heads);
  FC_CHECK(sharing >= 1 && p.heads % sharing == 0 && (p.scaling != Scaling::Channel || sharing == p.heads),
           "heads_k is ", sharing, ", and x has ", p.heads,
           " heads; expected a divisor of these, or with scaling \"channel\" their number");
  FC_CHECK(!hadamard || (p.dim & (p.dim - 1)) == 0, "hadamard is given, and x's head dim is ", p.dim,
           "; supported: powers of two");
  p.heads_k = static_cast<int>(sharing);
  p.power_of_two = power_of_two;
  p.hadamard = hadamard;
  const torch::stable::accelerator::DeviceGuard guard(x.device);
  const Tensor values = allocate(x, x.sizes, x.dims, ScalarType::Float8_e4m3fn), descale = allocate_descale(x, p);
  std::optional<Tensor> mean;
  if (subtract_mean) mean = allocate(x, {p.batch, p.heads, p.dim}, ScalarType::Float);
  p.values = static_cast<uint8_t*>(values.data_ptr());
  p.descale = static_cast<float*>(descale.data_ptr());
  if (mean && p.batch > 0) p.mean = static_cast<float*>(mean->data_ptr());
  const Tensor workspace = allocate(x, {quantize_workspace(p)}, ScalarType::Float);
  check_cuda("quantize_e4m3", quantize_e4m3(p, static_cast<float*>(workspace.data_ptr()), current_stream(x)));
  in.put(values, descale, mean);
}

void dequantize_e4m3(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const View values = in.view(), descale = in.view();
  const auto dtype = in.take<ScalarType>();
  FC_CHECK(values.dtype == ScalarType::Float8_e4m3fn && values.dims >= 3,
           "values is not torch.float8_e4m3fn (.., rows, heads, dim)");
  FC_CHECK(is_contiguous(values), "values is not contiguous: call contiguous()");
  check_device(descale, values, "descale");
  const int64_t heads = values.size(values.dims - 2), count = descale.numel();
  FC_CHECK(descale.dtype == ScalarType::Float && descale.dims == 1 && count > 0 && heads % count == 0,
           "descale is not torch.float32 with a divisor of the ", heads, " heads of values as its one size");
  FC_CHECK(is_contiguous(descale), "descale is not contiguous: call contiguous()");
  FC_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
           "dtype is not supported; supported: torch.float16, torch.bfloat16");
  const torch::stable::accelerator::DeviceGuard guard(values.device);
  const Tensor out = allocate(values, values.sizes, values.dims, dtype);
  const DequantizeE4M3 p{.values = static_cast<const uint8_t*>(values.ptr),
                         .descale = static_cast<const float*>(descale.ptr),
                         .heads_of_descale = checked_int(heads / count, "heads"),
                         .heads = checked_int(heads, "heads"),
                         .dim = checked_int(values.size(values.dims - 1), "the head dim"),
                         .numbers = values.numel(),
                         .out = out.data_ptr(),
                         .dtype = dtype == ScalarType::Half ? DType::FP16 : DType::BF16};
  check_cuda("dequantize_e4m3", dequantize_e4m3(p, current_stream(values)));
  in.put(out);
}

}  // namespace flash_cute
