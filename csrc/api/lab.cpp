// torch.ops.flash_cute.lab_*: the laboratory's kernels by name.
#include <torch/csrc/stable/accelerator.h>

#include <cuda_runtime_api.h>

#include <cmath>
#include <string>
#include <utility>

#include "api/api.h"
#include "api/arguments.h"
#include "api/tensors.h"
#include "core/device.h"
#include "kernels/lab/registry.h"

namespace flash_cute {
namespace {

// A CUDA event.
class Mark {
 public:
  Mark() { check_cuda("creating an event", cudaEventCreate(&event_)); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark() { cudaEventDestroy(event_); }

  void record(cudaStream_t stream) { check_cuda("recording an event", cudaEventRecord(event_, stream)); }
  float milliseconds_from(const Mark& begin) const {
    check_cuda("running the kernel", cudaEventSynchronize(event_));
    float milliseconds = 0.f;
    check_cuda("reading the time", cudaEventElapsedTime(&milliseconds, begin.event_, event_));
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

struct Call {
  const lab::Kernel& kernel;
  View q, k, v, out;
};

Call take_call(Stack& in) {
  const auto name = in.take<std::string>();
  View q = in.view(), k = in.view(), v = in.view(), out = in.view();  // all, before find() may throw
  return {lab::find(name), std::move(q), std::move(k), std::move(v), std::move(out)};
}

lab::ForwardKernelArgs arguments(const Call& call) {
  const FlashForwardKernelConfig& config = call.kernel.config;
  const ScalarType dtype = config.dtype == DType::FP16 ? ScalarType::Half : ScalarType::BFloat16;
  FC_CHECK(call.q.dtype == dtype, "lab: q's dtype is not the config's, ", name(config.dtype));
  FC_CHECK(call.q.dims == 4, "lab: q has ", call.q.dims, " dimensions; expected 4");
  check_device(call.q, call.q, "q");
  auto checked = [&](const View& t, const char* name) {
    check_same_kind(t, call.q, name);
    check_shape(t, call.q.sizes, call.q.dims, name);
    const TensorView m = tensor_view(t, name);
    FC_CHECK(m.vectors || t.numel() == 0, "lab: ", name, "'s rows must begin on 16-byte boundaries");
    return m;
  };
  check_outputs({named(call.out, "out")}, {named(call.q, "q"), named(call.k, "k"), named(call.v, "v")});
  const int seq_len = checked_int(call.q.size(1), "seq_len");
  FC_CHECK(call.q.size(3) == config.d_head, "lab: d_head is ", call.q.size(3), "; the config's is ", config.d_head);
  FC_CHECK(seq_len % config.B_r == 0, "lab: seq_len is ", seq_len, ", no multiple of B_r, ", config.B_r);
  FC_CHECK(seq_len % config.B_c == 0, "lab: seq_len is ", seq_len, ", no multiple of B_c, ", config.B_c);
  FC_CHECK(device(call.q.device).capability >= 80, "lab: kernels need compute capability 8.0 or higher");
  return {.q = checked(call.q, "q"),
          .k = checked(call.k, "k"),
          .v = checked(call.v, "v"),
          .o = checked(call.out, "out"),
          .batch = checked_int(call.q.size(0), "batch"),
          .seq_len = seq_len,
          .heads = checked_int(call.q.size(2), "heads"),
          .softmax_scale = 1.f / std::sqrt(static_cast<float>(config.d_head))};
}

}  // namespace

void lab_forward(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const Call call = take_call(in);
  const lab::ForwardKernelArgs args = arguments(call);
  const torch::stable::accelerator::DeviceGuard guard(call.q.device);
  check_cuda("launching the kernel", call.kernel.launch(args, current_stream(call.q)));
}

// Waits for the kernel; the time includes the launch latency on the GPU.
void lab_forward_timed(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const Call call = take_call(in);
  const lab::ForwardKernelArgs args = arguments(call);
  const torch::stable::accelerator::DeviceGuard guard(call.q.device);
  lab::Usage loaded;  // loads the kernel before the time starts
  check_cuda("loading the kernel", call.kernel.usage(loaded));
  const cudaStream_t stream = current_stream(call.q);
  Mark begin, end;
  begin.record(stream);
  check_cuda("launching the kernel", call.kernel.launch(args, stream));
  end.record(stream);
  in.put(static_cast<double>(end.milliseconds_from(begin)));
}

void lab_usage(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  lab::Usage usage;
  check_cuda("loading the kernel", lab::find(in.take<std::string>()).usage(usage));
  in.put(int64_t{usage.registers}, int64_t{usage.local_bytes}, int64_t{usage.ctas_per_sm});
}

}  // namespace flash_cute
